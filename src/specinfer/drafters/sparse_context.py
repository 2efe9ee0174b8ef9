"""The part of a long context that drafts attend to: its first tokens, its last ones, and pages between them.

The first tokens take the attention that finds nothing better (attention sinks, arXiv 2309.17453), and the last ones
most of the rest. Pages at even distances represent what lies between: on the embedded target more drafts are accepted
with them than with a longer window. What the target attended to most would be a better choice still, but its kernels do
not return the weights of keys, and writing them for every layer and head would slow every pass down.
"""

import numpy as np
import numpy.typing as npt

_SINKS, _PAGE = 16, 16  # tokens
_LEAST, _SHARE = 256, 16  # tokens kept of any context; a long one keeps one token in this many


def kept_places(num_known: int, least: int | None = None) -> npt.NDArray[np.int64] | None:
    """Return the places of the known tokens that drafts attend to, ascending, or None for all of them.

    Args:
        least: Contexts of up to this many tokens are kept whole, or None for the usual limit.
    """
    num_kept = max(_LEAST if least is None else least, num_known // _SHARE)
    if num_known <= num_kept:
        return None
    num_sinks, num_pages = min(_SINKS, num_kept // 4), num_kept // 4 // _PAGE
    window = num_known - (num_kept - num_sinks - num_pages * _PAGE)  # where it begins
    pages = np.linspace(num_sinks, max(window - _PAGE, num_sinks), num_pages + 2).astype(np.int64)[1:-1]
    between = (pages[:, np.newaxis] + np.arange(_PAGE)).ravel()
    return np.unique(np.concatenate([np.arange(num_sinks), between, np.arange(window, num_known)]))
