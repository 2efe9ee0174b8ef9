"""Experts on GPUs compute with codes: as if the CPU were a GPU, with plain products, and with Triton's kernels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gguf_files import write_model
from quantized_files import save_gpt_oss, save_quantized
from specinfer.model import routed_experts
from specinfer.model.folder import find_folder
from specinfer.model.load import load_model
from specinfer.model.load_config import LoadConfig
from specinfer.model.routed_experts import RoutedExperts
from specinfer.model.runner import ModelRunner
from specinfer.quantize.checkpoint import QuantizeConfig, write_quantized
from tiny import logits, random_prompts, save_model

pytest.importorskip("triton")
import interpreter as interpreter
from specinfer.kernels.triton import product as products

CPU = torch.device("cpu")
WIDE = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
PROMPT = random_prompts([24], seed=3)[0]


def _written(family: str, to: str = "int4", **sizes: int) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        source = save_model(place / "source", family, **(WIDE | sizes))
        write_quantized(QuantizeConfig(model=str(source), to=to, out=place / "q"), lambda *_: None, lambda _: None)
        return place / "q"

    return make


def _quantized(family: str, name: str) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        save_quantized(save_model(place / "source", family, **WIDE), place / "q", name)
        return place / "q"

    return make


def _gpt_oss(place: Path) -> Path:
    save_gpt_oss(save_model(place / "source", "gpt_oss", hidden_size=64, intermediate_size=96), place / "q")
    return place / "q"


def _gguf(**kinds: str) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        sizes = {"norm_topk_prob": True, "moe_intermediate_size": 64, "hidden_size": 128}
        write_model(place / "m.gguf", arch="qwen3moe", kind="Q4_0", kinds=kinds, **sizes)
        return find_folder(place / "m.gguf")

    return make


MODELS = {
    "qwen3_moe": _written("qwen3_moe"), "mixtral": _written("mixtral", "int8"), "gpt_oss": _written("gpt_oss"),
    "nemotron_h": _written("nemotron_h"), "granitemoe": _written("granitemoe"), "gemma4": _written("gemma4_text-moe"),
    "AWQ": _quantized("qwen3_moe", "AWQ"), "FP8": _quantized("mixtral", "FP8 of 128"),
    "NVFP4": _quantized("olmoe", "NVFP4"), "MXFP4": _gpt_oss, "Q4_0": _gguf(), "two types": _gguf(up_exps="Q8_0"),
}  # fmt: skip
# Experts that are stored unlike each other, or in part as numbers.
DECODED = {
    "without codes for outputs": _gguf(down_exps="F16"), "with and without codes": _gguf(up_exps="BF16"),
    "without whole groups": _written("gpt_oss", intermediate_size=48),
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadConfig, "_has_kernels_for_codes", True)


def _load(folder: Path) -> Any:
    return load_model(folder, torch.bfloat16, CPU, native=False)


def _near(loaded: Any, folder: Path) -> None:
    """The logits are those of the numbers that the codes stand for, but for the rounding of bfloat16."""
    found = logits(ModelRunner(loaded, 64), PROMPT).float()
    exact = logits(ModelRunner(load_model(folder, torch.float32, CPU, native=False), 64), PROMPT)
    assert (found - exact).std(dim=1).median() < 0.05 * exact.std()


@pytest.mark.parametrize("name", MODELS)
def test_experts_compute_with_codes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = MODELS[name](tmp_path)
    loaded = _load(folder)
    experts = [one for one in loaded.model.modules() if isinstance(one, RoutedExperts)]
    assert experts
    assert not [name for name, one in loaded.model.named_parameters() if "experts" in name and one.ndim > 2]
    _near(loaded, folder)
    x = torch.randn((3, experts[0].linears[0].in_features), dtype=torch.bfloat16)
    chosen, weights = torch.tensor([[0, 1], [1, 3], [3, experts[0].num_experts]]), torch.full((3, 2), 0.5)
    wanted = experts[0](x, chosen, weights)
    assert torch.equal(experts[0](x[:1], chosen[:1], weights[:1]), wanted[:1])
    monkeypatch.setattr(routed_experts, "routed_product", products.routed_product)
    assert (experts[0](x, chosen, weights) - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.parametrize("name", DECODED)
def test_experts_that_are_not_stored_alike_are_decoded(name: str, tmp_path: Path) -> None:
    folder = DECODED[name](tmp_path)
    loaded = _load(folder)
    assert not [one for one in loaded.model.modules() if isinstance(one, RoutedExperts)]
    assert loaded.stored_types is not None
    _near(loaded, folder)
