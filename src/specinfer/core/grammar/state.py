"""The state of one output in its grammar, and of the paths of a token tree that follow it."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher
from torch import Tensor

from specinfer.core.grammar.limits import SECONDS_PER_TOKEN, DigitLimit, MaskCredit, MaskTime
from specinfer.core.grammar.token_text import TokenText

Bits = npt.NDArray[np.uint8]
_MAX_RESTARTS = 4  # new matchers for one output; after these, all proposed tokens are illegal


def has_bit(bits: Bits, token: int) -> bool:
    """Return whether the bit of a token is set."""
    return bool(bits[token // 8] >> (token % 8) & 1)


def set_bit(bits: Bits, token: int, *, is_set: bool) -> None:
    """Set or clear the bit of a token."""
    byte, bit = int(bits[token // 8]), 1 << token % 8
    bits[token // 8] = byte | bit if is_set else byte & ~bit


class Grammar:
    """The constraints on one output: the tokens that are legal after it, and after proposed tokens that follow it.

    Args:
        make_matcher: Function that compiles the grammar.
        mask_time: Limit of the time of masks. When outputs have spent it, they are lost; those of proposed tokens may
            take as much again, and after that all proposed tokens are illegal.
        matcher: Matcher at the grammar's start, or None to compile one.
        digit_limit: The limit on digits of numbers, or None if the grammar has no JSON.
        text: The bytes of tokens, or None if they are unknown.

    Attributes:
        ignored: Fields of the request's constraint that no grammar can enforce, and that are left to the model.
        credit: That of the tenant, which all masks spend; without any left, proposed tokens are illegal.
        last_seconds: Processor time of the last masks of the output.
    """

    def __init__(
        self,
        make_matcher: Callable[[], LLMatcher],
        vocab_size: int,
        end_bit: int,
        eos_token_ids: Sequence[int],
        mask_time: MaskTime | None = None,
        matcher: LLMatcher | None = None,
        digit_limit: DigitLimit | None = None,
        text: TokenText | None = None,
    ) -> None:
        self._make_matcher = make_matcher
        self._vocab_size = vocab_size
        self._end_bit = end_bit
        self._eos_token_ids = [token for token in eos_token_ids if 0 <= token < vocab_size]
        self._matcher = matcher or make_matcher()
        self._num_restarts = 0
        self._time = mask_time or MaskTime()
        self._digit_limit = digit_limit
        self.text = text
        self.ignored: Sequence[str] = ()
        self.credit: MaskCredit | None = None
        self.last_seconds = 0.0
        self._said: list[int] = []
        self._ahead: list[int] = []  # proposed tokens that the matcher has consumed after the output
        self._has_ended = False
        self.is_lost = False  # the output has a token that the grammar does not allow, or that is too much work
        self._none = np.zeros(-(-vocab_size // 8), dtype=np.uint8)
        self._bits: dict[tuple[int, ...], Bits] = {}  # legal tokens after a path, one bit each
        self._ends: set[tuple[int, ...]] = set()  # paths that end the output

    def clone(self) -> "Grammar":
        """Return the same grammar at its start, for another request."""
        return self._with(MaskTime(self._time.most), None)

    def copy(self) -> "Grammar":
        """Return the same grammar at its start, for another output of the same request; its time counts for both.

        It is not compiled again. Copies of a matcher share tables that are limited in size: an output that finds them
        full because of another one's tokens starts again with tables of its own.
        """
        assert not self._said
        assert not self._ahead
        return self._with(self._time, self._matcher.deep_copy())

    def _with(self, mask_time: MaskTime, matcher: LLMatcher | None) -> "Grammar":
        made = Grammar(
            self._make_matcher,
            self._vocab_size,
            self._end_bit,
            self._eos_token_ids,
            mask_time,
            matcher,
            self._digit_limit,
            self.text,
        )
        made.ignored = self.ignored
        return made

    @property
    def is_limited(self) -> bool:
        """True if the time of its masks is limited."""
        return self._time.most < math.inf

    @property
    def is_finished(self) -> bool:
        """True if the output is complete and nothing may follow, not even an end-of-text token."""
        if not self._has_ended and not self._eos_token_ids:
            self._look_at(())
        return self._has_ended or () in self._ends

    def mask(self, path: Sequence[int]) -> Tensor:
        """Return `bits`, as a [vocab] bool mask."""
        bits = np.unpackbits(self.bits(path), count=self._vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))

    def bits(self, path: Sequence[int]) -> Bits:
        """Return the tokens that are legal after the output and a path of proposed tokens, a bit each: [vocab / 8].

        After the end all tokens are legal: the request ends there, and tokens after it are dropped.
        """
        path = tuple(path)
        if self._has_ended or any(self._ends_at(path[:length]) for length in range(len(path) + 1)):
            return np.full_like(self._none, 255)
        return self._bits[path]

    def bits_ahead(self, path: Sequence[int]) -> Bits:
        """Return `bits` of a path of text that is legal, without looking at the tokens on the way, which takes time."""
        path = tuple(path)
        if self._has_ended or path in self._bits:
            return self.bits(path)
        with self._timed(is_guess=True):
            is_legal = not self.is_lost and self._may_guess and self._go(path)
        if not is_legal:
            return self._none
        self._note(path)
        return self._bits[path]

    def forced_bytes(self, path: Sequence[int]) -> bytes:
        """Return the bytes that must follow the output and a path of proposed tokens, none if that is unknown."""
        if self._has_ended or self.is_lost or not self._may_guess:
            return b""
        with self._timed(is_guess=True):
            return self._matcher.compute_ff_bytes() if self._go(tuple(path)) else b""

    def num_legal(self, path: Sequence[int]) -> int:
        """Return how many tokens of a path are legal before the first illegal one; all if that is unknown."""
        if self._has_ended or self.is_lost or not self._may_guess:
            return len(path)
        with self._timed(is_guess=True):
            if not self._go(()):
                return len(path)
            ended = [self._end_bit if token in self._eos_token_ids else token for token in path]
            count: int = self._matcher.validate_tokens(ended)
            return count

    def advance(self, token: int) -> None:
        """Add a generated token to the output. After an illegal token nothing is legal."""
        self._has_ended = self.is_finished or (token in self._eos_token_ids and self._is_legal((), token))
        if not self._has_ended:
            with self._timed(is_guess=False):
                is_legal = not self.is_lost and self._go((token,))
            if not self.is_lost and not is_legal:
                self._start_again()
                self.is_lost = self.is_lost or not self._go((token,))
            self._ahead = []
            self._said.append(token)
            self._time.num_tokens += 1
            if self.credit is not None:
                self.credit.add(2 * SECONDS_PER_TOKEN)  # for the output and for proposed tokens
        self._bits.clear()
        self._ends.clear()

    def _look_at(self, path: tuple[int, ...]) -> None:
        """Compute the legal tokens after a path whose shorter paths are known."""
        if path in self._bits or path in self._ends:
            return
        if path and not self._is_legal(path[:-1], path[-1]):
            self._bits[path] = self._none
            return
        if path and path[-1] in self._eos_token_ids:
            self._ends.add(path)
            return
        self._note(path)

    def _note(self, path: tuple[int, ...]) -> None:
        """Compute the legal tokens after a legal path."""
        legal = self._compute(path)
        if legal is None:
            self._bits[path] = self._none
            return
        if self._digit_limit is not None:
            legal = self._digit_limit.limited(legal, chain(reversed(path), reversed(self._said)))
        is_complete = has_bit(legal, self._end_bit)
        bits = self._none.copy()
        count = min(len(bits), len(legal))
        bits[:count] = legal[:count]
        if self._end_bit < self._vocab_size:
            set_bit(bits, self._end_bit, is_set=False)
        for token in self._eos_token_ids:
            set_bit(bits, token, is_set=is_complete)
        if self._vocab_size % 8:  # bits of tokens beyond the vocabulary
            bits[-1] &= (1 << self._vocab_size % 8) - 1
        if is_complete and not bits.any():
            self._ends.add(path)
        self._bits[path] = bits

    def _ends_at(self, path: tuple[int, ...]) -> bool:
        self._look_at(path)
        return path in self._ends

    def _is_legal(self, path: tuple[int, ...], token: int) -> bool:
        self._look_at(path)
        return 0 <= token < self._vocab_size and has_bit(self._bits[path], token)

    def _compute(self, path: tuple[int, ...]) -> Bits | None:
        """Return llguidance's bits of legal tokens; None if the path is illegal or too much work."""
        bits = None
        if not path or self._may_guess:
            bits = self._try(path)
            if bits is None:  # perhaps because of the work for earlier paths
                self._start_again()
                bits = self._try(path)
            if bits is None:
                self._start_again()
        return bits

    @property
    def _may_guess(self) -> bool:
        has_credit = self.credit is None or self.credit.left > 0.0
        return has_credit and self._num_restarts < _MAX_RESTARTS and self._time.guesses <= self._time.allowed

    def _try(self, path: tuple[int, ...]) -> Bits | None:
        self.is_lost = self.is_lost or self._time.own > self._time.allowed
        if self.is_lost:
            return None
        with self._timed(is_guess=bool(path)):
            if not self._go(path):
                return None
            packed = self._matcher.compute_bitmask()
        if self._matcher.is_error():  # a matcher stays in this state, in which it reports the text as complete
            return None
        return np.frombuffer(packed, dtype=np.uint8)

    def _go(self, path: tuple[int, ...]) -> bool:
        """Move the matcher to the end of a path, and return whether that was possible."""
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
        """Replace a failed matcher by a new one, which does the same work as plain decoding of the output."""
        if self.is_lost:
            return
        begun = time.monotonic()  # another thread compiles it
        self._matcher = self._make_matcher()
        self._spend(time.monotonic() - begun, is_guess=True)
        self._ahead = []
        self._num_restarts += 1
        with self._timed(is_guess=True):
            self._matcher.compute_bitmask()
            for token in self._said:
                if not self._take(token):
                    self.is_lost = True
                    return
                self._matcher.compute_bitmask()

    @contextmanager
    def _timed(self, *, is_guess: bool) -> Iterator[None]:
        """Count the processor time of a block; an output that takes too much is lost, but not for its guesses."""
        begun = time.thread_time()
        try:
            yield
        finally:
            self._spend(time.thread_time() - begun, is_guess=is_guess)

    def _spend(self, seconds: float, *, is_guess: bool) -> None:
        if self.credit is not None:
            self.credit.add(-seconds)
        if is_guess:
            self._time.guesses += seconds
        else:
            self._time.own += seconds
            self.last_seconds = max(seconds, self.last_seconds / 2)  # a token takes several of these
            self.is_lost = self.is_lost or self._time.own > self._time.allowed
