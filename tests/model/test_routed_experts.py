"""Experts on GPUs compute with codes: as if the CPU were a GPU, with plain products, and with Triton's kernels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantized_files import quantized_model
from specinfer.model import linears
from specinfer.model import quantized_experts as routed_experts
from specinfer.model.folder import find_folder
from specinfer.model.load import load_model
from specinfer.model.load_config import LoadConfig
from specinfer.model.quantized_experts import QuantizedExperts, RoutedExperts, quantize_experts, round_experts
from specinfer.model.runner import ModelRunner
from specinfer.ops.quantization import BITS
from specinfer.quantize.checkpoint import write_quantized
from specinfer.quantize.options import QuantizeConfig
from tests.model.gguf_files import write_model
from thread_group import WHOLE, Ranks
from tiny import logits, make_model, random_prompts, save_model

pytest.importorskip("triton")
import interpreter as interpreter
from specinfer.ops.triton import product as products

CPU = torch.device("cpu")
WIDE = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
PROMPT = random_prompts([24], seed=3)[0]


def _written(family: str, to: str = "int4", **sizes: int) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        source = save_model(place / "source", family, **(WIDE | sizes))
        write_quantized(QuantizeConfig(model=str(source), to=to, out=place / "q"))
        return place / "q"

    return make


def _gguf(**kinds: str) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        sizes = {"norm_topk_prob": True, "moe_intermediate_size": 64, "hidden_size": 128}
        write_model(place / "m.gguf", arch="qwen3moe", kind="Q4_0", kinds=kinds, **sizes)
        return find_folder(place / "m.gguf")

    return make


MODELS = {
    "qwen3_moe": _written("qwen3_moe"), "mixtral": _written("mixtral", "int8"), "gpt_oss": _written("gpt_oss"),
    "nemotron_h": _written("nemotron_h"), "granitemoe": _written("granitemoe"), "gemma4": _written("gemma4_text-moe"),
    "AWQ": quantized_model("AWQ", "qwen3_moe", **WIDE), "FP8": quantized_model("FP8 of 128", "mixtral", **WIDE),
    "NVFP4": quantized_model("NVFP4", "olmoe", **WIDE),
    "MXFP4": quantized_model("MXFP4", "gpt_oss", hidden_size=64, intermediate_size=96),
    "Q4_0": _gguf(), "two types": _gguf(up_exps="Q8_0"),
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


@pytest.mark.parametrize("quantization", BITS)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "nemotron_h", "phimoe"])
def test_experts_that_are_rounded_at_load_have_the_codes_that_they_have_on_cpus(family: str, quantization: str) -> None:
    model, other = make_model(family, **WIDE), make_model(family, **WIDE)
    linears.quantize_linears(model, quantization, model.config, CPU, native=False)
    quantize_experts(other, ("model.layers.",), BITS[quantization])
    found, wanted = (
        [one for one in each.modules() if isinstance(one, kind)]
        for each, kind in ((model, RoutedExperts), (other, QuantizedExperts))
    )
    assert len(found) == len(wanted) > 0
    for ours, theirs in zip(found, wanted, strict=True):
        for i, linear in enumerate(ours.linears):
            calls = theirs.calls[i::2]
            assert torch.equal(linear.quantized.codes, torch.cat([one.panels.unpack_codes().codes for one in calls]))
        x = torch.randn((3, ours.linears[0].in_features))
        chosen, weights = torch.tensor([[0, 1], [1, 3], [3, ours.num_experts]]), torch.rand((3, 2))
        near = theirs(x, chosen, weights)  # with rounded activations
        assert (ours(x, chosen, weights) - near).norm() < 0.05 * near.norm()


def test_meta_weights_are_rounded_to_what_is_streamed() -> None:
    with torch.device("meta"):
        model = make_model("gpt_oss", **WIDE)
    round_experts(model, ("model.layers.",), 4, torch.device("cuda"))
    (first, *_) = [one for one in model.modules() if isinstance(one, RoutedExperts)]
    assert all(one.codes.is_meta and one.bias.is_meta for one in first.linears)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_parts_of_experts_compute_what_the_whole_does(family: str, tmp_path: Path) -> None:
    folder = _written(family, head_dim=32)(tmp_path)
    wanted = Ranks(folder, WHOLE, dtype=torch.bfloat16, native=False)
    parts = Ranks(folder, (2, 1), dtype=torch.bfloat16, native=False)
    assert [one for rank in parts.all for one in rank.model.modules() if isinstance(one, RoutedExperts)]
    for found, exact in zip(parts.logits(), wanted.logits(), strict=True):
        assert (found - exact).norm() < 0.03 * exact.norm()
