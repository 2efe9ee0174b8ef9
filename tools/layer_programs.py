"""Calls of the kernels of decoder layers, for `programs.py` to compile: shapes of models of 1 and 8 billion weights."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from specinfer.ops.cpu.recurrence import ConvolutionCall, Decays, HeadSizes, RecurrenceCall
from specinfer.ops.fixed_order import fixed_order
from specinfer.ops.float8 import LEVELS
from specinfer.ops.kv_types import FLOAT8
from specinfer.ops.quantized_weight import NEST, QuantizedWeight
from specinfer.ops.routes import Routes
from specinfer.ops.scan_order import ScanOrder
from specinfer.ops.splits import divide
from specinfer.ops.triton import few_rows
from specinfer.ops.triton import product as products
from specinfer.ops.triton.gate import gate
from specinfer.ops.triton.low_rank import add_low_rank
from specinfer.ops.triton.norm import add_norm
from specinfer.ops.triton.recurrence import convolve, recur
from specinfer.ops.triton.rotary import rotate_and_store
from specinfer.ops.triton.row_sum import row_sum
from specinfer.ops.triton.store import store
from specinfer.ops.triton.weights import widen

_SLOTS, _POSITIONS = 65536, 131072
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Bits, inputs of a group (0: all), type of the scales, and what there is besides.
_WEIGHTS: dict[str, tuple[int, int, torch.dtype, tuple[str, ...]]] = {
    "int8": (8, 64, torch.bfloat16, ()),
    "int4": (4, 32, torch.bfloat16, ()),
    "fp8": (8, 0, torch.float32, ("floats",)),
    "fp8 in blocks": (8, 128, torch.float32, ("floats",)),
    "Q8_0": (8, 32, torch.float16, ()),
    "Q4_K": (4, 32, torch.uint8, ("added", "nest")),
    "Q6_K": (6, 16, torch.int8, ("nest",)),
    "IQ4_NL": (4, 32, torch.float16, ("levels",)),
    "NVFP4": (4, 16, torch.float32, ("levels",)),
    "AWQ": (4, 128, torch.float16, ("zeros",)),
}
# Heads, heads of keys, sizes of keys and values, what has a decay, whether a value is a change, and a bound of decays.
_RECURRENCES: dict[str, tuple[int, int, int, int, Decays, bool, float]] = {
    "Qwen3-Next": (32, 16, 128, 128, "head", True, 0.0),
    "OLMo": (30, 30, 96, 192, "head", True, 0.0),
    "Kimi": (32, 32, 128, 128, "key", True, 0.0),
    "Bailing": (32, 32, 128, 128, "key", True, -5.0),
    "Mamba-2": (128, 8, 128, 64, "head", False, 0.0),
    "Falcon-H1": (24, 1, 256, 64, "head", False, 0.0),
    "Mamba": (1, 1, 16, 5120, "column", False, 0.0),
    "RG-LRU": (1, 1, 1, 2560, "column", False, 0.0),
}
_ROUNDED = ("int8", "int4", "fp8")  # that we round to; the others are of files
_ROUTED = ("int4", "fp8 in blocks", "Q4_K")


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def layer_cases(arch: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Sums and norms, rotations and stores, gates, and products with rounded weights."""
    has_float8 = (True, False) if arch >= 89 else (False,)
    for dtype in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        for width in (2048, 4096):
            hidden, weight = _empty(64, width, dtype=dtype), _empty(width, dtype=dtype)
            yield (
                f"add_norm {name} {width}",
                partial(add_norm, hidden, hidden, weight, 1e-5),
            )
            yield f"norm {name} {width}", partial(add_norm, hidden, None, weight, 1e-5)
        for dim in (64, 96, 128, 256):
            for has_norms in (False, True):
                yield f"rotate {name} {dim}{' norms' * has_norms}", _rotation(dtype, dim, has_norms=has_norms)
        for pool in FLOAT8:
            yield f"rotate {name} to {str(pool)[6:]}", _rotation(dtype, 128, has_norms=True, kind=pool)
        gated = _empty(64, 2 * 14336, dtype=dtype)
        yield f"gate {name}", partial(gate, gated)
        x, slots, places = _empty(64, 4096, dtype=dtype), _empty(64, dtype=torch.int32), _empty(3, 5, dtype=torch.int64)
        yield f"low rank {name}", partial(add_low_rank, _empty(64, 14336, dtype=dtype), x, slots, places, 64)
        for kind in _WEIGHTS if dtype == torch.bfloat16 else _ROUNDED:
            for rows in (1, 32, 256) if kind in _ROUNDED else (1, 256):
                yield f"product {name} {kind}, {rows} rows", _product(dtype, kind, rows, has_float8)
    yield "product of 1 output", _product(torch.bfloat16, "int8", 1, has_float8, outputs=1)
    for rows in (1, 32, 64) if arch // 10 == few_rows.COMPUTE_CAPABILITY_MAJOR else ():
        yield f"few rows, {rows}", _few_rows(rows)
    for dtype in _DTYPES:
        yield f"in order {str(dtype)[6:]}", partial(_in_order, dtype, has_float8[0])
    for kind in _ROUTED:
        for tokens in (1, 512):
            yield f"routed product {kind}, {tokens} tokens", _routed_product(kind, tokens, has_float8[0])


def recurrence_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Convolutions and recurrences in front of and between other parts of layers, of published models."""
    long = partial(_empty, dtype=torch.int64)
    for dtype in _DTYPES:
        for taps, channels in ((4, 8192), (3, 2048)):
            conv = ConvolutionCall(_empty(channels, 1, taps, dtype=dtype), None, activates=taps == 4)
            name = f"convolve {str(dtype).removeprefix('torch.')} {taps}"
            yield name, partial(convolve, _empty(_SLOTS, 1, channels, dtype=dtype), long(64, taps), conv)
    inputs, new = (_empty(rows, 1, 12288, dtype=torch.bfloat16) for rows in (_SLOTS, 64))
    yield "inputs of a convolution", partial(store, inputs, inputs, long(64), new, new)
    one = long(64)
    of_requests = long(8)
    order = ScanOrder(64, 16, of_requests, of_requests, of_requests, of_requests, one, one, one, one, one)
    for name, (heads, key_heads, keys, values, decays, is_delta, least) in _RECURRENCES.items():
        steps, is_column = heads * (keys if decays == "key" else 1), decays == "column"
        widths = [key_heads * keys, key_heads * keys, heads * values]
        sizes = HeadSizes(heads, key_heads, keys, values, sum(widths), 0, widths[0], 2 * widths[0])
        decay, skip = _empty(*((keys, values) if is_column else (heads,)), dtype=torch.float32), None
        if not is_delta and not is_column:
            skip = _empty(heads, dtype=torch.float32)
        bias = None if is_column else _empty(steps, dtype=torch.float32)
        call = RecurrenceCall(sizes, bias, decay, skip, (least, 1.0), is_delta=is_delta, decays=decays)
        mixed, pool = (_empty(*shape, dtype=torch.float32) for shape in ((64, sum(widths)), (64, heads, keys, values)))
        stored = _empty(_SLOTS, 1, steps + heads * is_delta, dtype=torch.bfloat16)
        if is_column:
            stored = _empty(64, 1, values, dtype=torch.float32)
        yield f"recur {name}", partial(recur, mixed, call, order, stored, pool)


def _rotation(
    dtype: torch.dtype, dim: int, *, has_norms: bool, kind: torch.dtype | None = None
) -> Callable[[], object]:
    tokens, heads, kv_heads = 64, 32, 8
    qkv = _empty(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    pool = _empty(_SLOTS, kv_heads, dim, dtype=kind or dtype)
    places, table = _empty(tokens, dtype=torch.int64), _empty(_POSITIONS, dim, dtype=torch.float32)
    norms = (_empty(dim, dtype=dtype), _empty(dim, dtype=dtype)) if has_norms else None
    return partial(rotate_and_store, qkv, places, table, places, pool, pool, norms, 1e-5)


def _few_rows(rows: int) -> Callable[[], object]:
    x, weight, bias = (_empty(*shape, dtype=torch.bfloat16) for shape in ((rows, 4096), (28672, 4096), (28672,)))

    def call() -> object:
        for outputs in (28672, 4096):  # in one part, and in several
            division = divide(rows, outputs, 4096, num_cores=132)
            few_rows.few_rows_product(x, weight[:outputs], bias[:outputs] if rows == 1 else None, division=division)
        return few_rows.gated_product(x, weight, division=divide(rows, 28672, 4096, num_cores=132))

    return call


def _product(
    dtype: torch.dtype, kind: str, rows: int, has_float8: tuple[bool, ...], outputs: int = 6144
) -> Callable[[], object]:
    inputs = 4096
    x, bias, weight = _empty(rows, inputs, dtype=dtype), _empty(outputs, dtype=dtype), _weight(kind, outputs, inputs)

    def call() -> object:
        # Both ways to widen, and with and without parts; the device that is not here cannot be asked.
        for native in has_float8 if weight.is_float else (False,):
            products.product(x, weight, bias, has_float8=native)
            widen(weight, dtype, has_float8=native)
        return products.product(x, weight, has_float8=has_float8[0], parts=1)

    return call


def _in_order(dtype: torch.dtype, has_float8: bool) -> None:
    """Call products in a fixed order: with numbers, codes and experts of numbers; and sums of rows."""
    x, weight = _empty(64, 4096, dtype=dtype), _empty(6144, 4096, dtype=dtype)
    routes = Routes.from_experts(_empty(64, 8, dtype=torch.int64), 8, dtype)
    with fixed_order():
        products.product(x, weight, has_float8=has_float8)
        products.product(x, _weight("int4", 6144, 4096), has_float8=has_float8)
        products.routed_product(x, weight, routes, 8, has_float8=has_float8)
        row_sum(x)


def _routed_product(kind: str, tokens: int, has_float8: bool) -> Callable[[], object]:
    inputs, outputs, experts, chosen = 2048, 1536, 128, 8
    x, weight = _empty(tokens, inputs, dtype=torch.bfloat16), _weight(kind, experts * outputs, inputs)
    routes = Routes.from_experts(_empty(tokens, chosen, dtype=torch.int64), experts, torch.bfloat16)
    return partial(products.routed_product, x, weight, routes, chosen, has_float8=has_float8)


def _weight(kind: str, outputs: int, inputs: int) -> QuantizedWeight:
    bits, group, dtype, parts = _WEIGHTS[kind]
    group = group or inputs
    groups, nests = inputs // group, inputs // NEST
    codes = _empty(outputs, inputs // 2 if bits == 4 else inputs, dtype=torch.uint8)

    def numbers(kind: torch.dtype) -> Tensor:
        return _empty(outputs, groups, dtype=kind)

    return QuantizedWeight(
        codes, numbers(dtype), bits, inputs, group,
        added=numbers(dtype) if "added" in parts else None,
        nest=_empty(outputs, nests, 1 + ("added" in parts), dtype=torch.float16) if "nest" in parts else None,
        levels=LEVELS if "floats" in parts else _empty(16, dtype=torch.int8) if "levels" in parts else None,
        zeros=numbers(torch.uint8) if "zeros" in parts else None,
    )  # fmt: skip
