"""Number of processes of a target, and the address where they meet, checked before anything is loaded."""

import ipaddress
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from specinfer.core.errors import check_int

DEFAULT_PORT = 29500  # the default of torch.distributed
PLACEMENTS = ("auto", "first", "spread")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252})")


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Settings of a target sharded over ranks, each of which is a process.

    Attributes:
        tensor_parallel_size: Ranks that share every layer.
        pipeline_parallel_size: Stages, each with a part of the layers.
        nnodes: Machines; each has the same number of ranks, and runs the same command.
        node_rank: Number of this machine; the engine is on machine 0.
        master_addr: Address of machine 0, as all machines reach it.
        master_port: Port there, or None for any free one on a single machine and 29500 otherwise.
        drafter_placement: "first": all model drafters are on the engine's rank. "spread": each rank runs a different
            drafter. "auto": "spread" if all ranks are on one machine.

    Raises:
        ValueError: A field is out of range, or contradicts the others; the message names it.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    drafter_placement: str = "auto"

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "nnodes"):
            check_int(name, getattr(self, name), 1, 1024)
        check_int("node_rank", self.node_rank, 0)
        if self.node_rank >= self.nnodes:
            raise ValueError(f"node_rank: {self.node_rank} is none of {self.nnodes} machines; count from 0")
        if self.world_size % self.nnodes:
            raise ValueError(
                f"nnodes: {self.world_size} ranks ({self.tensor_parallel_size} x {self.pipeline_parallel_size}) cannot "
                f"be spread evenly over {self.nnodes} machines; choose sizes whose product is a multiple of it"
            )
        if self.world_size > 1 and sys.platform == "win32":
            name = "tensor_parallel_size" if self.tensor_parallel_size > 1 else "pipeline_parallel_size"
            raise ValueError(f"{name}: several ranks need Linux or macOS; leave it out on Windows")
        if self.master_port is not None:
            check_int("master_port", self.master_port, 1, 65535)
        if self.drafter_placement not in PLACEMENTS:
            raise ValueError(
                f"drafter_placement must be one of {', '.join(PLACEMENTS)}, not {self.drafter_placement!r:.60}"
            )
        if self.drafter_placement == "spread" and self.world_size == 1:
            raise ValueError(
                "drafter_placement: there is one process to place drafters on; set tensor_parallel_size or "
                "pipeline_parallel_size, too, or leave it out"
            )
        if self.master_addr is None:
            if self.nnodes > 1:
                raise ValueError("master_addr: several machines need the address of machine 0; name it")
        elif not _is_host(self.master_addr):
            raise ValueError(f"master_addr: {self.master_addr!r:.60} is no host name and no address")

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def local_size(self) -> int:
        """Number of ranks on each machine."""
        return self.world_size // self.nnodes

    def wanted(self) -> dict[str, str]:
        """Return the settings that must be the same on all ranks, by the names of options."""
        return {
            "tensor_parallel_size": str(self.tensor_parallel_size),
            "pipeline_parallel_size": str(self.pipeline_parallel_size),
        }


def _is_host(name: object) -> bool:
    if not isinstance(name, str):
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return _HOST.fullmatch(name) is not None
    return True


@dataclass(frozen=True, slots=True)
class Place:
    """The position of one rank among all ranks, and the address where it meets them.

    Attributes:
        host: Address of rank 0.
        port: Port there. If it is 0, rank 0 chooses one, which only processes that it starts itself can know.
        is_hosted: True if another program, such as torchrun, runs the store.
        num_started: Number of ranks that this one starts on its machine; they have the next rank numbers.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    host: str = "127.0.0.1"
    port: int = 0
    is_hosted: bool = False
    num_started: int = 0


def find_place(config: ParallelConfig, environment: Mapping[str, str] | None = None) -> Place:
    """Return the place of the first rank on this machine, or of this process if torchrun started it.

    Raises:
        ValueError: torchrun started a number of processes that does not match the sizes.
    """
    environment = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" in environment or {"RANK", "WORLD_SIZE"} <= environment.keys():
        return _started_by_torchrun(config, environment)
    host = config.master_addr or "127.0.0.1"
    port = config.master_port or (DEFAULT_PORT if config.nnodes > 1 else 0)
    local = config.local_size
    return Place(config.node_rank * local, config.world_size, 0, local, host, port, num_started=local - 1)


def _started_by_torchrun(config: ParallelConfig, environment: Mapping[str, str]) -> Place:
    def number(name: str, default: int | None = None) -> int:
        text = environment.get(name, "" if default is None else str(default))
        if not text.isascii() or not text.isdecimal():
            raise ValueError(
                f"{name} in the environment is {text!r:.40}, not a number; start with torchrun, or unset it"
            )
        return int(text)

    rank, world_size = number("RANK"), number("WORLD_SIZE")
    if world_size != config.world_size or rank >= world_size:
        raise ValueError(
            f"WORLD_SIZE: {world_size} processes were started (this is {rank}), and tensor_parallel_size "
            f"{config.tensor_parallel_size} x pipeline_parallel_size {config.pipeline_parallel_size} needs "
            f"{config.world_size}; make them agree"
        )
    if config.nnodes > 1:
        raise ValueError("nnodes: torchrun knows the machines; leave nnodes and node_rank out")
    host = environment.get("MASTER_ADDR", "127.0.0.1")
    port = number("MASTER_PORT", DEFAULT_PORT)
    is_hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    local = number("LOCAL_RANK", 0), number("LOCAL_WORLD_SIZE", 1)
    return Place(rank, world_size, *local, host, port, is_hosted)
