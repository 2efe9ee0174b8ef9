"""Arguments of `LLM` that may be vLLM's, as those of `EngineArgs`."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from specinfer.core.flags import current_names
from specinfer.core.vllm_names import ENGINE, check_arguments, from_speculative_config, without_vllm_names
from specinfer.engine_args import EngineArgs


def engine_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that `EngineArgs` has, those of `speculative_config` among them.

    Raises:
        TypeError: An argument is not known; the message has the nearest name.
        ValueError: An argument cannot be used; the message names it.
    """
    ours = {each.name: each.default for each in fields(EngineArgs)}
    arguments = dict(given)
    config = arguments.pop("speculative_config", None) or {}
    if not isinstance(config, Mapping):
        raise ValueError(f"speculative_config: give a dict such as {{'method': 'ngram'}}, not {config!r:.60}")
    chosen = from_speculative_config(current_names(EngineArgs, config))
    # vLLM's defaults of some arguments are None.
    arguments = {name: value for name, value in arguments.items() if value is not None or ours.get(name) is None}
    arguments = without_vllm_names(arguments, ENGINE, ours)
    check_arguments("LLM", arguments, ours)
    if both := sorted(arguments.keys() & chosen.keys()):
        raise ValueError(f"speculative_config: it and {both[0]} both choose {both[0]}; leave one out")
    return arguments | chosen
