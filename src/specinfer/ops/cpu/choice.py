"""Choice of the next token from scores, with noise computed only for the few tokens that can win: see choice.h."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specinfer.core.noise import gumbel, noise_key
from specinfer.ops.cpu.library import library

_ROOM = 256  # most tokens that rounding could decide between; with more, all are checked

NAN, NO_VALID_TOKEN = -1, -2  # in place of a token: the model computed NaN; no token has a nonzero probability
SUPPORT = 128  # best tokens that may be drawn or chosen; more have little probability, and every one costs time


def noise_for(seeds: Sequence[int], numbers: Sequence[int], token_ids: Tensor) -> Tensor:
    """Return the noise that `gumbel` makes for [rows, tokens] ids; faster for few ids, rarely off by the last bit.

    Args:
        numbers: Number of each row: a position, or another number used in its place.
    """
    if token_ids.device.type != "cpu":
        device = token_ids.device
        return gumbel(torch.tensor(seeds, device=device), torch.tensor(numbers, device=device), token_ids)
    loaded, token_ids = library(), token_ids.contiguous()
    keys = np.array([noise_key(seed, number) for seed, number in zip(seeds, numbers, strict=True)], dtype=np.uint64)
    noise = torch.empty(token_ids.shape)
    loaded.specinfer_noise(keys.ctypes.data, token_ids.data_ptr(), noise.data_ptr(), *token_ids.shape)
    return noise


def most_probable(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the greatest of [rows, vocab] scores in descending order, and their tokens: both [rows, count]."""
    best = _most_probable_natively(scores, count)
    if best is not None:
        return best
    best = scores.topk(count, dim=-1)
    return best.values, best.indices


def most_probable_in_order(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return what `most_probable` does, of equal scores the first token first, on every device.

    Args:
        scores: [rows, vocab] float32.
    """
    best = _most_probable_natively(scores, count)
    return by_keys(scores, count) if best is None else best


def by_keys(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute `most_probable_in_order` in PyTorch, without waiting for a device.

    The upper half of a key is a score's bits, as integers in the order of the scores; the lower half falls with the id.
    """
    vocab = scores.shape[1]
    bits = (scores + 0.0).view(torch.int32)  # no -0.0, which equals 0.0
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys.bitwise_left_shift_(32).add_(torch.arange(vocab - 1, -1, -1, device=scores.device))
    tokens = vocab - 1 - (keys.topk(count, dim=1).values & 0xFFFFFFFF)
    return scores.gather(1, tokens), tokens


def _most_probable_natively(scores: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    """Return what `most_probable_in_order` does, or None where native code does not find it."""
    if scores.dtype != torch.float32 or scores.device.type != "cpu" or not count:
        return None
    (rows, vocab), loaded, scores = scores.shape, library(), scores.contiguous()
    values, tokens = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.int64)
    scratch = torch.empty(vocab // 64 + 1)  # one for each block, as in choice.h
    addresses = (values.data_ptr(), tokens.data_ptr(), scratch.data_ptr())
    num_found = loaded.specinfer_most_probable(scores.data_ptr(), rows, vocab, count, *addresses)
    return (values, tokens) if num_found == rows else None


def choose_token(scores: Tensor, noise: tuple[int, int] | None, least: float = -torch.inf) -> int:
    """Return the first token whose score, with noise, is the greatest; the same bits as `tree_ops.choose`.

    Args:
        scores: [vocab] float32 on the CPU.
        noise: The request's seed and the position of the token to choose, or None for no noise.
        least: Tokens with a lower score cannot be chosen.

    Returns:
        The token, or `NAN` if a score is NaN, or `NO_VALID_TOKEN` if all are -inf.
    """
    loaded, scores = library(), scores.contiguous()
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
