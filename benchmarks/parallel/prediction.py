"""Simulated speeds of the measured splits, predicted from the costs of the same batches in one process.

Costs are measured with as many processes computing as the split has computing at once: on one machine they share the
memory bandwidth, which separate machines would not. A fixed tree yields the same number of tokens as in one process,
since the tokens are the same. "auto" chooses again, by the acceptance rates by rank that were measured in one process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.parallel.plans import Setting
from specinfer.bench.results import Run
from specinfer.core.step_record import StepRecord
from specinfer.core.tree_shape import parse_tree
from specinfer.planning.cluster import Cluster, RankCosts, Split, TargetShape
from specinfer.planning.network import Link
from specinfer.planning.simulation_plans import Planner, run_round
from specinfer.policy.acceptance import expected_tokens
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.policy.optimizer import TreeSizes

_INNER = Link(0.0, 1e10)  # between ranks of one machine: memory bandwidth; `HereCosts.message` covers the CPU time
_NO_OVERHEAD = Curve((1e9,), (0.0,))


@dataclass(frozen=True, slots=True)
class HereCosts:
    """Measured costs of this machine.

    Attributes:
        busy: Number of processes that compute at once -> costs of one of them with the whole target. Beyond the largest
            number, processes wait for a core.
        parts: Number of tensor ranks -> seconds of all layers on one of them by rows, while all of them compute.
        message: CPU seconds of a message.
    """

    busy: Mapping[int, CostModel]
    parts: Mapping[int, Curve]
    message: float

    def for_ranks(self, num_working: int) -> RankCosts:
        """Return the costs of one rank when this number of ranks compute at once."""
        known = max(number for number in self.busy if number <= num_working)
        costs = RankCosts(self.busy[known], _NO_OVERHEAD, self.message, self.parts)
        return costs if num_working <= max(self.busy) else _paced(costs, num_working / known, 1.0, 0.0)


def predict(
    setting: Setting,
    tree: str,
    size: int,
    alone: Sequence[Run],
    shape: TargetShape,
    here: HereCosts,
    link: Link | None,
) -> float:
    """Return the predicted tokens per second of a batch of this size in a setting.

    Args:
        alone: Runs of the same tree in one process.
        link: Link between the hosts, or None if all ranks are on one host.
    """
    steps = [step for run in alone for step in run.steps]
    in_flight = min(setting.pipeline, size)
    costs = _as_of_late(here.for_ranks(setting.tensor * in_flight), here.busy[1], alone)
    per_machine = setting.num_ranks if link is None else max(setting.num_ranks // 2, 1)
    cluster = Cluster(link or _INNER, _INNER, per_machine)
    split = Split(setting.tensor, setting.pipeline, shape, costs, cluster)
    if tree != "off" and parse_tree(tree).is_auto:
        return _predict_auto(split, alone, steps, cluster)
    seconds = 0.0
    for count in {step.num_requests for step in steps}:
        some = [step for step in steps if step.num_requests == count]
        nodes = np.asarray([step.num_guessed / count for step in some])
        seconds += float(run_round(split, count, nodes, [_levels(step) for step in some]).seconds.sum())
    return sum(step.num_generated for step in steps) / seconds


def _predict_auto(split: Split, alone: Sequence[Run], steps: Sequence[StepRecord], cluster: Cluster) -> float:
    by_rank = np.asarray(alone[-1].counters["by_rank"])
    requests = sum(step.num_requests for step in steps)
    mean_requests = requests / len(steps)
    best, _ = Planner(split.shape, split.costs, cluster, by_rank).predict(
        split.tensor, split.pipeline, max(round(mean_requests), 1)
    )
    # Acceptance by rank does not show which texts are easy, so scale by its actual over expected gain in one process.
    guessed = sum(step.num_guessed for step in steps) / requests
    levels = sum(_levels(step) * step.num_requests for step in steps) / requests
    skill = 1.0
    if best.num_nodes and guessed > 0:
        expected = _expected(by_rank, guessed, levels) - 1
        skill = (sum(step.num_generated for step in steps) / requests - 1) / max(expected, 1e-9)
    tokens = 1 + skill * (best.tokens_per_pass - 1)
    return mean_requests * min(tokens, best.num_levels + 1) / best.step_seconds


def _expected(by_rank: np.ndarray, num_nodes: float, num_levels: float) -> float:
    """Return the expected tokens of a pass with the available tree closest to this size."""
    sizes = TreeSizes(TreeSizes.WIDE_SIZES, TreeSizes.WIDE_DEPTHS)
    distance = np.abs(np.log((1 + sizes.num_nodes) / (1 + num_nodes)))
    distance += np.abs(np.log((1 + sizes.num_levels) / (1 + num_levels)))
    return float(expected_tokens(by_rank, sizes.num_nodes, sizes.num_levels)[int(distance.argmin())])


def _as_of_late(costs: RankCosts, one: CostModel, alone: Sequence[Run]) -> RankCosts:
    """Return the costs corrected by the actual times of the batches: longer contexts, load and unmodelled time.

    Args:
        one: Costs of one process, which the runs in `alone` are compared with.
    """
    steps = [step for run in alone for step in run.steps]
    passes = sum(step.target_time - step.verify_time for step in steps)
    pace = passes / float(one.target([step.num_rows for step in steps]).sum())
    drafting = float(one.draft([step.num_guessed for step in steps], [_levels(step) for step in steps]).sum())
    draft_pace = sum(step.draft_time for step in steps) / drafting if drafting else 1.0
    rest = sum(run.time for run in alone) - passes - sum(step.draft_time for step in steps)
    return _paced(costs, pace, draft_pace, max(rest, 0.0) / len(steps))


def _paced(costs: RankCosts, pace: float, draft_pace: float, rest: float) -> RankCosts:
    assert isinstance(costs.step.target, Curve), "nothing is streamed"
    step = CostModel(
        _scaled(costs.step.target, pace),
        _scaled(costs.step.draft_level, draft_pace),
        draft_start=draft_pace * costs.step.draft_start,
    )
    step.rest = costs.step.rest + rest
    return replace(costs, step=step, parts={number: _scaled(part, pace) for number, part in costs.parts.items()})


def _scaled(curve: Curve, factor: float) -> Curve:
    return Curve(curve.sizes.tolist(), (curve.seconds * factor).tolist())


def _levels(step: StepRecord) -> int:
    """Return the number of levels that draft models proposed."""
    return step.num_levels if step.num_model_levels is None else step.num_model_levels
