"""Output that keeps to a grammar: a JSON schema, a regular expression, a list of choices or a Lark grammar.

`GrammarCompiler` turns what was asked into a `Grammar`, the state of one output: which tokens may come next, after
the output so far and after each path of a token tree. The work is llguidance's; this module is its one door. What
callers hand in is not to be trusted: llguidance recurses as deep as a text is nested, so a text is limited in length
and read on a stack that holds the deepest such a text can be.
"""

import json
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from specinfer.errors import RequestError
from specinfer.sampling import StructuredOutputsParams

MAX_CHARACTERS = {"json": 100_000, "regex": 100_000, "choice": 100_000, "grammar": 20_000}
_MAX_MULTIPLE = 100_000  # an automaton of this many states stands behind "multipleOf"
_MAX_PROBES = 256  # first tokens tried before a grammar is called impossible
_STACK_BYTES = 512 << 20  # address space; only what is needed becomes memory
_STACK_LOCK = threading.Lock()
_END = "<|end of grammar|>"  # stands for all tokens that end a text, whatever the model calls them
_LIMITS = LLParserLimits(verbose_errors=False)
Bits = npt.NDArray[np.uint8]


class Grammar:
    """What one output has to keep to: the tokens that are legal after it, and after guesses that follow it."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_bit: int, eos_token_ids: Sequence[int]) -> None:
        self._start = matcher
        self._vocab_size = vocab_size
        self._end_bit = end_bit
        self._eos_token_ids = [token for token in eos_token_ids if 0 <= token < vocab_size]
        self._matcher = matcher.deep_copy()
        self._said: list[int] = []
        self._ahead: list[int] = []  # guesses that the matcher has taken beyond what was said
        self._has_ended = False
        self.is_lost = False  # something was said that is not in the grammar, or that is too much work to follow
        self._bits: dict[tuple[int, ...], Bits] = {}  # legal tokens after a path, one bit each
        self._ends: set[tuple[int, ...]] = set()  # paths that end the output

    def clone(self) -> "Grammar":
        """The same grammar, at its start."""
        return Grammar(self._start, self._vocab_size, self._end_bit, self._eos_token_ids)

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
        if not self.is_lost and self._go(path):
            packed = self._matcher.compute_bitmask()
            # In an error state, which it never leaves, a matcher calls the text complete.
            if not self._matcher.is_error():
                bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), bitorder="little")
        if bits is None:
            self._start_again()
            bits = np.zeros(max(self._vocab_size, self._end_bit + 1), dtype=np.uint8)
        return bits

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
        """Leaves an error state behind: a fresh matcher takes what was said."""
        self._matcher = self._start.deep_copy()
        self._ahead = []
        self.is_lost = self.is_lost or not all(self._take(token) for token in self._said)


class GrammarCompiler:
    """Reads grammars for the tokens of one model.

    Args:
        tokenizer: The model's; of the transformers library, with a backend of the tokenizers library.
        vocab_size: Of the model's logits, which may be more than the tokenizer has.
        eos_token_ids: Tokens that end a text.

    Raises:
        RequestError: The tokenizer is of a kind that grammars cannot be read for.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._tokenizer, self._end_bit = _read_tokenizer(tokenizer, vocab_size)
        self._made = lru_cache(maxsize=16)(self._make)

    def compile(self, asked: StructuredOutputsParams, *, ignore_eos: bool = False) -> Grammar:
        """The grammar at its start, for one output; the next output takes a clone.

        Args:
            ignore_eos: No end-of-text token is legal: the output goes on until it can only end, and ends there.

        Raises:
            RequestError: It cannot be read, is too large, or no text of this model's tokens fits it.
        """
        made = self._made(asked.kind, asked.text, ignore_eos)
        if isinstance(made, str):
            raise RequestError(f"structured_outputs: {asked.kind}: {made}")
        return made.clone()

    def _make(self, kind: str, text: str, ignore_eos: bool) -> Grammar | str:
        """A grammar that something can be said under, or what is wrong and what to change."""
        matcher = self._read(kind, text)
        if isinstance(matcher, str):
            return matcher
        grammar = Grammar(matcher, self._vocab_size, self._end_bit, () if ignore_eos else self._eos_token_ids)
        if grammar.is_finished:
            return "only the empty text fits, and no end-of-text token can say so; allow some text"
        for token in grammar.mask(()).nonzero().flatten().tolist()[:_MAX_PROBES]:
            probe = grammar.clone()
            probe.advance(token)
            if probe.mask(()).any():
                return grammar
            if probe.is_lost:
                break
        return (
            "no text of this model's tokens fits, or finding one takes too much work; check for contradictions, rules "
            "without an end, and large repetitions"
        )

    def _read(self, kind: str, text: str) -> LLMatcher | str:
        if len(text) > MAX_CHARACTERS[kind]:
            return f"{len(text)} characters; make it shorter, at most {MAX_CHARACTERS[kind]}"
        if kind == "json" and (number := _large_multiple(text)) is not None:
            return f"multipleOf {number} takes too much work; use at most {_MAX_MULTIPLE} steps, or leave it out"
        try:
            matcher: LLMatcher = _on_large_stack(lambda: self._matcher_of(kind, text))
        except ValueError as error:
            return f"cannot be read, mend it: {_short(str(error))}"
        if matcher.is_error():
            return f"cannot be read, mend it: {_short(matcher.get_error())}"
        return matcher

    def _matcher_of(self, kind: str, text: str) -> LLMatcher:
        if kind == "json":
            grammar = LLMatcher.grammar_from_json_schema(text)
        elif kind == "grammar":
            grammar = LLMatcher.grammar_from_lark(text)
        else:
            grammar = LLMatcher.grammar_from_regex(text)
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)


def _read_tokenizer(tokenizer: Any, vocab_size: int) -> tuple[LLTokenizer, int]:
    """llguidance's tokenizer, and the token by which it says that a text is complete."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RequestError("structured_outputs: this model has no fast tokenizer; convert it to a tokenizer.json")
    backend = type(backend).from_str(backend.to_str())
    backend.no_padding()
    backend.no_truncation()
    backend.add_special_tokens([_END])
    end = backend.token_to_id(_END)
    try:
        made = _on_large_stack(lambda: LLTokenizer(backend.to_str(), n_vocab=max(vocab_size, end + 1), eos_token=end))
    except ValueError as error:
        raise RequestError(
            f"structured_outputs: this model's tokenizer is of a kind that has no grammars yet: {_short(str(error))}"
        ) from error
    return made, end


def _large_multiple(text: str) -> float | None:
    """A number in a schema's "multipleOf" with too many steps up to a whole, or above."""
    nodes: list[Any] = [json.loads(text)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            number = node.get("multipleOf")
            if isinstance(number, (int, float)) and _steps(number) > _MAX_MULTIPLE:
                return number
            nodes.extend(node.values())
        elif isinstance(node, list):
            nodes.extend(node)
    return None


def _steps(number: float) -> float:
    """Its decimal digits as a whole number: 0.25 is 25."""
    digits = f"{abs(number):.12e}".split("e")[0].replace(".", "").rstrip("0")
    return max(abs(number), float(digits or 0))


def _on_large_stack(make: Callable[[], Any]) -> Any:
    """Runs this in a thread whose stack does not end before the text does."""
    done: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(make())
        except BaseException as error:  # a panic of llguidance is no Exception
            failed.append(error)

    with _STACK_LOCK:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run)
            thread.start()
        except RuntimeError as error:
            raise ValueError(f"no thread to read it in: {error}") from error
        finally:
            threading.stack_size(before)
    thread.join()
    if failed:
        raise ValueError(str(failed[0])) from failed[0]
    return done[0]


def _short(message: str) -> str:
    """What an error says, without the text it was found in."""
    lines = message.split("<backtrace>")[0].replace("<non-verbose/>", "").strip().split("\n")
    said = next((line for line in lines if line.startswith("error:")), lines[0])
    return said.removeprefix("error:").rpartition(" (in regex): ")[2].strip()[:300]
