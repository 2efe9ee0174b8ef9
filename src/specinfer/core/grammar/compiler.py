"""Compilation of a request's constraint to a grammar that some text fits, or the reason why none does."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from specinfer.core.errors import RequestError
from specinfer.core.grammar.checks import Checked, check
from specinfer.core.grammar.lark import shortened
from specinfer.core.grammar.limits import DigitLimit, MaskTime
from specinfer.core.grammar.matcher import make_matcher, make_tokenizer
from specinfer.core.grammar.state import Grammar
from specinfer.core.grammar.token_text import TokenText
from specinfer.core.grammar.trial import CPU_SECONDS, GrammarTrials
from specinfer.core.structured_outputs import StructuredOutputsParams

_MAX_PROBES = 256  # first tokens that are tried before a grammar is refused as impossible
_PROBE_SECONDS = 5.0
_END = "<|end of grammar|>"  # stands for all of the model's tokens that end a text


@dataclass(frozen=True, slots=True)
class _Made:
    grammar: Grammar
    ignored: tuple[tuple[str, str], ...]


class GrammarCompiler:
    """A compiler of grammars for the tokens of one model.

    Args:
        tokenizer: The model's transformers tokenizer, with a backend of the tokenizers library.
        vocab_size: The size of the model's logits, which may be larger than the tokenizer's vocabulary.
        eos_token_ids: Tokens that end a text.
        has_trials: Whether grammars are compiled in another process first, with limits on time and memory, and the time
            of their masks is limited too.

    Raises:
        RequestError: Grammars are not supported for this kind of tokenizer.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int], *, has_trials: bool = False
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        text, self._end_bit = _with_end_token(tokenizer)
        num_tokens = max(vocab_size, self._end_bit + 1)
        try:
            self._tokenizer = make_tokenizer(text, num_tokens, self._end_bit)
        except ValueError as error:
            raise RequestError(
                "structured_outputs: this model's tokenizer is of a kind that has no grammars yet: "
                f"{shortened(str(error))}"
            ) from error
        self._text = TokenText(self._tokenizer, vocab_size, self._eos_token_ids)
        self._trials = GrammarTrials(text, num_tokens, self._end_bit) if has_trials else None
        self._made = lru_cache(maxsize=16)(self._make)

    def close(self) -> None:
        """End the processes of trials."""
        if self._trials is not None:
            self._trials.close()

    def compile(self, asked: StructuredOutputsParams, *, ignore_eos: bool = False) -> Grammar:
        """Return the grammar at its start, for one output; each other one of the request gets a copy.

        Args:
            ignore_eos: No end-of-text token is legal: the output goes on until only its end is legal, and ends there.

        Raises:
            RequestError: The grammar cannot be parsed, is too large, or fits no text of this model's tokens.
        """
        made, fields = self._made(asked.kind, asked.text, ignore_eos), asked.fields
        if isinstance(made, Checked):
            name, wrong = made.fault
            raise RequestError(f"{fields[name]}: {wrong}" if name else f"{asked.field}: {asked.kind}: {wrong}")
        grammar = made.grammar.clone()
        grammar.ignored = [f"{fields[name]}.{place}".rstrip(".") for name, place in made.ignored]
        return grammar

    def _make(self, kind: str, text: str, ignore_eos: bool) -> "_Made | Checked":
        """Return a grammar that some text fits, or a fault."""
        if self._trials is not None:
            checked = self._trials.check(kind, text)
        else:
            checked = check(self._tokenizer, self._end_bit, kind, text)
        made = checked.text
        if made is None:
            return checked
        grammar = Grammar(
            lambda: make_matcher(self._tokenizer, kind, made),
            self._vocab_size,
            self._end_bit,
            () if ignore_eos else self._eos_token_ids,
            None if self._trials is None else MaskTime(CPU_SECONDS),
            digit_limit=self._digit_limit if kind in ("json", "grammars") else None,
            text=self._text,
        )
        fault = _fault(grammar)
        return _Made(grammar, checked.ignored) if fault is None else replace(checked, text=None, fault=("", fault))

    @cached_property
    def _digit_limit(self) -> DigitLimit:
        return DigitLimit(self._tokenizer, self._end_bit)


def _fault(grammar: Grammar) -> str | None:
    """Return why no text fits a grammar, or None if one does."""
    if grammar.is_finished:
        return "only the empty text fits, and no end-of-text token can end it; allow some text"
    end = time.monotonic() + _PROBE_SECONDS
    for token in grammar.mask(()).nonzero().flatten().tolist()[:_MAX_PROBES]:
        probe = grammar.copy()
        probe.mask(())  # compute the mask as in generation: it counts against the limits on work
        probe.advance(token)
        if probe.mask(()).any():
            return None
        if probe.is_lost or time.monotonic() > end:
            break
    return (
        "no text of this model's tokens fits, or finding one takes too much work; check for contradictions, rules "
        "without an end, large repetitions, and hundreds of optional properties"
    )


def _with_end_token(tokenizer: Any) -> tuple[str, int]:
    """Return the text of the tokenizer.json with one more token, which marks that a text is complete, and its id."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RequestError("structured_outputs: this model has no fast tokenizer; convert it to a tokenizer.json")
    backend = type(backend).from_str(backend.to_str())
    backend.no_padding()
    backend.no_truncation()
    backend.add_special_tokens([_END])
    return backend.to_str(), backend.token_to_id(_END)
