"""The token that follows a row of scores, with noise made only for the few tokens that can win: see choice.h."""

import numpy as np
import torch
from torch import Tensor

from specinfer.kernels.library import library
from specinfer.noise import gumbel, noise_key

_ROOM = 256  # tokens that rounding could decide between; where there are more, all are looked at


def chooses(scores: Tensor) -> bool:
    """Whether `choose_token` can be called for such scores."""
    return scores.device.type == "cpu" and library() is not None


def choose_token(scores: Tensor, noise: tuple[int, int] | None, least: float = -torch.inf) -> int:
    """The first token whose score, with noise, is the greatest; as `plain_tree.choose`, to the last bit.

    Args:
        scores: [vocab] float32 on the CPU.
        noise: The request's seed, and the position of the token to be chosen; None: there is none.
        least: Tokens with a lower score cannot be said.

    Returns:
        The token; `NAN` where a score is NaN, `NOTHING` where all are -inf.
    """
    loaded, scores = library(), scores.contiguous()
    assert loaded is not None
    ids, sums = np.empty(_ROOM, dtype=np.int64), np.empty(_ROOM)
    key = 0 if noise is None else noise_key(*noise)
    count: int = loaded.specinfer_choose(
        scores.data_ptr(), len(scores), least, key, noise is not None, ids.ctypes.data, sums.ctypes.data, _ROOM
    )
    if count < 0:
        return count
    if count == 1:
        return int(ids[0])
    assert noise is not None
    left = torch.from_numpy(ids[:count]) if count <= _ROOM else (scores >= least).nonzero().squeeze(1)
    seed, position = torch.tensor(noise).split(1)
    return int(left[(scores[left] + gumbel(seed, position, left)[0]).argmax()])
