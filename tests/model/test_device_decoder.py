"""The GPU's decoder, on the CPU by its plain twins: what transformers computes, and nothing that cannot be captured."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional

from native_layers import tree_logits
from on_device import as_on_a_gpu
from quantized_files import save_quantized
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TreeBudget
from specinfer.drafters import SmallModelDrafter
from specinfer.model.batch import ForwardBatch
from specinfer.model.folder import find_folder
from specinfer.model.graphs.capture import Graphs, SynchronizationCheck
from specinfer.model.kv_tensors import KVTensors
from specinfer.model.layers import device as device_decoder
from specinfer.model.layers.device import DeviceDecoder, can_fuse_on_device
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.load_config import LoadConfig
from specinfer.model.runner import ModelRunner
from specinfer.ops import QuantizedLinear
from tests.model.gguf_files import write_model
from tiny import (
    FAMILIES,
    MORE_FUSED,
    VOCAB,
    make_engine,
    make_model,
    make_request,
    quick,
    random_prompts,
    run,
    save_model,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")
Folders = Callable[..., Path]
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
LIKE_LLAMA = {"llama", "mistral", "qwen2", "qwen3", "iquestcoder", "internlm3", "seed_oss", "ministral"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biased": ("llama", {"attention_bias": True, "num_key_value_heads": 4}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama, llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama, yarn": ("llama", {"rope_parameters": _YARN}),
    "mistral": ("mistral", {}),  # with a window
    "qwen2": ("qwen2", {}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
}


def _decoder(loaded: LoadedModel) -> LoadedModel:
    """Takes the model apart."""
    assert can_fuse_on_device(loaded.model, GPU)
    return replace(loaded, model=DeviceDecoder(loaded.model, loaded.max_position).eval())


def _both(folder: Path, dtype: torch.dtype, quantization: str | None = None) -> tuple[LoadedModel, LoadedModel]:
    """As transformers defines it, and the decoder."""
    theirs, ours = (load_model(folder, dtype, CPU, quantization, native=False) for _ in range(2))
    return theirs, _decoder(ours)


def _logits(loaded: LoadedModel) -> Tensor:
    return tree_logits(ModelRunner(loaded, 400))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(name: str, model_folder: Folders) -> None:
    family, changes = VARIANTS[name]
    theirs, ours = _both(model_folder(family, **changes), torch.float32)
    wanted, found = _logits(theirs), _logits(ours)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_parts_of_products_are_added_up(family: str, model_folder: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = _both(model_folder(family), torch.float32)

    def in_parts(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As the kernel for few rows returns them, with the bias in the first one."""
        halves = zip(rows.chunk(2, dim=1), weight.chunk(2, dim=1), (bias, None), strict=True)
        return torch.stack([functional.linear(*half) for half in halves])

    wanted = _logits(theirs)
    monkeypatch.setattr(device_decoder, "has_few_rows_kernel", lambda rows, _: len(rows) > 3)
    monkeypatch.setattr(device_decoder, "few_rows_product", in_parts)
    torch.testing.assert_close(_logits(ours), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_half_precision_is_close(family: str, dtype: torch.dtype, model_folder: Folders) -> None:
    """As close to what is computed in fp32 as transformers is."""
    folder = model_folder(family)
    theirs, ours = _both(folder, dtype)
    exact = _logits(load_model(folder, torch.float32, CPU, native=False))
    assert (_logits(ours) - exact).norm() <= 1.1 * (_logits(theirs) - exact).norm()


@pytest.mark.covering(1)
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_rounded_weights_are_joined_as_they_are(family: str, quantization: str, model_folder: Folders) -> None:
    theirs, ours = _both(model_folder(family, intermediate_size=64), torch.float32, quantization)
    decoder: Any = ours.model
    assert isinstance(decoder.layers[0].qkv, QuantizedLinear)
    assert isinstance(decoder.head, QuantizedLinear)
    assert not any(isinstance(module, torch.nn.Linear) for module in decoder.modules())
    wanted, found = _logits(theirs), _logits(ours)
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()


PROMPTS = random_prompts([3, 26, 12], seed=5)
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=20),
    SamplingParams(temperature=0.9, max_tokens=16),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=12),
)


@pytest.mark.covering(1)
@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_engines_generate_what_they_generate_with_transformers(
    family: str, quantization: str | None, model_folder: Folders
) -> None:
    """Plainly and with trees, of a drafter that is such a decoder, too; in batches, and padded as captures are."""
    target = _both(model_folder(family), torch.float32, quantization)
    small = _both(model_folder(family, noise=0.1), torch.float32)

    def generated(which: int, tree: Any, graphs: Graphs | None = None) -> list[list[int]]:
        runners = [ModelRunner(one[which], 1024, graphs=graphs) for one in (target, small)]
        assert all((runner.padded is None) == (graphs is None) for runner in runners)
        drafter = SmallModelDrafter(runners[1], VOCAB)
        engine = make_engine(runners[0], drafter, tree, max_num_batched_tokens=16)
        jobs = enumerate(zip(PROMPTS, PARAMS, strict=True))
        return run(engine, [make_request(str(i), prompt, its, seed=i) for i, (prompt, its) in jobs])

    wanted = generated(0, ())
    for tree in ((), (2, 1, 1), TreeBudget(10, 4)):
        assert generated(1, tree) == wanted
        assert generated(1, tree, Graphs(CPU)) == wanted


# ------------------------------------------------------------------------------------------------- capturing


def test_nothing_waits_for_the_device(model_folder: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without contents, whatever depends on contents raises: reading one back, a shape that follows."""
    loaded = _decoder(load_model(model_folder("qwen3"), torch.float32, CPU, native=False))
    seen = []

    def attend(batch: ForwardBatch, layer: int, query: Tensor, *_: Any, **__: Any) -> Tensor:
        seen.append(layer)
        return query + batch.store.keys[layer].sum()

    monkeypatch.setattr(device_decoder, "attend_stored", attend)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        numbers = [torch.zeros(6, dtype=torch.int64) for _ in range(3)]
        batch = ForwardBatch(*numbers, torch.zeros(4, dtype=torch.int64), (), KVTensors(
            loaded.layer_shapes, 20, torch.float32, CPU
        ))  # fmt: skip
        logits = loaded.model(batch)
        assert logits.shape == (4, VOCAB)
        with pytest.raises(DataDependentOutputException):
            numbers[0].max().item()
    assert seen == [0, 1]


def test_guesses_beyond_the_longest_text_have_places(model_folder: Folders) -> None:
    loaded = _decoder(load_model(model_folder("llama"), torch.float32, CPU, native=False))
    decoder: Any = loaded.model
    assert decoder.stack.rotations.shape == (loaded.max_position + 1024, 8)


# --------------------------------------------------------------------------------------------------- loading


@pytest.mark.covering(1)
@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
@pytest.mark.parametrize("tied", [False, True])
def test_loading(tied: bool, quantization: str | None, model_folder: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder("llama", tie_word_embeddings=tied)
    plain = load_model(folder, torch.float32, CPU, quantization, native=False)
    with as_on_a_gpu(monkeypatch):
        loaded = load_model(folder, torch.float32, CPU, quantization)
        assert isinstance(loaded.model, DeviceDecoder)
        table = loaded.model.stack.rotations.nbytes
        assert loaded.num_bytes == plain.num_bytes + table - 2 * 4 * 4  # frequencies, stored twice, are gone
        assert loaded.num_parameters == plain.num_parameters
        assert not isinstance(load_model(folder, torch.float32, CPU, native=False).model, DeviceDecoder)
    assert not isinstance(load_model(folder, torch.float32, CPU, quantization).model, DeviceDecoder)


@pytest.mark.parametrize("family", [*FAMILIES, *quick(MORE_FUSED), "llama with gelu"])
def test_only_layers_of_llamas_kind_are_fused(family: str) -> None:
    family, *gelu = family.split(" with ")
    model = make_model(family, **({"hidden_act": "gelu_pytorch_tanh"} if gelu else {}))
    assert can_fuse_on_device(model, GPU) == (family in LIKE_LLAMA and not gelu)
    assert not can_fuse_on_device(model, CPU)


def test_what_does_not_agree_is_not_used(
    model_folder: Folders, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, right = model_folder("llama"), device_decoder.DeviceLayer.__init__

    def wrong(self: Any, *args: Any) -> None:
        right(self, *args)
        self.scale *= 1.2

    monkeypatch.setattr(device_decoder.DeviceLayer, "__init__", wrong)
    for quantization in (None, "fp8"):
        caplog.clear()
        with as_on_a_gpu(monkeypatch), caplog.at_level(logging.WARNING):
            loaded = load_model(folder, torch.float32, CPU, quantization)
        assert not isinstance(loaded.model, DeviceDecoder)
        assert loaded.quantization == quantization
        assert "fused device layers" in caplog.text


@pytest.fixture
def keeps_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU were a GPU, with the plain twins of its products."""
    monkeypatch.setattr(LoadConfig, "_has_kernels_for_codes", True)


@pytest.mark.usefixtures("keeps_codes")
def test_nvfp4_of_a_folder_stays_packed(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    plain = save_quantized(save_model(tmp_path / "source", **sizes), tmp_path / "quantized", "NVFP4")
    loaded = load_model(tmp_path / "quantized", torch.bfloat16, CPU, native=False)
    assert loaded.stored_types == "NVFP4"
    down: Any = loaded.model.get_submodule("model.layers.0.mlp.down_proj")
    assert (down.codes.shape, down.group) == ((128, 128), 16)
    exact = load_model(plain, torch.float32, CPU, native=False)
    assert torch.equal(down.weight, exact.model.get_submodule("model.layers.0.mlp.down_proj").weight.bfloat16())
    wanted = _logits(exact)
    assert (_logits(_decoder(loaded)) - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.usefixtures("keeps_codes")
def test_codes_of_a_file_stay_packed(is_tied: bool, tmp_path: Path) -> None:
    """Queries and values of several types are computed one after the other, and a tied embedding is read from codes."""
    path = tmp_path / "m.gguf"
    kinds = {"attn_v": "Q6_K", "token_embd": "Q6_K", "ffn_down": "IQ4_XS"}
    write_model(path, kind="Q4_K", kinds=kinds, hidden_size=256, intermediate_size=256, tie_word_embeddings=is_tied)
    loaded = load_model(find_folder(path), torch.bfloat16, CPU, native=False)
    assert loaded.stored_types == "IQ4_XS, Q4_K, Q6_K"
    assert loaded.num_bytes < 1.3 * path.stat().st_size
    found = _logits(_decoder(loaded))
    layer: Any = loaded.model.model.layers
    assert not len(layer), "the definition was not taken apart"
    exact = _logits(load_model(find_folder(path), torch.float32, CPU, native=False))
    assert (found - exact).norm() < 0.05 * exact.norm()


@pytest.mark.usefixtures("keeps_codes")
def test_codes_that_stand_for_levels_are_read_without_waiting_for_the_device(tmp_path: Path) -> None:
    """Rows of an embedding, and a product for some outputs at a time."""
    path = tmp_path / "m.gguf"
    kinds = {"token_embd": "IQ4_NL", "output": "IQ4_XS"}
    write_model(path, kind="Q4_K", kinds=kinds, hidden_size=256, intermediate_size=256)
    loaded = load_model(find_folder(path), torch.bfloat16, CPU, native=False)
    decoder: Any = _decoder(loaded).model.to("meta")
    assert decoder.head.levels is not None
    with torch.inference_mode(), SynchronizationCheck():
        rows = decoder.embedded(torch.zeros(3, dtype=torch.int64, device="meta"))
        assert decoder.head(rows).shape == (3, VOCAB)
