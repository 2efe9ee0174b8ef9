"""Where one output stands in its grammar, and where the guesses of a tree lead from there."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher
from torch import Tensor

Bits = npt.NDArray[np.uint8]
_MAX_RESTARTS = 4  # of one output; after them guesses are no longer looked at, and so none is made


class Grammar:
    """What one output has to keep to: the tokens that are legal after it, and after guesses that follow it."""

    def __init__(
        self, make_matcher: Callable[[], LLMatcher], vocab_size: int, end_bit: int, eos_token_ids: Sequence[int]
    ) -> None:
        # Never a copy: copies share the tables that are limited, and then one output's guesses would end another.
        self._make_matcher = make_matcher
        self._vocab_size = vocab_size
        self._end_bit = end_bit
        self._eos_token_ids = [token for token in eos_token_ids if 0 <= token < vocab_size]
        self._matcher = make_matcher()
        self._num_restarts = 0
        self._said: list[int] = []
        self._ahead: list[int] = []  # guesses that the matcher has taken beyond what was said
        self._has_ended = False
        self.is_lost = False  # something was said that is not in the grammar, or that is too much work to follow
        self._bits: dict[tuple[int, ...], Bits] = {}  # legal tokens after a path, one bit each
        self._ends: set[tuple[int, ...]] = set()  # paths that end the output

    def clone(self) -> "Grammar":
        """The same grammar, at its start."""
        return Grammar(self._make_matcher, self._vocab_size, self._end_bit, self._eos_token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete and nothing may follow, not even an end-of-text token."""
        if not self._has_ended and not self._eos_token_ids:
            self._look_at(())
        return self._has_ended or () in self._ends

    def mask(self, path: Sequence[int]) -> Tensor:
        """[vocab] bool: the tokens that are legal after the output so far and these guesses.

        After the end every token is: the request ends there, and what comes behind is dropped.
        """
        path = tuple(path)
        if self._has_ended:
            return torch.ones(self._vocab_size, dtype=torch.bool)
        for length in range(len(path) + 1):
            self._look_at(path[:length])
            if path[:length] in self._ends:
                return torch.ones(self._vocab_size, dtype=torch.bool)
        bits = np.unpackbits(self._bits[path], count=self._vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))

    def advance(self, token: int) -> None:
        """Takes a token that was said. After an illegal one nothing is legal."""
        self._has_ended = self.is_finished or (token in self._eos_token_ids and self._is_legal((), token))
        if not self._has_ended:
            if not self.is_lost and not self._go((token,)):
                self._start_again()
                self.is_lost = self.is_lost or not self._go((token,))
            self._ahead = []
            self._said.append(token)
        self._bits.clear()
        self._ends.clear()

    def _look_at(self, path: tuple[int, ...]) -> None:
        """Finds what is legal after a path, whose shorter paths were looked at before."""
        if path in self._bits or path in self._ends:
            return
        if path and not self._is_legal(path[:-1], path[-1]):
            self._bits[path] = np.zeros(-(-self._vocab_size // 8), dtype=np.uint8)
            return
        if path and path[-1] in self._eos_token_ids:
            self._ends.add(path)
            return
        bits = self._compute(path)
        is_complete = bool(bits[self._end_bit])
        bits = bits.copy()
        bits[self._end_bit] = 0
        bits[self._eos_token_ids] = is_complete
        bits = bits[: self._vocab_size]
        if is_complete and not bits.any():
            self._ends.add(path)
        self._bits[path] = np.packbits(bits, bitorder="little")

    def _is_legal(self, path: tuple[int, ...], token: int) -> bool:
        self._look_at(path)
        return 0 <= token < self._vocab_size and bool(self._bits[path][token // 8] >> (token % 8) & 1)

    def _compute(self, path: tuple[int, ...]) -> Bits:
        """[tokens of llguidance] 1 where legal; all 0 if the path leads nowhere or is too much work."""
        bits = None
        if not path or self._num_restarts < _MAX_RESTARTS:
            bits = self._try(path)
            if bits is None:  # perhaps for the work that guesses before this one made
                self._start_again()
                bits = self._try(path)
            if bits is None:
                self._start_again()
        return np.zeros(max(self._vocab_size, self._end_bit + 1), dtype=np.uint8) if bits is None else bits

    def _try(self, path: tuple[int, ...]) -> Bits | None:
        if self.is_lost or not self._go(path):
            return None
        packed = self._matcher.compute_bitmask()
        if self._matcher.is_error():  # it never leaves this state, in which it calls the text complete
            return None
        return np.unpackbits(np.frombuffer(packed, dtype=np.uint8), bitorder="little")

    def _go(self, path: tuple[int, ...]) -> bool:
        """Brings the matcher to the end of a path; whether it could."""
        shared = 0
        while shared < min(len(path), len(self._ahead)) and path[shared] == self._ahead[shared]:
            shared += 1
        back = len(self._ahead) - shared
        if back and not self._matcher.rollback(back):
            self._start_again()
            shared = 0
        del self._ahead[shared:]
        for token in path[shared:]:
            if not self._take(token):
                return False
            self._ahead.append(token)
        return not self._matcher.is_error()

    def _take(self, token: int) -> bool:
        return token >= 0 and self._matcher.try_consume_tokens([token]) == 1 and not self._matcher.is_error()

    def _start_again(self) -> None:
        """Leaves an error state behind: a fresh matcher does the work that plain decoding would have done."""
        if self.is_lost:
            return
        self._matcher = self._make_matcher()
        self._ahead = []
        self._num_restarts += 1
        self._matcher.compute_bitmask()
        for token in self._said:
            if not self._take(token):
                self.is_lost = True
                return
            self._matcher.compute_bitmask()
