"""A learned speculation policy beside fixed trees and "auto" by cost alone, as in `bench latency`.

All arms run on each prompt in turn. Policies that learn keep learning from prompt to prompt.
"""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.growth.models import growing
from benchmarks.options import LabSettings
from specinfer.bench.comparisons import numbers_by_kind
from specinfer.bench.loop import open_session
from specinfer.bench.measurement import measure_request
from specinfer.bench.options import PLAIN, CompareConfig
from specinfer.bench.results import Arm
from specinfer.cli.measure import Measurement, usual_settings
from specinfer.core.options import setting, setting_of
from specinfer.core.tree_shape import parse_tree
from specinfer.reporting.progress_bar import StageBar
from specinfer.reporting.report import Report, Table, Value, reported

AUTO, LEARNED, MIX = "auto", "learned", "all"
FIXED = ("1,1,1,1,1,1", "best-first:7:7", "best-first:11:8", "best-first:15:8", "best-first:31:12")


@dataclass(frozen=True, slots=True)
class ScheduleConfig(CompareConfig):
    """Options of the comparison. Plain decoding, "auto" by cost alone and the learned policy are always measured."""

    trees: tuple[str, ...] = setting(
        FIXED,
        "Speculation",
        "Fixed tree to compare with. May be repeated. (default: five trees)",
        name="fixed",
        metavar="TREE",
    )
    grow: str | None = setting_of(LabSettings, "grow")
    plot: str | Path | None = None

    def __post_init__(self) -> None:
        CompareConfig.__post_init__(self)
        if self.speculation_policy is None:
            raise ValueError("speculation_policy: none; make one with specinfer tune --policy, and name its file")
        if AUTO in self.trees:
            raise ValueError(f'fixed: "{AUTO}" is always measured; leave it out')


@reported
def run_schedule(config: ScheduleConfig, progress: StageBar) -> Report[None]:
    """Run the comparison.

    Raises:
        ModelError: A model, or the policy's file, cannot be used.
        ValueError: An option cannot be used; the message names it. Nothing was measured.
        RuntimeError: A request failed, or an arm changed a greedy output of a float32 target without quantization.
    """
    with open_session(config, progress, growing(config.grow)) as session:
        policies = session.policies | {
            (1, name): session.llm.make_policy(parse_tree(AUTO), fresh=True, learned=name == LEARNED)
            for name in (AUTO, LEARNED)
        }
        measured = session.compare(
            lambda turn, name: measure_request(session.of_arm(name), turn, policies[1, name], samples=False),
            (AUTO, LEARNED),
        )
    result, environment, kinds = measured.result, measured.environment, numbers_by_kind(measured.kinds)
    parts = {**kinds, MIX: {number for run in result.plain.runs for number in run.prompts}}

    def rate(name: str, part: str = MIX) -> float:
        """Return all tokens after the first divided by all seconds after the first."""
        arm = result.arm(name).of(parts[part])
        return arm.num_tokens / sum(run.time for run in arm.runs)

    def speed(part: str) -> Value[Arm]:
        return Value(part, lambda arm: rate(arm.name, part), "{:.1f}")

    def ratio(name: str) -> Value[str]:
        return Value(name, lambda part: rate(name, part) / rate(best, part), "{:.3f}")

    best = max((PLAIN, *config.trees), key=rate)
    tables = (
        Table(
            "arms",
            "Tokens per second after the first token",
            (
                Value[Arm]("arm", lambda arm: arm.name),
                *map(speed, parts),
                Value[Arm]("tokens_per_pass", lambda arm: arm.tokens_per_pass, "{:.2f}"),
                Value[Arm]("nodes", lambda arm: arm.nodes, "{:.1f}"),
            ),
            result.arms,
        ),
        Table(
            "over_best_fixed",
            f"Over {best}, the best single configuration",
            (Value[str]("prompts", str), ratio(AUTO), ratio(LEARNED)),
            list(parts),
        ),
    )
    lines = [f"{config.model}: {environment.description}, one request at a time"]
    numbers = {"best_fixed": best}
    return Report(lines, tables, environment=environment, numbers=numbers, last=measured.fidelity())


SCHEDULE = Measurement(
    "schedule",
    ScheduleConfig,
    "benchmarks.schedule:run_schedule",
    "Compare a learned speculation policy with fixed trees and auto.",
    usual=usual_settings,
)
