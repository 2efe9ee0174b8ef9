"""EAGLE-1 heads and MTP layers: growth by the formulas, and exact output."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import reference
from heads import check_growth, cycle_text, ids_of, llm_of, save_cycle, texts_of
from pair_heads import LAYERS, MTP_FAMILIES, save_eagle, save_mtp
from reference.heads import slow_eagle, slow_tree, tensors_of
from specinfer import LLM, SamplingParams
from specinfer.core.errors import ModelError
from specinfer.core.tree import TokenTree
from specinfer.drafters.feature_drafter import FeatureDrafter
from specinfer.model.heads.load import load_head
from specinfer.model.load import load_model
from tiny import make_model, random_prompts, save_model, save_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


def _last_states(model: Any, tokens: Sequence[int], *, is_normed: bool = True) -> Tensor:
    """Return [tokens, width] hidden states around the target's last norm."""
    found: list[Tensor] = []
    handle = model.model.norm.register_forward_hook(lambda _, args, output: found.extend([args[0][0], output[0]]))
    with torch.no_grad():
        model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    handle.remove()
    return found[int(is_normed)]


def _check_growth(llm: LLM, slow: Any, model: Any, *, is_normed: bool = True) -> None:
    def wanted(tokens: list[int], shape: Sequence[int]) -> TokenTree:
        return slow_tree(slow, _last_states(model, tokens[:-1], is_normed=is_normed), tokens, shape)

    check_growth(llm, wanted)


@pytest.fixture
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specinfer.setup.assembly.choose_dialect", lambda *_: None)


# ----------------------------------------------------------------------------------------- formulas


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True, "pickled": True}, {"own_embedding": False, "architectures": ["EagleLlamaForCausalLM"]}],
    ids=["safetensors", "bias, pickled", "named, target's embedding"],
)
def test_growth_of_an_eagle_head_follows_the_formulas(
    options: dict[str, Any], target: Path, model: Any, tmp_path: Path
) -> None:
    folder = save_eagle(tmp_path / "head", **options)
    with llm_of(target, folder, tree="1") as llm:
        _check_growth(llm, slow_eagle(folder, model), model)


def test_an_eagle_head_reads_what_gemmas_last_norm_computes(tmp_path: Path) -> None:
    target = save_model(tmp_path / "target", "gemma3_text")
    model = make_model("gemma3_text")
    folder = save_eagle(tmp_path / "head", own_embedding=False)
    with llm_of(target, folder, tree="1") as llm:
        _check_growth(llm, slow_eagle(folder, model), model)


@pytest.mark.usefixtures("no_choice")
@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_growth_of_an_mtp_layer_follows_the_formulas(family: str, tmp_path: Path) -> None:
    model, slow = save_mtp(tmp_path, family)
    with llm_of(tmp_path, "mtp", tree="1") as llm:
        _check_growth(llm, slow, model)
        prompts = random_prompts([7, 20])
        assert texts_of(llm, prompts, GREEDY) == [reference.greedy(model, prompt, 16) for prompt in prompts]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_what_chooses_experts_of_an_mtp_layer_is_as_precise_as_in_its_target(family: str, tmp_path: Path) -> None:
    save_mtp(tmp_path, family)
    target = load_model(tmp_path, torch.bfloat16, torch.device("cpu"), native=False)
    head: Any = load_head(tmp_path, target).model
    found = head.layers[0].mlp.gate.e_score_correction_bias
    assert torch.equal(found, tensors_of(tmp_path)[f"model.layers.{LAYERS}.mlp.gate.e_score_correction_bias"])
    assert head.layers[0].mlp.gate.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["mimo", "ernie4_5_moe"])
def test_features_before_the_last_norm_are_the_other_dialect(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specinfer.setup.assembly.choose_dialect", lambda run, _: run.head.speak(run.head.dialects[1]))
    model, slow = save_mtp(tmp_path, family, is_normed=False)
    with llm_of(tmp_path, "mtp", tree="1") as llm:
        _check_growth(llm, slow, model, is_normed=False)


# ---------------------------------------------------------------------------------- perfect drafters


def _perfect_eagle(target: Path, folder: Path) -> Path | str:
    """Write an EAGLE head for `save_cycle`, which knows a token only by the feature of the token before."""
    step = tensors_of(target)["lm_head.weight"]
    tensors = {
        "fc.weight": torch.cat([torch.zeros(64, 64), step], dim=1),
        "layers.0.post_attention_layernorm.weight": torch.ones(64),
        **_empty_layer("layers.0."),
    }
    folder.mkdir()
    fields = json.loads((target / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 1}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _perfect_mtp(target: Path, folder: Path) -> Path | str:
    """Write an MTP layer into the target of `save_cycle`; names are MiMo's."""
    del folder
    at, tensors = "model.mtp_layers.0.", tensors_of(target)
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm", "post_attention_layernorm")
    tensors |= {f"{at}{name}.weight": torch.ones(64) for name in norms}
    tensors[f"{at}input_proj.weight"] = torch.cat([tensors["lm_head.weight"], torch.zeros(64, 64)], dim=1)
    save_file(tensors | _empty_layer(at), target / "model.safetensors", metadata={"format": "pt"})
    return "mtp"


def _empty_layer(at: str) -> dict[str, Tensor]:
    shapes = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
    return {f"{at}self_attn.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()} | {
        f"{at}mlp.{name}_proj.weight": torch.zeros(64, 64) for name in ("gate", "up", "down")
    }


@pytest.mark.parametrize("tree", ["1,1,1,1,1,1", "best-first:12:6"])
@pytest.mark.parametrize("make", [None, _perfect_eagle, _perfect_mtp], ids=["EAGLE-3", "EAGLE", "MTP"])
def test_a_perfect_head_is_accepted_at_every_level(make: Any, tree: str, tmp_path: Path) -> None:
    target, eagle3 = save_cycle(tmp_path)
    head = eagle3 if make is None else make(target, tmp_path / "eagle")
    prompt = cycle_text(20)
    with llm_of(target, head, tree=tree) as llm:
        for num_tokens in (43, 42):  # the second time the prompt is cached, and the first pass has a tree too
            params = SamplingParams(temperature=0, max_tokens=num_tokens)
            (output,) = llm.generate(ids_of([prompt]), params, use_tqdm=False)
            assert dict(output.metrics.speculative_decoding)["mean_acceptance_length"] == 7
        assert output.num_cached_tokens == 19


# ----------------------------------------------------------------------------------------- exactness


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("mimo")
    model, _ = save_mtp(folder, "mimo")
    save_tokenizer(folder)
    return folder, model


def test_a_streamed_target_with_experts_has_its_mtp_layer_too(tmp_path: Path) -> None:
    model, _ = save_mtp(tmp_path / "target", "glm4_moe")
    prompts = random_prompts([8, 20])
    with llm_of(tmp_path / "target", "mtp", tree="2,2,1", offload="disk", offload_folder=tmp_path) as llm:
        assert texts_of(llm, prompts, GREEDY) == [reference.greedy(model, prompt, 16) for prompt in prompts]


# ------------------------------------------------------------------------------------------ bad input


def test_mtp_of_a_target_that_has_none_is_refused_with_the_remedy(target: Path) -> None:
    with pytest.raises(ModelError, match=r'^drafters: "mtp" stands for MTP layers .* has none that are known; name a '):
        llm_of(target, "mtp")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"mlp.experts.3.up_proj": None}, r"mlp\.experts\.3\.up_proj\.weight is missing; "),
        ({"eh_proj": torch.ones(32, 32)}, r"eh_proj\.weight of .* \[32, 32\], and \[32, 64\] fits"),
        ({"enorm": torch.full((32,), torch.nan)}, r"enorm\.weight of .* has NaN or infinity"),
        ({"gate": torch.ones(3)}, r"1 tensors of .* are not known, model\.layers\.2\.gate\.weight"),
        ({"self_attn.o_proj": None}, r"has no tensor model\.layers\.2\.self_attn\.o_proj\.weight"),
    ],
    ids=["expert", "shape", "nan", "unknown", "missing"],
)
def test_damaged_mtp_layers_are_refused_by_name(change: dict[str, Tensor | None], part: str, tmp_path: Path) -> None:
    save_mtp(tmp_path, "glm4_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"model.layers.2.{name}.weight": one for name, one in change.items()}
    kept = {name: one for name, one in tensors.items() if one is not None}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"^drafters: .*{part}"):
        llm_of(tmp_path, "mtp")


def test_the_first_of_several_mtp_layers_is_used(
    mimo: tuple[Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(mimo[0], folder)
    tensors = load_file(folder / "model.safetensors")
    second = {name.replace("layers.0", "layers.1"): one.clone() for name, one in tensors.items() if "mtp" in name}
    save_file(tensors | second, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level("INFO"), llm_of(folder, "mtp", tree="2,1"):
        assert "has 2 MTP layers; the first drafts all levels" in caplog.text


def test_an_eagle_head_of_another_width_than_its_target_is_refused(tmp_path: Path) -> None:
    """Features are hidden states of the target and of the head alike."""
    target, folder = save_model(tmp_path / "target", hidden_size=64), save_eagle(tmp_path / "head", target_width=64)
    tensors = load_file(folder / "model.safetensors") | {"lm_head.weight": torch.zeros(96, 32)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"^drafters: hidden size 32 of .* is not its target's 64; take a drafter"):
        llm_of(target, folder)


def test_an_eagle_head_is_no_target_and_needs_a_known_last_norm(tmp_path: Path) -> None:
    head = save_eagle(tmp_path / "head", pickled=True)
    with pytest.raises(ModelError, match=r"is a drafter \(EAGLE\); name its target as the model"):
        LLM(head)
    with pytest.raises(ModelError, match=r"reads what the target's last norm computes, which is not known for"):
        llm_of(save_model(tmp_path / "gpt2", "gpt2"), head)


def test_a_model_of_one_layer_is_no_head(target: Path, tmp_path: Path) -> None:
    small = save_model(tmp_path / "small", "llama", num_hidden_layers=1)
    with llm_of(target, small, tree="2") as llm:
        assert llm.drafter is not None
        assert not any(isinstance(one, FeatureDrafter) for one in llm.drafter.drafters)
