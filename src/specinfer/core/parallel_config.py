"""Number of processes of a target, and the address where they meet, checked before anything is loaded."""

import ipaddress
import os
import re
import ssl
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from specinfer.core.options import check_settings, setting

DEFAULT_PORT = 29500  # the default of torch.distributed
DrafterPlacement = Literal["auto", "first", "spread"]
RANKS = "Ranks"  # section of the help
_MAX_RANKS = 1024
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252})")


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Settings of a target sharded over ranks, each of which is a process. Ranks on one machine use no ports.

    Raises:
        ValueError: A field is out of range, or contradicts the others; the message names it.
    """

    tensor_parallel_size: int = setting(
        1, RANKS, "Number of tensor parallel processes.", short="-tp", low=1, high=_MAX_RANKS
    )
    pipeline_parallel_size: int = setting(
        1, RANKS, "Number of pipeline parallel stages.", short="-pp", low=1, high=_MAX_RANKS
    )
    nnodes: int = setting(1, RANKS, "Number of nodes. Start the same command on each.", low=1, high=_MAX_RANKS)
    node_rank: int = setting(0, RANKS, "Rank of this node, from 0. Node 0 runs the engine.", low=0)
    master_addr: str | None = setting(None, RANKS, "Address of node 0, reachable from all nodes.", metavar="HOST")
    master_port: int | None = setting(
        None, RANKS, "Port of node 0 for the rendezvous of ranks. (default: 29500)", low=1, high=65535
    )
    drafter_placement: DrafterPlacement = setting(
        "auto",
        RANKS,
        "Ranks that run draft models: first (all on the rank of the engine), spread (in parallel, one after the other "
        "on each rank), or auto (spread on a single node with two CPUs per rank).",
        choices=get_args(DrafterPlacement),
    )
    cluster_cert: str | None = setting(
        None,
        RANKS,
        "File with the private key and certificate, the same on all nodes, by which ranks accept and encrypt messages.",
        metavar="FILE",
    )
    insecure_cluster: bool = setting(False, RANKS, "Allow several nodes without --cluster-cert.")

    def __post_init__(self) -> None:
        check_settings(self)
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
        if self.drafter_placement == "spread" and self.world_size == 1:
            raise ValueError(
                "drafter_placement: there is one process to place drafters on; set tensor_parallel_size or "
                "pipeline_parallel_size, too, or leave it out"
            )
        if self.master_addr is None:
            if self.nnodes > 1:
                raise ValueError("master_addr: several machines need the address of machine 0; name it")
        elif not _is_host(self.master_addr):
            raise ValueError(f"master_addr: {self.master_addr!r:.60} is neither a host name nor an address")
        if self.cluster_cert is not None:
            make_tls(self.cluster_cert)
        self.check_cluster("nnodes", self.nnodes)

    def check_cluster(self, name: str, num_machines: int) -> None:
        """Raise `ValueError`, with this name, if ranks on this many machines would have to trust every network."""
        if num_machines > 1 and self.cluster_cert is None and not self.insecure_cluster:
            raise ValueError(
                f"{name}: ranks on several machines need cluster_cert, a file with a key that only they have "
                "(docs/distributed.md says how to make it); or set insecure_cluster if nobody else reaches their ports"
            )

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


def make_tls(file: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS settings of listening and of connecting ranks; both sides need the file's key and certificate.

    Raises:
        ValueError: The file cannot be used.
    """
    contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if Path(file).stat().st_mode & 0o007:
            raise ValueError(f"cluster_cert: {file} can be read by other users of this machine; chmod 600 it")
        for context in contexts:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # whoever has the key may be on any machine
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(file, password=lambda: "")  # instead of asking for the password of a key
            context.load_verify_locations(file)
    except OSError as error:  # of ssl, too
        raise ValueError(
            f"cluster_cert: {file} cannot be used ({error.strerror or error}); it must hold a private key and its "
            "certificate, in PEM format"
        ) from error
    contexts[0].num_tickets = 0  # nothing is sent to a rank that only sends
    return contexts


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
        port: Port of rank 0. Ranks on one machine use no port.
        is_hosted: True if torchrun listens at that port itself.
        num_started: Number of ranks that this one starts on its machine; they have the next rank numbers.
        folder: Private folder for the sockets of ranks on one machine, or "" if rank 0 is to create one.
        cluster_cert: See `ParallelConfig`; used if the ranks are on several machines.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    host: str = "127.0.0.1"
    port: int = 0
    is_hosted: bool = False
    num_started: int = 0
    folder: str = ""
    cluster_cert: str | None = None

    @property
    def is_on_one_machine(self) -> bool:
        return self.local_size == self.world_size


def find_place(config: ParallelConfig, environment: Mapping[str, str] | None = None) -> Place:
    """Return the place of the first rank on this machine, or of this process if torchrun started it.

    Raises:
        ValueError: torchrun started a number of processes that does not match the sizes.
    """
    environment = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" in environment or {"RANK", "WORLD_SIZE"} <= environment.keys():
        return _started_by_torchrun(config, environment)
    host = config.master_addr or "127.0.0.1"
    port = config.master_port or DEFAULT_PORT
    local = config.local_size
    return Place(
        config.node_rank * local, config.world_size, 0, local, host, port, num_started=local - 1,
        cluster_cert=config.cluster_cert,
    )  # fmt: skip


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
    config.check_cluster("LOCAL_WORLD_SIZE", world_size // max(local[1], 1))
    # All ranks have to find it; whoever creates it first is checked to be this user.
    restart = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    user = getattr(os, "getuid", int)()
    folder = str(Path(tempfile.gettempdir()) / f"specinfer-{user}-ranks-{port}-{restart}")
    return Place(rank, world_size, *local, host, port, is_hosted, folder=folder, cluster_cert=config.cluster_cert)
