"""Between the tokens of the target and those of a small model: nothing downstream knows of another vocabulary.

A drafter with the target's tokenizer shares its vocabulary; for one with a tokenizer of its own there is
`translation`. Logits of only some of the target's tokens stay as short as they are until somebody needs all of them.
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


@dataclass(frozen=True, slots=True, eq=False)
class TokenMap:
    """The target tokens that a drafter guesses among, where these are not all."""

    ids: Tensor  # [map] int64
    vocab_size: int  # of the target

    def expand(self, logits: Tensor) -> Tensor:
        """[rows, vocab] of [rows, map]; -inf for all other tokens."""
        none = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return none.index_copy_(1, self.ids, logits)


class Vocabulary(Protocol):
    """Between the tokens of the target and those of one drafter."""

    @property
    def token_map(self) -> TokenMap | None:
        """The target tokens of the columns of `compact`; None: all of them."""
        ...

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

    def compact(self, logits: Tensor) -> Tensor:
        """[rows, map] logits of the tokens it guesses among, of what the drafter computes."""
        ...

    def to_target(self, logits: Tensor) -> Tensor:
        """[rows, target_vocab] logits of what the drafter computes; -inf for tokens that it never guesses."""
        ...


class SharedVocabulary:
    """The same tokens with the same ids; only padded, it may be, to different sizes.

    Args:
        token_ids: [map] the only tokens that the drafter computes logits of; None: it does of all.
    """

    translates = False

    def __init__(self, target_vocab_size: int, drafter_vocab_size: int, token_ids: Tensor | None = None) -> None:
        self.token_map = None if token_ids is None else TokenMap(token_ids, target_vocab_size)
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

    def compact(self, logits: Tensor) -> Tensor:
        if self.token_map is not None:
            return logits
        missing = self._target_vocab_size - logits.shape[-1]
        return pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, : self._target_vocab_size]

    def to_target(self, logits: Tensor) -> Tensor:
        return self.compact(logits) if self.token_map is None else self.token_map.expand(logits)
