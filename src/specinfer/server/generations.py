"""From token ids and parameters to running generations, and from these to chunks or a failure."""

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request

import specinfer
from specinfer.async_llm import Generation
from specinfer.errors import RequestError
from specinfer.outputs import RequestOutput, TextChunk
from specinfer.sampling import SamplingParams
from specinfer.server.disconnect import cancel
from specinfer.server.errors import ApiError
from specinfer.server.fields import SharedFields
from specinfer.server.logprobs import TokenTexts
from specinfer.server.state import ServerState, state_of
from specinfer.server.trace import step_record

_FINGERPRINT = f"specinfer-{specinfer.__version__}"
_NAME = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class Call:
    """Who asks, for what model, under which name."""

    state: ServerState
    fields: SharedFields
    name: str
    model: str
    tenant: str

    @classmethod
    def of(cls, request: Request, fields: SharedFields) -> "Call":
        """Checks what does not depend on the prompt.

        Raises:
            ApiError: There is no such model, or a name cannot be used.
        """
        state = state_of(request)
        if fields.model is not None and fields.model not in state.names:
            raise ApiError(
                404,
                f"model: there is no {fields.model[:200]!r} here; use {state.names[0]!r}, or leave it out",
                param="model",
                code="model_not_found",
            )
        name = fields.request_id
        if name is None:
            name = getattr(request.state, "request_id", None) or uuid.uuid4().hex
        elif not _NAME.fullmatch(name):
            raise RequestError("request_id: use 1 to 128 visible ASCII characters without spaces")
        return cls(state, fields, name, fields.model or state.names[0], getattr(request.state, "tenant", ""))

    def head(self, prefix: str, kind: str, created: int) -> dict[str, Any]:
        """What all answers and events begin with."""
        return {
            "id": f"{prefix}-{self.name}",
            "object": kind,
            "created": created,
            "model": self.model,
            "system_fingerprint": _FINGERPRINT,
        }

    async def submit(self, prompts: Sequence[tuple[list[int], SamplingParams]]) -> list[Generation]:
        """Queues all prompts or none.

        Raises:
            RequestError: One of them cannot be served.
            QueueFullError: They do not all find room.
        """
        engine = self.state.engine
        room = engine.llm.max_num_seqs + engine.limits.max_num_queued_reqs
        if (count := sum(params.n for _, params in prompts)) > room:
            raise RequestError(f"prompt: {count} outputs are more than the {room} that may wait; send fewer at once")
        salt = self._cache_salt()
        generations: list[Generation] = []
        try:
            for ids, params in prompts:
                prompt: dict[str, object] = {"prompt_token_ids": ids}
                generations.append(
                    await engine.submit(
                        prompt if salt is None else prompt | {"cache_salt": salt},
                        params,
                        request_id=self.name,
                        priority=self.fields.priority or 0,
                        tenant=self.tenant,
                        trace=bool(self.fields.trace),
                    )
                )
        except BaseException:
            close_all(generations)
            raise
        return generations

    def _cache_salt(self) -> str | None:
        """Tenants do not share what they cached: the time an answer takes would tell of others' prompts."""
        asked = self.fields.cache_salt
        shared = len(self.state.config.api_keys) < 2
        return asked if shared else f"{self.tenant}:{asked or ''}"


def close_all(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.close()


async def finish_all(generations: Sequence[Generation]) -> list[RequestOutput]:
    """Waits for all outputs.

    Raises:
        ApiError: One of them failed.
    """
    try:
        outputs = [await generation.finish() for generation in generations]
    finally:
        close_all(generations)
    for output in outputs:
        if output.error is not None or any(one.finish_reason in ("abort", "error") for one in output.outputs):
            raise failure(output.error)
    return outputs


async def chunks_of(
    generations: Sequence[Generation], ping_seconds: float, interval: int = 1
) -> AsyncGenerator[tuple[int, TextChunk] | None]:
    """Chunks of all generations as they come, each with its generation's place; None: nothing came for a while.

    Args:
        interval: A chunk is held until it has so many tokens or is an output's first or last.

    Raises:
        ApiError: One of them failed.
    """
    iterators = [aiter(generation) for generation in generations]
    awaited = {asyncio.ensure_future(anext(iterator)): place for place, iterator in enumerate(iterators)}
    held: dict[tuple[int, int], TextChunk] = {}
    begun: set[tuple[int, int]] = set()
    try:
        while awaited:
            done, _ = await asyncio.wait(awaited, timeout=ping_seconds or None, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                yield None
            for task in done:
                place = awaited.pop(task)
                try:
                    chunk = task.result()
                except StopAsyncIteration:
                    continue
                if chunk.finish_reason in ("abort", "error"):
                    raise failure(generations[place].output().error)
                awaited[asyncio.ensure_future(anext(iterators[place]))] = place
                key = place, chunk.index
                if key in held:
                    chunk = held.pop(key) + chunk
                if key in begun and chunk.finish_reason is None and len(chunk.token_ids) < interval:
                    held[key] = chunk
                    continue
                begun.add(key)
                yield place, chunk
    finally:
        await cancel(*awaited)
        close_all(generations)


def as_chunks(generation: Generation, output: RequestOutput) -> list[TextChunk]:
    """Each output of a prompt that has ended, as one chunk."""
    return [
        TextChunk(
            text=one.text,
            token_ids=one.token_ids,
            origins=one.token_origins,
            index=one.index,
            logprobs=one.logprobs,
            finish_reason=one.finish_reason,
            stop_reason=one.stop_reason,
            steps=request.trace or [],
        )
        for one, request in zip(output.outputs, generation.requests, strict=True)
    ]


def steps_of(chunk: TextChunk, texts: TokenTexts | None) -> dict[str, Any]:
    """The trees behind a chunk, and who guessed each of its tokens."""
    name = str if texts is None else texts.name
    return {"steps": [step_record(step, name) for step in chunk.steps], "origins": chunk.origins}


def failure(error: str | None) -> ApiError:
    """What a caller is told of a request that did not end by itself."""
    told = error or "the request was ended before it was complete"
    if told.startswith(("structured_outputs", "no token may follow")):
        return ApiError(400, told, code="invalid_value")
    if "stopped" in told or "ended before" in told:
        return ApiError(503, told, kind="server_error", code="engine_unavailable", headers={"Retry-After": "5"})
    if "longer than it was given" in told:
        return ApiError(504, told, kind="server_error", code="timeout", headers={"x-should-retry": "false"})
    return ApiError(500, told, kind="server_error", code="generation_failed", headers={"x-should-retry": "false"})
