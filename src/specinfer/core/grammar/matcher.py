"""Matchers of llguidance, made from the text of a constraint.

Grammars of clients are not trusted: llguidance recurses as deeply as a text is nested. So a text is limited in length
and compiled on a stack that is large enough for the deepest text of that length.
"""

import json
import threading
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from specinfer.core.grammar.lark import is_gbnf

STACK_BYTES = 512 << 20  # address space; only the part that is used becomes memory
_STACK_LOCK = threading.Lock()
_LIMITS = LLParserLimits(verbose_errors=False)


def make_tokenizer(text: str, num_tokens: int, end_token: int) -> LLTokenizer:
    """Return llguidance's tokenizer from the text of a tokenizer.json.

    Raises:
        ValueError: llguidance cannot read it.
    """
    made: LLTokenizer = _on_large_stack(lambda: LLTokenizer(text, n_vocab=num_tokens, eos_token=end_token))
    return made


def make_matcher(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """Return a matcher for a constraint that was checked, or is being checked. It may be in an error state.

    Raises:
        ValueError: The text cannot be parsed.
    """
    made: LLMatcher = _on_large_stack(lambda: _parse(tokenizer, kind, text))
    return made


def _parse(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
    parts = json.loads(text) if kind == "grammars" else [("", kind, text)]
    grammars = [_grammar(*part) for part in parts]
    return LLMatcher(tokenizer, json.dumps({"grammars": grammars}), log_level=0, limits=_LIMITS)


def _grammar(name: str, kind: str, text: str) -> dict[str, Any]:
    """Return one constraint in llguidance's format."""
    if kind == "json":
        return {"name": name, "json_schema": json.loads(text)}
    if kind == "grammar":
        return {"name": name, "lark_grammar": gbnf_to_lark(text) if is_gbnf(text) else text}
    made: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]
    return made | {"name": name}


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
        before = threading.stack_size(STACK_BYTES)
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
