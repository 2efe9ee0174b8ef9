"""Compilation of grammars.

Grammars of clients are not trusted: llguidance recurses as deeply as a text is nested. So a text is limited in length
and compiled on a stack that is large enough for the deepest text of that length.
"""

import json
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from specinfer.core.errors import RequestError
from specinfer.core.grammar.refusals import refusal, remedy, shortened
from specinfer.core.grammar.state import Grammar
from specinfer.core.structured_outputs import StructuredOutputsParams

_MAX_PROBES = 256  # first tokens that are tried before a grammar is refused as impossible
_STACK_BYTES = 512 << 20  # address space; only the part that is used becomes memory
_STACK_LOCK = threading.Lock()
_END = "<|end of grammar|>"  # stands for all of the model's tokens that end a text
_LIMITS = LLParserLimits(verbose_errors=False)


class GrammarCompiler:
    """Compiles grammars for the tokens of one model.

    Args:
        tokenizer: The model's transformers tokenizer, with a backend of the tokenizers library.
        vocab_size: The size of the model's logits, which may be larger than the tokenizer's vocabulary.
        eos_token_ids: Tokens that end a text.

    Raises:
        RequestError: Grammars are not supported for this kind of tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._tokenizer, self._end_bit = _read_tokenizer(tokenizer, vocab_size)
        self._made = lru_cache(maxsize=16)(self._make)

    def compile(self, asked: StructuredOutputsParams, *, ignore_eos: bool = False) -> Grammar:
        """Return the grammar at its start, for one output; each output gets a clone.

        Args:
            ignore_eos: No end-of-text token is legal: the output goes on until only its end is legal, and ends there.

        Raises:
            RequestError: The grammar cannot be parsed, is too large, or fits no text of this model's tokens.
        """
        made = self._made(asked.kind, asked.text, ignore_eos)
        if isinstance(made, str):
            raise RequestError(f"{asked.field}: {asked.kind}: {made}")
        return made.clone()

    def _make(self, kind: str, text: str, ignore_eos: bool) -> Grammar | str:
        """Return a grammar that some text fits, or a message that says what is wrong and what to change."""
        if (wrong := self._check(kind, text)) is not None:
            return wrong
        grammar = Grammar(
            lambda: _on_large_stack(lambda: self._matcher_of(kind, text)),
            self._vocab_size,
            self._end_bit,
            () if ignore_eos else self._eos_token_ids,
        )
        if grammar.is_finished:
            return "only the empty text fits, and no end-of-text token can end it; allow some text"
        for token in grammar.mask(()).nonzero().flatten().tolist()[:_MAX_PROBES]:
            probe = grammar.clone()
            probe.mask(())  # compute the mask as in generation: it counts against the limits on work
            probe.advance(token)
            if probe.mask(()).any():
                return grammar
            if probe.is_lost:
                break
        return (
            "no text of this model's tokens fits, or finding one takes too much work; check for contradictions, rules "
            "without an end, large repetitions, and hundreds of optional properties"
        )

    def _check(self, kind: str, text: str) -> str | None:
        """Return what is wrong with a text and what to change, or None if nothing is."""
        if (wrong := refusal(kind, text, self._end_bit)) is not None:
            return wrong
        try:
            matcher: LLMatcher = _on_large_stack(lambda: self._matcher_of(kind, text))
        except ValueError as error:
            return remedy(str(error))
        if not matcher.is_error():
            return None
        if kind == "grammars":
            for name, schema in json.loads(text)[1:]:
                if (wrong := self._check("json", schema)) is not None:
                    return f"{name}: {wrong}"
        return remedy(matcher.get_error())

    def _matcher_of(self, kind: str, text: str) -> LLMatcher:
        if kind == "json":
            grammar = LLMatcher.grammar_from_json_schema(text)
        elif kind == "grammar":
            grammar = LLMatcher.grammar_from_lark(text)
        elif kind == "grammars":
            lark, *schemas = json.loads(text)
            named = [{"name": name, "json_schema": json.loads(schema)} for name, schema in schemas]
            grammar = json.dumps({"grammars": [{"lark_grammar": lark}, *named]})
        else:
            grammar = LLMatcher.grammar_from_regex(text)
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)


def _read_tokenizer(tokenizer: Any, vocab_size: int) -> tuple[LLTokenizer, int]:
    """Return llguidance's tokenizer, and the token by which it marks that a text is complete."""
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
            f"structured_outputs: this model's tokenizer is of a kind that has no grammars yet: {shortened(str(error))}"
        ) from error
    return made, end


def _on_large_stack(make: Callable[[], Any]) -> Any:
    """Call a function in a thread whose stack is large enough for the deepest text."""
    done: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(make())
        except BaseException as error:  # a panic in llguidance is not an Exception
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
