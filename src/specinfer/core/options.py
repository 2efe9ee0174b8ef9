"""Settings as fields of dataclasses: each field has the description from which flags, checks and documents are made."""

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from specinfer.core.errors import check_float, check_int


@dataclass(frozen=True, slots=True)
class Flag:
    """Description of a setting, and of its flag on the command line.

    Attributes:
        panel: Section of the help.
        help: Description; "{choices}" stands for the choices.
        name: Name of the flag without dashes, if it is not the name of the field.
        short: Short flag.
        metavar: Name of the value in the help.
        choices: Allowed values, or () if they are checked in another way.
        other_names: Names elsewhere of some choices, for the error.
        low, high: Least and largest number, or None without a limit.
        low_open: Whether `low` itself is not allowed.
        old_name: Former name of the field, accepted with a warning.
        variable: Environment variable that sets the flag of every command.
        is_negated: Whether the flag switches the setting off.
        repeats: Whether the flag may be repeated, for a field that is not a list of text or has a `read`.
        read: Function from the value of the flag to that of the field, if they differ.
    """

    panel: str
    help: str
    name: str | None = None
    short: str | None = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    other_names: Mapping[str, str] = field(default_factory=dict)
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    old_name: str | None = None
    variable: str | None = None
    is_negated: bool = False
    repeats: bool = False
    read: Callable[[Any], Any] | None = None

    @property
    def text(self) -> str:
        """Description with the choices."""
        *first, last = self.choices or ("",)
        return self.help.replace("{choices}", f"{', '.join(first)} or {last}")

    def check(self, name: str, kinds: Collection[Any], value: Any) -> None:
        """Check a value against the choices or the limits.

        Args:
            kinds: Types of the field.

        Raises:
            ValueError: It is none of the choices, or beyond a limit; the message names the field.
        """
        if self.choices and value not in self.choices:
            remedy = "; leave it out for none" if NoneType in kinds else ""
            if isinstance(value, str) and value in self.other_names:
                remedy = f", which is called {self.other_names[value]} here"
            raise ValueError(f"{name} must be one of {', '.join(self.choices)}, not {value!r:.60}{remedy}")
        if self.low is None or (str in kinds and isinstance(value, str)):  # text is checked where it is parsed
            return
        if float in kinds:
            check_float(name, value, self.low, math.inf if self.high is None else self.high, low_open=self.low_open)
        else:
            check_int(name, value, int(self.low), None if self.high is None else int(self.high))


def setting(default: Any, panel: str, help: str, **more: Any) -> Any:
    """Return a field of a dataclass with a description.

    Args:
        default: Default value, or `dict` for an empty one.
        more: Further attributes of `Flag`.
    """
    metadata = {"flag": Flag(panel, help, **more)}
    kind: dict[str, Any] = {"default_factory": dict} if default is dict else {"default": default}
    return field(**kind, metadata=metadata)


def setting_of(config: type, name: str, **changed: Any) -> Any:
    """Return the field of another dataclass: the same setting, perhaps with another default."""
    (same,) = (each for each in fields(config) if each.name == name)
    return field(default=changed.get("default", same.default), metadata=same.metadata)


def settings_of(kind: type) -> Iterator[tuple[Field[Any], Flag]]:
    """Yield the described fields of a dataclass."""
    return ((each, each.metadata["flag"]) for each in fields(kind) if "flag" in each.metadata)


def kinds_of(each: Field[Any]) -> tuple[Any, ...]:
    """Return the types that a field may have; choices of text are text."""
    kinds = get_args(each.type) if get_origin(each.type) in (Union, UnionType) else (each.type,)
    return tuple(str if get_origin(kind) is Literal else kind for kind in kinds)


def check_settings(settings: Any) -> None:
    """Check the fields that have choices or limits, true and false among these.

    Raises:
        ValueError: A value is not allowed; the message names the field.
    """
    for each, flag in settings_of(type(settings)):
        value, kinds = getattr(settings, each.name), kinds_of(each)
        if isinstance(each.default, bool) and not isinstance(value, bool):  # "false" would be true
            raise ValueError(f"{each.name} must be true or false, not {value!r:.60}")
        if value is not None or each.default is not None:
            flag.check(each.name, kinds, value)


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}; the old name ends with the next release", DeprecationWarning, stacklevel=4)


def current_names(kind: type, arguments: Mapping[str, Any], warn: Callable[[str, str], None] = _warn) -> dict[str, Any]:
    """Return arguments of a dataclass under the names of today, with a warning for each former name.

    Raises:
        ValueError: A field is given by both names.
    """
    named = dict(arguments)
    for each, flag in settings_of(kind):
        if flag.old_name in named:
            if each.name in named:
                raise ValueError(f"{flag.old_name}: it is now {each.name}; give only that")
            warn(flag.old_name, each.name)
            named[each.name] = named.pop(flag.old_name)
    return named


# Single letters are vLLM's: small ones are powers of 1000, capital ones of 1024. Longer units may be in any case.
_UNITS = {"": 1}
for power, letter in enumerate("kmgt", 1):
    _UNITS |= {letter: 1000**power, letter.upper(): 1024**power, f"{letter}b": 1000**power, f"{letter}ib": 1024**power}


def parse_size(name: str, value: object) -> int:
    """Return a size in bytes, given as a whole number or as text such as "4GiB", "500MB" or "512M".

    Raises:
        ValueError: The value has none of these forms, or is less than a byte.
    """
    forms = "give bytes, or a size such as 4GiB, 500MB or 512M"
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{name}: {value!r:.60} is not a size; {forms}")
    match = re.fullmatch(r"(\d{1,20}(?:\.\d{1,9})?)\s*([A-Za-z]{0,3})", str(value).strip(), re.ASCII)
    unit = None if match is None else match[2] if len(match[2]) < 2 else match[2].lower()
    if match is None or unit not in _UNITS:
        raise ValueError(f"{name}: {value!r:.60} is not a size; {forms}")
    size = int(float(match[1]) * _UNITS[unit]) if "." in match[1] else int(match[1]) * _UNITS[unit]
    if size < 1:
        raise ValueError(f"{name}: {value!r:.60} is nothing; {forms}")
    return size
