"""Between the tokens of the target and those of a small model: nothing downstream knows of another vocabulary.

A drafter with the target's tokenizer shares its vocabulary; for one with a tokenizer of its own there is
`translation`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from specinfer.request import Request


@dataclass(frozen=True, slots=True)
class Known:
    """The known tokens of a request, as its drafter reads them."""

    ids: Sequence[int]  # the drafter's
    num_tokens: int  # of the target, which they stand for
    num_kept: int  # of the ids, from the start, that are as they were


class Vocabulary(Protocol):
    """Between the tokens of the target and those of one drafter."""

    @property
    def translates(self) -> bool:
        """Whether the drafter's tokens are others than the target's."""
        ...

    def read(self, request: Request, num_cached: int) -> Known | None:
        """The known tokens, of which the drafter has computed so many; None: it cannot go on from them."""
        ...

    def keep(self, request_id: str, tokens: Sequence[int]) -> None:
        """These guessed target tokens, computed by the drafter, are known now."""
        ...

    def forget(self, request_id: str) -> None:
        """What is kept for the request can go."""
        ...

    def to_drafter(self, tokens: Sequence[int]) -> Sequence[int]:
        """The drafter's ids of guessed tokens."""
        ...

    def to_target(self, logits: Tensor) -> Tensor:
        """[rows, target_vocab] logits of the drafter's [rows, drafter_vocab]; -inf for what it cannot say."""
        ...


class SharedVocabulary:
    """The same tokens with the same ids; only padded, it may be, to different sizes."""

    translates = False

    def __init__(self, target_vocab_size: int, drafter_vocab_size: int) -> None:
        self._target_vocab_size = target_vocab_size
        self._drafter_vocab_size = drafter_vocab_size

    def read(self, request: Request, num_cached: int) -> Known | None:
        unread = request.token_ids[num_cached:]
        if unread and max(unread) >= self._drafter_vocab_size:
            return None
        count = len(request.token_ids)
        return Known(request.token_ids, count, count)

    def keep(self, request_id: str, tokens: Sequence[int]) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def to_drafter(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens

    def to_target(self, logits: Tensor) -> Tensor:
        missing = self._target_vocab_size - logits.shape[-1]
        return pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, : self._target_vocab_size]
