"""Latency targets of a request: service level objectives under the names of vLLM's benchmark, in milliseconds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from specinfer.core.errors import as_python

_NAMES = ("ttft", "tpot")


@dataclass(frozen=True, slots=True, kw_only=True)
class SLO:
    """Latency targets of a request, in milliseconds; None is no target. They affect only who is served first.

    Attributes:
        ttft: Time to the first token, from the arrival.
        tpot: Mean time of each token after the first.

    Raises:
        ValueError: A target is no time, or there is none; the message names it.
    """

    ttft: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        targets = {name: as_python(getattr(self, name)) for name in _NAMES}
        if all(target is None for target in targets.values()):
            raise ValueError("slo: states no target; give ttft, tpot or both, or leave slo out")
        for name, target in targets.items():
            if target is None:
                continue
            is_number = isinstance(target, int | float) and not isinstance(target, bool)
            if not (is_number and 0 < target < math.inf):
                raise ValueError(f"slo: {name} must be milliseconds above 0, not {target!r:.60}")
            object.__setattr__(self, name, target)

    @classmethod
    def of(cls, given: "SLO | Mapping[str, Any] | str | None") -> Self | None:
        """Return the targets of a mapping, or of text such as "ttft:500,tpot:50"; None stays None.

        Raises:
            ValueError: They cannot be read; the message names the field.
        """
        if given is None or isinstance(given, cls):
            return given
        if isinstance(given, str):
            given = dict(_read(word) for word in given.split(","))
        if not isinstance(given, Mapping):
            raise ValueError(f"slo must be an SLO, or a dict of ttft and tpot, not {given!r:.60}")
        if unknown := sorted(set(map(str, given)) - set(_NAMES)):
            raise ValueError(f"slo: {unknown[0]!r:.60} is not known; use {' and '.join(_NAMES)}")
        return cls(**given)


def _read(word: str) -> tuple[str, float]:
    name, _, number = word.partition(":")
    try:
        return name.strip(), float(number)
    except ValueError as error:
        raise ValueError(f"slo: {word!r:.60} cannot be read; give such as ttft:500,tpot:50") from error
