"""The objects of a response in Ollama's format, as a whole and as lines."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from specinfer.core.outputs import TextChunk
from specinfer.generation import Generation
from specinfer.inputs.formats.parser import OutputDelta
from specinfer.server.dialect import OLLAMA
from specinfer.server.errors import ApiError
from specinfer.server.generations import metrics_of
from specinfer.server.json_body import read_generated
from specinfer.server.logprobs import TokenTexts, chat_logprobs


class Pieces:
    """The objects of one response; a whole response is all of them in one.

    Args:
        kind: The field of the text: "response", or "message" with calls.
        texts: The texts of tokens, if log-probabilities are sent.
        count: Number of most probable tokens to list for each token.
    """

    def __init__(self, model: str, kind: str, generation: Generation, texts: TokenTexts | None, count: int) -> None:
        self._model, self._kind, self._generation, self._texts, self._count = model, kind, generation, texts, count
        self._content, self._thinking = "", ""
        self._calls, self._logprobs = list[dict[str, Any]](), list[dict[str, Any]]()
        self._call: tuple[OutputDelta, list[str]] | None = None  # the call that is being generated
        self._end: dict[str, Any] = {}

    def begin(self) -> list[dict[str, Any]]:
        return []

    def wait(self) -> list[dict[str, Any]]:
        return [self._piece("", "", [], []) | {"done": False}]

    def push(self, deltas: Sequence[OutputDelta], chunk: TextChunk) -> list[dict[str, Any]]:
        calls = []
        for delta in deltas:
            if self._call is not None and delta.index != self._call[0].index:
                calls += self._close()
            if delta.index is not None and self._call is None:
                self._call = delta, []
            if self._call is not None and delta.index is not None:
                self._call[1].append(delta.arguments)
        if chunk.finish_reason is not None:
            calls += self._close()
        text, thinking = "".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas)
        logprobs = []
        if self._texts is not None and chunk.logprobs is not None:
            logprobs = chat_logprobs(chunk.token_ids, chunk.logprobs, self._count, (), self._texts)["content"]
        self._content += text
        self._thinking += thinking
        self._calls += calls
        self._logprobs += logprobs
        has_news = text or thinking or calls or logprobs
        return [self._piece(text, thinking, calls, logprobs) | {"done": False}] if has_news else []

    def finish(self, chunk: TextChunk) -> list[dict[str, Any]]:
        request = self._generation.requests[0]
        start, first = request.scheduled_time or request.arrival_time, request.first_token_time
        end = request.finished_time or time.time()
        self._end = {
            "done": True,
            "done_reason": chunk.finish_reason,
            "total_duration": _nanoseconds(end - request.arrival_time),
            "load_duration": 0,
            "prompt_eval_count": len(request.prompt_ids),
            "prompt_eval_duration": _nanoseconds((first or end) - start),
            "eval_count": request.num_output,
            "eval_duration": _nanoseconds(end - (first or end)),
            "metrics": metrics_of([self._generation]),
        }
        return [self._piece("", "", [], []) | self._end]

    def fail(self, error: ApiError) -> list[dict[str, Any]]:
        return [OLLAMA.error(error)]

    def whole(self) -> dict[str, Any]:
        return self._piece(self._content, self._thinking, self._calls, self._logprobs) | self._end

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

    def _close(self) -> list[dict[str, Any]]:
        """Return the call that has ended; one that was cut off is left out."""
        if self._call is None:
            return []
        (delta, parts), self._call = self._call, None
        arguments = read_generated("".join(parts))
        if arguments is None:
            return []
        function = {"index": delta.index, "name": delta.name, "arguments": arguments}
        return [{"id": delta.id, "function": function}]


def formatted(seconds: float) -> str:
    """Return a time, in seconds since 1970, as the API writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return max(int(seconds * 1e9), 1)  # clients divide by it
