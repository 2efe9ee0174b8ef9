"""Turns token ids and parameters into running generations, and these into chunks or errors."""

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeVar

from fastapi import Request

from specinfer.core.errors import RequestError
from specinfer.core.lora import LoRARequest
from specinfer.core.outputs import CompletionOutput, TextChunk
from specinfer.core.request import Fault
from specinfer.core.request import Request as EngineRequest
from specinfer.core.sampling import SamplingParams
from specinfer.core.step_trace import StepTrace
from specinfer.core.tree_shape import parse_tree
from specinfer.generation import Generation
from specinfer.server.auth import body_size_of, cache_salt_of, tenant_of
from specinfer.server.errors import ApiError, as_api_error
from specinfer.server.protocol import SharedFields
from specinfer.server.state import ServerState, state_of

T = TypeVar("T")

# Limits of one request. An entry takes about 100 bytes, and as much again in the response; a prompt's come all at once.
_MAX_PROMPT_LOGPROBS = _MAX_LOGPROBS = 1 << 20
# Nodes and levels of a tree that a request may ask for: the whole batch waits for its largest tree. Passes of a
# streamed target take seconds, so larger trees hardly slow them.
_MAX_TREE, _MAX_STREAMED_TREE = (64, 16), (256, 32)
_MAX_TRACED_NODES = 200_000
_SHORT_BYTES = 2048  # of a request whose text is encoded in the event loop
_NAME = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class Call:
    """One API request: its fields, its name, and the tenant that sent it."""

    state: ServerState
    fields: SharedFields
    name: str
    tenant: str
    cache_salt: str | None
    body_size: int
    adapter: LoRARequest | None = None

    @classmethod
    def of(cls, request: Request, fields: SharedFields) -> "Call":
        """Check everything that does not depend on the prompt.

        Raises:
            ApiError: The model is not served here.
            RequestError: The request id or the tree cannot be used.
        """
        state = state_of(request)
        state.check_model(fields.model)
        state.engine.check_seats(1, tenant_of(request))
        name = fields.request_id
        if name is None:
            name = getattr(request.state, "request_id", None) or uuid.uuid4().hex
        elif not _NAME.fullmatch(name):
            raise RequestError("request_id: use 1 to 128 visible ASCII characters without spaces")
        if fields.speculative is not None and fields.speculative.tree is not None:
            is_streamed = state.engine.llm.target.loaded.stream is not None
            max_nodes, max_depth = _MAX_STREAMED_TREE if is_streamed else _MAX_TREE
            _check_tree(fields.speculative.tree, state.config.max_tree_nodes or max_nodes, max_depth)
        if fields.trace and len(state.config.api_keys) > 1 and state.engine.llm.adaptation is not None:
            raise RequestError(
                "trace: drafters learn from the texts of all keys here (--adapt-drafters), which their draft tokens "
                "could show; leave trace out"
            )
        salt = cache_salt_of(request, state.config, fields.cache_salt)
        return cls(
            state, fields, name, tenant_of(request), salt, body_size_of(request), state.adapters.get(fields.model or "")
        )

    async def read(self, action: Callable[[], T], *, only_encodes: bool = False) -> T:
        """Run an action with the tokenizer, templates or grammars in a thread, when it is the tenant's turn.

        One that `only_encodes` a short text runs in the event loop.
        """
        is_brief = only_encodes and self.body_size <= _SHORT_BYTES
        return await self.state.engine.read(action, self.tenant, num_bytes=self.body_size, is_brief=is_brief)

    @property
    def model(self) -> str:
        return self.fields.model or self.state.names[0]

    def check_count(self, num_prompts: int, num_outputs: int) -> None:
        """Refuse more outputs than the queue can ever have.

        Raises:
            RequestError: There are more.
        """
        capacity = self.state.engine.admission.capacity_of(self.tenant)
        if num_outputs > capacity:
            field = "n" if num_prompts == 1 else "prompt"
            raise RequestError(
                f"{field}: {num_outputs} outputs are more than the {capacity} that may wait; ask for fewer"
            )

    async def submit(self, prompts: Sequence[tuple[list[int], SamplingParams]]) -> list[Generation]:
        """Queue all prompts, or none of them.

        Raises:
            RequestError: One of the prompts cannot be served.
            QueueFullError: The queue has no room for all of them.
        """
        engine = self.state.engine
        self.check_count(len(prompts), sum(params.n for _, params in prompts))
        self._check_logprobs(prompts)
        extra = {} if self.cache_salt is None else {"cache_salt": self.cache_salt}
        generations: list[Generation] = []
        try:
            for ids, params in prompts:
                generations.append(
                    await engine.submit(
                        {"prompt_token_ids": ids, **extra},
                        params,
                        request_id=self.name,
                        priority=self.fields.priority or 0,
                        tenant=self.tenant,
                        trace=bool(self.fields.trace),
                        lora_request=self.adapter,
                    )
                )
        except BaseException:
            close_all(generations)
            raise
        return generations

    async def submit_one(self, ids: list[int], params: SamplingParams) -> Generation:
        """Queue a prompt with one output, whose limit is lowered to the capacity that the context has left.

        Raises:
            RequestError: The prompt cannot be served.
            QueueFullError: The queue has no room for it.
        """
        left = self.state.engine.llm.max_model_len - len(ids)
        if params.max_tokens is not None and 0 < left < params.max_tokens:
            params = replace(params, max_tokens=left)
        (generation,) = await self.submit([(ids, params)])
        return generation

    def _check_logprobs(self, prompts: Sequence[tuple[list[int], SamplingParams]]) -> None:
        max_model_len, of_prompts, of_outputs = self.state.engine.llm.max_model_len, 0, 0
        for ids, params in prompts:
            if params.prompt_logprobs is not None:
                of_prompts += params.n * len(ids) * (1 + params.prompt_logprobs)
            if params.logprobs is not None:
                max_tokens = params.max_tokens or max_model_len - len(ids)
                of_outputs += params.n * max_tokens * (1 + params.logprobs + len(params.scored_tokens))
        if of_prompts > _MAX_PROMPT_LOGPROBS:
            raise RequestError(
                f"prompt_logprobs: {of_prompts} would be returned; ask for {_MAX_PROMPT_LOGPROBS} at most, by shorter "
                "prompts, fewer of them, or fewer for each token"
            )
        if of_outputs > _MAX_LOGPROBS:
            raise RequestError(
                f"logprobs: up to {of_outputs} would be returned; ask for {_MAX_LOGPROBS} at most, by fewer tokens "
                "(max_tokens), outputs (n) or prompts"
            )


def _check_tree(tree: str, max_nodes: int, max_depth: int) -> None:
    try:
        shape = parse_tree(tree)
    except ValueError as error:
        raise RequestError(f"speculative.{error}") from error
    if shape.max_nodes > max_nodes:
        raise RequestError(
            f"speculative.tree: {tree[:60]!r} has {shape.max_nodes} nodes; use at most {max_nodes} (--max-tree-nodes)"
        )
    if shape.max_depth > max_depth:
        raise RequestError(f"speculative.tree: {tree[:60]!r} has {shape.max_depth} levels; use at most {max_depth}")


def close_all(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.close()


async def finish_all(generations: Sequence[Generation]) -> list[list[TextChunk]]:
    """Wait for all outputs and return each as one chunk, by generation.

    Raises:
        ApiError: One of the outputs failed.
    """
    found: list[list[TextChunk]] = []
    num_nodes = 0
    try:
        for generation in generations:
            steps: list[list[StepTrace]] = [[] for _ in generation.requests]
            async for chunk in generation:
                _check(generation, chunk)
                for step in chunk.steps:  # those of several steps come together if this task was late
                    num_nodes += 1 + len(step.nodes)
                    if num_nodes <= _MAX_TRACED_NODES:  # later steps are left out; a stream has them all
                        steps[chunk.index].append(step)
            found.append([_as_chunk(one, steps[one.index]) for one in generation.output().outputs])
    finally:
        close_all(generations)
    return found


def _as_chunk(output: CompletionOutput, steps: list[StepTrace]) -> TextChunk:
    return TextChunk(
        text=output.text,
        token_ids=output.token_ids,
        origins=output.token_origins,
        index=output.index,
        logprobs=output.logprobs,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        steps=steps,
    )


def _check(generation: Generation, chunk: TextChunk) -> None:
    if chunk.finish_reason in ("abort", "error"):
        raise failure(generation.failed)


async def chunks_of(
    generations: Sequence[Generation], ping_seconds: float, interval: int = 1
) -> AsyncGenerator[tuple[int, TextChunk] | None]:
    """Yield the chunks of all generations as they come, each with the index of its generation.

    None is yielded when nothing has come for `ping_seconds`.

    Args:
        interval: A chunk is kept back until it has this many tokens or is an output's first or last.

    Raises:
        ApiError: One of the outputs failed.
    """
    held: dict[tuple[int, int], TextChunk] = {}
    begun: set[tuple[int, int]] = set()
    try:
        async with aclosing(_arrivals(generations, ping_seconds)) as arrivals:
            async for arrived in arrivals:
                if not arrived:
                    yield None
                for place, chunk in arrived:
                    _check(generations[place], chunk)
                    key = place, chunk.index
                    joined = TextChunk.joined([held.pop(key), chunk]) if key in held else chunk
                    if key in begun and chunk.finish_reason is None and len(joined.token_ids) < interval:
                        held[key] = joined
                        continue
                    begun.add(key)
                    yield place, joined
    finally:
        close_all(generations)


async def _arrivals(
    generations: Sequence[Generation], ping_seconds: float
) -> AsyncGenerator[Sequence[tuple[int, TextChunk]]]:
    """Yield what has come, with the indices of generations; nothing if nothing has come for `ping_seconds`.

    A task or a timer for each chunk would cost more than the chunk.
    """
    event, clock = asyncio.Event(), asyncio.get_running_loop()
    for generation in generations:
        generation.announce(event)
    last, alarm = clock.time(), None

    def ring() -> None:
        nonlocal alarm
        alarm = None
        event.set()

    try:
        while any(generation.has_more for generation in generations):
            if ping_seconds and alarm is None:
                alarm = clock.call_at(last + ping_seconds, ring)
            await event.wait()
            event.clear()
            arrived = [(place, chunk) for place, generation in enumerate(generations) for chunk in generation.take()]
            if arrived or (alarm is None and clock.time() - last >= ping_seconds):
                yield arrived
                last = clock.time()
    finally:
        if alarm is not None:
            alarm.cancel()


def failure(request: EngineRequest | None) -> ApiError:
    """Return the error for a request that was ended early; `request` is None if the reason is not known."""
    message = "the request was ended before it was complete" if request is None else request.error or ""
    match None if request is None else request.fault:
        case Fault.NO_VALID_TOKEN:
            return as_api_error(RequestError(message))
        case Fault.LATE_START:
            return ApiError(429, message, kind="rate_limit_error", code="queue_timeout", headers={"Retry-After": "1"})
        case Fault.LATE_END:
            return ApiError(504, message, kind="server_error", code="timeout", headers={"x-should-retry": "false"})
        case Fault.BROKEN:
            headers = {"x-should-retry": "false"}
            return ApiError(500, message, kind="server_error", code="generation_failed", headers=headers)
        case _:  # another server may be able to serve it
            return ApiError(503, message, kind="server_error", code="engine_unavailable", headers={"Retry-After": "5"})
