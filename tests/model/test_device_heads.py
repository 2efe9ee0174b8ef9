"""Decoder layers of heads on GPUs, on the CPU by their plain twins: what the formulas and transformers' modules say."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from assistants import save_assistant
from head_passes import CHAIN, chain_features, head_passes
from heads import save_block, save_eagle3
from on_device import load_device_head, load_plain
from pair_heads import save_eagle, save_mtp
from reference.heads import SlowEagle3, slow_eagle
from specinfer.model.heads import load as heads_load
from specinfer.model.heads.block import BlockHead
from specinfer.model.heads.eagle3 import Eagle3Head
from specinfer.model.heads.load import load_head
from specinfer.model.load import LoadedModel, load_model
from specinfer.ops import Float8Linear, QuantizedLinear
from specinfer.ops.kv_types import FLOAT8
from tiny import make_model, save_model

CPU = torch.device("cpu")
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
EAGLE3: dict[str, dict[str, Any]] = {
    "original": {},
    "of Qwen3": {"family": "qwen3"},
    "norm before residual": {"layout": "speculators", "norm_before_residual": True},
    "normed output": {"layout": "speculators", "norm_before_residual": False, "norm_output": True},
    "both": {"layout": "speculators", "norm_before_residual": True, "norm_output": True},
    "norms before fc": {"fc_norm": True, "norm_before_fc": True},
    "reduced vocabulary": {"draft_ids": range(3, 90, 2), "own_embedding": True},
    "several layers": {"num_layers": 3, "family": "qwen3"},
    "several layers, both": {
        "num_layers": 2, "layout": "speculators", "norm_before_residual": True, "norm_output": True,
    },
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "eagle3, rotations of Llama 3": {"rope_parameters": _LLAMA3},
    "eagle3, windows of Qwen3": {
        "family": "qwen3", "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0,
    },
    "eagle3, parallel": {"parallel": True, "mask_token_id": 90},
    "dflash": {},
    "dflash, causal windows": {
        "sliding_window_non_causal": False, "layer_types": ["full_attention", "sliding_attention"],
        "use_sliding_window": True, "sliding_window": 8,
    },
    "jetspec": {"num_layers": 1},
    "dspark": {},
    "eagle": {},
    "eagle, bias": {"bias": True},
    "mtp of MiMo": {"family": "mimo"},
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=8)


def _folders(kind: str, target: Path, folder: Path) -> tuple[Path, Path]:
    """Write a head of this kind; return its target and itself."""
    if kind.startswith("mtp"):
        save_mtp(folder, OTHERS[kind]["family"])
        return folder, folder
    if kind in EAGLE3:
        return target, save_eagle3(folder, **EAGLE3[kind])
    if (block := kind.partition(",")[0]) in ("dflash", "jetspec", "dspark"):
        return target, save_block(folder, block, **OTHERS[kind])
    return target, (save_eagle3 if kind.startswith("eagle3") else save_eagle)(folder, **OTHERS[kind])


def _head(target: Path, folder: Path, dtype: torch.dtype = torch.float32, *, on_device: bool) -> LoadedModel:
    own = load_model(target, dtype, CPU, native=False)
    return load_device_head(folder, own) if on_device else load_head(folder, own)


def _near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("kind", EAGLE3)
def test_passes_follow_the_formulas_in_every_dialect(kind: str, target: Path, tmp_path: Path) -> None:
    options = EAGLE3[kind]
    flags = {name: options.get(name, False) for name in ("norm_output", "norm_before_residual")}
    loaded = _head(*_folders(kind, target, tmp_path / "head"), on_device=True)
    head: Any = loaded.model
    slow = SlowEagle3(tmp_path / "head", make_model("llama", num_hidden_layers=8).model.embed_tokens.weight, **flags)
    taps = [chain_features(loaded, seed=i) for i in range(3)]
    _near(head.project(taps), slow.project(taps))
    with torch.no_grad():
        logits, stored = slow.run(chain_features(loaded), CHAIN)
    found, rows = head_passes(loaded, len(CHAIN))
    _near(found[: len(CHAIN)], logits)
    _near(rows[: len(CHAIN)], stored)


def test_passes_of_eagle_heads_follow_the_formulas(target: Path, tmp_path: Path) -> None:
    loaded = _head(target, save_eagle(tmp_path / "head", bias=True), on_device=True)
    slow = slow_eagle(tmp_path / "head", make_model("llama", num_hidden_layers=8))
    logits, stored = slow.run(chain_features(loaded), CHAIN)
    found, rows = head_passes(loaded, len(CHAIN))
    _near(found[: len(CHAIN)], logits)
    _near(rows[: len(CHAIN)], stored)


@pytest.mark.parametrize("is_normed", [True, False])
def test_passes_of_mtp_layers_follow_the_formulas(is_normed: bool, tmp_path: Path) -> None:
    _, slow = save_mtp(tmp_path, "mimo", is_normed=is_normed)
    loaded = _head(tmp_path, tmp_path, on_device=True)
    head: Any = loaded.model
    head.speak(next(one for one in head.dialects if one.is_normed == is_normed))
    logits, stored = slow.run(chain_features(loaded), CHAIN)
    found, rows = head_passes(loaded, len(CHAIN))
    _near(found[: len(CHAIN)], logits)
    _near(rows[: len(CHAIN)], stored)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kv_dtype", [None, *FLOAT8], ids=str)
@pytest.mark.parametrize("kind", [*EAGLE3, *OTHERS])
def test_trees_are_what_the_modules_compute(
    kind: str, kv_dtype: torch.dtype | None, target: Path, tmp_path: Path
) -> None:
    folders = _folders(kind, target, tmp_path / "head")
    wanted, found = (
        head_passes(replace(_head(*folders, on_device=on_device), kv_dtype=kv_dtype)) for on_device in (False, True)
    )
    for one, other in zip(found, wanted, strict=True):
        if kv_dtype is None:
            _near(one, other)
        else:  # a last bit of a key may be a step of 8 bits
            assert (one - other).norm() < 0.01 * other.norm()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["original", "several layers, both", "dflash", "eagle", "mtp of MiMo"])
def test_half_precision_is_close(kind: str, dtype: torch.dtype, target: Path, tmp_path: Path) -> None:
    """As close to what is computed in fp32 as transformers is."""
    folders = _folders(kind, target, tmp_path / "head")
    exact = head_passes(_head(*folders, on_device=False))
    theirs = head_passes(_head(*folders, dtype, on_device=False))
    ours = head_passes(_head(*folders, dtype, on_device=True))
    for found, modules, wanted in zip(ours, theirs, exact, strict=True):
        assert (found - wanted).norm() <= 1.1 * (modules - wanted).norm()


# --------------------------------------------------------------------------------------------------- loading


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are loaded on the CPU by the path of GPUs."""
    quantized: Callable[..., None] = heads_load.quantize_linears
    for kind in (Eagle3Head, BlockHead):
        monkeypatch.setattr(kind, "fuse", lambda self, _: self.fuse_on_device(256))
    monkeypatch.setattr(heads_load, "pack_linears", lambda _: 0)
    monkeypatch.setattr(heads_load, "quantize_linears", lambda *args, **_: quantized(*args, native=False))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("quantization", [None, "int8", "int4", "fp8"])
@pytest.mark.parametrize("kind", ["original", "reduced vocabulary", "several layers", "dflash"])
def test_loaded_heads_are_rounded_as_their_modules_are(
    kind: str, quantization: str | None, target: Path, tmp_path: Path
) -> None:
    own, folder = load_plain(target), _folders(kind, target, tmp_path)[1]
    plain, loaded = load_head(folder, own, quantization), load_head(folder, replace(own, native=True), quantization)
    head: Any = loaded.model
    assert plain.compute_path == "PyTorch"
    assert loaded.compute_path == "fused device layers"
    assert loaded.num_parameters == plain.num_parameters
    assert loaded.num_bytes == plain.num_bytes + head.on_device.rotations.nbytes
    linears = {None: torch.nn.Linear, "fp8": Float8Linear}
    assert type(head.on_device.layers[0].qkv) is linears.get(quantization, QuantizedLinear)
    wanted, found = head_passes(plain), head_passes(loaded)
    near = 1e-5 if quantization in (None, "fp8") else 0.03  # of a rounded activation a last bit may be a step
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= near * other.norm()


@pytest.mark.parametrize("kind", ["eagle", "mtp of deepseek_v3", "assistant", "dflash"])
def test_everything_of_a_head_is_on_the_device_of_its_target(kind: str, target: Path, tmp_path: Path) -> None:
    """Also rotations, which are no weights: a pass that brings them from the host waits, and cannot be captured."""
    if kind == "assistant":
        folders = save_model(tmp_path / "gemma", "gemma4_text"), save_assistant(tmp_path / "head")
    elif kind == "mtp of deepseek_v3":
        save_mtp(tmp_path, "deepseek_v3")
        folders = tmp_path, tmp_path
    else:
        folders = _folders(kind, target, tmp_path / "head")
    own = load_plain(folders[0])
    own.model.to("meta")
    loaded = load_head(folders[1], replace(own, device=torch.device("meta")))
    tensors = dict([*loaded.model.named_parameters(), *loaded.model.named_buffers()])
    assert [name for name, one in tensors.items() if one.device.type != "meta"] == []


@pytest.mark.parametrize(
    "kind", ["gelu", "dynamic rotations", *(f"mtp of {name}" for name in ("deepseek_v3", "qwen3_5_text"))]
)
def test_other_layers_stay_as_they_are(kind: str, target: Path, tmp_path: Path) -> None:
    """Also those of other activations, of experts and latent attention, and of gates."""
    if kind.startswith("mtp"):
        save_mtp(tmp_path, kind.removeprefix("mtp of "))
        folders = tmp_path, tmp_path
    else:
        dynamic = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
        folders = target, save_eagle3(tmp_path, **({"hidden_act": "gelu"} if kind == "gelu" else dynamic))
    loaded = _head(*folders, on_device=False)
    head: Any = loaded.model
    wanted = head_passes(loaded)
    assert not head.fuse_on_device(256)
    assert len(head.layers) > 0
    assert all(map(torch.equal, head_passes(loaded), wanted))
