"""On a CUDA device: the same tokens as on the CPU in float32, and pools that balance in half precision."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from head_passes import head_passes
from heads import save_tiny_block, save_tiny_head
from pair_heads import save_eagle, save_mtp
from specinfer import LLM, SamplingParams
from specinfer.model.batch import Piece
from specinfer.model.heads.head import FeatureHead
from specinfer.model.heads.load import load_head
from specinfer.model.layers.device import DeviceDecoder
from specinfer.model.load import load_model
from specinfer.model.runner import ModelRunner
from specinfer.ops.quantization import Bits, dequantize, quantize
from tiny import FAMILIES, random_prompts

pytestmark = pytest.mark.gpu
PROMPTS = random_prompts([3, 40, 17, 60])
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(temperature=1.0, top_k=20, seed=1, max_tokens=24),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=2, max_tokens=24, logprobs=2),
    SamplingParams(temperature=1.2, min_p=0.05, logit_bias={3: 2.0}, min_tokens=5, seed=3, max_tokens=24),
]


def _tokens(folder: Path, small: Path, device: str, tree: str, **options: object) -> list[list[int]]:
    options = {"max_num_batched_tokens": 32} | options
    llm = LLM(folder, drafters=[str(small), "ngram"], tree=tree, device=device, **options)
    outputs = llm.generate(PROMPTS, PARAMS)
    cache = llm.target.cache
    assert cache.num_free + cache.num_cached == cache.num_slots
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_cpu(family: str, model_folder: Callable[..., Path]) -> None:
    folder, small = model_folder(family), model_folder(family, noise=0.02)
    wanted = _tokens(folder, small, "cpu", "off")
    for tree in ("off", "2,2,1"):
        assert _tokens(folder, small, "cuda", tree) == wanted


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_says_as_many_tokens(dtype: str, model_folder: Callable[..., Path]) -> None:
    folder, small = model_folder("llama"), model_folder("llama", noise=0.02)
    tokens = _tokens(folder, small, "cuda", "auto", dtype=dtype)
    assert [len(output) for output in tokens] == [24] * len(PROMPTS)


@pytest.mark.parametrize("tree", ["2,2,1", "best-first:8:4"])
@pytest.mark.parametrize("drawing", ["top-k", "without-replacement", "iid", "hybrid"])
def test_target_only_generates_what_plain_decoding_does(
    drawing: str, tree: str, model_folder: Callable[..., Path]
) -> None:
    folder, small = model_folder("llama"), model_folder("llama", noise=0.02)
    wanted = _tokens(folder, small, "cpu", "off")
    assert _tokens(folder, small, "cuda", tree, verification="target-only", draft_sampling=drawing) == wanted


@pytest.mark.parametrize("drawing", ["top-k", "without-replacement", "iid", "hybrid"])
@pytest.mark.parametrize("rule", ["multi-step", "traversal"])
def test_rules_that_use_random_numbers_generate_what_they_do_on_the_cpu(
    rule: str, drawing: str, model_folder: Callable[..., Path]
) -> None:
    """Of a fixed tree: coins, draws and distributions are the same.

    No tree is cut to the tokens of a pass, which depends on the requests that take steps of their own on a GPU.
    """
    folder, small = model_folder("llama"), model_folder("llama", noise=0.02)
    options = {"verification": rule, "draft_sampling": drawing, "max_num_batched_tokens": 256}
    assert _tokens(folder, small, "cuda", "2,2,1", **options) == _tokens(folder, small, "cpu", "2,2,1", **options)


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_are_rounded_as_on_the_cpu(bits: Bits) -> None:
    weight = torch.randn((150, 200), generator=torch.Generator().manual_seed(0))
    there, here = (dequantize(quantize(one, bits)) for one in (weight.cuda(), weight))
    torch.testing.assert_close(there.cpu(), here, rtol=0, atol=0.05)


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_fused_decoder_computes_what_the_definition_does(
    family: str, dtype: torch.dtype, quantization: str | None, model_folder: Callable[..., Path]
) -> None:
    """Of prompts of few and of many rows, whose products are other ones; in the same type."""
    found = []
    for native in (True, False):
        folder = model_folder(family, max_position_embeddings=512)
        loaded = load_model(folder, dtype, torch.device("cuda"), quantization, native=native)
        assert isinstance(loaded.model, DeviceDecoder) == native
        runner = ModelRunner(loaded, 1024)
        for name, tokens in zip("ab", random_prompts([5, 300]), strict=True):
            slots = runner.cache.reserve(name, len(tokens))
            piece = Piece.from_span(tokens, None, runner.cache.slots(name), slots)
            found.append(runner.forward([replace(piece, num_logits=len(tokens))]))
        for name in "ab":
            runner.cache.free(name)
    near = 1e-4 if dtype == torch.float32 else 0.05
    for ours, theirs in zip(found[:2], found[2:], strict=True):
        assert (ours - theirs).norm() <= near * theirs.norm()


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["EAGLE-3", "several layers", "EAGLE", "MTP", "dflash"])
def test_the_fused_layers_of_heads_compute_what_the_definition_does(
    kind: str, dtype: torch.dtype, quantization: str | None, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    target, folder = tmp_path if kind == "MTP" else model_folder("llama"), tmp_path
    if kind == "MTP":
        save_mtp(folder, "mimo")
    elif kind == "EAGLE":
        save_eagle(folder)
    elif kind == "dflash":
        save_tiny_block(folder, kind)
    else:
        save_tiny_head(folder, num_layers=3 if kind == "several layers" else 1)
    found = []
    for native in (True, False):
        loaded = load_head(folder, load_model(target, dtype, torch.device("cuda"), native=native), quantization)
        assert isinstance(loaded.model, FeatureHead)
        assert (loaded.model.on_device is not None) == native
        assert loaded.compute_path == ("fused device layers" if native else "PyTorch")
        found.append(head_passes(loaded))
    near = 1e-4 if dtype == torch.float32 else 0.05
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= near * theirs.norm()


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_families_generate_as_many_tokens(
    family: str, quantization: str, model_folder: Callable[..., Path]
) -> None:
    folder, small = model_folder(family), model_folder(family, noise=0.02)
    options = {"quantization": quantization, "drafter_quantization": quantization}
    assert [len(output) for output in _tokens(folder, small, "cuda", "2,2,1", **options)] == [24] * len(PROMPTS)
