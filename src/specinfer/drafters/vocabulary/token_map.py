"""The mapping between the tokens of the target and those of a small model; callers see only target tokens.

A drafter with the target's tokenizer shares its vocabulary; for one with its own tokenizer there is `translation`.
Logits of only some of the target's tokens stay compact until a caller needs all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from specinfer.core.request import Request
from specinfer.ops.scales import WIDTH

# Of the last tokens of a request, so many may be outside a reduced vocabulary: then the whole head, which takes a third
# longer for a level, finds about as many tokens more.
_RECENT, _MAX_OTHERS = 32, 3


@dataclass(frozen=True, slots=True)
class Known:
    """The known tokens of a request, as its drafter reads them."""

    ids: Sequence[int]  # ids of the drafter
    num_tokens: int  # number of target tokens that the ids stand for
    num_kept: int  # number of ids, from the start, that are unchanged


@dataclass(frozen=True, slots=True, eq=False)
class TokenMap:
    """The target tokens that a drafter can draft, if these are not all."""

    ids: Tensor  # [map] int64
    vocab_size: int  # of the target

    def expand(self, logits: Tensor) -> Tensor:
        """Return [rows, vocab] logits from [rows, map], with -inf for all other tokens."""
        none = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return none.index_copy_(1, self.ids, logits)


@dataclass(frozen=True, slots=True, eq=False)
class ReducedVocabulary:
    """The tokens that a drafter proposes to requests whose texts hardly have other ones.

    Whether a request is of that kind depends on its past alone, so draws from the reduced distribution stay exact.

    Attributes:
        runs: Ascending ranges of ids, each of whole panels of the output head, up to its end.
    """

    runs: tuple[range, ...]

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, vocab_size: int, count: int) -> "ReducedVocabulary | None":
        """Return the first tokens in the order of merges, with special ones and single characters.

        Merges are ordered by how often they occur in the tokenizer's training text (FR-Spec, arXiv 2502.14856, ranks by
        such counts). None for tokenizers without merges, and for vocabularies that are not larger.
        """
        model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        if type(model).__name__ != "BPE" or count >= vocab_size:
            return None
        single = tokenizer.convert_tokens_to_ids([chr(code) for code in range(33, 127)] + ["\u2581"])
        others = {*tokenizer.added_tokens_decoder, *(i for i in single if i is not None)}
        panels = {*range(-(-count // WIDTH)), *(i // WIDTH for i in others if i < vocab_size)}
        runs: list[range] = []
        for panel in sorted(panels):
            start, stop = panel * WIDTH, min((panel + 1) * WIDTH, vocab_size)
            if runs and runs[-1].stop == start:
                start = runs.pop().start
            runs.append(range(start, stop))
        return cls(tuple(runs))

    @property
    def ids(self) -> Tensor:
        """The tokens, [map] int64, ascending."""
        return torch.cat([torch.arange(run.start, run.stop) for run in self.runs])

    def suits(self, token_ids: Sequence[int]) -> bool:
        """Return whether hardly any of the last tokens of a text are other ones."""
        first, others = self.runs[0], self.runs[1:]
        rare = [i for i in token_ids[-_RECENT:] if i >= first.stop]
        return sum(not any(i in run for run in others) for i in rare) <= _MAX_OTHERS


class Vocabulary(Protocol):
    """A mapping between the tokens of the target and those of one drafter."""

    @property
    def token_map(self) -> TokenMap | None:
        """The target tokens of the columns of `compact`, or None for all of them."""
        ...

    @property
    def reduced(self) -> ReducedVocabulary | None:
        """The tokens that are proposed as a rule, or None for all that it can draft."""
        ...

    @property
    def translates(self) -> bool:
        """True if the drafter's tokens differ from the target's."""
        ...

    def read(self, request: Request, num_cached: int) -> Known | None:
        """Return the known tokens, of which the drafter has computed `num_cached`; None if it cannot read them."""
        ...

    def keep(self, request_id: str, tokens: Sequence[int]) -> None:
        """Note that these drafted target tokens, computed by the drafter, are now known."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop all state of the request."""
        ...

    def to_drafter(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the drafter's ids of drafted target tokens."""
        ...

    def compact(self, logits: Tensor) -> Tensor:
        """Return [rows, map] logits of the tokens it can draft, from the drafter's logits."""
        ...

    def to_target(self, logits: Tensor) -> Tensor:
        """Return [rows, target_vocab] logits from the drafter's logits; -inf for tokens that it never drafts."""
        ...


class SharedVocabulary:
    """A vocabulary with the same tokens and ids as the target's, possibly padded to a different size.

    Args:
        token_ids: [map] the only tokens that the drafter computes logits of, or None for all.
        reduced: The tokens that it proposes as a rule, or None for all.
    """

    translates = False

    def __init__(
        self,
        target_vocab_size: int,
        drafter_vocab_size: int,
        token_ids: Tensor | None = None,
        reduced: ReducedVocabulary | None = None,
    ) -> None:
        assert token_ids is None or reduced is None
        self.reduced = reduced
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
