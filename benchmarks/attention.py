"""Time of attention over a prefix and a tree on a GPU, compared with PyTorch's and with the memory bandwidth limit.

One layer's attention takes microseconds, so calls over several KV caches are captured and replayed together. Like the
layers of a model, they read more than the GPU's cache holds, and launch latency does not count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specinfer.bench.ceilings import now
from specinfer.model.kv_tensors import LayerShape
from specinfer.ops.tree_layout import TreeLayout, pack_bits
from specinfer.ops.tree_ops import attend
from specinfer.reporting.spread import Spread

BATCHES, NODES, CONTEXT = (1, 8), (1, 8, 16, 32, 64), 4096
_CACHE_BYTES = 2**28  # more than any GPU's cache
_MOST_CALLS = 32


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """Seconds of one layer's attention in each repeat.

    Attributes:
        num_bytes: Bytes of keys and values, each read once.
        torch_seconds: Seconds of PyTorch's fastest attention over contiguous keys without a mask.
    """

    requests: int
    nodes: int
    context: int
    num_bytes: int
    seconds: tuple[float, ...]
    torch_seconds: tuple[float, ...]

    @property
    def us(self) -> Spread:
        return Spread.from_values(1e6 * each for each in self.seconds)

    @property
    def torch_us(self) -> Spread:
        return Spread.from_values(1e6 * each for each in self.torch_seconds)

    @property
    def over_torch(self) -> Spread:
        """PyTorch's time divided by ours in each repeat."""
        return Spread.from_values(b / a for a, b in zip(self.seconds, self.torch_seconds, strict=True))

    def of_floor(self, bytes_per_second: float) -> float:
        """Return the share of the median call's time that reading its keys and values takes at this rate."""
        return self.num_bytes / bytes_per_second / Spread.from_values(self.seconds).median


def time_attention(
    shape: LayerShape,
    num_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
    seed: int = 0,
    *,
    batches: tuple[int, ...] = BATCHES,
    nodes: tuple[int, ...] = NODES,
    context: int = CONTEXT,
) -> tuple[AttentionTimes, ...]:
    """Measure every batch size with every number of nodes. Our attention and PyTorch's take turns."""
    measured = []
    for requests in batches:
        for size in nodes:
            num_bytes = requests * (context + size) * shape.num_values * dtype.itemsize
            num_calls = min(max(_CACHE_BYTES // num_bytes, 2), _MOST_CALLS)
            pools = [
                torch.randn((requests * (context + size), shape.num_kv_heads, dim), dtype=dtype, device=device)
                for dim in (shape.key_dim, shape.value_dim)
                for _ in range(num_calls)
            ]
            keys, values = pools[:num_calls], pools[num_calls:]
            query = torch.randn((requests * size, num_heads, shape.key_dim), dtype=dtype, device=device)
            ours = partial(_attend_all, query, keys, values, make_layout(requests, size, context, device, seed))
            theirs = partial(_torch_all, query, keys, values, requests)
            timed: tuple[list[float], list[float]] = ([], [])
            runs = [_captured(run, device) for run in (ours, theirs)]
            for _ in range(repeats):
                for run, seconds in zip(runs, timed, strict=True):
                    seconds.append(_seconds(run, device) / num_calls)
            measured.append(AttentionTimes(requests, size, context, num_bytes, tuple(timed[0]), tuple(timed[1])))
    return tuple(measured)


def make_layout(requests: int, nodes: int, context: int, device: torch.device, seed: int) -> TreeLayout:
    """Return the layout of random trees of `nodes` nodes after prefixes with scattered slots."""
    source = torch.Generator().manual_seed(seed)
    each = context + nodes
    slots = torch.stack([torch.randperm(each, generator=source) + i * each for i in range(requests)])
    visible = torch.eye(nodes, dtype=torch.bool)
    depths = torch.zeros(nodes, dtype=torch.int64)
    for node in range(1, nodes):
        parent = int(torch.randint(node, (1,), generator=source))
        visible[node] |= visible[parent]
        depths[node] = depths[parent] + 1
    positions = (context + depths).repeat(requests, 1)

    def numbers(table: Tensor) -> Tensor:
        return table.to(device, torch.int32).contiguous()

    return TreeLayout(
        slot_table=numbers(slots[:, :context]),
        prefix_lens=numbers(torch.full((requests,), context)),
        starts=numbers(torch.arange(requests + 1) * nodes),
        node_slots=numbers(slots[:, context:]),
        node_positions=numbers(positions),
        node_lens=numbers(torch.full((requests,), nodes)),
        visible=numbers(pack_bits(visible).repeat(requests, 1)),
        positions=numbers(positions.flatten()),
        max_new=nodes,
        is_chain=False,
    )


def _attend_all(query: Tensor, keys: list[Tensor], values: list[Tensor], layout: TreeLayout) -> None:
    for k, v in zip(keys, values, strict=True):
        attend(query, k, v, layout, scale=query.shape[2] ** -0.5)


def _torch_all(query: Tensor, keys: list[Tensor], values: list[Tensor], requests: int) -> None:
    """[requests, heads, rows, dim] each, as views."""
    by_request = query.unflatten(0, (requests, -1)).transpose(1, 2)
    for k, v in zip(keys, values, strict=True):
        k, v = (pool.unflatten(0, (requests, -1)).transpose(1, 2) for pool in (k, v))
        scaled_dot_product_attention(by_request, k, v, enable_gqa=query.shape[1] > k.shape[1])


def _captured(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    run()  # compiles
    if device.type != "cuda":
        return run
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph.replay


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        started = now(device)
        run()
        return now(device) - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
