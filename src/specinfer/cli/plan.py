"""The command that shows how "auto" chooses trees."""

from typing import Any

from specinfer.cli.measure import Measurement
from specinfer.planning.options import PlanConfig

# Flags of simulated machines.
_SIMULATED: dict[str, Any] = {"simulate": bool} | dict.fromkeys(
    (
        "machines", "batch", "devices-per-machine", "link-latency", "link-bandwidth", "inner-latency",
        "inner-bandwidth", "scale", "memory-bandwidth", "device-memory", "layer-overhead", "message-overhead",
    ),
    list[str],
)  # fmt: skip
PLAN = Measurement(
    "plan",
    PlanConfig,
    "specinfer.planning.device_plan:run_any_plan",
    "Show the cost of a step on this machine, and the trees that auto chooses by batch size.",
    model="Target model, as in generate.",
    is_required=True,
    moved=_SIMULATED,
    moved_to="simulate",
)
