"""The settings of replicas: how many there are and when that changes, their resources, and what each loads."""

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specinfer.core.errors import check_float, check_int
from specinfer.core.limits import QueueLimits
from specinfer.engine_args import EngineArgs
from specinfer.server.config import ServerConfig

_COUNTS = re.compile(r"(\d{1,6})(?::(\d{1,6}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The number of replicas, and when it changes.

    Attributes:
        min_replicas, max_replicas: Bounds on the number; equal bounds fix it.
        target_requests: Requests that each replica should have, running and waiting together.
        target_ttft: Seconds within which nine of ten requests should get their first token, or None for no limit.
        up_seconds, down_seconds: Seconds for which more, or fewer, replicas must have been wanted.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    min_replicas: int
    max_replicas: int
    target_requests: int = 16
    target_ttft: float | None = None
    up_seconds: float = 10.0
    down_seconds: float = 300.0

    def __post_init__(self) -> None:
        check_int("replicas", self.min_replicas, 1, 1000)
        check_int("replicas", self.max_replicas, 1, 1000)
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"replicas: {self.min_replicas}:{self.max_replicas} has the larger number first; swap them"
            )
        check_int("scale_requests", self.target_requests, 1)
        if self.target_ttft is not None:
            check_float("scale_ttft", self.target_ttft, 0.0, 86400.0, low_open=True)
        check_float("scale_up_seconds", self.up_seconds, 0.0, 86400.0)
        check_float("scale_down_seconds", self.down_seconds, 0.0, 86400.0)

    @property
    def is_fixed(self) -> bool:
        return self.min_replicas == self.max_replicas


def read_counts(words: str) -> tuple[int, int]:
    """Return the bounds given as "2" or "1:3".

    Raises:
        ValueError: The text does not have this form.
    """
    match = _COUNTS.fullmatch(words.strip())
    if match is None:
        raise ValueError(f"replicas: {words!r:.40} is not a number of replicas; write 2, or 1:3 for one to three")
    return int(match[1]), int(match[2] or match[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The resources that Ray reserves for a replica.

    Attributes:
        cpus: Cores; a fraction shares one core.
        gpus: Devices; a fraction shares one device.
        num_ranks: Processes that the target is split over; they share these resources.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        check_float("replica_cpus", self.cpus, 0.0, 4096.0, low_open=True)
        check_float("replica_gpus", self.gpus, 0.0, 64.0)
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError(f"replica_gpus: {self.gpus:g}: a fraction shares one device; above 1 give whole numbers")

    @property
    def num_threads(self) -> int:
        """The number of threads of each rank."""
        return max(int(self.cpus / self.num_ranks), 1)


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """The model that each replica loads, and how it serves it.

    Attributes:
        names: The names by which clients may call the model.
        server: The settings of all replicas and of the router; both check requests by them.
        limits: The limits of each replica's own queue.
    """

    engine: EngineArgs
    names: tuple[str, ...]
    server: ServerConfig = field(default_factory=ServerConfig)
    limits: QueueLimits = field(default_factory=QueueLimits)

    def __post_init__(self) -> None:
        if self.engine.adapt_dir is not None:
            raise ValueError("adapt_dir: one server at a time uses a folder; leave it out with --replicas")

    def of_replica(self, name: str) -> "ReplicaSettings":
        """Return the settings of one replica: it logs no requests, as the router does, and has its own trace files."""
        trace = None if self.server.trace is None else _named_after(name, self.server.trace)
        server = dataclasses.replace(self.server, access_log=False, trace=trace)
        log = None if self.engine.step_log is None else _named_after(name, self.engine.step_log)
        return dataclasses.replace(self, engine=dataclasses.replace(self.engine, step_log=log), server=server)


def _named_after(name: str, path: str | Path) -> str:
    """Return a path with the replica's name in it: steps.jsonl becomes steps.NAME.jsonl."""
    place = Path(path)
    return str(place.with_name(f"{place.stem}.{name}{place.suffix}"))


@dataclass(frozen=True, slots=True)
class ReplicaDeployment:
    """Settings, scaling and resources of a deployment of replicas."""

    settings: ReplicaSettings
    scaling: Scaling
    resources: Resources


class LoadPolicy:
    """A policy of as many replicas as the requests need, and one more while first tokens are too late.

    Args:
        target_requests: Requests per replica, running and waiting together.
        target_ttft: Seconds to the first token for nine requests in ten, or None for no limit.
    """

    def __init__(self, target_requests: float, target_ttft: float | None = None) -> None:
        self._target_requests, self._target_ttft = target_requests, target_ttft

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas wanted now, and an empty state."""
        wanted = context.total_num_requests / self._target_requests
        slowest = max((context.aggregated_metrics or {}).get("ttft", {}).values(), default=0.0)
        # With no requests running, the last measured times are out of date.
        if self._target_ttft is not None and slowest > self._target_ttft and context.total_num_requests > 0:
            wanted = max(wanted, context.current_num_replicas + 1)
        return wanted, {}
