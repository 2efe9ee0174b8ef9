"""Heads that were trained for another target: refused by what their files state, or noticed by what they draft."""

import json
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from assistants import save_assistant
from heads import cycle_text, drafter_of, llm_of, save_block, save_cycle, save_eagle3
from pair_heads import save_eagle
from reference.heads import SlowBlock
from reference.texts import hidden_states
from specinfer.core.errors import ModelError
from specinfer.drafters.dialect_choice import _block_agreement, _target_choices
from tiny import make_model, quick, random_prompts, save_model, save_tokenizer

WARNING = "agrees with the target on"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=8)
    save_tokenizer(folder)
    return folder


def _verifier(architecture: str, name: str = "org/other") -> dict[str, Any]:
    return {"speculators_config": {"verifier": {"name_or_path": name, "architectures": [architecture]}}}


# Each kind of head, and its target.
SAVE: dict[str, tuple[str, Callable[..., Path]]] = {
    "eagle3": ("llama", save_eagle3),
    "eagle": ("llama", save_eagle),
    **{kind: ("llama", partial(save_block, kind=kind)) for kind in ("dflash", "dspark")},
    "assistant": ("gemma4_text", save_assistant),
}
OTHER = ".*; take a drafter that was trained for"


MISFITS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "eagle3": [
        ({"target_hidden_size": 48}, "target_hidden_size .* is 48, and the target's is 32" + OTHER),
        (
            {"layout": "speculators", **_verifier("Qwen3ForCausalLM")},
            r"verifier\.architectures .* is Qwen3ForCausalLM, and the target's is LlamaForCausalLM" + OTHER,
        ),
        (
            {"vocab_size": 128, "draft_ids": range(2, 50)},
            r"tensor t2d of .* has shape \[128\], and \[96\] fits" + OTHER,
        ),
        ({"target_width": 48}, r"tensor fc\.weight of .* has shape \[32, 144\], and \[32, 96\] fits this target"),
        ({"vocab_size": 128}, r"tensor lm_head\.weight of .* has shape \[128, 32\], and \[96, 32\] fits"),
        ({"drop": ["midlayer.mlp.up_proj.weight"]}, r"no tensor midlayer\.mlp\.up_proj\.weight; fetch the drafter"),
        ({"drop": ["lm_head.weight"], "draft_ids": range(2, 50)}, r"no tensor lm_head\.weight"),
        ({"draft_ids": range(60, 110)}, "d2t .* leads to tokens that the target's vocabulary of 96 does not have"),
        ({"draft_ids": [5, 5, 7]}, "d2t .* or twice to one"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}},
            "reads hidden states after layers 3, 17, 30, and the target has 8 layers",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}}, "is 'all', not a list"),
        ({"family": "gpt2"}, "layers of family 'gpt2'"),
        ({"layout": "speculators", "transformer_layer_config": 3}, "no transformer_layer_config"),
        ({"hidden_act": "none"}, "config.json of a drafter cannot be used"),
    ],
    "dflash": [
        ({"num_target_layers": 36}, "num_target_layers .* is 36, and the target's is 8" + OTHER),
        ({"block_size": 0}, "block_size in config.json of .* is 0, not a number from 1 to 128"),
        ({"dflash_config": {}}, "mask_token_id in config.json of .* is None, not a number from 0 to 95"),
        ({"drop": ["layers.1.mlp.up_proj.weight"]}, r"no tensor layers\.1\.mlp\.up_proj\.weight"),
        ({"drop": ["fc.weight"]}, r"no tensor fc\.weight"),
    ],
    "eagle": [
        ({"drop": ["layers.0.mlp.up_proj.weight"]}, r"no tensor layers\.0\.mlp\.up_proj\.weight; fetch the drafter"),
        ({"target_width": 48}, r"tensor fc\.weight of .* has shape \[32, 80\], and \[32, 64\] fits this target"),
        ({"num_attention_heads": 8}, r"tensor layers\.0\.self_attn\.q_proj\.weight of .* has shape \[32, 32\]"),
    ],
    "dspark": [
        ({"mask_token_id": 200}, "mask_token_id in config.json of .* is 200"),
        ({"markov_head_type": "rnn"}, "a markov head of type 'rnn', not vanilla"),
        ({"target_layer_ids": [2, 31]}, "reads hidden states after layers 3, 32, and the target has 8 layers"),
    ],
    "assistant": [
        ({"target_width": 48}, "backbone_hidden_size in config.json of .* is 48, not a number from 32 to 32"),
        ({"text": {"vocab_size": 128}}, "vocab_size in config.json of .* is 128, not a number from 96 to 96"),
        ({"text_config": None}, "config.json of .* has no text_config"),
        (
            {"text": {"head_dim": 12}},
            r"tensor model\.layers\.0\.self_attn\.q_proj\.weight of .* heads of size 12, and the target's layer 3",
        ),
        ({"drop": ["model.layers.1.self_attn.q_norm.weight"]}, r"has no tensor model\.layers\.1\.self_attn\.q_norm\.w"),
        ({"drop": ["pre_projection.weight"]}, r"has no tensor pre_projection\.weight; fetch the drafter again"),
        ({"tensors": {"model.norm.weight": torch.full((16,), torch.nan)}}, r"model\.norm\.weight of .* has NaN"),
        ({"tensors": {"model.layers.0.self_attn.k_proj.weight": torch.ones(3)}}, r"1 tensors of .* not known, mod"),
        (
            {"clusters": 8, "tensors": {"masked_embedding.token_ordering": torch.zeros(96, dtype=torch.int64)}},
            r"tensor masked_embedding\.token_ordering of .* does not divide the 96 tokens of the target into 8 cl",
        ),
        ({"clusters": 8, "centroid_intermediate_top_k": 9}, "centroid_intermediate_top_k in config.json of .* is 9"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "options", "part"), [(kind, *row) for kind, rows in MISFITS.items() for row in rows], ids=str
)
def test_heads_that_do_not_fit_are_refused_by_name(
    kind: str, options: dict[str, Any], part: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    family, save = SAVE[kind]
    target = model_folder(family, **({"num_hidden_layers": 8} if family == "llama" else {}))
    folder = save(tmp_path / "head", **options)
    with pytest.raises(ModelError, match=f"^drafters: .*{part}"):
        llm_of(target, folder)


def test_a_head_with_another_tokenizer_is_refused(target: Path, tmp_path: Path) -> None:
    head = save_eagle3(tmp_path / "head")
    fields = json.loads((target / "tokenizer.json").read_text())
    ids = fields["model"]["vocab"]
    fields["model"]["vocab"] = dict(zip(ids, [*list(ids.values())[1:], 0], strict=True))
    (head / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=r"^drafters: tokenizer\.json of .*head .* not the target's; take a drafter"):
        llm_of(target, head)


@pytest.mark.parametrize("text", ["", "[]", '{"model": [1]}', '{"model": {"vocab": [[1]]}, "added_tokens": [{}]}'])
def test_a_head_whose_tokenizer_is_malformed_is_refused(text: str, target: Path, tmp_path: Path) -> None:
    head = save_eagle3(tmp_path / "head")
    (head / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"^drafters: tokenizer\.json of .*head cannot be read; replace it"):
        llm_of(target, head)


def test_renamed_special_tokens_and_another_class_of_the_family_are_no_other_target(
    target: Path, tmp_path: Path
) -> None:
    fields = json.loads((target / "tokenizer.json").read_text())
    fields["added_tokens"][0]["content"] = "<|another_name|>"
    head = save_eagle3(tmp_path / "head", "speculators", **_verifier("Llama4ForConditionalGeneration"))
    (head / "tokenizer.json").write_text(json.dumps(fields))
    llm_of(target, head)


@pytest.mark.parametrize("kind", quick(["eagle3", "dflash", "dspark"], "eagle3", "dspark"))
def test_a_head_that_drafts_nothing_right_is_noticed_at_load_in_one_line(
    kind: str, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"draft_ids": range(90, 94), **_verifier("LlamaForCausalLM")}
    if kind == "eagle3":
        head = save_eagle3(tmp_path / "head", **options)
    else:
        head = save_block(tmp_path / "head", kind, **options)
    llm_of(target, head)
    (line,) = [one for one in caplog.records if one.levelno == logging.WARNING and WARNING in one.getMessage()]
    assert "\n" not in line.getMessage()
    assert "was trained for org/other" in line.getMessage()
    caplog.clear()
    shutil.copy(target / "tokenizer.json", head)  # the same tokens: the user's text may just be unlike the short one
    llm_of(target, head)
    assert not [one for one in caplog.records if WARNING in one.getMessage()]


def test_a_head_that_drafts_well_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = save_cycle(tmp_path)
    generated = cycle_text(48)
    monkeypatch.setattr("specinfer.drafters.dialect_choice.common_tokens", lambda *_: generated)
    llm_of(target, head)
    assert not [one for one in caplog.records if WARNING in one.getMessage()]


@pytest.mark.parametrize("kind", ["dflash", "jetspec", "dspark"])
def test_the_agreement_of_a_block_head_is_that_of_the_first_tokens_of_its_blocks(
    kind: str, target: Path, tmp_path: Path
) -> None:
    head, ids = save_block(tmp_path / "head", kind), random_prompts([40])[0]
    model = make_model("llama", num_hidden_layers=8)
    embedding, output = (one.weight.detach() for one in (model.model.embed_tokens, model.lm_head))
    slow, first = SlowBlock(head, embedding, output), int(kind != "dspark")
    with llm_of(target, head) as llm:
        runner = drafter_of(llm).runner
        _target_choices(runner, ids)
        states = hidden_states(model, ids, runner.head.reads)
        wanted = torch.zeros(40, dtype=torch.long)
        for end in range(1, 40):
            rows = slow.rows([one[:end] for one in states], ids[end], 6, causal=kind == "jetspec")
            wanted[end] = slow.logits(rows[first], ids[end]).argmax()
        assert _block_agreement(runner, ids, wanted) == 1.0
        assert _block_agreement(runner, ids, wanted + 1) == 0.0
        assert runner.cache.num_owned == 0
        runner.target.cache.free("dialect-probe")
