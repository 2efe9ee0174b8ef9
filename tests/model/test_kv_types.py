"""Keys and values of 8 bits: what is stored, and attention over it, against PyTorch's own conversions.

Kernels run in Triton's interpreter; compiling them is tests/ops/test_programs.py's.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import reference
from interpreter import interpreted
from reference import layers
from reference import trees as reference_trees
from specinfer.core.tree import TokenTree
from specinfer.model.attention import AttentionFeatures, attend_stored
from specinfer.model.batch import Piece, pack
from specinfer.model.kv_tensors import KVTensors, LayerShape, bytes_per_slot
from specinfer.ops import AttentionCall, cpu
from specinfer.ops.kv_types import FLOAT8, KV_TYPES, KVScales, to_stored
from specinfer.ops.triton import attention, float8, rotary, store
from specinfer.ops.triton.blocks import Blocks
from tree_cases import FEATURES, AttentionCase, Part, wide

E4M3, E5M2 = FLOAT8
CPU = torch.device("cpu")
SCALES = KVScales(0.37, 2.5)
BYTES = torch.arange(256, dtype=torch.uint8)
ROOT = TokenTree.root(1)


def check(out: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(out.float(), wanted.float(), rtol=tolerance, atol=tolerance)


def numbers() -> Tensor:
    """[..., 2, 8] float32: all of the types, the middles between them, tiny and too large ones, and NaN."""
    generator = torch.Generator().manual_seed(0)
    special = [449.0, 463.9, 464.0, 1e9, torch.inf, torch.nan, 61440.0, 65536.0, 2.0**-10, 2.0**-17, 1e-30]
    parts = [torch.tensor(special)]
    for dtype in FLOAT8:
        exact = BYTES.view(dtype).float()
        exact = exact[exact.isfinite()].sort().values
        parts += [exact, (exact[1:] + exact[:-1]) / 2]
    parts.append(torch.randn(3000, generator=generator) * 10.0 ** torch.randint(-8, 5, (3000,), generator=generator))
    found = torch.cat(parts)
    return torch.cat([found, -found])[: len(found) * 2 // 16 * 16].view(-1, 2, 8)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers of the type as float32, found by trying all of them; of two equally near the even one."""
    codes = BYTES[BYTES.view(dtype).float().isfinite()]
    exact = codes.view(dtype).double()
    order = torch.argsort(exact, stable=True)
    exact, even = exact[order], (codes[order] & 1) == 0
    wanted = x.double().clamp(exact[0], exact[-1])
    above = torch.searchsorted(exact, wanted).clamp(1, len(exact) - 1)
    low, high = exact[above - 1], exact[above]
    takes_high = (high - wanted < wanted - low) | ((high - wanted == wanted - low) & even[above])
    return torch.where(x.isnan(), torch.nan, torch.where(takes_high, high, low)).float()


def equal(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(found.float().nan_to_num(7777), wanted.float().nan_to_num(7777))


# ------------------------------------------------------------------------------------------ what is stored


def test_back_ends_know_the_numbers_of_all_types() -> None:
    header = (Path(cpu.__file__).parent / "types.h").read_text()
    native = re.findall(r"enum Type \{ (.*?) \}", header)[0].split(", ")
    names = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16", E4M3: "FP8", E5M2: "E5M2"}
    assert {dtype: native[kind.native] for dtype, kind in KV_TYPES.items()} == names, "branches of fetch and store"
    kinds = dict.fromkeys(names, float8.AS_STORED.value) | {E4M3: float8.E4M3.value, E5M2: float8.E5M2.value}
    assert {dtype: kind.kernel for dtype, kind in KV_TYPES.items()} == kinds


@pytest.mark.parametrize("dtype", FLOAT8)
def test_numbers_are_rounded_to_the_nearest_and_saturate(dtype: torch.dtype) -> None:
    x = numbers()
    assert equal(to_stored(x, dtype), rounded(x, dtype))
    assert equal(to_stored(x, dtype, 1 / 0.37), rounded(x * torch.tensor(1 / 0.37), dtype))
    assert bool(to_stored(torch.tensor([torch.inf, -torch.inf]), dtype).float().isfinite().all())


@interpreted
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_the_kernel_stores_the_same(dtype: torch.dtype, kind: torch.dtype) -> None:
    x = numbers().flatten().to(kind)
    x = x[: len(x) // 512 * 512].view(-1, 64, 8)  # few programs
    slots = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    found, wanted = ([torch.zeros(len(x), 64, 8, dtype=dtype) for _ in range(2)] for _ in range(2))
    store.store(*found, slots, x, -x, SCALES)
    reference_trees.store(*wanted, slots, x, -x, SCALES)
    assert all(equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert equal(wanted[0][slots], rounded(x.float() * torch.tensor(1 / SCALES.key), dtype))


@interpreted
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_rotated_keys_are_stored_the_same(dtype: torch.dtype, kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    qkv = (torch.randn(6, (3 + 2 * 2) * 16, generator=generator) * 9).to(kind)
    angles = torch.randn(40, 8, generator=generator)
    table, slots = torch.cat([angles.cos(), angles.sin()], dim=1), torch.tensor([3, 0, -1, 8, 5, 2])
    found, wanted = ([torch.zeros(9, 2, 16, dtype=dtype) for _ in range(2)] for _ in range(2))
    positions = torch.tensor([0, 5, 7, 39, 2, 11])
    outs = [
        run(qkv, positions, table, slots, *pools, scales=SCALES)
        for run, pools in ((rotary.rotate_and_store, found), (layers.rotate_and_store, wanted))
    ]
    check(outs[0], outs[1], 1e-5 if kind == torch.float32 else 1e-2)
    assert equal(found[1], wanted[1])
    check(found[0].float(), wanted[0].float(), 0.26)  # a sum may round to the next number
    assert (found[0].float() == wanted[0].float()).float().mean() > 0.95
    assert equal(wanted[1][slots[3]], rounded(qkv[3, -32:].float().view(2, 16) * torch.tensor(1 / SCALES.value), dtype))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_native_code_stores_the_same(isa: str, dtype: torch.dtype) -> None:
    x = numbers()
    cache = KVTensors([LayerShape(2, 8, 8, scales=SCALES)], len(x), torch.float32, CPU, kv_dtype=dtype)
    slots = np.arange(len(x))
    pieces = pack([Piece.from_span([0] * len(x), None, slots[:0], slots)], cache, CPU).native
    assert pieces is not None
    call = AttentionCall(cache.keys[0], cache.values[0], 0, 1.0, kv_scales=SCALES)
    nothing = torch.zeros(0)
    call.rotate(pieces, nothing, nothing, torch.cat([x.flatten(1), -x.flatten(1)], dim=1).contiguous())
    assert equal(cache.keys[0], to_stored(x, dtype, 1 / SCALES.key))
    assert equal(cache.values[0], to_stored(-x, dtype, 1 / SCALES.value))


# ---------------------------------------------------------------------------------------------- attention


@interpreted
@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["plain", "window", "all"])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_attention_is_that_over_the_widened_numbers(dtype: torch.dtype, name: str) -> None:
    cases = [[Part(21, 2, wide(5), 1), Part(0, 3, ROOT)], [Part(70, 1, ROOT), Part(3, 1, wide(2))]]
    for splits, parts in enumerate(cases, start=1):
        case = AttentionCase(parts, heads=4, kv_heads=2, seed=splits)
        case.store_as(dtype, SCALES)
        wanted = case.expected(**FEATURES[name])
        check(case.run(reference_trees.attend, **FEATURES[name]), wanted)
        check(case.run(attention.attend, **FEATURES[name], blocks=Blocks(16, 16, splits, 4)), wanted)


@interpreted
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(6, 5), (64, 64)])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_queries_in_half_precision(dtype: torch.dtype, dims: tuple[int, int], kind: torch.dtype) -> None:
    case = AttentionCase([Part(18, 1, wide(3)), Part(2, 9, ROOT)], heads=2, kv_heads=1, dims=dims, dtype=kind)
    case.store_as(dtype, SCALES)
    out = case.run(attention.attend)
    assert out.dtype == kind
    check(out, case.expected(), 2e-2)


@interpreted
@pytest.mark.filterwarnings("ignore:All-NaN slice|invalid value:RuntimeWarning")
@pytest.mark.parametrize("attend", [attention.attend, reference_trees.attend])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_no_number_is_taken_for_one(dtype: torch.dtype, attend: Callable[..., Tensor]) -> None:
    case = AttentionCase([Part(9, 1, ROOT), Part(3, 1, wide(2))])
    case.keys[case.paths[0]] = torch.nan
    case.store_as(dtype, SCALES)
    out = case.run(attend)
    assert bool(out[0].isnan().all())
    assert not bool(out[1:].isnan().any())


class NoSelection(TorchDispatchMode):
    """As on GPUs with builds of PyTorch that select no rows of 8-bit numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ != "index_select" or args[0].dtype not in FLOAT8
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_passes_without_fixed_shapes_read_keys_and_values_as_bytes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    cache = KVTensors([LayerShape(2, 8, 8, scales=SCALES)], 12, torch.float32, CPU, kv_dtype=dtype)
    slots = torch.randperm(12, generator=generator)
    cache.store(0, slots, *(torch.randn(12, 2, 8, generator=generator) for _ in range(2)))
    batch = pack([Piece.from_span([0], wide(3), slots[:8].numpy(), slots[8:].numpy())], cache, CPU, native=False)
    query = torch.randn(4, 4, 8, generator=generator)
    with NoSelection():
        found = attend_stored(batch, 0, query, AttentionFeatures(0.3))
    pools = (cache.keys[0].float() * SCALES.key)[slots], (cache.values[0].float() * SCALES.value)[slots]
    sees = torch.cat([torch.ones(4, 8, dtype=torch.bool), torch.from_numpy(batch.pieces[0].visible)], dim=1)
    for row in range(4):
        check(found[row], reference.attention(query[row], *(pool[sees[row]] for pool in pools), 0.3))


@pytest.mark.parametrize("dim", [8, 20, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_native_attention_is_that_over_the_widened_numbers(isa: str, dtype: torch.dtype, dim: int) -> None:
    """Of few rows, of many, and over a prefix in several parts; a key that is no number reaches those that see it."""
    generator = torch.Generator().manual_seed(dim)
    for prefix, tree in ((700, TokenTree.root(0)), (40, wide(5)), (3, TokenTree.chain(0, range(1, 30)))):
        count = prefix + len(tree)
        cache = KVTensors([LayerShape(1, dim, dim, scales=SCALES)], count, torch.float32, CPU, kv_dtype=dtype)
        slots = torch.randperm(count, generator=generator)
        cache.store(0, slots, *(torch.randn(count, 1, dim, generator=generator) for _ in range(2)))
        piece = Piece.from_span([0], tree, slots[:prefix].numpy(), slots[prefix:].numpy())
        batch = pack([piece], cache, CPU)
        query = torch.randn(len(tree), 3, dim, generator=generator)
        call = AttentionCall(cache.keys[0], cache.values[0], 3, dim**-0.5, kv_scales=SCALES)

        def found(batch: Any = batch, call: AttentionCall = call, query: Tensor = query) -> Tensor:
            return call.attend(batch.native, query.flatten(1)).view(query.shape)

        for row in range(len(tree)):
            seen = torch.cat([slots[:prefix], slots[prefix:][torch.from_numpy(piece.visible[row])]])
            pools = cache.keys[0].float() * SCALES.key, cache.values[0].float() * SCALES.value
            check(found()[row], reference.attention(query[row], pools[0][seen], pools[1][seen], dim**-0.5), 2e-5)
        cache.keys[0][slots[0]] = torch.nan
        assert bool(found().isnan().all())


# ------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("dtype", FLOAT8)
def test_keys_and_values_take_a_byte_each(dtype: torch.dtype) -> None:
    shapes = [LayerShape(2, 8, 6), LayerShape(1, 16, 0, attends=False), LayerShape(1, 4, 4, scales=SCALES)]
    cache = KVTensors(shapes, 10, torch.bfloat16, CPU, kv_dtype=dtype)
    assert bytes_per_slot(shapes, torch.bfloat16, kv_dtype=dtype) == 28 + 2 * 16 + 8
    assert cache.num_bytes() == 10 * bytes_per_slot(shapes, torch.bfloat16, kv_dtype=dtype)
    assert [pool.dtype for pool in cache.keys] == [dtype, torch.bfloat16, dtype], "inputs of a convolution stay as is"
    assert [tuple(scales) for scales in cache.scales] == [(1, 1), (1, 1), tuple(SCALES)]
    assert KVTensors(shapes, 10, torch.bfloat16, CPU, kv_dtype=torch.bfloat16).scales[2] == (1, 1)
