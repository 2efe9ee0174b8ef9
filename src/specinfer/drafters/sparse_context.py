"""The part of a long context that drafters use: its first tokens, its last ones, and pages between them.

The first tokens take the attention that finds nothing better (attention sinks, arXiv 2309.17453), and the last ones
most of the rest. Pages at even distances represent what lies between: on the embedded target more drafts are accepted
with them than with a longer window. What the target attended to most would be a better choice still, but its kernels do
not return the weights of keys, and writing them for every layer and head would slow every pass down.

A copy of the target attends to a part of what the target stored (`kept_places`). A small model has to compute what it
attends to, so it reads them side by side, as a shorter text (`places_to_read`). There too, pages are better than a
longer window: 1.8 tokens a step become 2.2 where a model of 0.5 B reads 512 of 6,000 tokens.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_SINKS, _PAGE = 16, 16  # tokens
_LEAST, _SHARE = 256, 16  # tokens kept of any context; a long one keeps one token in this many
_ROW = 64  # slots that the length of a row is a multiple of, so that kernels are compiled once for all


def places_to_read(num_known: int, window: int | None) -> npt.NDArray[np.int64] | None:
    """Return the places of the known tokens that a small model reads as it begins with a context, or None for all.

    They are those of `kept_places` for a length in steps of half a window, and all later ones. So the next turn of a
    conversation often begins with the text of the last one, which is cached.

    Args:
        window: Least number of tokens that are read, or None to read all.
    """
    begun = _begun(num_known, window)
    places = kept_places(begun, window) if begun else None
    return None if places is None else np.concatenate([places, np.arange(begun, num_known)])


def _begun(num_known: int, window: int | None) -> int:
    """Return the length for which places are chosen, or 0 if all tokens are read."""
    return 0 if window is None or num_known < 2 * window else num_known // (window // 2) * (window // 2)


def num_to_read(num_known: int, num_cached: int, window: int | None) -> int:
    """Return the tokens that a small model reads of a context, if it has read what another one of `num_cached` has."""
    if _begun(num_known, window) == _begun(num_cached, window):
        return num_known - num_cached
    places = places_to_read(num_known, window)
    return num_known if places is None else len(places)


def num_kept(num_known: int) -> int:
    """Return the number of known tokens that drafts attend to."""
    return min(max(_LEAST, num_known // _SHARE), num_known)


def kept_places(num_known: int, least: int | None = None) -> npt.NDArray[np.int64] | None:
    """Return the places of the known tokens that drafts attend to, ascending, or None for all of them.

    Args:
        least: Contexts of up to this many tokens are kept whole, or None for the usual limit.
    """
    most = max(_LEAST if least is None else least, num_known // _SHARE)
    if num_known <= most:
        return None
    num_sinks, num_pages = min(_SINKS, most // 4), most // 4 // _PAGE
    window = num_known - (most - num_sinks - num_pages * _PAGE)  # where it begins
    pages = np.linspace(num_sinks, max(window - _PAGE, num_sinks), num_pages + 2).astype(np.int64)[1:-1]
    between = (pages[:, np.newaxis] + np.arange(_PAGE)).ravel()
    return np.unique(np.concatenate([np.arange(num_sinks), between, np.arange(window, num_known)]))


def kept_slots(slots: Tensor, num_known: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slots of the known tokens that drafts attend to, those of `kept_places`, and their number.

    A row is [first tokens | pages | last tokens]. Shapes depend on no number, and nothing waits for the device.

    Args:
        slots: [requests, context] int32 slots of the known tokens of each request.
        num_known: [requests] int32.

    Returns:
        [requests, kept] int32 and [requests] int32.
    """
    context, known = slots.shape[1], num_known.long().unsqueeze(1)
    width = max(_LEAST, context // _SHARE)
    number = torch.arange(width, device=slots.device).unsqueeze(0)
    most = (known // _SHARE).clamp(min=_LEAST)
    num_sinks, num_pages = (most // 4).clamp(max=_SINKS), most // 4 // _PAGE
    window = known - (most - num_sinks - num_pages * _PAGE)
    after = number - num_sinks
    step = ((window - _PAGE).maximum(num_sinks) - num_sinks).double() / (num_pages + 1)
    in_pages = ((after // _PAGE + 1) * step + num_sinks).long() + after % _PAGE
    between = torch.where(after < num_pages * _PAGE, in_pages, window + after - num_pages * _PAGE)
    places = torch.where((after < 0) | (known <= most), number, between)
    # Pages of a context that is hardly too long overlap: what the ones before have is not kept again.
    before = torch.nn.functional.pad(places.cummax(dim=1).values[:, :-1], (1, 0), value=-1)
    is_kept = (places > before) & (number < torch.minimum(known, most))
    columns = torch.where(is_kept, is_kept.cumsum(dim=1) - 1, width)
    table = slots.new_zeros((len(slots), (width // _ROW + 1) * _ROW))
    table.scatter_(1, columns, slots.gather(1, places.clamp(0, context - 1)))
    return table[:, :width], is_kept.sum(dim=1, dtype=torch.int32)
