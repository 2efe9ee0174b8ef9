"""Client of the process that runs our arms: it loads the models, requests runs, and watches the process's memory."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch

from specinfer.bench.environment import Environment, surroundings
from specinfer.bench.memory_cap import MemoryCap
from specinfer.bench.offload_engine import OwnAsk, OwnSetup
from specinfer.bench.offload_report import Loading, OffloadRun
from specinfer.bench.peers.names import PeerError
from specinfer.bench.peers.process import PeerProcess
from specinfer.bench.peers.race import LOADING_TIMEOUT, SLOW_PER_TOKEN
from specinfer.bench.resident import peak_resident, reset_peak
from specinfer.bench.throughput_report import BatchRun
from specinfer.core.errors import ModelError
from specinfer.core.sampling import SamplingParams
from specinfer.core.step_record import StepRecord

_MODULE = "specinfer.bench.offload_engine"


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
        self._process = PeerProcess(_MODULE, torch.get_num_threads(), cap)
        try:
            said = self._ask({"do": "load", "job": asdict(job)}, LOADING_TIMEOUT)
            if "refused" in said:
                raise (ModelError if said["is_model"] else ValueError)(said["refused"])
        except BaseException:
            self._process.close()
            raise
        # The process does not know this process's command line.
        environment = Environment(**(said["environment"] | surroundings()))
        loading = Loading(
            num_layers=said["num_layers"],
            num_resident=said["num_resident"],
            bytes_per_pass=said["bytes_per_pass"],
            peak_resident=peak_resident(self._process.pid),
        )
        self.loaded = Loaded(loading, said["dtype"], said["device"], environment)

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
    ) -> OffloadRun:
        """Run one batch with one arm. All `params` are equal except for their seeds."""
        most, temperature = params[0].max_tokens, params[0].temperature
        assert most is not None
        ask = OwnAsk(arm, repeat, temperature, most, [*numbers], [*prompts], [one.seed or 0 for one in params])
        reset_peak(self._process.pid)
        said = self._ask({"do": "measure", "ask": asdict(ask)}, SLOW_PER_TOKEN * (60 + most))
        return OffloadRun(
            batch=batch_run(said["run"]),
            bytes_read=int(said["streamed"]["bytes_read"]),
            seconds_reading=said["streamed"]["seconds_reading"],
            seconds_waiting=said["streamed"]["seconds_waiting"],
            peak_resident=peak_resident(self._process.pid),
            disk_rate=0.0,
        )

    def _ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        try:
            return self._process.ask(message, timeout)
        except PeerError as error:
            if self._process.met_its_cap:
                raise ValueError(
                    f"memory_budget: our process needed more than the {self._process.cap.limit / 2**20:,.0f} MiB that "
                    "the system held it to, and was ended; raise it, or leave cap_own out"
                ) from error
            raise RuntimeError(f"our own arms: {error}") from error


def batch_run(fields: dict[str, Any]) -> BatchRun:
    """Return a batch run from its fields in JSON."""
    return BatchRun(
        **(
            fields
            | {
                "prompts": tuple(fields["prompts"]),
                "outputs": tuple(map(tuple, fields["outputs"])),
                "steps": tuple(StepRecord(**step) for step in fields["steps"]),
            }
        )
    )
