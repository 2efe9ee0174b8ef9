"""Running generations into chunks or errors, and their usage: OpenAI's token counts, and vLLM's counters."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from specinfer.core.errors import RequestError
from specinfer.core.outputs import CompletionOutput, TextChunk
from specinfer.core.request import Fault, Request
from specinfer.core.speculation import StepTrace
from specinfer.drafters.lookup.prediction import PredictionDrafter
from specinfer.generation import Generation
from specinfer.server.errors import ApiError, as_api_error

_MAX_TRACED_NODES = 200_000  # of a response


def close_all(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.close()


async def finish_all(generations: Sequence[Generation]) -> list[list[TextChunk]]:
    """Wait for all outputs and return each as one chunk, by generation.

    Raises:
        ApiError: One of the outputs failed.
    """
    ended: list[list[TextChunk]] = []
    num_nodes = 0
    try:
        for generation in generations:
            steps: list[list[StepTrace]] = [[] for _ in generation.requests]
            async for chunk in generation:
                _check(generation, chunk)
                for step in chunk.steps:  # those of several steps come together if this task was late
                    num_nodes += 1 + len(step.nodes)
                    if num_nodes <= _MAX_TRACED_NODES:  # a stream has later steps, too
                        steps[chunk.index].append(step)
            ended.append([_as_chunk(output, steps[output.index]) for output in generation.output().outputs])
    finally:
        close_all(generations)
    return ended


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


def failure(request: Request | None) -> ApiError:
    """Return the error for a request that was ended early; `request` is None if the reason is not known."""
    message = "the request was ended before it was complete" if request is None else request.error or ""
    match None if request is None else request.fault:
        case Fault.NO_VALID_TOKEN:
            return as_api_error(RequestError(message))
        case Fault.LATE_START:
            return ApiError("queue_timeout", message)
        case Fault.LATE_END:
            return ApiError("timeout", message)
        case Fault.BROKEN:
            return ApiError("generation_failed", message)
        case _:  # another server may be able to serve it
            return ApiError("engine_unavailable", message)


def usage_of(generations: Sequence[Generation], *, hides_output: bool = False) -> dict[str, Any]:
    """Return the numbers of prompt and output tokens so far.

    Accepted prediction tokens are output tokens that the prediction proposed. Rejected ones are the rest of the
    prediction; they appear in no output. With several outputs, both are summed over the outputs.

    Args:
        hides_output: True if the output is not part of the response because only the prompt was asked about.
    """
    requests = [request for generation in generations for request in generation.requests]
    num_prompt = sum(len(generation.requests[0].prompt_ids) for generation in generations)
    num_generated = 0 if hides_output else sum(request.num_output for request in requests)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(g.requests[0].num_cached for g in generations)},
    }
    num_predicted = sum(len(request.prediction_ids) for request in requests)
    details: dict[str, int] = {}
    if thoughts := [request.thought for request in requests if request.thought is not None]:
        details["reasoning_tokens"] = sum(thought.num_tokens for thought in thoughts)
    if num_predicted:
        accepted = sum(request.origins.count(PredictionDrafter.name) for request in requests)
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = max(num_predicted - accepted, 0)
    return usage | {"completion_tokens_details": details} if details else usage


def metrics_of(generations: Sequence[Generation]) -> dict[str, Any] | None:
    """Return the speculation counters of one output; None for several outputs, whose counters would be mixed."""
    requests = [request for generation in generations for request in generation.requests]
    if len(requests) != 1:
        return None
    return {"speculative_decoding": requests[0].speculation.as_dict()}
