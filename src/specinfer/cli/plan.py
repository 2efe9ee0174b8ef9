"""The command that shows how "auto" chooses trees."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from specinfer.cli.errors import UsageError
from specinfer.cli.measure import Measurement
from specinfer.planning.options import PlanConfig

_SIMULATED = ("--machines", "--batch", "--devices-per-machine", "--link-latency", "--link-bandwidth", "--inner-latency",
              "--inner-bandwidth", "--scale", "--memory-bandwidth", "--device-memory", "--layer-overhead",
              "--message-overhead")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedPlanFlags:
    """Flags of simulated machines, which only `python -m benchmarks simulate` has."""

    simulate: Annotated[bool, typer.Option("--simulate", hidden=True)] = False
    machines: Annotated[list[str] | None, typer.Option(*_SIMULATED, hidden=True)] = None

    def settings(self, command: str, model: str | None) -> dict[str, Any]:
        """Return nothing.

        Raises:
            UsageError: A flag is given.
        """
        if self.simulate or self.machines:
            raise UsageError(f"simulate: run python -m benchmarks simulate {model} in a checkout of the repository")
        return {}


PLAN = Measurement(
    "plan",
    PlanConfig,
    "specinfer.planning.device_plan:run_any_plan",
    "Show the cost of a step on this machine, and the trees that auto chooses by batch size.",
    model="Target model, as in generate.",
    is_required=True,
    extra=MovedPlanFlags,
)
