"""The processes of one target as seen from here: rank 0 is asked, the others follow it."""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Self

from specinfer.bench.environment import Environment, surroundings
from specinfer.bench.namespaces import ADDRESSES, Namespaces
from specinfer.bench.offload_own import batch_run
from specinfer.bench.parallel_engine import EngineAsk, EngineJob
from specinfer.bench.parallel_plans import NUM_HOSTS, Setting
from specinfer.bench.parallel_report import ParallelRun, RankMemory
from specinfer.bench.peers.names import PeerError
from specinfer.bench.peers.process import PeerProcess
from specinfer.bench.peers.race import LOADING_TIMEOUT, SLOW_PER_TOKEN
from specinfer.bench.resident import children_of, peak_resident, reset_peak, resident
from specinfer.errors import ModelError

_MODULE, _FOLLOWER = "specinfer.bench.parallel_engine", "specinfer.bench.parallel_follower"
_FIRST_PORT = 29500
_COSTS_TIMEOUT = 600.0
_GOODBYE = 10.0  # seconds for ranks to end in when rank 0 has


@dataclass(frozen=True, slots=True)
class Where:
    """Where the ranks of a target run.

    Attributes:
        namespaces: The hosts; None: all ranks run here.
        number: Of the target among those that are loaded at once: their ports differ.
        threads: Of each process.
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
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the processes)
        is_spread = setting.num_ranks > 1 and where.namespaces is not None
        prefix = where.namespaces.command(0) if where.namespaces is not None else ()
        device = where.namespaces.names[0] if where.namespaces is not None else None
        self._process = PeerProcess(_MODULE, where.threads, command=prefix)
        try:
            options = dict(job.options)
            if setting.num_ranks > 1:
                options |= {"tensor_parallel_size": setting.tensor, "pipeline_parallel_size": setting.pipeline}
            if is_spread:
                port = _FIRST_PORT + where.number
                options |= {"nnodes": NUM_HOSTS, "master_addr": ADDRESSES[0], "master_port": port}
                self._follow(job.target, options)
            said = self._ask(
                {"do": "load", "job": asdict(job) | {"options": options, "device": device}}, LOADING_TIMEOUT
            )
            if "refused" in said:
                raise (ModelError if said["is_model"] else ValueError)(said["refused"])
        except BaseException:
            self.close()
            raise
        # Whose command line it was, the process cannot know.
        self.environment = Environment(**(said["environment"] | surroundings()))
        self.num_bytes: int = said["num_bytes"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends rank 0, which the others follow; those that do not are killed."""
        self._process.close()
        if self._follower is not None:
            try:
                self._follower.wait(_GOODBYE)
            except subprocess.TimeoutExpired:
                self._follower.kill()
                self._follower.wait()
        self._said.close()

    def costs(self) -> dict[str, Any]:
        """What passes take now, as `StepCosts.as_dict` has it."""
        return self._ask({"do": "costs"}, _COSTS_TIMEOUT)

    def part(self, num_ranks: int) -> tuple[list[float], list[float]]:
        """Sizes and seconds of passes of one of so many tensor ranks."""
        sizes, seconds = self._ask({"do": "part", "num_ranks": num_ranks}, LOADING_TIMEOUT)["part"]
        return sizes, seconds

    def be_busy(self, seconds: float) -> None:
        """Computes for so long."""
        self._ask({"do": "busy", "seconds": seconds}, _COSTS_TIMEOUT)

    def prepare(self, setting: Setting) -> dict[str, Any]:
        """New policies for a setting, as it is now; what passes take in it."""
        return self._ask({"do": "prepare", "setting": setting.name}, _COSTS_TIMEOUT)

    def measure(self, ask: EngineAsk) -> ParallelRun:
        said = self._ask({"do": "measure", "ask": asdict(ask)}, SLOW_PER_TOKEN * (60 + ask.max_tokens))
        return ParallelRun(batch_run(said["run"]), **said["traffic"], by_rank=tuple(said["by_rank"] or ()))

    def forget_peaks(self) -> None:
        """From now on peaks are those of what follows."""
        for pid in self._ranks():
            reset_peak(pid)

    def memory(self) -> tuple[RankMemory, ...]:
        """Of each rank, in their order."""
        return tuple(RankMemory(peak_resident(pid), resident(pid)) for pid in self._ranks())

    def _ranks(self) -> list[int]:
        """Process ids."""
        firsts = [self._process.pid] + ([self._follower.pid] if self._follower is not None else [])
        return [pid for first in firsts for pid in (first, *children_of(first))]

    def _follow(self, model: str, options: dict[str, Any]) -> None:
        """Starts the ranks of host 1, which look for rank 0 until it is there."""
        assert self._where.namespaces is not None
        job = json.dumps({"model": model, "options": options | {"node_rank": 1}})
        self._follower = subprocess.Popen(
            [*self._where.namespaces.command(1), sys.executable, "-m", _FOLLOWER, job],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            env=os.environ | {"OMP_NUM_THREADS": str(self._where.threads)},
        )

    def _ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        try:
            return self._process.ask(message, timeout)
        except PeerError as error:
            self._said.seek(0)
            lines = [line.strip() for line in self._said.read().decode(errors="replace").splitlines() if line.strip()]
            others = f"; another rank said: {lines[-1]}" if lines else ""
            raise RuntimeError(f"{self.setting.name}: {error}{others}") from error


def message_seconds(namespaces: Namespaces | None) -> float:
    """What a small sum over two ranks takes, one on each host.

    Raises:
        RuntimeError: They did not meet.
    """
    host, port = (ADDRESSES[0] if namespaces else "127.0.0.1"), _FIRST_PORT
    commands = [namespaces.command(rank) if namespaces else () for rank in range(2)]
    processes = [PeerProcess("specinfer.bench.message_costs", 1, command=command) for command in commands]
    try:
        with ThreadPoolExecutor(2) as pool:
            asked = [
                pool.submit(process.ask, {"rank": rank, "host": host, "port": port}, _COSTS_TIMEOUT)
                for rank, process in enumerate(processes)
            ]
            return max(float(one.result()["seconds"]) for one in asked)
    except PeerError as error:
        raise RuntimeError(f"two ranks that only count: {error}") from error
    finally:
        for process in processes:
            process.close()
