"""Decoder layers of heads in native calls: what transformers' modules compute."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from head_passes import head_passes
from heads import save_block, save_eagle3
from pair_heads import save_eagle, save_mtp
from specinfer.model.heads.head import FeatureHead
from specinfer.model.heads.load import load_head
from specinfer.model.load import load_model
from tiny import save_model

KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3 of Qwen3": {"family": "qwen3"},
    "eagle3, norms before residual and recycled": {
        "layout": "speculators", "norm_before_residual": True, "norm_output": True,
    },
    "eagle": {},
    "mtp of MiMo": {"family": "mimo"},
    "mtp of Qwen3.5": {"family": "qwen3_5_text"},  # its attention has gates
    "dflash": {"num_layers": 2},
    "jetspec": {"num_layers": 1},
    "dspark": {},
    "dflash with causal windows": {
        "sliding_window_non_causal": False, "layer_types": ["full_attention", "sliding_attention"],
        "use_sliding_window": True, "sliding_window": 8,
    },
}  # fmt: skip


def _folders(kind: str, folder: Path) -> tuple[Path, Path]:
    """Write a target and a head of this kind."""
    if kind.startswith("mtp"):
        save_mtp(folder, KINDS[kind]["family"])
        return folder, folder
    target = save_model(folder / "target", "llama", num_hidden_layers=8)
    if (block := kind.partition(" ")[0]) in ("dflash", "jetspec", "dspark"):
        return target, save_block(folder / "head", block, **KINDS[kind])
    save = save_eagle if kind == "eagle" else save_eagle3
    return target, save(folder / "head", **KINDS[kind])


def _computed(
    target: Path, head: Path, dtype: torch.dtype, quantization: str | None, *, is_native: bool
) -> tuple[Tensor, Tensor, FeatureHead]:
    """Return the logits of two passes, the features that they store, and the head."""
    loaded = load_head(head, load_model(target, dtype, torch.device("cpu"), native=is_native), quantization)
    assert isinstance(loaded.model, FeatureHead)
    return *head_passes(loaded), loaded.model


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "int8"), (torch.float32, "int4")],
    ids=str,
)
def test_native_layers_compute_what_the_modules_do(
    kind: str, dtype: torch.dtype, quantization: str | None, tmp_path: Path
) -> None:
    target, head = _folders(kind, tmp_path)
    logits, stored, fused = _computed(target, head, dtype, quantization, is_native=True)
    wanted_logits, wanted_stored, modules = _computed(target, head, dtype, quantization, is_native=False)
    assert fused.fused is not None
    assert modules.fused is None
    if dtype == torch.float32 and quantization is None:
        torch.testing.assert_close(logits, wanted_logits, rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(stored, wanted_stored, rtol=2e-4, atol=2e-4)
        return
    # Activations that are rounded to few bits: a sum that differs in its last bit may become another step.
    for found, wanted in ((logits, wanted_logits), (stored, wanted_stored)):
        assert (found - wanted).norm() < 0.03 * wanted.norm()


def test_a_quantized_head_counts_the_bytes_of_its_native_layers(tmp_path: Path) -> None:
    target, head = _folders("eagle3", tmp_path)
    loaded = load_model(target, torch.float32, torch.device("cpu"))
    whole, rounded = load_head(head, loaded), load_head(head, loaded, "int8")
    assert whole.compute_path == rounded.compute_path == "native fused layers"
    assert whole.num_parameters == rounded.num_parameters
    assert whole.num_bytes > 3.9 * whole.num_parameters > 2 * rounded.num_bytes


def test_formats_that_native_layers_do_not_know_run_as_modules(tmp_path: Path) -> None:
    target, head = _folders("eagle3", tmp_path)
    loaded = load_head(head, load_model(target, torch.float32, torch.device("cpu")), "fp8")
    assert isinstance(loaded.model, FeatureHead)
    assert loaded.model.fused is None
