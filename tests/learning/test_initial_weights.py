"""Where drafters start: checkpoints, layers cut out of the target, and fresh models, for several families."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specinfer.core.sampling import SamplingParams
from specinfer.learning.trainable import export
from specinfer.learning.tune.initial_weights import build, check_vocabulary, parse_initial_weights
from tests.learning.outputs import check_same_output
from tiny import VOCAB, random_prompts, save_model

FAMILIES = ["llama", "gpt2", "qwen3", "gemma3_text", "phi3", "opt", "falcon", "gpt_neox", "qwen3_moe"]
PROMPT = torch.tensor(random_prompts([20], seed=3))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """[1, 20, vocab]"""
    return torch.as_tensor(model.eval()(input_ids=PROMPT, use_cache=False).logits)


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def made(name: str, target: Path, seed: int = 0) -> Any:
    return build(parse_initial_weights(name), target, seed).model


def written(name: str, target: Path, folder: Path, seed: int = 0) -> None:
    export(build(parse_initial_weights(name), target, seed), folder, target)


# --------------------------------------------------------------------------------- layers of the target


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_of_the_target_generate_what_the_target_does(model_folder: Callable[..., Path], family: str) -> None:
    target = model_folder(family)
    count = loaded(target).config.num_hidden_layers
    assert logits(made(f"layers:{count}", target)) == pytest.approx(logits(loaded(target)), abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_are_cut_out_are_the_targets_own(
    model_folder: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    changes: dict[str, Any] = {"n_layer" if family == "gpt2" else "num_hidden_layers": 5}
    if family == "gemma3_text":
        changes["layer_types"] = [*["sliding_attention", "full_attention"] * 2, "full_attention"]
    target = model_folder(family, **changes)
    model = made("layers:3", target)
    whole = dict(loaded(target).named_parameters())
    places = {0: 0, 1: 2, 2: 4}  # evenly spread, first and last among them
    seen = set()
    for name, weight in model.named_parameters():
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if number is not None:
            seen.add(int(parts[number]))
            parts[number] = str(places[int(parts[number])])
        assert torch.equal(weight, whole[".".join(parts)]), name
    assert seen == {0, 1, 2}
    written("layers:3", target, tmp_path / "out")
    again = loaded(tmp_path / "out")
    assert again.config.num_hidden_layers == 3
    assert logits(again) == pytest.approx(logits(model), abs=1e-5)


# ------------------------------------------------------------------------------------- from nothing


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "layers", "hidden"), [("new:1", 1, 8), ("new:3x16", 3, 16)])
def test_fresh_models_have_the_targets_family_and_the_asked_size(
    model_folder: Callable[..., Path], tmp_path: Path, family: str, name: str, layers: int, hidden: int
) -> None:
    target = model_folder(family)
    model = made(name, target, seed=1)
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (layers, hidden)
    assert model.config.vocab_size == VOCAB
    assert model.config.model_type == loaded(target).config.model_type
    assert torch.equal(logits(made(name, target, seed=1)), logits(model))
    assert not torch.equal(logits(made(name, target, seed=2)), logits(model))
    written(name, target, tmp_path / "out", seed=1)
    assert logits(loaded(tmp_path / "out")) == pytest.approx(logits(model), abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_a_new_hybrid_has_the_targets_vocabulary_and_a_size_of_its_own(
    model_folder: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    target = model_folder(family)
    model = made("new:hybrid", target, seed=1)
    assert (model.config.num_hidden_layers, model.config.hidden_size, model.config.vocab_size) == (4, 64, VOCAB)
    assert model.config.layer_types == [*["linear_attention"] * 3, "full_attention"]
    assert torch.equal(logits(made("new:hybrid", target, seed=1)), logits(model))
    assert not torch.equal(logits(made("new:hybrid", target, seed=2)), logits(model))
    written("new:hybrid", target, tmp_path / "out", seed=1)
    assert logits(loaded(tmp_path / "out")) == pytest.approx(logits(model), abs=1e-5)


@pytest.mark.parametrize("ties", [False, True])
def test_a_new_hybrid_of_the_targets_width_starts_with_its_embeddings(
    model_folder: Callable[..., Path], ties: bool
) -> None:
    target = model_folder(hidden_size=64, tie_word_embeddings=ties)
    model, of_target = made("new:hybrid:2x64", target), loaded(target)
    assert torch.equal(model.get_input_embeddings().weight, of_target.get_input_embeddings().weight)
    assert torch.equal(model.get_output_embeddings().weight, of_target.get_output_embeddings().weight)
    other = made("new:hybrid:2x128", target)
    assert other.get_input_embeddings().weight.shape == (VOCAB, 128)


# -------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma3_text", "phi3"])
def test_what_is_written_drafts_and_leaves_the_output_alone(
    model_folder: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    target = model_folder(family, tokenizer=True)
    starts = [*("layers:1", "new:1", "new:2x16"), str(model_folder(family, noise=0.2, tokenizer=True))]
    folders = [tmp_path / str(i) for i in range(len(starts))]
    for start, folder in zip(starts, folders, strict=True):
        written(start, target, folder)
        assert (folder / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
        assert len({file.stat().st_mode for file in folder.iterdir()}) == 1  # whoever reads one may read all
    params = [SamplingParams(temperature=t, max_tokens=12, seed=4) for t in (0.0, 1.0)]
    check_same_output(target, folders, "1,1,1", random_prompts([5, 9]), params)


def test_a_folder_that_is_there_is_replaced_in_one_move(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    target, out = model_folder(tokenizer=True), tmp_path / "out"
    written("new:1", target, out, 0)
    (out / "left-over").touch()
    written("new:1", target, out, 1)
    assert logits(loaded(out)) == pytest.approx(logits(made("new:1", target, 1)))
    assert not (out / "left-over").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_an_export_that_fails_leaves_the_folder_before(
    model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, out = model_folder(tokenizer=True), tmp_path / "out"
    written("new:1", target, out, 0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(OSError, match="No space"):
        written("new:1", target, out, 1)
    assert logits(loaded(out)) == pytest.approx(logits(made("new:1", target, 0)))
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


# -------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_starts_as_it_is(model_folder: Callable[..., Path]) -> None:
    start = model_folder(noise=0.2, tokenizer=True)
    assert torch.equal(logits(made(str(start), model_folder(tokenizer=True))), logits(loaded(start)))


def test_a_drafter_with_fewer_padded_tokens_than_the_target_gets_its_number(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    target, start = model_folder(tokenizer=True, vocab_size=VOCAB + 32), model_folder(noise=0.2, tokenizer=True)
    check_vocabulary(parse_initial_weights(str(start)), target)
    model = made(str(start), target)
    assert model.config.vocab_size == VOCAB + 32
    assert logits(model)[..., :VOCAB] == pytest.approx(logits(loaded(start)), abs=1e-5)
    written(str(start), target, tmp_path / "out")
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("with_tokenizers", [True, False])
def test_another_vocabulary_is_refused_with_the_remedy(
    model_folder: Callable[..., Path], tmp_path: Path, with_tokenizers: bool
) -> None:
    other = save_model(tmp_path / "other", vocab_size=64)
    if with_tokenizers:
        tokens = json.loads((model_folder(tokenizer=True) / "tokenizer.json").read_text())
        vocabulary = tokens["model"]["vocab"]
        first, second = [name for name in vocabulary if len(name) == 1][:2]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        (other / "tokenizer.json").write_text(json.dumps(tokens))
    target = model_folder(tokenizer=with_tokenizers)
    with pytest.raises(ValueError, match=r'drafter: .*other has other tokens .*"layers:N" or "new:N"'):
        check_vocabulary(parse_initial_weights(str(other)), target)


def test_broken_weights_are_met_before_the_work_begins(tmp_path: Path, model_folder: Callable[..., Path]) -> None:
    model = loaded(model_folder())
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    with pytest.raises(ValueError, match=r"drafter: .*broken has weights that are not finite"):
        made(str(tmp_path / "broken"), model_folder())


# ------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers:0", "drafter: layers:0: the number of layers, 0, is not from 1 to 1000"),
        ("layers:9999", ", 9999, is not from 1"),
        ("new:0", "drafter: new:0: the number of layers, 0, is not from 1"),
        ("new:dspark:0x384", "the number of layers, 0, is not from 1 to 1000"),
        ("new:dspark:1x0", "the width, 0, is not from 1 to 65536"),
        ("new:dspark:1x8x0", "the rank, 0, is not from 1 to 65536"),
        ("new:dspark:1", "'new:dspark:1' has none of the forms .*new:dspark:LAYERSxWIDTH"),
        ("new:eagle3:1x384", "'new:eagle3:1x384' has none of the forms"),
        ("new:hybrid:0x64", "the number of layers, 0, is not from 1 to 1000"),
        ("new:hybrid:2x0", "the hidden size, 0, is not from 1 to 65536"),
        ("new:hybrid:3", "'new:hybrid:3' has none of the forms .*new:hybrid:LAYERSxWIDTH"),
        ("new:2x0", "the hidden size, 0, is not from 1 to 65536"),
        ("new:2x99999", ", 99999, is not from 1"),
        ("layers:two", "layers:two"),
        ("layers:٣", "layers:٣' has none of the forms"),
        ("new:", "new:"),
        ("ngram", "learns nothing"),
        ("suffix", "learns nothing"),
        ("self:int4", "is the target itself and is not trained"),
        ("", "drafter: "),
        ("/nowhere/at/all", "drafter: "),
    ],
)
def test_wrong_names_are_refused_with_the_forms_there_are(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_initial_weights(name)
    assert '"layers:N" cut out of the target' in str(caught.value)
    assert str(caught.value).startswith("drafter: ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers:9", "layers:9: the target has 2 layers; ask for fewer"),
        ("new:hybrid:1x64", "new:hybrid:1x64: .*take at least 2 layers"),
        ("new:hybrid:3x200", "new:hybrid:3x200: the hidden size 200 is not a multiple of the 64 of a head; take 192"),
        ("new:1x13", "must be a multiple of the target's heads' 8"),
    ],
)
def test_sizes_that_no_model_of_this_target_has_are_refused(
    model_folder: Callable[..., Path], name: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        made(name, model_folder())


def test_layers_that_cannot_be_distinguished_are_refused(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specinfer.learning.tune.initial_weights._LAYER_LISTS", ())
    with pytest.raises(ValueError, match="cannot be found; start from a checkpoint"):
        made("layers:1", model_folder())
