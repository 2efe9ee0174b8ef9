"""Codes of files in layers that are streamed from disk, and in the shards of several ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantized_files import quantized_model
from specinfer import LLM, ModelError, SamplingParams
from specinfer.core.config import OffloadConfig
from specinfer.model.folder import find_folder
from specinfer.model.load import load_model
from tests.model.gguf_files import write_family, write_model
from thread_group import WHOLE, Ranks
from tiny import quick

CPU = torch.device("cpu")
WIDE = {"hidden_size": 512, "intermediate_size": 512}
MIXTURE = {"norm_topk_prob": True, "moe_intermediate_size": 64}


def _gguf(**settings: Any) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        write_model(place / "m.gguf", **settings)
        return find_folder(place / "m.gguf")

    return make


def _hybrid(arch: str, **settings: Any) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        write_family(place / "m.gguf", arch, "Q8_0", **settings)
        return find_folder(place / "m.gguf")

    return make


MODELS = {
    "Q4_K_M": _gguf(kind="Q4_K", kinds={"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K"}, **WIDE),
    "Q8_0, tied": _gguf(kind="Q8_0", tie_word_embeddings=True, hidden_size=128, intermediate_size=192),
    "Q4_0 and F16": _gguf(kind="Q4_0", kinds={"attn_k": "F16"}, hidden_size=256, intermediate_size=96),
    "experts": _gguf(arch="qwen3moe", kind="Q4_0", kinds={"up_exps": "F16"}, hidden_size=128, **MIXTURE),
    "gpt-oss": quantized_model("MXFP4", "gpt_oss", hidden_size=64, intermediate_size=64),
    "Qwen3.5": _hybrid(
        "qwen35moe",
        hidden_size=128,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        linear_value_head_dim=32,
        layer_types=["linear_attention", "full_attention"],
        num_hidden_layers=2,
    ),
    "Granite 4": _hybrid(
        "granitehybrid",
        hidden_size=128,
        intermediate_size=64,
        shared_intermediate_size=64,
        mamba_n_heads=16,
        layer_types=["mamba", "attention"],
        num_hidden_layers=2,
    ),
    "W4A16": quantized_model("pack-quantized", "llama", hidden_size=256, intermediate_size=128),
    "FP8": quantized_model("FP8 of 128", "qwen3", hidden_size=256, intermediate_size=256, head_dim=64),
    "AWQ experts": quantized_model("AWQ", "qwen3_moe", hidden_size=64, head_dim=16, moe_intermediate_size=64),
    "W4A16 experts of Mixtral": quantized_model("pack-quantized", "mixtral", hidden_size=64, intermediate_size=64),
}


# 48 inputs of each rank, which are decoded; what is stored of tokens in bfloat16 differs by a step, and states with it.
DIFFER = {"Q4_0 and F16", "Qwen3.5"}
# One of each kind of layers and codes.
QUICK = ("Q4_K_M", "Q8_0, tied", "Q4_0 and F16", "experts", "gpt-oss", "Qwen3.5", "W4A16")


@pytest.fixture(scope="module", params=quick(MODELS, *QUICK))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp("model"))


@pytest.fixture
def offload(tmp_path: Path) -> OffloadConfig:
    return OffloadConfig("disk", None, tmp_path)


def ranks(folder: Path, split: tuple[int, int], **options: Any) -> Ranks:
    return Ranks(folder, split, dtype=torch.bfloat16, **options)


def test_streamed_and_staged_layers_compute_what_the_whole_does_to_the_last_bit(
    model: Path, offload: OffloadConfig
) -> None:
    whole = ranks(model, WHOLE)
    wanted, (loaded,) = whole.logits(), whole.all
    for split, options in ((WHOLE, {"offload": offload}), ((1, 2), {})):
        parts = ranks(model, split, **options)
        for found, its in zip(parts.logits(), wanted, strict=True):
            assert torch.equal(found, its)
        for part in parts.all:
            assert part.stored_types is not None
            assert part.compute_path.startswith(loaded.compute_path)
            assert set(part.stored_types.split(", ")) <= set(str(loaded.stored_types).split(", "))
        parts.close()


def test_shards_compute_with_their_part_of_the_codes(
    model: Path, offload: OffloadConfig, request: pytest.FixtureRequest
) -> None:
    """But for sums in another order, which may move activations by a step where they are rounded to 8 bits."""
    name = request.node.callspec.params["model"]
    whole = ranks(model, WHOLE)
    wanted, (loaded,) = whole.logits(), whole.all
    exact = Ranks(model, WHOLE, dtype=torch.float32).logits()
    found = ranks(model, (2, 1))
    moved = []
    for one, its, plain in zip(found.logits(), wanted, exact, strict=True):
        lost = (its - plain).norm()  # by rounding activations
        assert (one - plain).norm() < 1.4 * lost
        moved.append((one - its).norm() / lost)
    if name not in DIFFER and loaded.compute_path == "native fused layers":  # others round to bfloat16
        assert min(moved) < 1e-3
    assert all(part.num_bytes < 0.75 * loaded.num_bytes for part in found.all)
    if name in ("Q4_K_M", "experts"):
        streamed = ranks(model, (2, 1), offload=offload)
        for one, its in zip(streamed.logits(), found.logits(), strict=True):
            assert torch.equal(one, its)
        streamed.close()


def test_codes_are_not_streamed_without_a_copy(tmp_path: Path) -> None:
    folder = MODELS["Q8_0, tied"](tmp_path)
    with pytest.raises(ModelError, match=r"offload_folder: model\.layers\.0.* name a folder for a copy of the layers"):
        load_model(folder, torch.bfloat16, CPU, offload=OffloadConfig("disk"))


def test_speculation_with_streamed_codes_changes_no_text(tmp_path: Path) -> None:
    folder, prompts = MODELS["Q8_0, tied"](tmp_path), ["the other one and the other", "the"]
    texts = []
    for options in ({"tree": "off"}, {"tree": "2,1", "offload": "disk", "offload_folder": str(tmp_path / "copy")}):
        with LLM(folder, drafters=["ngram"], memory_budget="4GiB" if "offload" in options else None, **options) as llm:  # type: ignore[arg-type]
            params = SamplingParams(temperature=0.8, seed=3, max_tokens=16)
            texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert texts[0] == texts[1]
