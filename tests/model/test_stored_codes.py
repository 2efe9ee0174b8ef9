"""Weights that are computed with as files store them: codes, products, models."""

import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from reference import layers
from specinfer import LLM, ModelError, SamplingParams
from specinfer.model.definition import load_plain
from specinfer.model.folder import find_folder
from specinfer.model.gguf.blocks import weight_of
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.runner import ModelRunner
from specinfer.ops import AdapterRuns, AdapterTable, Ending, LinearCall, LowRank, Panels, QuantizedWeight
from specinfer.ops.cpu.panels import TYPES, has_dots
from specinfer.ops.float8 import LEVELS
from specinfer.ops.quantization import dequantize
from tests.model.gguf_files import random_blocks, scaled, write_model
from tiny import logits, random_prompts

CPU = torch.device("cpu")
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
         "NVFP4")  # fmt: skip
WIDE = {"hidden_size": 256, "intermediate_size": 256}
MIXTURE = {"norm_topk_prob": True, "moe_intermediate_size": 64}
MIXES: dict[str, dict[str, Any]] = {
    "Q4_K_M": {"kind": "Q4_K", "kinds": {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K"}},
    "Q4_0": {"kind": "Q4_0", "kinds": {"token_embd": "Q6_K"}, "tie_word_embeddings": True},
    "Q5_K_S": {"kind": "Q5_K", "kinds": {"attn_k": "F16", "output": "BF16"}},
    "MXFP4": {"kind": "Q8_0", "kinds": {"ffn_gate": "MXFP4", "ffn_up": "MXFP4", "ffn_down": "MXFP4"}},
    "NVFP4": {"kind": "Q8_0", "kinds": dict.fromkeys(("attn_q", "ffn_gate", "ffn_up", "ffn_down"), "NVFP4")},
    "experts in NVFP4": {"arch": "qwen3moe", "kind": "Q4_0", "kinds": {"exps": "NVFP4"}, **MIXTURE},
    "gates of two types": {"kind": "Q4_1", "kinds": {"1.ffn_up": "IQ4_XS"}},
    "gemma2": {"arch": "gemma2", "kind": "Q5_1"},
    "phi3": {"arch": "phi3", "kind": "Q6_K", "pad_token_id": None},
    "experts": {"arch": "qwen3moe", "kind": "Q4_0", "kinds": {"down_exps": "Q5_1", "gate_inp": "F32"}, **MIXTURE},
    "experts of two types": {"arch": "qwen3moe", "kind": "Q8_0", "kinds": {"gate_exps": "Q4_1"}, **MIXTURE},
    "experts with and without codes": {"arch": "qwen3moe", "kind": "Q4_0", "kinds": {"up_exps": "BF16"}, **MIXTURE},
    "experts without codes for outputs": {"arch": "qwen3moe", "kind": "Q4_0", "kinds": {"down_exps": "F16"}, **MIXTURE},
    "gpt-oss": {"arch": "gpt-oss", "kind": "Q8_0", "kinds": {"exps": "MXFP4", "gate_inp": "F32"}},
    "gpt-oss without codes for outputs": {"arch": "gpt-oss", "kind": "Q4_0", "kinds": {"down_exps": "BF16"}},
    "experts in 16 bits": {"arch": "qwen3moe", "kind": "Q4_0", "kinds": {"exps": "F16"}, **MIXTURE},
}
FUSED = {
    "Q4_K_M",
    "Q4_0",
    "Q5_K_S",
    "MXFP4",
    "NVFP4",
    "phi3",
    "experts",
    "experts without codes for outputs",
    "experts in 16 bits",
    "experts in NVFP4",
}


def weights(name: str, rows: int, blocks: int, scale: float | None) -> tuple[QuantizedWeight, torch.Tensor]:
    """Random weights of a type, and the numbers that the library makes of them; any bytes without a scale."""
    kind = gguf.GGMLQuantizationType[name]
    data = random_blocks(kind, rows, blocks)
    data = data if scale is None else scaled(data, kind, scale)
    with np.errstate(invalid="ignore", over="ignore"):
        numbers = torch.from_numpy(gguf.quants.dequantize(data, kind))
    return weight_of(torch.from_numpy(data), kind), numbers


@pytest.mark.parametrize("name", KINDS)
def test_codes_are_the_numbers_that_the_library_reads(name: str) -> None:
    weight, wanted = weights(name, 300, 6, None)
    found = dequantize(weight)
    is_finite = wanted.isfinite()
    assert is_finite.float().mean() > 0.8
    assert torch.equal(found[is_finite], wanted[is_finite])


@pytest.mark.parametrize("name", [*KINDS, "4 bits with zeros"])
def test_whole_groups_of_inputs_are_weights_of_their_own(name: str) -> None:
    weight, numbers = weights(name, 40, 4, 0.01) if name in KINDS else with_zeros(4)
    size = weight.group_size if weight.nest is None else 256
    part = range(size, numbers.shape[1])
    assert weight.can_split(part)
    assert torch.equal(dequantize(weight.of_inputs(part)), numbers[:, size:])
    assert not weight.can_split(range(size // 2, numbers.shape[1]))
    assert not weight.can_split(range(size + size // 2))


def with_zeros(bits: int) -> tuple[QuantizedWeight, torch.Tensor]:
    """Weights of groups with a zero each, as AWQ has them."""
    generator = torch.Generator().manual_seed(bits)
    codes, zeros = (torch.randint(0, 1 << bits, (70, n), generator=generator).to(torch.uint8) for n in (512, 16))
    scales = (torch.rand((70, 16), generator=generator) / 50).half()
    numbers = (codes.float() - zeros.repeat_interleave(32, 1)) * scales.float().repeat_interleave(32, 1)
    return QuantizedWeight(codes, scales, bits, 512, 32, zeros=zeros), numbers


def of_fp8(rows: int, inputs: int, used: int = 300) -> tuple[QuantizedWeight, torch.Tensor]:
    """Weights of all codes but NaN, with a scale for each row and 128 inputs, of which so many are used."""
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 256, (rows, inputs), generator=generator).to(torch.uint8)
    codes[codes & 127 == 127] = 0
    codes[:, used:] = 0  # of a last group that is partly filled
    scales = torch.rand((rows, inputs // 128), generator=generator) / 50
    numbers = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, 1)
    return QuantizedWeight(codes, scales, 8, used, 128, levels=LEVELS), numbers[:, :used]


def test_native_products_of_fp8_are_those_of_its_numbers(isa: str) -> None:
    weight, numbers = of_fp8(70, 384)
    assert torch.equal(dequantize(weight), numbers)
    bias = torch.randn(70, generator=torch.Generator().manual_seed(1))
    for dots in (True, False):
        call = LinearCall(Panels.from_codes(weight, bias), dots=dots)
        for rows in (1, 5, 40):
            x = torch.randn((rows, 300), generator=torch.Generator().manual_seed(rows))
            seen = x.bfloat16().float() if dots and has_dots(TYPES[torch.bfloat16]) else x
            exact = (seen.double() @ numbers.T.double() + bias).float()
            torch.testing.assert_close(call(x), exact, rtol=1e-4, atol=1e-3)
            for row in range(rows):
                assert torch.equal(call(x[row : row + 1])[0], call(x)[row])
    assert torch.equal(call.rows(torch.tensor([69, 0, 32])), numbers[[69, 0, 32]])
    assert torch.equal(dequantize(Panels.from_codes(weight).unpack_codes()), numbers)
    assert torch.equal(dequantize(weight.of_inputs(range(128, 300))), numbers[:, 128:])


def test_parts_of_many_inputs_in_fp8_are_whole_groups(isa: str) -> None:
    """Several blocks of rows take turns on a part of the inputs, of which there are 33 groups."""
    weight, numbers = of_fp8(40, 4224, 4224)
    x = torch.randn((40, 4224), generator=torch.Generator().manual_seed(0))
    for dots in (True, False):
        call = LinearCall(Panels.from_codes(weight), dots=dots)
        y = call(x)
        assert torch.equal(call(x[39:])[0], y[39])
        torch.testing.assert_close(y, x @ numbers.T, rtol=0.02, atol=1.0)


def of_nvfp4(rows: int, inputs: int) -> tuple[QuantizedWeight, torch.Tensor]:
    """Weights with levels, and scales in float32 for each row and 16 inputs."""
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 16, (rows, inputs), generator=generator).to(torch.uint8)
    levels = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
    scales = torch.rand((rows, inputs // 16), generator=generator) / 50
    numbers = levels[codes.long()].float() * scales.repeat_interleave(16, 1)
    return QuantizedWeight(codes, scales, 4, inputs, 16, levels=levels), numbers


@pytest.mark.parametrize("name", [*KINDS, "4 bits with zeros", "8 bits with zeros", "NVFP4"])
def test_native_products_are_the_plain_ones_and_a_row_does_not_depend_on_others(isa: str, name: str) -> None:
    if name in KINDS:
        weight, numbers = weights(name, 70, 2, 0.01)
    else:
        weight, numbers = of_nvfp4(70, 512) if name == "NVFP4" else with_zeros(int(name[0]))
    bias = torch.randn(70, generator=torch.Generator().manual_seed(1))
    for dots in (True, False):
        call = LinearCall(Panels.from_codes(weight, bias), dots=dots)
        for rows in (1, 5, 40):
            x = torch.randn((rows, numbers.shape[1]), generator=torch.Generator().manual_seed(rows))
            y, wanted = call(x), layers.rounded_product(x, weight, bias)
            # An activation in the middle between two steps may be rounded to either.
            off = (y - wanted).norm(dim=1) / wanted.norm(dim=1)
            assert off.median() < 1e-6
            assert off.max() < 3e-3
            for row in range(rows):
                assert torch.equal(call(x[row : row + 1])[0], y[row])
    assert torch.equal(call.rows(torch.tensor([69, 0, 32])), numbers[[69, 0, 32]])
    again = Panels.from_codes(weight).unpack_codes()
    assert torch.equal(dequantize(again), numbers)


def test_neighbours_of_several_types_are_one_call_with_adapters(isa: str) -> None:
    """As the projections of queries, keys and values are, whose values often have a type of their own."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((9, 512), generator=generator)
    parts = [Panels.from_codes(weights(name, rows, 2, 0.01)[0]) for name, rows in (("Q4_K", 96), ("Q6_K", 32))]
    parts.append(Panels.from_weight(torch.randn((70, 512), generator=generator).bfloat16()))
    wanted = torch.cat([LinearCall(part)(x) for part in parts], dim=1)
    call = LinearCall(parts[0], following=LinearCall(parts[1], following=LinearCall(parts[2])))
    call.number = 1
    assert torch.equal(call(x), wanted)
    assert torch.equal(call(x, torch.ones(9, 198), Ending.ADD), wanted + 1)
    down, up = torch.randn((4, 512), generator=generator), torch.randn((198, 4), generator=generator)
    runs = AdapterRuns.from_requests([2, 7], [None, AdapterTable([None, LowRank.from_matrices(down, up)])])
    wanted[2:] += x[2:] @ down.T @ up.T
    torch.testing.assert_close(call(x, runs=runs), wanted, rtol=1e-4, atol=1e-2)


def load(path: Path, dtype: Any = "auto", **options: Any) -> LoadedModel:
    return load_model(find_folder(path), dtype, CPU, **options)


@pytest.mark.parametrize("mix", MIXES)
def test_models_of_mixed_types_compute_with_codes(mix: str, tmp_path: Path) -> None:
    """Near the numbers in fp32, in the memory of the file."""
    path = tmp_path / "m.gguf"
    write_model(path, **MIXES[mix], **WIDE)
    loaded = load(path)
    assert loaded.compute_path == ("native fused layers" if mix in FUSED else "native linear layers")
    assert MIXES[mix]["kind"] in str(loaded.stored_types)
    most = 1.4 if "NVFP4" in mix else 1.2  # its scales take 32 bits, and 8 in the file
    assert loaded.num_bytes < most * path.stat().st_size
    tokens = random_prompts([24], seed=3)[0]
    exact = load_plain(find_folder(path), torch.float32).eval()(torch.tensor([tokens])).logits[0].detach()
    found = logits(ModelRunner(loaded, 64), tokens).float()
    assert (found - exact).std(dim=1).median() < 0.1 * exact.std()


QUICK = (next(mix for mix in MIXES if mix in FUSED), next(mix for mix in MIXES if mix not in FUSED))


@pytest.mark.parametrize("mix", [mix if mix in QUICK else pytest.param(mix, marks=pytest.mark.slow) for mix in MIXES])
def test_texts_of_mixed_types_are_the_same_whatever_the_tree(mix: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, **MIXES[mix], **WIDE)
    texts = [
        [output.outputs[0].token_ids for output in outputs]
        for tree, drafters in (("off", []), ("2,2,1", ["ngram", str(path)]))
        for outputs in [_generate(path, tree, drafters)]
    ]
    assert texts[0] == texts[1]


def _generate(path: Path, tree: str, drafters: list[str]) -> Any:
    greedy, sampled = (
        SamplingParams(temperature=0.0, max_tokens=16),
        SamplingParams(temperature=0.9, seed=5, max_tokens=16),
    )
    with LLM(path, drafters=drafters, tree=tree, max_model_len=128) as llm:
        prompts: Any = ["the other one and the other", "the"]
        return [*llm.generate(prompts, greedy), *llm.generate(prompts, sampled)]


def test_float32_and_quantization_decode_the_codes(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", **MIXES["Q4_K_M"], **WIDE)
    for dtype, options in ((torch.float32, {}), ("auto", {"quantization": "int8"}), ("auto", {"native": False})):
        loaded = load(tmp_path / "m.gguf", dtype, **options)
        assert loaded.stored_types is None
        assert loaded.quantization == options.get("quantization")
    assert load(tmp_path / "m.gguf", torch.bfloat16).weights_type == "Q4_K, Q6_K"


@pytest.mark.parametrize("name", ["output_norm.weight", "token_embd.weight", "blk.1.ffn_up.weight"])
def test_scales_that_are_not_finite_are_refused_by_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, kind="Q4_0", **WIDE)
    tensor = gguf.GGUFReader(path).tensors
    (offset,) = (one.data_offset for one in tensor if one.name == name)
    data = bytearray(path.read_bytes())
    data[int(offset) : int(offset) + 4] = b"\x00\x7e\xc0\x7f"  # NaN in float16 at the beginning, in float32 at the end
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"m\.gguf has NaN or infinity; fetch the model again"):
        load(path)


def test_factors_of_nvfp4_that_no_matrix_has_are_refused_by_name(tmp_path: Path) -> None:
    path, whole = tmp_path / "m.gguf", {"kind": "NVFP4", **WIDE}
    write_model(path, **whole)
    (at,) = (int(one.data_offset) for one in gguf.GGUFReader(path).tensors if one.name == "blk.1.attn_k.scale")
    data = path.read_bytes()
    path.write_bytes(data[:at] + b"\0\0\xc0\x7f" + data[at + 4 :])
    with pytest.raises(
        ModelError, match=r"weight model\.layers\.1\.self_attn\.k_proj\.weight of .*has NaN or infinity"
    ):
        load(path)
    entry = data.index(b"blk.1.attn_k.scale") + len(b"blk.1.attn_k.scale") + 4
    path.write_bytes(data[:entry] + b"\2" + data[entry + 1 :])
    with pytest.raises(ModelError, match=r"'blk\.1\.attn_k\.scale' has the shape \[2\], not \[1\]"):
        load(path)
    path.write_bytes(data.replace(b"blk.1.attn_k.scale", b"blk.1.attn_x.scale"))
    with pytest.raises(ModelError, match=r"'blk\.1\.attn_x\.scale' has no place in such a model"):
        load(path)


def test_a_draft_head_shares_the_stored_embedding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log names the stored types, and the fused decoder holds tied weights once."""
    path = tmp_path / "m.gguf"
    write_model(path, **MIXES["Q4_0"], **WIDE)
    with caplog.at_level(logging.INFO), LLM(path, drafters=[]) as llm:
        model = llm.target.loaded.model
        assert isinstance(model, FusedDecoder)
        assert model.head is not None
        assert model.head.call.panels is model.embedding.call.panels  # type: ignore[union-attr]
    assert "parameters in Q4_0, Q6_K on cpu" in caplog.text
