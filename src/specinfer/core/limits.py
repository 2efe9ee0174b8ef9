"""Latency targets of requests, and limits on what may wait: in the queue of an `AsyncLLM`, and by tenant."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from specinfer.core.errors import as_python, check_int
from specinfer.core.options import check_settings, setting

_NAMES = ("ttft", "tpot")
_LIMITS = "Limits"  # section of the help
_SECONDS: dict[str, Any] = {"low": 0, "high": 1e9, "low_open": True}


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
    def parse(cls, given: "SLO | Mapping[str, Any] | str | None") -> Self | None:
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


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of the queue, so that a burst is refused early instead of served late.

    Attributes:
        max_num_queued_reqs: Outputs (each of `n` counts) that may wait in addition to the running ones.
        queue_timeout: Seconds from arrival to the first computation, or None for no limit.
        max_step_seconds: Seconds after which a step counts as hung.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    max_num_queued_reqs: int = setting(
        256, _LIMITS, "Maximum number of waiting outputs; more are answered with 429.", low=0
    )
    max_num_queued_tokens: int | None = setting(None, _LIMITS, "Maximum number of waiting prompt tokens.", low=1)
    request_timeout: float | None = setting(
        None, _LIMITS, "Maximum time of a request in total, in seconds.", **_SECONDS
    )
    queue_timeout: float | None = setting(
        None, _LIMITS, "Maximum time a request waits in the queue, in seconds.", **_SECONDS
    )
    max_step_seconds: float = setting(
        300.0, _LIMITS, "Time after which a step counts as hung, and the engine is started again.", **_SECONDS
    )

    def __post_init__(self) -> None:
        check_settings(self)

    def deadlines(self, arrival: float, timeout: float | None) -> tuple[float, float]:
        """Return the times by which a request must have ended, and must have been started.

        Args:
            arrival: Time at which it arrived.
            timeout: Seconds that its caller allows, or None for no limit.
        """
        limits = [limit for limit in (timeout, self.request_timeout) if limit is not None]
        start = float("inf") if self.queue_timeout is None else arrival + self.queue_timeout
        return arrival + min(limits, default=float("inf")), start


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Limits of one tenant; None for none but the fair shares that all tenants have.

    Attributes:
        max_num_seqs: Outputs that run at once.
        max_num_queued_reqs: Outputs that may wait in addition to the running ones.
        max_tokens_per_minute: Tokens of prompts and outputs. A request begins if there are tokens left, and what it
            takes beyond them must come back before the next one begins.
        max_connections: Requests that are served at once.
        max_incoming_bytes: Bytes of bodies that are being read at once.
        max_outgoing_bytes: Largest number of bytes of responses that its clients have not read.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    max_num_seqs: int | None = None
    max_num_queued_reqs: int | None = None
    max_tokens_per_minute: int | None = None
    max_connections: int | None = None
    max_incoming_bytes: int | None = None
    max_outgoing_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                check_int(field.name, value, 0 if field.name == "max_num_queued_reqs" else 1)
