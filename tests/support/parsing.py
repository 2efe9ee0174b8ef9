"""What a model generates, against the grammar that it is generated under and the parser that reads it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from specinfer import SamplingParams
from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.inputs.formats.parser import OutputDelta
from specinfer.inputs.prompts import PromptReader


class Parsed(NamedTuple):
    """What a response says: calls with their arguments as JSON text, and the ids of these calls."""

    content: str
    thought: str
    calls: list[tuple[str, str]]
    ids: list[str | None]


def parse(parser: Any, pieces: Sequence[str]) -> Parsed:
    """Read a whole response in these pieces."""
    deltas: list[OutputDelta] = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    calls: list[list[str]] = []
    for delta in deltas:
        if delta.index is None:
            assert (delta.id, delta.name, delta.arguments) == (None, None, "")
            assert delta.content or delta.reasoning
        elif delta.name is not None:
            assert (delta.index, delta.arguments) == (len(calls), ""), "the first delta of a call has no arguments"
            calls.append([delta.name, ""])
        else:
            calls[delta.index][1] += delta.arguments
    content, thought = ("".join(getattr(delta, kind) for delta in deltas) for kind in ("content", "reasoning"))
    ids = [delta.id for delta in deltas if delta.name is not None]
    assert len({*ids}) == len(calls)
    return Parsed(content, thought, [(name, text) for name, text in calls], ids)


def pieces_of(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def reader_of(tokenizer: Any, max_model_len: int = 4096) -> PromptReader:
    return PromptReader(tokenizer, len(tokenizer), max_model_len, [tokenizer.eos_token_id])


def is_response(reader: PromptReader, asked: StructuredOutputsParams | None, text: str) -> bool | None:
    """Whether a text is a response; None if it is the beginning of one."""
    assert asked is not None
    grammar = reader.grammar(SamplingParams(structured_outputs=asked))
    assert grammar is not None
    for token in reader.tokenizer.encode(text, add_special_tokens=False):
        if not grammar.mask(())[token]:
            return False
        grammar.advance(token)
    return True if grammar.is_finished or grammar.mask(())[reader.tokenizer.eos_token_id] else None
