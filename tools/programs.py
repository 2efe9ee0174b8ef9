"""Compile every Triton kernel for a GPU that need not be here, and print what each takes of it.

The wrappers are called with tensors that have shapes and no contents, and each launch compiles instead: down to machine
code, by the ptxas that Triton brings along. That finds errors which Triton's interpreter does not look for.

    python tools/programs.py [--arch 90] [--triton VERSION] [--ptx FOLDER] [kernel ...]
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from layer_programs import layer_cases, recurrence_cases
from specinfer.ops.cpu.choice import SUPPORT
from specinfer.ops.kv_types import FLOAT8
from specinfer.ops.logits import MAX_ENDS, Adjustments, Paths, Truncation
from specinfer.ops.tree_layout import TreeLayout, num_words
from specinfer.ops.trees import (
    MOST_TOKENS,
    Candidates,
    ChanceTable,
    DeviceDraws,
    DeviceTrees,
    DrawnRows,
    Frontier,
    Guesses,
    Limits,
    Sampling,
    WalkInputs,
)
from specinfer.ops.triton.adjustment import adjust_logits, mask_logits
from specinfer.ops.triton.attention import attend
from specinfer.ops.triton.blocks import Device, choose_blocks
from specinfer.ops.triton.candidates import add_candidates
from specinfer.ops.triton.choose import choose
from specinfer.ops.triton.commit import commit
from specinfer.ops.triton.compilation import compiling
from specinfer.ops.triton.draft import best_tree, keep_drafted, mark_ancestors, merge_guesses, next_frontier
from specinfer.ops.triton.drawn import draw_candidates
from specinfer.ops.triton.fixed_attention import attend_in_order
from specinfer.ops.triton.multi_step import walk_multi_step
from specinfer.ops.triton.store import store
from specinfer.ops.triton.traversal import walk_traversal
from specinfer.ops.triton.truncation import least_kept
from specinfer.ops.triton.walk import walk
from triton_versions import installed, run_with

Case = tuple[str, Callable[[], object]]  # what is compiled, and the call that does
# A GPU of each compute capability: A100, RTX 3090, 4090, H100, B200 and RTX 5090.
DEVICES = {
    80: Device(108, 166912), 86: Device(82, 101376), 89: Device(128, 101376),
    90: Device(132, 232448), 100: Device(148, 232448), 120: Device(170, 101376),
}  # fmt: skip
_MOST_STACK = 256  # bytes of a thread that do not fit into registers
_SLOTS, _CONTEXT = 65536, 8192
_HALF, _FULL = torch.bfloat16, torch.float32
_E4M3, _E5M2 = FLOAT8
# Head dims, types of queries, and types of keys and values of 8 bits.
FLOAT8_CASES = [(64, _HALF, _E4M3), (128, _HALF, _E4M3), (256, _HALF, _E4M3), (128, torch.float16, _E4M3),
                (128, _HALF, _E5M2), (128, _FULL, _E4M3)]  # fmt: skip


def _empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _layout(requests: int, max_new: int, *, is_chain: bool = False) -> TreeLayout:
    tokens = requests * max_new
    return TreeLayout(
        slot_table=_empty(requests, _CONTEXT),
        prefix_lens=_empty(requests),
        starts=_empty(requests + 1),
        node_slots=_empty(requests, max_new),
        node_positions=_empty(requests, max_new),
        node_lens=_empty(requests),
        visible=_empty(tokens, num_words(max_new)),
        positions=_empty(tokens),
        max_new=max_new,
        is_chain=is_chain,
    )


def attention_cases(arch: int) -> Iterator[Case]:
    """Head dims, types and features, each with few rows and with many, in the blocks that this GPU has."""
    dims = [*((dim, _HALF) for dim in (64, 80, 96, 128, 256, 512)), (128, torch.float16), (128, _FULL)]
    for dim, dtype in dims:
        for requests, max_new in ((1, 1), (8, 64)):
            yield _attention_case(arch, f"{dim} {str(dtype)[6:]}", requests, max_new, dim, dtype)
    sinks, bias = _empty(32, dtype=_FULL), _empty(32, _CONTEXT, dtype=_FULL)
    features: list[dict[str, Any]] = [{"window": 512}, {"softcap": 50.0}, {"sinks": sinks}, {"key_bias": bias}]
    features.append({name: value for feature in features for name, value in feature.items()})
    for feature in features:
        name = "all" if len(feature) > 1 else next(iter(feature))
        yield _attention_case(arch, name, 1, 16, 128, _HALF, **feature)
    for requests, max_new in ((1, 1), (1, 64), (1, 2048), (8, 1)):
        yield _attention_case(arch, "chain", requests, max_new, 128, _HALF, is_chain=True)
    yield _attention_case(arch, "padded", 1, 16, 6, _FULL)
    for dim, dtype, pool in FLOAT8_CASES:
        name = f"{str(pool)[6:]} {dim} {str(dtype)[6:]}"
        for requests, max_new in ((1, 1), (8, 64)):
            yield _attention_case(arch, name, requests, max_new, dim, dtype, pool=pool)
        yield _attention_case(arch, f"{name} chain", 1, 2048, dim, dtype, is_chain=True, pool=pool)


def fixed_attention_cases(arch: int) -> Iterator[Case]:
    """Attention in a fixed order: trees, and chains in parts and folded."""
    types = [(dim, dtype, None) for dim, dtype in ((64, _HALF), (128, _HALF), (256, _HALF), (512, _HALF), (128, _FULL))]
    for dim, dtype, pool in (*types, *FLOAT8_CASES[:2]):
        for requests, max_new, is_chain, is_split in (
            (1, 64, False, True), (8, 64, False, False), (1, 1, True, True), (1, 2048, True, False),
        ):  # fmt: skip
            layout = _layout(requests, max_new, is_chain=is_chain)
            query = _empty(requests * max_new, 32, dim, dtype=dtype)
            keys, values = (_empty(_SLOTS, 8, dim, dtype=pool or dtype) for _ in range(2))
            features: dict[str, Any] = dict.fromkeys(("window", "softcap", "sinks", "key_bias"))
            call = partial(
                attend_in_order, query, keys, values, query, layout, features | {"scale": 0.1, "value_scale": 1.0},
                DEVICES[arch], has_float8=arch >= 89, is_split=is_split,
            )  # fmt: skip
            name = f"attend in order {dim} {str(pool or dtype)[6:]}, {requests} x {max_new}"
            yield f"{name}{' chain' * is_chain}{' parts' * is_split}", call


def _attention_case(
    arch: int,
    name: str,
    requests: int,
    max_new: int,
    dim: int,
    dtype: torch.dtype,
    is_chain: bool = False,
    pool: torch.dtype | None = None,
    **features: Any,
) -> Case:
    layout = _layout(requests, max_new, is_chain=is_chain)
    query = _empty(requests * max_new, 32, dim, dtype=dtype)
    keys, values = (_empty(_SLOTS, 8, dim, dtype=pool or dtype) for _ in range(2))
    by_bits = pool is not None and arch < 89
    blocks = choose_blocks(layout, 32, 8, dim, dim, dtype.itemsize, DEVICES[arch], by_bits=by_bits)

    features["has_float8"] = arch >= 89
    call = partial(attend, query, keys, values, layout, scale=dim**-0.5, blocks=blocks, **features)
    return f"attend {name}, {requests} x {max_new}", call


def step_cases() -> Iterator[Case]:
    """What goes on around the passes of a step."""
    nodes, depth, requests = 64, 8, 8
    for dtype in (_HALF, _FULL):
        pool, new = _empty(_SLOTS, 8, 128, dtype=dtype), _empty(nodes, 8, 128, dtype=dtype)
        yield f"store {str(dtype)[6:]}", partial(store, pool, pool, _empty(nodes), new, new)
        for kind in FLOAT8:
            pool = _empty(_SLOTS, 8, 128, dtype=kind)
            yield f"store {str(kind)[6:]} of {str(dtype)[6:]}", partial(store, pool, pool, _empty(nodes), new, new)
        for rows, vocab in ((1, 50257), (64, 128256)):
            of_rows = (_empty(rows, dtype=torch.int64), _empty(rows), _empty(rows, dtype=_FULL))
            yield (
                f"choose {str(dtype)[6:]}, {rows} x {vocab}",
                partial(choose, _empty(rows, vocab, dtype=dtype), *of_rows),
            )
    starts, sizes = _empty(requests), _empty(requests)
    for size in (nodes, 1024):
        tokens, parents = _empty(requests, size), _empty(requests, size)
        choices = _empty(requests * size, dtype=torch.int64)
        yield f"walk {size}", partial(walk, choices, starts, tokens, parents, sizes, max_depth=depth)
    walked = (_empty(requests, depth), _empty(requests), _empty(requests, dtype=torch.int64))
    limits = _empty(requests * nodes, dtype=_FULL)
    for vocab, support, least in ((50257, SUPPORT, None), (128256, SUPPORT, limits), (128256, MOST_TOKENS, limits)):
        logits, temperatures = _empty(requests * nodes, vocab, dtype=_FULL), _empty(requests, dtype=_FULL)
        distributions = _empty(requests, nodes, support), _empty(requests, nodes, support, dtype=torch.float64)
        draws, uniforms = (_empty(requests, nodes), *distributions), _empty(requests, dtype=torch.int64)
        trees = (_empty(requests, nodes), _empty(requests, nodes), sizes, *draws, uniforms)
        for name, walk_drawn in (("multi-step", walk_multi_step), ("traversal", walk_traversal)):
            yield (
                f"{name} {vocab}, {support} tokens",
                partial(walk_drawn, WalkInputs(logits, starts, temperatures, *trees, least), out=walked),
            )
    yield from _processing_cases(requests, nodes)
    tables = (_empty(requests, _CONTEXT), _empty(requests), _empty(requests, nodes))
    yield "commit", partial(commit, *tables, _empty(requests, depth), _empty(requests))


def _processing_cases(requests: int, nodes: int) -> Iterator[Case]:
    """What is done with logits, of the nodes of trees and of candidates."""
    floats, table = _empty(requests, dtype=_FULL), _empty(requests, nodes)
    truncation = Truncation(floats, floats, _empty(requests), _empty(requests, dtype=torch.float64))
    for vocab in (SUPPORT, 50257, 128256, 262144):
        logits = _empty(requests * nodes, vocab, dtype=_FULL)
        yield f"truncation {vocab}", partial(least_kept, logits, truncation)
    for vocab, dtype in ((50257, torch.int32), (128256, torch.int64)):
        logits, tokens = _empty(requests * nodes, vocab, dtype=_FULL), _empty(requests, nodes, dtype=dtype)
        adjustments = Adjustments(
            _empty(requests), _empty(requests, vocab, dtype=_FULL), _empty(requests, vocab),
            floats, floats, floats, floats, _empty(requests), _empty(requests, MAX_ENDS),
        )  # fmt: skip
        call = partial(adjust_logits, logits, adjustments, Paths(table, tokens, table, 1, 8))
        yield f"adjustment {vocab}", call
        words = _empty(requests * nodes, -(-vocab // 32))
        yield f"mask {vocab}", partial(mask_logits, logits, words, _empty(requests * nodes))


def draft_cases() -> Iterator[Case]:
    """What goes on around the passes of a draft loop, for 8 requests."""
    requests, levels = 8, 8
    table = ChanceTable(_empty(15, dtype=_FULL), *_empty(2, 3, 8 * 16, dtype=_FULL))
    long = partial(_empty, dtype=torch.int64)
    sampling = Sampling(long(requests), _empty(requests, dtype=_FULL), _empty(requests))
    limits = Limits(_empty(requests), long(requests), _empty(requests, dtype=_FULL), _empty(requests, levels))

    def candidates(count: int) -> Candidates:
        return Candidates.empty(requests, count, torch.device("meta"))

    def frontier(width: int) -> Frontier:
        ints = (_empty(requests, width, 2), _empty(requests, width), _empty(requests, width, dtype=_FULL))
        return Frontier(1, long(requests, width), *ints)

    for dtype, nodes, vocab in ((_HALF, 8, 128256), (_FULL, 1, 50257), (_HALF, 16, 262144)):
        logits, whole = _empty(requests * nodes, vocab, dtype=dtype), candidates(8 * nodes)
        call = partial(add_candidates, logits, frontier(nodes), 0, 8, sampling, table, limits, whole)
        yield f"candidates {str(dtype)[6:]}, {nodes} x {vocab}", call
        predicted = partial(call, accepted=_empty(requests * nodes, dtype=_FULL))
        yield f"candidates {str(dtype)[6:]}, {nodes} x {vocab}, predicted", predicted
    logits = _empty(requests, 262144, dtype=_HALF)
    call = partial(add_candidates, logits, frontier(1), 0, 64, sampling, table, limits, candidates(64))
    yield "candidates, 64 after a root", call
    for nodes, width in ((1, 4), (16, 2), (8, 8)):
        of_nodes = (_empty(requests * nodes, SUPPORT, dtype=_FULL), long(requests * nodes, SUPPORT))
        noise = (long(requests), long(requests), _empty(requests, dtype=_FULL))
        drawn = DrawnRows(_empty(requests, dtype=torch.bool), *noise)
        whole, draws = (
            candidates(width * nodes),
            DeviceDraws.empty(requests, width * nodes, SUPPORT, torch.device("meta")),
        )
        least = _empty(requests * nodes, dtype=_FULL)
        given = (*of_nodes, least, drawn, frontier(nodes), 0, width, table, limits, whole, draws)
        yield f"drawn {nodes} x {width}", partial(draw_candidates, *given)
        yield f"drawn {nodes} x {width}, predicted", partial(draw_candidates, *given, accepted=least)
    for width in (4, 16):
        whole, level_probs = candidates(64 * width), _empty(requests, levels, dtype=_FULL)
        probs, above = whole.path_prob[:, : 8 * width], frontier(width)
        yield f"frontier {width}", partial(next_frontier, probs, above, 0, 2, whole, level_probs, frontier(width))
    for nodes in (16, 64, 256):
        whole = candidates(16 * nodes)
        ints = [_empty(requests, nodes + 1) for _ in range(3)]
        rest = (_empty(requests), _empty(requests, nodes + 1, dtype=_FULL), ints[2], _empty(requests, levels))
        out = DeviceTrees(ints[0], ints[1], *rest)
        roots, has_two = long(requests), _empty(requests, dtype=torch.bool)
        guesses = Guesses(_empty(requests, nodes), _empty(requests, nodes), _empty(requests, nodes, dtype=_FULL))
        yield f"guesses {nodes}", partial(merge_guesses, guesses, whole, 15 * nodes)
        yield f"tree {nodes}", partial(best_tree, whole.path_prob, whole, roots, has_two, limits, out)
        yield f"ancestors {nodes}", partial(mark_ancestors, ints[0], _empty(requests), max_depth=levels, last=_CONTEXT)
    path, of_requests = _empty(requests, levels), (_empty(requests), _empty(requests, 65), _empty(requests, 65))
    state = (_empty(requests), long(requests), _empty(requests, dtype=torch.bool))
    kept = (_empty(requests, levels + 1), _empty(requests))
    yield "kept", partial(keep_drafted, path, *of_requests, *state, kept)


class _AbsentDevice:
    """What Triton asks of a driver before it launches."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        """The GPU to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """There is one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Nothing is launched on it."""
        return 0


def compile_all(cases: Iterator[Case], arch: int) -> Iterator[tuple[str, str, Any]]:
    """(case, kernel's name, compiled kernel), of every launch of every case."""
    compiled: list[tuple[str, Any]] = []
    name, run = "", JITFunction.run

    def noted(*args: Any, **options: Any) -> Any:
        compiled.append((name, run(*args, **options)))
        return compiled[-1][1]

    triton.runtime.driver.set_active(_AbsentDevice(arch))
    JITFunction.run = noted
    try:
        with compiling(ignore_errors=False):
            for case, call in cases:
                name = case
                call()
    finally:
        JITFunction.run = run
    for name, kernel in compiled:
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        yield name, kernel.metadata.name, kernel


def resources(kernel: Any) -> tuple[int, int]:
    """Registers and bytes of stack of a thread, as the machine code states them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(part.split(":", 1) for part in report.split() if part.split(":", 1)[0] in ("REG", "STACK", "LOCAL"))
    return int(found["REG"]), int(found["STACK"])


def main() -> None:
    """Compile, and print a line a kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90, choices=DEVICES, help="compute capability")
    parser.add_argument("--triton", metavar="VERSION", help="version to compile with, which pip installs in .cache/")
    parser.add_argument("--ptx", type=Path, metavar="FOLDER", help="where to write the PTX of each kernel")
    parser.add_argument("kernels", nargs="*", help="beginnings of the names of those wanted; none: all")
    options = parser.parse_args()
    if options.triton not in (None, triton.__version__):
        if Path(triton.__file__).parent.parent == installed(options.triton):
            sys.exit(f"what pip installs as Triton {options.triton} says that it is {triton.__version__}")
        sys.exit(run_with(options.triton))
    cases = [*attention_cases(options.arch), *fixed_attention_cases(options.arch), *step_cases(), *draft_cases()]
    cases += [*layer_cases(options.arch), *recurrence_cases()]
    wanted = [case for case in cases if not options.kernels or case[0].startswith(tuple(options.kernels))]
    if unknown := [name for name in options.kernels if not any(case[0].startswith(name) for case in cases)]:
        sys.exit(f"no kernel's name begins with {' or '.join(unknown)}; without names all are compiled")
    shared_bytes, too_large, variants = DEVICES[options.arch].shared_bytes, 0, set[str]()
    if options.ptx:
        options.ptx.mkdir(parents=True, exist_ok=True)
    for number, (name, kernel_name, kernel) in enumerate(compile_all(iter(wanted), options.arch)):
        if options.ptx:
            (options.ptx / f"{name}, {number} {kernel_name}.ptx").write_text(kernel.asm["ptx"])
        (registers, stack), shared = resources(kernel), kernel.metadata.shared
        fits = shared <= shared_bytes and stack <= _MOST_STACK
        too_large, variants = too_large + (not fits), variants | {kernel.hash}
        parts = (f"{registers:>3} registers", f"{stack:>4} bytes of stack", f"{shared:>6} of shared memory")
        needs = ", ".join((*parts, f"{kernel.metadata.num_warps} warps"))
        print(f"{name:<28} {kernel_name:<16} {needs}{'' if fits else ' TOO LARGE'}")
    compiled = f"{len(wanted)} calls compiled for sm_{options.arch} by Triton {triton.__version__}"
    print(f"{compiled}, {len(variants)} variants of kernels")
    if too_large:
        sys.exit(f"{too_large} kernels need more shared memory than {shared_bytes} bytes, or too much stack")


if __name__ == "__main__":
    main()
