"""The usage of a request: OpenAI's token counts, and vLLM's counters of speculation."""

from collections.abc import Sequence
from typing import Any

from specinfer.drafters.lookup.prediction import PredictionDrafter
from specinfer.generation import Generation


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
