"""Exceptions that are raised before any work starts, and checks of numbers that many fields share.

Each message names the field and the remedy.
"""

import copy
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any


class ModelError(ValueError):
    """A model folder or name that cannot be used as it is."""


class NativeCodeError(RuntimeError):
    """Native code that is missing or is not of this version of the package; the message has the remedy."""


class WeightsError(RuntimeError):
    """Weights that can no longer be read while the model runs; the message names the file and the remedy."""


class RequestError(ValueError):
    """A prompt or its parameters that cannot be served."""


class ContextLengthError(RequestError):
    """A prompt that does not fit into the context. The message is OpenAI's, because clients search for its words.

    Attributes:
        field: The field that is too long.
        num_tokens: Tokens of the prompt. A text that was not encoded has at least so many.
        max_model_len: Tokens that the context has.
    """

    def __init__(self, message: str, field: str = "prompt", num_tokens: int = 0, max_model_len: int = 0) -> None:
        super().__init__(message)
        self.field, self.num_tokens, self.max_model_len = field, num_tokens, max_model_len


def too_long(field: str, num_tokens: int, max_model_len: int, *, is_encoded: bool = True) -> ContextLengthError:
    """Return the error for a prompt that leaves no space for a token of output."""
    number = f"{num_tokens}" if is_encoded else f"at least {num_tokens}"
    rest = " and leave no space for output" if num_tokens == max_model_len else ""
    return ContextLengthError(
        f"This model's maximum context length is {max_model_len} tokens. However, your {field} resulted in {number} "
        f"tokens{rest}. Please reduce the length of the {field}.",
        field,
        num_tokens,
        max_model_len,
    )


def reworded(error: RequestError, message: str) -> RequestError:
    """Return a copy of an error with another message."""
    made = copy.copy(error)
    made.args = (message,)
    return made


class QueueFullError(Exception):
    """A refusal by a full queue; the same request may be served later."""


class QuotaError(QueueFullError):
    """A refusal at a tenant's own limit; the same request may be served after `seconds`."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class EngineDeadError(Exception):
    """An engine that failed or is shutting down, and serves nothing any more."""


class RanksError(EngineDeadError):
    """A rank of the target that ended, hangs or failed; the target cannot be used any more."""


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Check that a value is a whole number from `low` to `high`.

    Raises:
        ValueError: It is not; the message names the field and its range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, not {value!r:.60}")
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be {span}, not {value}")


def check_float(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    """Check that a value is a finite number from `low` (excluded with `low_open`) to `high`.

    Raises:
        ValueError: It is not; the message names the field and its range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value!r:.60}")
    if value < low or value > high or (low_open and value == low):
        allowed = f"above {low:g} and at most {high:g}" if low_open else f"from {low:g} to {high:g}"
        raise ValueError(f"{name} must be {allowed}, not {value:g}")


def check_path(name: str, value: object) -> None:
    """Check that a value can be the name of a file, a folder or a model.

    Raises:
        ValueError: It cannot; the message names the field.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError(f"{name} must be a name or a path, not {value!r:.60}")
    if not str(value).strip():
        raise ValueError(f"{name}: an empty name; give a name or a path")
    if "\0" in str(value):
        raise ValueError(f"{name}: {str(value)!r:.60} has the character U+0000, which no path has")


def as_python(value: Any) -> Any:
    """Return a number, an array or a tensor as Python's number or list; anything else stays as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def as_tuple(name: str, values: Iterable[Any] | None) -> tuple[Any, ...]:
    """Return a list of any kind as a tuple; None gives an empty one.

    Raises:
        ValueError: The value is not a list; the message names the field.
    """
    if values is None:
        return ()
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list, not {values!r:.60}")
    return tuple(map(as_python, values))


def first_line(error: Exception) -> str:
    """Return the informative part of a library's error message, at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return message[:300] or type(error).__name__


def file_error(error: Exception) -> str:
    """Return why a file cannot be written or read: the system's reason, or the first line of a library's message."""
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else first_line(error)
