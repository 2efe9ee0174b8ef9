"""Sampling parameters of a request: its fields come first, then the model's recommended values, then OpenAI's
defaults, which are those of `SamplingParams`.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from specinfer.core.errors import RequestError
from specinfer.core.sampling import SamplingParams
from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.server.protocol import Prediction, SharedFields

_SAME = {each.name for each in fields(SamplingParams)} & SharedFields.model_fields.keys()
_MAX_STOP = 1 << 12  # characters of all stop strings, which are compared with the end of the text after each pass


def sampling_params(
    request: SharedFields,
    defaults: Mapping[str, float],
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    structured_outputs: StructuredOutputsParams | None = None,
    thinking_token_budget: int | None = None,
    shows_special_tokens: bool = False,
) -> SamplingParams:
    """Return the sampling parameters of a request.

    Args:
        defaults: Values that the model's makers recommend.
        shows_special_tokens: Keep special tokens in the text because it is parsed for them, whatever the request asks.
    """
    asked: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    asked = dict(defaults) | {name: value for name, value in asked.items() if value is not None}
    asked |= {
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "structured_outputs": structured_outputs,
        "thinking_token_budget": thinking_token_budget,
        "tree": None if request.speculative is None else request.speculative.tree,
        "slo": None if request.slo is None else request.slo.model_dump(),
        "prediction": None if request.prediction is None else prediction_text(request.prediction),
    }
    if shows_special_tokens:
        asked["skip_special_tokens"] = False
    try:
        params = SamplingParams(**asked)
    except ValueError as error:
        raise RequestError(str(error)) from error
    if (length := sum(map(len, params.stop_strings))) > _MAX_STOP:
        raise RequestError(f"stop: {length} characters are too many; send {_MAX_STOP} at most")
    return params


def prediction_text(prediction: Prediction) -> str:
    """Return the predicted text, which may be given whole or in parts."""
    content = prediction.content
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError("prediction: content must be text, or a list of parts of type text")
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise RequestError("prediction: a part of content must be {'type': 'text', 'text': ...}")
    return "".join(part["text"] for part in content)


def truncated(ids: list[int], request: SharedFields, max_model_len: int, max_tokens: int | None) -> list[int]:
    """Return the tokens of a prompt that its limit keeps: the last ones, or the first.

    -1 keeps as many as leave capacity for `max_tokens` of output, or for one token if the context has fewer.
    """
    limit = request.prompt_limit
    if limit is None:
        return ids
    if limit == 0:
        raise RequestError("truncate_prompt_tokens: 0 leaves no prompt; use at least 1, or -1 for what fits")
    if limit < 0:
        limit = max_model_len - (max_tokens if max_tokens and max_tokens < max_model_len else 1)
    return ids[:limit] if request.truncation_side == "right" else ids[-limit:]
