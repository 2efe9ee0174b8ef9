"""What is raised at the edge, before any work starts, and the checks of numbers that many fields share.

Each message names the field and the remedy.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any


class ModelError(ValueError):
    """A model folder or name that cannot be used as it is."""


class WeightsError(RuntimeError):
    """Weights that can no longer be read while the model runs; the message names the file and the remedy."""


class RequestError(ValueError):
    """A prompt or its parameters that cannot be served."""


class ContextLengthError(RequestError):
    """What is asked for does not fit into the context."""


class QueueFullError(Exception):
    """Too much waits already; the same request may be served later."""


class EngineDeadError(Exception):
    """The engine failed or is going down, and serves nothing any more."""


class RanksError(EngineDeadError):
    """A process that computes a part of the target is gone, hangs or failed; the target cannot be used any more."""


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Refuses what is no whole number from `low` to `high`.

    Raises:
        ValueError: The message names the field and its range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be {span}, not {value}")


def check_float(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    """Refuses what is no finite number from `low`, or above it, to `high`.

    Raises:
        ValueError: The message names the field and its range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    if value < low or value > high or (low_open and value == low):
        allowed = f"above {low:g} and at most {high:g}" if low_open else f"from {low:g} to {high:g}"
        raise ValueError(f"{name} must be {allowed}, not {value:g}")


def as_tuple(name: str, values: Iterable[Any] | None) -> tuple[Any, ...]:
    """A list of any kind as a tuple; None is empty.

    Raises:
        ValueError: It is no list; the message names the field.
    """
    if values is None:
        return ()
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list, not {values!r}")
    return tuple(values)


def first_line(error: Exception) -> str:
    """Of what a library says of its failure, the part that tells."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return said[:300] or type(error).__name__
