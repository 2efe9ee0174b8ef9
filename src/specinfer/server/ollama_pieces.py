"""The objects of a response in Ollama's format, as a whole and as lines."""

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from specinfer.core.clock import epoch_seconds
from specinfer.core.outputs import TextChunk
from specinfer.generation import Generation
from specinfer.server.blocks import Block, Blocks
from specinfer.server.dialects import Event, to_json
from specinfer.server.generations import metrics_of
from specinfer.server.json_body import read_generated
from specinfer.server.logprobs import TokenTexts, chat_logprobs


class Pieces:
    """The writer of one response as objects; a whole response is all of them in one.

    Args:
        kind: The field of the text: "response", or "message" with calls.
        texts: The texts of tokens, if log-probabilities are sent.
        count: Number of most probable tokens to list for each token.
    """

    def __init__(
        self, model: str, kind: str, generation: Generation, blocks: Blocks, texts: TokenTexts | None, count: int
    ) -> None:
        self._model, self._kind, self._generation, self._blocks = model, kind, generation, blocks
        self._texts, self._count = texts, count
        self._logprobs: list[dict[str, Any]] = []

    def begin(self) -> list[Event]:
        return []

    def wait(self) -> list[Event]:
        return [self._piece("", "", [], []) | {"done": False}]

    def write(self, chunk: TextChunk, place: int = 0) -> list[Event]:
        is_last = chunk.finish_reason is not None
        changes = [*self._blocks.read(chunk), *(self._blocks.end() if is_last else ())]
        grown = [(block.kind, text) for change, block, text in changes if change == "grow"]
        text, thinking = ("".join(piece for of, piece in grown if of == kind) for kind in ("text", "thought"))
        calls = _written_calls(block for change, block, _ in changes if change == "end" and block.kind == "call")
        logprobs = []
        if self._texts is not None and chunk.logprobs is not None:
            logprobs = chat_logprobs(chunk.token_ids, chunk.logprobs, self._count, (), self._texts)["content"]
        self._logprobs += logprobs
        has_news = text or thinking or calls or logprobs
        events: list[Event] = [self._piece(text, thinking, calls, logprobs) | {"done": False}] if has_news else []
        return [*events, self._piece("", "", [], []) | self._end(chunk)] if is_last else events

    def whole(self, chunks: Sequence[Sequence[TextChunk]]) -> bytes:
        ((chunk,),) = chunks
        self.write(chunk)
        return to_json(self.answer() | self._end(chunk))

    def answer(self) -> dict[str, Any]:
        """Return all that was written so far in one object."""
        blocks = self._blocks
        return self._piece(blocks.text("text"), blocks.text("thought"), _written_calls(blocks.calls()), self._logprobs)

    def _end(self, chunk: TextChunk) -> dict[str, Any]:
        request = self._generation.requests[0]
        start, first = request.times.scheduled or request.times.arrival, request.times.first_token
        end = request.times.finished or epoch_seconds()
        return {
            "done": True,
            "done_reason": chunk.finish_reason,
            "total_duration": _nanoseconds(end - request.times.arrival),
            "load_duration": 0,
            "prompt_eval_count": len(request.prompt_ids),
            "prompt_eval_duration": _nanoseconds((first or end) - start),
            "eval_count": request.num_output,
            "eval_duration": _nanoseconds(end - (first or end)),
            "metrics": metrics_of([self._generation]),
        }

    def _piece(
        self, text: str, thinking: str, calls: list[dict[str, Any]], logprobs: list[dict[str, Any]]
    ) -> dict[str, Any]:
        thoughts = {"thinking": thinking} if thinking else {}
        piece: dict[str, Any] = {"model": self._model, "created_at": formatted(time.time())}
        if self._kind == "response":
            piece |= {"response": text, **thoughts}
        else:
            piece["message"] = {"role": "assistant", "content": text, **thoughts}
            piece["message"] |= {"tool_calls": calls} if calls else {}
        return piece | ({"logprobs": logprobs} if logprobs else {})


def _written_calls(blocks: Iterable[Block]) -> list[dict[str, Any]]:
    """Return calls that have ended; one that was cut off is skipped."""
    read = ((block, read_generated(block.text)) for block in blocks)
    return [
        {"id": block.call.id, "function": {"index": block.call.index, "name": block.call.name, "arguments": arguments}}
        for block, arguments in read
        if arguments is not None
    ]


def formatted(seconds: float) -> str:
    """Return a time, in seconds since 1970, as the API writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return max(int(seconds * 1e9), 1)  # clients divide by it
