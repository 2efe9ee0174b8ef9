"""Tree attention, stores, choices, walks and commits of a device in plain PyTorch: the reference of their kernels."""

import torch
from torch import Tensor

from specinfer.core.noise import gumbel
from specinfer.ops.kv_types import NO_SCALES, KVScales, to_stored
from specinfer.ops.tree_layout import TreeLayout, unpack_bits
from specinfer.ops.trees import NAN, NO_VALID_TOKEN, Walk


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: TreeLayout,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_bias: Tensor | None = None,
    value_scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `attend` of `ops/triton/attention.py`."""
    requests, kv_heads, device, heads = layout.num_requests, keys.shape[1], query.device, query.shape[1]
    starts = layout.starts.long()
    request, row = _requests_of_rows(starts, layout.num_tokens)
    # Queries: [requests, max_new], repeating a row where a request has fewer.
    rows = (starts[:-1, None] + torch.arange(layout.max_new, device=device)).clamp(max=layout.num_tokens - 1)
    slots, valid, key_positions = _keys(layout)
    sees = _seen(layout, rows) & valid.unsqueeze(1)
    if window is not None:
        sees &= layout.positions.long()[rows].unsqueeze(-1) - key_positions.unsqueeze(1) < window
    precise = torch.promote_types(query.dtype, torch.float32)
    # [requests, kv_heads, ...]; heads of one KV head are rows of one product.
    k = keys[slots].to(precise).masked_fill(~valid[..., None, None], 0).permute(0, 2, 3, 1)
    v = values[slots].to(precise).masked_fill(~valid[..., None, None], 0).transpose(1, 2)
    q = query[rows].to(precise).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    scores = (q.flatten(2, 3) @ k).unflatten(2, (-1, layout.max_new)) * scale  # [.., repeats, new, keys]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if key_bias is not None:
        scores = scores + key_bias[:, key_positions].transpose(0, 1).unflatten(1, (kv_heads, -1)).unsqueeze(3)
    scores = scores.masked_fill(~sees[:, None, None], -torch.inf)
    if sinks is not None:
        column = sinks.to(precise).view(kv_heads, -1, 1, 1).expand(requests, -1, -1, layout.max_new, 1)
        weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    found = (weights.flatten(2, 3) @ v).unflatten(2, (-1, layout.max_new)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    is_new = row < layout.max_new
    result = (found[request, row.clamp(max=layout.max_new - 1)] * value_scale).to(query.dtype)
    result = result.masked_fill(~(is_new & (torch.arange(len(row), device=device) < starts[-1]))[:, None, None], 0)
    assert result.shape == (layout.num_tokens, heads, values.shape[2])
    return result if out is None else out.copy_(result)


def _keys(layout: TreeLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Return the slots of all keys, which of them exist, and their positions: each [requests, context + nodes].

    Missing keys are read from slot 0, and masked.
    """
    (requests, nodes), context, device = layout.node_slots.shape, layout.slot_table.shape[1], layout.starts.device
    prefix_lens, node_lens = layout.prefix_lens.long()[:, None], layout.node_lens.long()[:, None]
    numbers = torch.arange(context, device=device)
    valid = torch.cat([numbers < prefix_lens, torch.arange(nodes, device=device) < node_lens], dim=1)
    slots = torch.cat([layout.slot_table, layout.node_slots], dim=1).long().masked_fill(~valid, 0)
    positions = torch.cat([numbers.expand(requests, -1), layout.node_positions.long()], dim=1)
    return slots, valid, positions.masked_fill(~valid, 0)


def _seen(layout: TreeLayout, rows: Tensor) -> Tensor:
    """Return [requests, max_new, context + nodes] which keys each query of `rows` [requests, max_new] sees."""
    (requests, nodes), context, device = layout.node_slots.shape, layout.slot_table.shape[1], rows.device
    if layout.is_chain:
        num_new = layout.starts.long().diff()
        first = (layout.node_lens.long() - num_new)[:, None] + torch.arange(layout.max_new, device=device)
        sees_nodes = torch.arange(nodes, device=device) <= first.unsqueeze(-1)
    else:
        sees_nodes = unpack_bits(layout.visible, nodes)[rows]
    return torch.cat([sees_nodes.new_ones((requests, layout.max_new, context)), sees_nodes], dim=2)


def _requests_of_rows(starts: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return, for each row of the packed queries, its request (the last one for padding) and its index there."""
    rows = torch.arange(num_tokens, device=starts.device)
    request = torch.searchsorted(starts[1:], rows, right=True).clamp(max=len(starts) - 2)
    return request, rows - starts[request]


def store(
    keys: Tensor, values: Tensor, slots: Tensor, key: Tensor, value: Tensor, scales: KVScales = NO_SCALES
) -> None:
    """Compute `store` of `ops/triton/store.py`."""
    # A skipped row repeats the write of the first row with a slot. If there is none, it rewrites the old contents.
    kept = slots >= 0
    first = kept.to(torch.int8).argmax()
    row = torch.where(kept, torch.arange(len(slots), device=slots.device), first)
    places = slots.long()[row].clamp(min=0)
    for pool, new, inverse in zip((keys, values), (key, value), scales.inverses, strict=True):
        pool[places] = torch.where(kept.any(), to_stored(new[row], pool.dtype, inverse), pool[places])


def choose(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    least: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `choose` of `ops/triton/choose.py`."""
    scores = logits.float()
    sampled = (temperatures > 0).unsqueeze(1)
    noise = gumbel(seeds.long(), positions.long(), torch.arange(logits.shape[1], device=logits.device))
    scaled = scores / torch.where(sampled, temperatures.unsqueeze(1), 1)
    if least is not None:
        scaled = scaled.masked_fill(scaled < least.unsqueeze(1), -torch.inf)
    scores = torch.where(sampled, scaled + noise, scores)
    best = scores.max(dim=1)  # max returns NaN if a row has one
    tokens = best.indices.masked_fill(best.values == -torch.inf, NO_VALID_TOKEN).masked_fill(best.values.isnan(), NAN)
    return tokens if out is None else out.copy_(tokens)


def walk(
    chosen: Tensor,
    starts: Tensor,
    tokens: Tensor,
    parents: Tensor,
    sizes: Tensor,
    *,
    max_depth: int,
    out: Walk | None = None,
) -> Walk:
    """Compute `walk` of `ops/triton/walk.py`."""
    requests, nodes = tokens.shape
    numbers = torch.arange(nodes, device=tokens.device)
    in_use = numbers < sizes.unsqueeze(1)
    node = torch.zeros(requests, dtype=torch.int64, device=tokens.device)
    going = sizes > 0
    path = torch.full((requests, max_depth), -1, dtype=torch.int32, device=tokens.device)
    lengths = going.int() - 1
    following = chosen[starts.long().clamp(max=len(chosen) - 1)]
    for depth in range(max_depth):
        is_child = in_use & (parents == node.unsqueeze(1)) & (tokens == following.unsqueeze(1)) & (numbers > 0)
        going = going & is_child.any(dim=1)
        node = torch.where(going, is_child.to(torch.int8).argmax(dim=1), node)
        path[:, depth] = torch.where(going, node, -1).int()
        lengths += going
        following = torch.where(going, chosen[(starts.long() + node).clamp(max=len(chosen) - 1)], following)
    following = following.masked_fill(sizes <= 0, NO_VALID_TOKEN)
    found = (path, lengths, following)
    if out is None:
        return found
    for place, result in zip(out, found, strict=True):
        place.copy_(result)
    return out


def commit(slot_table: Tensor, prefix_lens: Tensor, node_slots: Tensor, path: Tensor, lengths: Tensor) -> None:
    """Compute `commit` of `ops/triton/commit.py`."""
    places = torch.arange(path.shape[1] + 1, device=path.device)
    nodes = torch.cat([torch.zeros_like(path[:, :1]), path.clamp(min=0)], dim=1).long()
    slots = node_slots.gather(1, nodes).to(slot_table.dtype)
    kept = places <= lengths.unsqueeze(1)
    # Slots that are not kept go to an extra column, which is dropped, so that shapes stay fixed.
    columns = prefix_lens.long().unsqueeze(1) + places
    table = torch.cat([slot_table, slot_table.new_empty((len(slot_table), 1))], dim=1)
    table.scatter_(1, torch.where(kept, columns, slot_table.shape[1]), slots)
    slot_table.copy_(table[:, :-1])
    prefix_lens.add_((lengths + 1).to(prefix_lens.dtype))
