"""vLLM's arguments, flags and keys in the place of ours: translated, ignored or refused, by `vllm_tables`."""

import difflib
import functools
import inspect
import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import FrozenInstanceError, fields
from typing import Any, TypeVar

from specinfer.core.errors import as_python
from specinfer.core.lookups import MTP, quoted_lookups, reserved_names
from specinfer.core.options import current_names
from specinfer.core.tree_shape import MAX_TREE_NODES
from specinfer.core.vllm_tables import ENGINE, METHODS, SAMPLING, SPECULATIVE, VllmName

T = TypeVar("T")
logger = logging.getLogger(__name__)
_SAME_METHOD = {"ngram_gpu": "ngram"}
_WITH_MODEL = ("mtp", "gemma4_mtp")  # MTP methods that may have a model of their own, an assistant
_OF_MODELS = ("draft_model", "eagle", "eagle3", "dflash", "dspark")  # methods with a model, whose files say its kind
# Formats that a checkpoint has or has not: its own configuration says which.
_STORED = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "auto-round", "mxfp4", "gguf")
_FLAT = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}


def without_vllm_names(
    given: Mapping[str, Any], table: Mapping[str, VllmName], ours: Iterable[str], place: str = ""
) -> dict[str, Any]:
    """Return arguments without those of vLLM that have no effect here.

    Args:
        given: Arguments by name.
        table: vLLM's names that are not ours.
        ours: Names that work, whatever the table has.
        place: Prefix of messages.

    Raises:
        ValueError: An argument would have an effect in vLLM that it cannot have here; the message names the remedy.
    """
    remaining, known = {}, frozenset(ours)
    for name, value in given.items():
        entry = None if name in known else table.get(name)
        if entry is None:
            remaining[name] = value
        elif entry.accepted is not None and value not in entry.accepted:
            raise ValueError(f"{place}{name}: {value!r:.60} has no equivalent: {entry.about}")
        elif value is not None:
            _note(name, entry.about)
    return remaining


@functools.cache
def _note(name: str, about: str) -> None:
    """Log, once, that a name has no effect."""
    logger.info("%s of vLLM has no effect: %s", name, about)


def without_vllm_flags(words: Sequence[str], known: Container[str]) -> list[str]:
    """Return the words of a command line without flags of vLLM that have no effect, and without their values.

    Args:
        known: Flags that the command has itself.
    """
    remaining: list[str] = []
    words_left = iter(words)
    for word in words_left:
        flag, equals, value = word.replace("_", "-").partition("=")
        name = flag.removeprefix("--").removeprefix("no-").partition(".")[0].replace("-", "_")
        entry = ENGINE.get(name) if flag.startswith("--") and flag not in known else None
        taken = [word]
        if entry is not None and entry.is_switch:
            value = value or ("false" if flag.startswith("--no-") else "true")
        elif entry is not None and not equals:
            taken += [value for value in (next(words_left, None),) if value is not None]
            value = taken[-1]
        if entry is None or (entry.accepted is not None and value.lower() not in map(_as_word, entry.accepted)):
            remaining += taken
        else:
            _note(name, entry.about)
    return remaining


def _as_word(value: object) -> str:
    return str(value).lower()


def check_arguments(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Check the names of keyword arguments.

    Raises:
        TypeError: One is not known; the message has the nearest name that is.
    """
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1, 0.7)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def takes_vllm_arguments(kind: type[T]) -> type[T]:
    """Let the constructor of EngineArgs take vLLM's arguments, too."""
    make = kind.__init__

    @functools.wraps(make)
    def init(self: Any, *model: Any, **given: Any) -> None:
        if len(model) > 1:
            raise TypeError(f"give one model, and name what follows: LLM({model[0]!r}, drafters={model[1]!r})")
        if not model and "model" not in given:
            raise TypeError("model is missing; give a folder, a GGUF file, a Hugging Face model ID, or 'demo'")
        make(self, *model, **engine_arguments(kind, given))

    kind.__init__ = init  # type: ignore[method-assign]
    return kind


def engine_arguments(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that EngineArgs has, those of `speculative_config` among them.

    Raises:
        TypeError: An argument is not known; the message has the nearest name.
        ValueError: An argument cannot be used; the message names it.
    """
    ours = {each.name: each.default for each in fields(kind)}
    arguments = {name: as_python(value) for name, value in given.items()}
    config = arguments.pop("speculative_config", None) or {}
    if not isinstance(config, Mapping):
        raise ValueError(f"speculative_config: give a dict such as {{'method': 'ngram'}}, not {config!r:.60}")
    flat = {key: value for name, key in _FLAT.items() if (value := arguments.pop(name, None)) is not None}
    if both := sorted(config.keys() & flat.keys()):
        raise ValueError(f"speculative_config: {both[0]} is given twice; leave one out")
    chosen = from_speculative_config(current_names(kind, {**config, **flat}))
    if arguments.get("quantization") in _STORED:
        _note("quantization", "a checkpoint is read in the format that it has")
        del arguments["quantization"]
    if arguments.get("max_model_len") in (-1, "auto"):  # what the model has and the memory allows
        del arguments["max_model_len"]
    # vLLM's defaults of some arguments are None.
    arguments = {name: value for name, value in arguments.items() if value is not None or ours.get(name) is None}
    arguments = without_vllm_names(arguments, ENGINE, ours)
    check_arguments("LLM", arguments, ours)
    if both := sorted(arguments.keys() & chosen.keys()):
        raise ValueError(f"speculative_config: it and {both[0]} both choose {both[0]}; leave one out")
    return arguments | chosen


_SAME = (
    *("tree", "verification", "draft_sampling", "select", "drafter_window", "speculation_policy"),
    *("prompt_lookup_max", "prompt_lookup_min"),
)


def asks_for_invariance(environment: Mapping[str, str]) -> bool:
    """Return whether vLLM's environment variable for `batch_invariant` is set.

    Raises:
        ValueError: It is not 0 or 1.
    """
    value = environment.get("VLLM_BATCH_INVARIANT", "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"VLLM_BATCH_INVARIANT in the environment is {value!r:.40}; set it to 1 or 0, or unset it")
    return value == "1"


def from_speculative_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return our arguments for vLLM's `speculative_config`, whose keys may also be ours.

    Raises:
        ValueError: A key or a value is not known, or two contradict each other.
    """
    keys = ("method", "model", "revision", "quantization", "num_speculative_tokens", *_SAME)
    config = without_vllm_names(given, SPECULATIVE, keys, "speculative_config: ")
    if unknown := sorted(config.keys() - set(keys)):
        raise ValueError(f"speculative_config: key {unknown[0]!r} is not known; use {', '.join(keys)}")
    chosen: dict[str, Any] = {name: config[name] for name in _SAME if config.get(name) is not None}
    if config.get("quantization") is not None:
        chosen["drafter_quantization"] = config["quantization"]
    if (drafters := _drafters(config.get("method"), config.get("model"), config.get("revision"))) is not None:
        chosen["drafters"] = drafters
    _choose_sizes(chosen)
    if (count := config.get("num_speculative_tokens")) is not None:
        if "tree" in chosen:
            raise ValueError("speculative_config: tree and num_speculative_tokens both choose the shape; leave one out")
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_TREE_NODES:
            raise ValueError(
                f"speculative_config: num_speculative_tokens must be from 1 to {MAX_TREE_NODES}, not {count!r}"
            )
        chosen["tree"] = ",".join(["1"] * count)
    return chosen


def _drafters(method: object, model: object, revision: object) -> list[str] | None:
    if revision not in (None, "main"):
        if not isinstance(model, str) or not isinstance(revision, str):
            raise ValueError("speculative_config: revision is for one model of the hub; of several, name NAME@REVISION")
        model = f"{model}@{revision}"
    if method is None and model is None:
        return None
    method = _SAME_METHOD.get(str(method), method)
    if method in _WITH_MODEL and model is not None:
        method = None  # the model's files say its kind
    elif isinstance(method, str) and method.endswith("_mtp"):  # vLLM has a name for each family
        method = MTP
    if method in reserved_names():
        if model is not None:
            raise ValueError(f'speculative_config: method "{method}" has no model; leave one out')
        return [str(method)]
    if method in METHODS:
        raise ValueError(f"speculative_config: method {method!r}: {METHODS[str(method)]}")
    if method is not None and method not in _OF_MODELS:
        names = ", ".join(f'"{name}"' for name in _OF_MODELS)
        raise ValueError(f'speculative_config: method must be {names}, "{MTP}", {quoted_lookups("or")}, not {method!r}')
    if model is None:
        raise ValueError(f"speculative_config: method {method!r} needs a model; name its folder, file or hub name")
    models = [model] if isinstance(model, str) else model
    if not isinstance(models, list) or not models or not all(isinstance(name, str) for name in models):
        raise ValueError("speculative_config: model must be a name or a list of names")
    return models


def _choose_sizes(chosen: dict[str, Any]) -> None:
    """Let one n-gram size stand for both limits if only it is given, as in vLLM."""
    least, most = "prompt_lookup_min", "prompt_lookup_max"
    for name, same in ((least, most), (most, least)):
        if name in chosen:
            chosen.setdefault(same, chosen[name])


def accepts_vllm_names(kind: type[T]) -> type[T]:
    """Let the constructor of sampling parameters take vLLM's names that have no effect, and refuse others by name.

    Assignments, which vLLM allows, are refused with the remedy.
    """
    make = kind.__init__
    known = tuple(inspect.signature(kind).parameters)

    @functools.wraps(make)
    def init(self: Any, **given: Any) -> None:
        given = without_vllm_names({name: as_python(value) for name, value in given.items()}, SAMPLING, ())
        check_arguments(kind.__name__, given, known)
        make(self, **given)

    def refuse(self: Any, name: str, value: Any) -> None:
        raise FrozenInstanceError(
            f"{name}: parameters never change; make others: dataclasses.replace(params, {name}={value!r:.60})"
        )

    kind.__init__, kind.__setattr__ = init, refuse  # type: ignore[method-assign]
    return kind
