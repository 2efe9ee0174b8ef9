"""Short convolutions and recurrences over token trees, in plain PyTorch: the reference of the kernels for GPUs.

Numbers are rounded to the type of what is stored where transformers rounds them; sums and states are float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from specinfer.ops.cpu.recurrence import ConvolutionCall, RecurrenceCall
from specinfer.ops.cpu.transfers import send_together

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScanOrder:
    """The tokens of a pass in the order of a recurrence, one request after the other; all tensors are int64.

    A state is that of the token before, or of another one that was put in a place:

        parents  -1 0 0 1 2        a ─ b ─ d
        origins  -1 -1 0 1 2         └ c ─ e     of a, b, c, d, e
        places    0  1 2 -1 -1

    Attributes:
        num_results: Number of results.
        num_places: Number of states that are put down.
    """

    num_results: int
    num_places: int
    starts: Tensor  # [requests] first token of each request
    ends: Tensor  # [requests] the token after its last one
    first_rows: Tensor  # [requests] rows of the pool with the first states; -1: zeros
    first_places: Tensor  # [requests] places of the first states; -1: none
    slots: Tensor  # [tokens]
    origins: Tensor  # [tokens] places of the states before them; -1: that of the token before, or the first state
    places: Tensor  # [tokens] places of the states after them; -1: none
    rows: Tensor  # [tokens] rows of the pool for the states after them; -1: none
    results: Tensor  # [tokens] rows of their results; -1: none

    @classmethod
    def of(
        cls,
        slots: _Integers,
        parents: Sequence[_Integers],
        first_rows: Sequence[int],
        rows: _Integers,
        results: _Integers,
        num_results: int,
        device: torch.device,
    ) -> Self:
        """Return the order of the same tokens as a `NativeScan`, sent to the device in one copy."""
        arrays, num_places = cls.arrays_of(slots, parents, first_rows, rows, results)
        return cls(num_results, num_places, *send_together(list(arrays.values()), device))

    @staticmethod
    def arrays_of(
        slots: _Integers, parents: Sequence[_Integers], first_rows: Sequence[int], rows: _Integers, results: _Integers
    ) -> tuple[dict[str, _Integers], int]:
        """Return the tensors' contents by name, and the number of places."""
        origins, places, first_places, num_places = [], [], [], 0
        for one in parents:
            origin, place, first, count = _places(one)
            origins.append(np.where(origin < 0, -1, origin + num_places))
            places.append(np.where(place < 0, -1, place + num_places))
            first_places.append(first + num_places if first >= 0 else -1)
            num_places += count
        starts = np.cumsum([0, *map(len, parents)])
        arrays = {
            "starts": starts[:-1], "ends": starts[1:], "first_rows": first_rows, "first_places": first_places,
            "slots": slots, "origins": np.concatenate(origins), "places": np.concatenate(places), "rows": rows,
            "results": results,
        }  # fmt: skip
        return {name: np.asarray(values, dtype=np.int64) for name, values in arrays.items()}, num_places


def _places(parents: _Integers) -> tuple[_Integers, _Integers, int, int]:
    """Return origins, places, the first state's place or -1, and the number of places, of one request."""
    count = len(parents)
    follows = parents == np.arange(-1, count - 1)
    needed = np.unique(parents[~follows])  # -1 is the first state
    own = np.full(count + 1, -1)
    own[needed + 1] = np.arange(len(needed))
    return np.where(follows, -1, own[parents + 1]), own[1:], int(own[0]), len(needed)


def convolve(inputs: Tensor, paths: Tensor, call: ConvolutionCall) -> Tensor:
    """Return the [tokens, channels] float32 results of a convolution with one filter for each channel.

    They are rounded to the type of the inputs.

    Args:
        inputs: [slots, 1, channels] inputs by slot.
        paths: [tokens, taps] slots of the last tokens on each token's path, itself last; -1 before the first.
    """
    result = torch.zeros(len(paths), inputs.shape[2], device=paths.device)
    if call.bias is not None:
        result += call.bias
    for weight, slots in zip(call.weight, paths.unbind(dim=1), strict=True):
        taken = inputs[slots.clamp(min=0), 0].float()
        # Not multiplied by 0: what a slot had before may be NaN.
        result += taken.masked_fill((slots < 0).unsqueeze(-1), 0.0) * weight
    result = result.to(inputs.dtype)
    return (functional.silu(result) if call.activates else result).float()


def recur(mixed: Tensor, call: RecurrenceCall, order: ScanOrder, stored: Tensor, pool: Tensor | None) -> Tensor:
    """Return [results, heads, value_dim] float32, and write the states that are kept.

    Args:
        mixed: [tokens, channels] float32 queries, keys and values, in the order of the scan.
        stored: [slots, 1, width] steps before activation; see `RecurrenceCall`.
        pool: [rows, heads, key_dim, value_dim] float32 kept states, or None for none.
    """
    sizes, device = call.sizes, mixed.device
    query, key, value = (
        mixed[:, start : start + heads * dim].unflatten(1, (heads, dim))
        for start, heads, dim in (
            (sizes.query, sizes.num_key_heads, sizes.key_dim),
            (sizes.key, sizes.num_key_heads, sizes.key_dim),
            (sizes.value, sizes.num_heads, sizes.value_dim),
        )
    )
    if call.is_delta:
        query, key = unit(query) * sizes.key_dim**-0.5, unit(key)
    query, key = (one.repeat_interleave(sizes.num_heads // sizes.num_key_heads, dim=1) for one in (query, key))
    share, kept = _rates(call, stored[:, 0] if call.decays == "column" else stored[order.slots, 0])
    state_shape = (sizes.num_heads, sizes.key_dim, sizes.value_dim)
    states = torch.zeros(len(order.first_rows), *state_shape, device=device)
    if pool is not None and len(pool):
        has_row = (order.first_rows >= 0).view(-1, 1, 1, 1)
        states = torch.where(has_row, pool[order.first_rows.clamp(min=0)], states)
    # The last places and results are those of tokens that have none.
    held = torch.empty(order.num_places + 1, *state_shape, device=device)
    held[order.first_places] = states
    result = torch.zeros(order.num_results + 1, *state_shape[::2], device=device)
    kept_ones: list[tuple[Tensor, Tensor]] = []
    lengths = order.ends - order.starts
    for i in range(int(lengths.max())):
        live = (lengths > i).nonzero().squeeze(1)
        of = order.starts[live] + i
        origins, rows = order.origins[of], order.rows[of]
        before = torch.where((origins >= 0).view(-1, 1, 1, 1), held[origins], states[live])
        before = before * kept(of)
        change = value[of]
        if call.is_delta:
            change = change - torch.einsum("nhkv,nhk->nhv", before, key[of])
        change = change if share is None else change * share[of].unsqueeze(-1)
        after = before + key[of].unsqueeze(-1) * change.unsqueeze(-2)
        states[live] = held[order.places[of]] = after
        result[order.results[of]] = torch.einsum("nhkv,nhk->nhv", after, query[of])
        if pool is not None:
            kept_ones.append((rows[rows >= 0], after[rows >= 0]))
    for rows, after in kept_ones:  # a row that one request reads may be written for another
        assert pool is not None
        pool[rows] = after
    if call.skip is not None:
        result[order.results] += call.skip.unsqueeze(-1) * value
    return result[:-1]


def _rates(call: RecurrenceCall, stored: Tensor) -> tuple[Tensor | None, Callable[[Tensor], Tensor]]:
    """Return [tokens, heads] the shares of the changes, and the function from tokens [n] to what they keep of states.

    Args:
        stored: [tokens, width].
    """
    least, most = call.limits
    if call.decays == "column":
        return None, lambda of: (stored[of].unsqueeze(1) * call.decay).exp().unsqueeze(1)
    assert call.bias is not None
    heads, decay = call.sizes.num_heads, call.decay.view(-1, 1)
    if call.is_delta:
        steps = (stored[:, heads:].float() + call.bias.flatten()).unflatten(1, (heads, -1))
        log_kept = functional.softplus(steps) * decay if least >= 0 else (-decay * steps).sigmoid() * least
        share = stored[:, :heads].sigmoid().float() * most
    else:
        share = functional.softplus(stored + call.bias.to(stored.dtype)).clamp(least, most).float()
        log_kept = share.unsqueeze(-1) * decay
    kept = log_kept.exp().unsqueeze(-1)
    return share, lambda of: kept[of]


def unit(vectors: Tensor) -> Tensor:
    """Return vectors of length 1, where they are not almost 0."""
    return vectors * torch.rsqrt(vectors.pow(2).sum(dim=-1, keepdim=True) + 1e-6)
