"""The parent's side of the processes of one target: messages go to rank 0, and the other ranks follow it."""

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Self

from benchmarks.parallel.engine import EngineAsk, EngineJob
from benchmarks.parallel.namespaces import ADDRESSES, Namespaces
from benchmarks.parallel.plans import NUM_HOSTS, Setting
from benchmarks.parallel.report import RankMemory
from benchmarks.peers.race import LOADING_TIMEOUT, SLOW_PER_TOKEN
from benchmarks.process import Worker, WorkerError, environment
from benchmarks.resident import children_of, peak_resident, reset_peak, resident
from benchmarks.runs import read_run
from specinfer.bench.results import Run
from specinfer.core.errors import ModelError
from specinfer.reporting.environment import Environment, surroundings

_MODULE, _FOLLOWER = "benchmarks.parallel.engine", "benchmarks.parallel.follower"
_FIRST_PORT = 29500
_COSTS_TIMEOUT = 600.0
_GOODBYE = 10.0  # seconds that the other ranks have to end after rank 0


@dataclass(frozen=True, slots=True)
class Where:
    """The place where the ranks of a target run.

    Attributes:
        namespaces: Network namespaces of the hosts, or None if all ranks run on this host.
        number: Number of the target among those loaded at once, which gives each its own port.
        threads: Threads of each process.
    """

    namespaces: Namespaces | None
    number: int
    threads: int


class Engine:
    """One target, whole or split.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used; the message names it.
        RuntimeError: A process failed.
    """

    def __init__(self, job: EngineJob, setting: Setting, where: Where) -> None:
        self.setting = setting
        self._where = where
        self._follower: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the processes)
        is_spread = setting.num_ranks > 1 and where.namespaces is not None
        prefix = where.namespaces.command(0) if where.namespaces is not None else ()
        device = where.namespaces.names[0] if where.namespaces is not None else None
        self._process = Worker(_MODULE, where.threads, command=prefix)
        try:
            options = dict(job.options)
            if setting.num_ranks > 1:
                options |= {"tensor_parallel_size": setting.tensor, "pipeline_parallel_size": setting.pipeline}
            if is_spread:
                port = _FIRST_PORT + where.number
                options |= {
                    "nnodes": NUM_HOSTS,
                    "master_addr": ADDRESSES[0],
                    "master_port": port,
                    "insecure_cluster": True,
                }
                self._follow(job.target, options)
            reply = self._ask(
                {"do": "load", "job": asdict(job) | {"options": options, "device": device}}, LOADING_TIMEOUT
            )
            if "refused" in reply:
                raise (ModelError if reply["is_model"] else ValueError)(reply["refused"])
        except BaseException:
            self.close()
            raise
        # The process does not know the command line of the benchmark.
        self.environment = Environment(**(reply["environment"] | surroundings()))
        self.num_bytes: int = reply["num_bytes"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End rank 0. The other ranks end with it, or are killed."""
        self._process.close()
        if self._follower is not None:
            try:
                self._follower.wait(_GOODBYE)
            except subprocess.TimeoutExpired:
                self._follower.kill()
                self._follower.wait()
        self._errors.close()

    def costs(self) -> dict[str, Any]:
        """Measure and return the costs of passes, as given by `CostModel.as_dict`."""
        return self._ask({"do": "costs"}, _COSTS_TIMEOUT)

    def part(self, num_ranks: int) -> tuple[list[float], list[float]]:
        """Return sizes and seconds of passes on one of this many tensor ranks."""
        sizes, seconds = self._ask({"do": "part", "num_ranks": num_ranks}, LOADING_TIMEOUT)["part"]
        return sizes, seconds

    def be_busy(self, seconds: float) -> None:
        """Compute for this many seconds."""
        self._ask({"do": "busy", "seconds": seconds}, _COSTS_TIMEOUT)

    def prepare(self, setting: Setting) -> dict[str, Any]:
        """Create the policies of a setting, and return the costs of passes in it."""
        return self._ask({"do": "prepare", "setting": setting.name}, _COSTS_TIMEOUT)

    def measure(self, ask: EngineAsk) -> Run:
        """Run one batch. The run's counters are the bytes and packets that crossed the link, and the bytes and messages
        between rank 0 and all others, all while decoding and both ways; and acceptance rates by rank for "auto"."""
        return read_run(self._ask({"do": "measure", "ask": asdict(ask)}, SLOW_PER_TOKEN * (60 + ask.max_tokens)))

    def forget_peaks(self) -> None:
        """Reset the memory peaks of all ranks."""
        for pid in self._ranks():
            reset_peak(pid)

    def memory(self) -> tuple[RankMemory, ...]:
        """Return the memory of each rank, in rank order."""
        return tuple(RankMemory(peak_resident(pid), resident(pid)) for pid in self._ranks())

    def _ranks(self) -> list[int]:
        """Return the process ids of all ranks, in rank order."""
        firsts = [self._process.pid] + ([self._follower.pid] if self._follower is not None else [])
        return [pid for first in firsts for pid in (first, *children_of(first))]

    def _follow(self, model: str, options: dict[str, Any]) -> None:
        """Start the ranks of host 1, which retry until they can connect to rank 0."""
        assert self._where.namespaces is not None
        job = json.dumps({"model": model, "options": options | {"node_rank": 1}})
        self._follower = subprocess.Popen(
            [*self._where.namespaces.command(1), sys.executable, "-m", _FOLLOWER, job],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env=environment(self._where.threads),
        )

    def _ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        try:
            return self._process.ask(message, timeout)
        except WorkerError as error:
            self._errors.seek(0)
            lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
            others = f"; another rank: {lines[-1]}" if lines else ""
            raise RuntimeError(f"{self.setting.name}: {error}{others}") from error


def message_seconds(namespaces: Namespaces | None) -> float:
    """Return the seconds that a small all-reduce over two ranks takes, one on each host.

    Raises:
        RuntimeError: The ranks could not connect.
    """
    host, port = (ADDRESSES[0] if namespaces else "127.0.0.1"), _FIRST_PORT
    commands = [namespaces.command(rank) if namespaces else () for rank in range(2)]
    processes = [Worker("benchmarks.parallel.message_costs", 1, command=command) for command in commands]
    try:
        with ThreadPoolExecutor(2) as pool:
            asked = [
                pool.submit(process.ask, {"rank": rank, "host": host, "port": port}, _COSTS_TIMEOUT)
                for rank, process in enumerate(processes)
            ]
            return max(float(one.result()["seconds"]) for one in asked)
    except WorkerError as error:
        raise RuntimeError(f"two ranks that only count: {error}") from error
    finally:
        for process in processes:
            process.close()
