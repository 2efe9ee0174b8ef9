"""Prompts, parameters and adapters as callers give them: one, or one for each of several prompts."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NotRequired, TypeAlias, TypedDict, TypeVar

from specinfer.core.errors import RequestError, as_python
from specinfer.core.lora import LoRARequest
from specinfer.core.sampling import SamplingParams
from specinfer.core.text import counted
from specinfer.core.thought import Reasoning
from specinfer.core.vllm_names import check_arguments, without_vllm_names
from specinfer.core.vllm_tables import CALLS

T = TypeVar("T")
_MAX_BRIEF = 1 << 12  # tokens of all outputs of a request that takes less time than another thread's turn


class TextPrompt(TypedDict):
    """A prompt as text; `reasoning` describes the thought of its outputs."""

    prompt: str
    cache_salt: NotRequired[str]
    reasoning: NotRequired[Reasoning | None]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `reasoning` describes the thought of its outputs."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]
    reasoning: NotRequired[Reasoning | None]


Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Message: TypeAlias = Mapping[str, Any]


def check_call(function: str, given: Mapping[str, Any]) -> None:
    """Check arguments of a call that are not ours.

    Raises:
        TypeError: One is not of vLLM either; of a sampling parameter the message names the place.
        ValueError: One cannot have its effect here; the message names the remedy.
    """
    unknown = without_vllm_names(given, CALLS, ())
    for name in unknown.keys() & inspect.signature(SamplingParams).parameters.keys():
        params = f"SamplingParams({name}={unknown[name]!r:.60})"
        raise TypeError(f"{name}: a sampling parameter; give {params} to {function}()")
    check_arguments(function, unknown, ())


def text_of(prompt: Prompt) -> str | None:
    """Return the prompt's text, if it was given as text."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def is_brief(prompt: Prompt, params: SamplingParams) -> bool:
    """Return whether a request is token ids already, so that reading it takes next to no time."""
    if params.structured_outputs is not None or params.bad_words or params.prediction is not None:
        return False
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    return isinstance(ids, list) and params.n * (len(ids) + 256) <= _MAX_BRIEF


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list; a list of whole numbers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, bytearray)):  # whose items are whole numbers
        raise RequestError(f"prompts: give text, token ids, or a list of them, not {type(prompts).__name__}")
    items = [as_python(item) for item in prompts]
    if items and all(isinstance(item, int) for item in items):
        return [items]
    return items


def one_params(given: Any) -> SamplingParams:
    """Return the sampling parameters of a single prompt; None is the default ones."""
    if given is not None and not isinstance(given, SamplingParams):
        raise ValueError(f"sampling_params: give a SamplingParams, not {given!r:.80}")
    return given or SamplingParams()


def params_list(given: Any, count: int) -> list[SamplingParams]:
    """Return the sampling parameters of each of `count` prompts; None is the default ones."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if not (isinstance(given, (list, tuple)) and all(isinstance(one, SamplingParams) for one in given)):
        raise ValueError(
            f"sampling_params: give a SamplingParams, or a list with one for each prompt, not {given!r:.80}"
        )
    return _one_for_each("sampling_params", given, count)


def lora_list(given: Any, count: int) -> list[LoRARequest | None]:
    """Return the adapter of each of `count` prompts, or None for the model alone."""
    adapters = given if isinstance(given, (list, tuple)) else [given] * count
    if not all(adapter is None or isinstance(adapter, LoRARequest) for adapter in adapters):
        raise ValueError(
            f"lora_request: give a LoRARequest, or a list with one or None for each prompt, not {given!r:.80}"
        )
    return _one_for_each("lora_request", adapters, count)


def _one_for_each(field: str, given: Sequence[T], count: int) -> list[T]:
    if len(given) != count:
        raise ValueError(f"{field}: {len(given)} given for {counted(count, 'prompt')}; give one for each")
    return list(given)
