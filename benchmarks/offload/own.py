"""Client of the process that runs our arms: it loads the models, requests runs, and watches the process's memory."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch

from benchmarks.memory_cap import MemoryCap
from benchmarks.offload.engine import OwnAsk, OwnSetup
from benchmarks.offload.report import Loading
from benchmarks.peers.race import LOADING_TIMEOUT, SLOW_PER_TOKEN
from benchmarks.process import Worker, WorkerError
from benchmarks.resident import peak_resident, reset_peak
from benchmarks.runs import read_run
from specinfer.bench.results import Run
from specinfer.core.errors import ModelError
from specinfer.core.sampling import SamplingParams
from specinfer.reporting.environment import Environment, surroundings

_MODULE = "benchmarks.offload.engine"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Description of what the process has loaded."""

    loading: Loading
    dtype: str
    device: str
    environment: Environment


class OwnArms:
    """Process that holds the target, with an optional memory cap by the operating system.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used. The message names it.
        RuntimeError: The process failed.
    """

    def __init__(self, job: OwnSetup, cap: MemoryCap | None = None) -> None:
        self._process = Worker(_MODULE, torch.get_num_threads(), cap)
        try:
            reply = self._ask({"do": "load", "job": asdict(job)}, LOADING_TIMEOUT)
            if "refused" in reply:
                raise (ModelError if reply["is_model"] else ValueError)(reply["refused"])
        except BaseException:
            self._process.close()
            raise
        # The process does not know this process's command line.
        environment = Environment(**(reply["environment"] | surroundings()))
        loading = Loading(
            num_layers=reply["num_layers"],
            num_resident=reply["num_resident"],
            bytes_per_pass=reply["bytes_per_pass"],
            peak_resident=peak_resident(self._process.pid),
        )
        self.loaded = Loaded(loading, reply["dtype"], reply["device"], environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()

    def measure(
        self,
        arm: str,
        repeat: int,
        numbers: Sequence[int],
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
    ) -> Run:
        """Run one batch with one arm. All `params` are equal except for their seeds."""
        most, temperature = params[0].max_tokens, params[0].temperature
        assert most is not None
        ask = OwnAsk(arm, repeat, temperature, most, [*numbers], [*prompts], [one.seed or 0 for one in params])
        reset_peak(self._process.pid)
        reply = self._ask({"do": "measure", "ask": asdict(ask)}, SLOW_PER_TOKEN * (60 + most))
        run = read_run(reply)
        return replace(run, counters={**run.counters, "peak_resident": peak_resident(self._process.pid)})

    def _ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        try:
            return self._process.ask(message, timeout)
        except WorkerError as error:
            if self._process.met_its_cap:
                raise ValueError(
                    f"memory_budget: our process needed more than the {self._process.cap.limit / 2**20:,.0f} MiB that "
                    "the system allows it, and was ended; raise it, or leave cap_own out"
                ) from error
            raise RuntimeError(f"our own arms: {error}") from error
