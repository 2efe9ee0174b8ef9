"""Decoder layers of heads in native calls and on GPUs, there by references: what formulas and modules compute."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from assistants import save_assistant
from head_passes import CHAIN, EAGLE3_KINDS, HEAD_KINDS, chain_features, head_passes, save_kind
from heads import save_eagle3
from on_device import load_device_head, load_plain
from pair_heads import save_eagle, save_mtp
from reference.heads import SlowEagle3, slow_eagle
from specinfer.model.heads import load as heads_load
from specinfer.model.heads.block import BlockHead
from specinfer.model.heads.eagle3 import Eagle3Head
from specinfer.model.heads.load import load_head
from specinfer.model.load import LoadedModel, load_model
from specinfer.ops import QuantizedLinear
from specinfer.ops.kv_types import FLOAT8
from tiny import make_model, save_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=8)


def _head(target: Path, folder: Path, dtype: torch.dtype = torch.float32, *, on_device: bool) -> LoadedModel:
    loaded = load_model(target, dtype, CPU, native=False)
    return load_device_head(folder, loaded) if on_device else load_head(folder, loaded)


def _near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("kind", EAGLE3_KINDS)
def test_passes_follow_the_formulas_in_every_dialect(kind: str, target: Path, tmp_path: Path) -> None:
    options = EAGLE3_KINDS[kind]
    flags = {name: options.get(name, False) for name in ("norm_output", "norm_before_residual")}
    loaded = _head(*save_kind(kind, target, tmp_path / "head"), on_device=True)
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
    head.speak(next(dialect for dialect in head.dialects if dialect.is_normed == is_normed))
    logits, stored = slow.run(chain_features(loaded), CHAIN)
    found, rows = head_passes(loaded, len(CHAIN))
    _near(found[: len(CHAIN)], logits)
    _near(rows[: len(CHAIN)], stored)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kv_dtype", [None, *FLOAT8], ids=str)
@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_trees_are_what_the_modules_compute(
    kind: str, kv_dtype: torch.dtype | None, target: Path, tmp_path: Path
) -> None:
    folders = save_kind(kind, target, tmp_path / "head")
    wanted, found = (
        head_passes(replace(_head(*folders, on_device=on_device), kv_dtype=kv_dtype)) for on_device in (False, True)
    )
    for ours, theirs in zip(found, wanted, strict=True):
        if kv_dtype is None:
            _near(ours, theirs)
        else:  # a last bit of a key may be a step of 8 bits
            assert (ours - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["eagle3", "eagle3, several layers, both", "dflash", "eagle", "mtp of mimo"])
def test_half_precision_is_close(kind: str, dtype: torch.dtype, target: Path, tmp_path: Path) -> None:
    """As close to what is computed in fp32 as transformers is."""
    folders = save_kind(kind, target, tmp_path / "head")
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
@pytest.mark.parametrize("kind", ["eagle3", "eagle3, reduced vocabulary", "eagle3, several layers", "dflash"])
def test_loaded_heads_are_rounded_as_their_modules_are(
    kind: str, quantization: str | None, target: Path, tmp_path: Path
) -> None:
    target_model, folder = load_plain(target), save_kind(kind, target, tmp_path)[1]
    plain = load_head(folder, target_model, quantization)
    loaded = load_head(folder, replace(target_model, native=True), quantization)
    head: Any = loaded.model
    assert plain.compute_path == "PyTorch"
    assert loaded.compute_path == "fused device layers"
    assert loaded.num_parameters == plain.num_parameters
    assert loaded.num_bytes == plain.num_bytes + head.on_device.rotations.nbytes
    assert type(head.on_device.layers[0].qkv) is (torch.nn.Linear if quantization is None else QuantizedLinear)
    wanted, found = head_passes(plain), head_passes(loaded)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("kind", ["eagle", "mtp of deepseek_v3", "assistant", "dflash"])
def test_everything_of_a_head_is_on_the_device_of_its_target(kind: str, target: Path, tmp_path: Path) -> None:
    """Also rotations, which are no weights: a pass that brings them from the host waits, and cannot be captured."""
    if kind == "assistant":
        folders = save_model(tmp_path / "gemma", "gemma4_text"), save_assistant(tmp_path / "head")
    else:
        folders = save_kind(kind, target, tmp_path / "head")
    target_model = load_plain(folders[0])
    target_model.model.to("meta")
    loaded = load_head(folders[1], replace(target_model, device=torch.device("meta")))
    tensors = dict([*loaded.model.named_parameters(), *loaded.model.named_buffers()])
    assert [name for name, tensor in tensors.items() if tensor.device.type != "meta"] == []


@pytest.mark.parametrize(
    "kind", ["gelu", "dynamic rotations", *(f"mtp of {name}" for name in ("deepseek_v3", "qwen3_5_text"))]
)
def test_other_layers_stay_as_they_are(kind: str, target: Path, tmp_path: Path) -> None:
    """Also those of other activations, of experts and latent attention, and of gates."""
    if kind.startswith("mtp"):
        folders = save_kind(kind, target, tmp_path)
    else:
        dynamic = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
        folders = target, save_eagle3(tmp_path, **({"hidden_act": "gelu"} if kind == "gelu" else dynamic))
    loaded = _head(*folders, on_device=False)
    head: Any = loaded.model
    wanted = head_passes(loaded)
    head.fuse_on_device(256)
    assert head.on_device is None
    assert len(head.layers) > 0
    assert all(map(torch.equal, head_passes(loaded), wanted))


# ---------------------------------------------------------------------------------------------- native calls


NATIVE_KINDS = [
    *("eagle3", "eagle3, of Qwen3", "eagle3, both", "eagle", "mtp of mimo"),
    "mtp of qwen3_5_text",  # its attention has gates
    *("dflash", "dflash, causal windows", "jetspec", "dspark"),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", NATIVE_KINDS)
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "int8"), (torch.float32, "int4")],
    ids=str,
)
def test_native_layers_compute_what_the_modules_do(
    kind: str, dtype: torch.dtype, quantization: str | None, target: Path, tmp_path: Path
) -> None:
    folders = save_kind(kind, target, tmp_path)
    fused, modules = (
        load_head(folders[1], load_model(folders[0], dtype, CPU, native=is_native), quantization)
        for is_native in (True, False)
    )
    assert [type(head.model.fused).__name__ for head in (fused, modules)] == ["NativeLayers", "NoneType"]
    for ours, theirs in zip(head_passes(fused), head_passes(modules), strict=True):
        if dtype == torch.float32 and quantization is None:
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)
        else:  # of activations that are rounded to few bits a last bit may become another step
            assert (ours - theirs).norm() < 0.03 * theirs.norm()


def test_a_quantized_head_counts_the_bytes_of_its_native_layers(target: Path, tmp_path: Path) -> None:
    head, loaded = save_kind("eagle3", target, tmp_path)[1], load_model(target, torch.float32, CPU)
    whole, rounded = load_head(head, loaded), load_head(head, loaded, "int8")
    assert whole.compute_path == rounded.compute_path == "native fused layers"
    assert whole.num_parameters == rounded.num_parameters
    assert whole.num_bytes > 3.9 * whole.num_parameters > 2 * rounded.num_bytes


def test_formats_that_native_layers_do_not_know_run_as_modules(target: Path, tmp_path: Path) -> None:
    head: Any = load_head(save_kind("eagle3", target, tmp_path)[1], load_model(target, torch.float32, CPU), "fp8").model
    assert head.fused is None
