"""Responses that consist of choices, one for each output: those of the two completion endpoints."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import specinfer
from specinfer.core.outputs import TextChunk
from specinfer.generation import Generation
from specinfer.server.call import Call
from specinfer.server.dialect import Event, to_json
from specinfer.server.generations import metrics_of, usage_of
from specinfer.server.logprobs import TokenTexts
from specinfer.server.pending_response import PendingResponse
from specinfer.server.trace import step_record

_FINGERPRINT = f"specinfer-{specinfer.__version__}"


class Output(Protocol):
    """A formatter of one output for the client; it takes the output's chunks in order."""

    def pieces(self, chunk: TextChunk) -> list[dict[str, Any]]:
        """Return the choices for events, each of which is one; none if there is nothing to send yet."""

    def whole(self, chunk: TextChunk) -> dict[str, Any]:
        """Return the choice for a whole response, from the complete output."""


class Choices:
    """The writer of a response with choices.

    Args:
        prefix: Put before the request's id.
        kinds: Values of the "object" field: of a whole response, and of an event.
        outputs: The outputs of each generation.
        texts: The texts of tokens, if the response includes them.
        once: Returns the fields that appear once next to the choices, in a whole response or in the first event.
        hides_output: True if the output is not part of the response because only the prompt was asked about.
        returns_progress: Whether events report how far the prompts are read.
    """

    def __init__(
        self,
        call: Call,
        prefix: str,
        kinds: tuple[str, str],
        generations: Sequence[Generation],
        outputs: Sequence[Sequence[Output]],
        texts: TokenTexts | None,
        *,
        once: Callable[[], dict[str, Any]] = dict,
        hides_output: bool = False,
        returns_progress: bool = False,
    ) -> None:
        self._fields, self._kind_of_whole, self._kind = call.fields, *kinds
        self._generations, self._outputs, self._texts = generations, outputs, texts
        self._once, self._hides_output = once, hides_output
        self._is_first, self._is_reading = True, returns_progress
        self._returns_progress = returns_progress
        self._num_open = sum(map(len, outputs))
        self._head = {
            "id": f"{prefix}-{call.name}",
            "object": self._kind,
            "created": int(time.time()),
            "model": call.model,
            "system_fingerprint": _FINGERPRINT,
        }

    def response(self, ignored: Sequence[str] = ()) -> PendingResponse:
        """Return the response that this writer formats."""
        return PendingResponse(
            self._fields,
            self._generations,
            self,
            ignored,
            is_slow=self._texts is not None,
            returns_progress=self._returns_progress,
        )

    def begin(self) -> list[Event]:
        return []

    def wait(self) -> list[Event]:
        return self._progress()

    def write(self, chunk: TextChunk, place: int = 0) -> list[Event]:
        events = self._progress() if self._is_read else []
        choices, fields = self._outputs[place][chunk.index].pieces(chunk), self._fields
        for choice in choices:
            event = self._head | {"choices": [choice]}
            event |= self._trace(chunk) if choice is choices[-1] else {}
            if fields.wants_usage:
                event["usage"] = self._usage() if fields.wants_usage_always else None
            events.append(event | self._once() if self._is_first else event)
            self._is_first = False
        self._num_open -= chunk.finish_reason is not None
        if fields.wants_usage and not self._num_open:
            end: dict[str, Any] = {"choices": [], "usage": self._usage(), "metrics": metrics_of(self._generations)}
            events.append(self._head | end)
        return events

    def whole(self, chunks: Sequence[Sequence[TextChunk]]) -> bytes:
        choices = []
        for outputs, ended in zip(self._outputs, chunks, strict=True):
            for output, chunk in zip(outputs, ended, strict=True):
                choices.append(output.whole(chunk) | self._trace(chunk))
        end = {"usage": self._usage(), "metrics": metrics_of(self._generations)} | self._once()
        # One by one: encoding many large ones in a single call would keep Python's lock for seconds.
        encoded = b",".join(map(to_json, choices))
        head = to_json(self._head | {"object": self._kind_of_whole})
        return head[:-1] + b',"choices":[' + encoded + b"]," + to_json(end)[1:]

    @property
    def _is_read(self) -> bool:
        """True if all prompts are computed."""
        return all(one.num_prompt_computed == len(one.requests[0].prompt_ids) for one in self._generations)

    def _progress(self) -> list[Event]:
        """Return an event that reports how far the prompts are read, as llama.cpp's server does; none afterwards."""
        if not self._is_reading:
            return []
        self._is_reading = not self._is_read
        firsts, now = [generation.requests[0] for generation in self._generations], time.time()
        started = min(now if one.scheduled_time is None else one.scheduled_time for one in firsts)
        progress = {
            "total": sum(len(one.prompt_ids) for one in firsts),
            "cache": sum(one.num_cached for one in firsts),
            "processed": sum(generation.num_prompt_computed for generation in self._generations),
            "time_ms": round(1000 * (now - started)),
        }
        is_text = self._kind == "text_completion"
        empty = {"text": ""} if is_text else {"delta": {"role": "assistant", "content": None}}
        choice = {"index": 0, **empty, "logprobs": None, "finish_reason": None}
        return [self._head | {"choices": [choice], "prompt_progress": progress}]

    def _usage(self) -> dict[str, Any]:
        return usage_of(self._generations, hides_output=self._hides_output)

    def _trace(self, chunk: TextChunk) -> dict[str, Any]:
        """Return the steps' token trees and the drafter that proposed each token of a chunk."""
        if not self._fields.trace:
            return {}
        name = str if self._texts is None else self._texts.name
        return {"specinfer": {"steps": [step_record(step, name) for step in chunk.steps], "origins": chunk.origins}}
