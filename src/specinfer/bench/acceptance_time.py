"""Drafters compared in the same time: each with the trees that a step drafts and verifies within it.

The time is that of a step of the first drafter with the tree of the other comparison. Costs of passes and of draft
levels are measured as `tree="auto"` measures them; the target's are those measured first, so that all drafters get the
same ones. Depth may be exchanged for nodes, so several trees use up the time, and the best of them counts.
"""

from collections.abc import Callable

from specinfer.bench.acceptance_options import AcceptanceConfig
from specinfer.bench.acceptance_plans import MAX_DEPTH, Plan
from specinfer.bench.acceptance_report import Counts, Row, Setup
from specinfer.core.config import SpeculativeConfig
from specinfer.core.tree_shape import BEST_FIRST, MAX_TREE_NODES
from specinfer.llm import LLM
from specinfer.policy.cost_measurement import measure_costs
from specinfer.policy.cost_model import CostModel

_MAX_SECONDS = 1.5  # for each measurement of costs
_DEPTHS = (1, 2, 4, 8, MAX_DEPTH)


def same_time_rows(llm: LLM, config: AcceptanceConfig, plan: Plan, count: Callable[[Setup], Counts]) -> tuple[Row, ...]:
    """Measure the costs of each row's drafters, and count tokens per pass of the trees that fit into one time.

    Args:
        plan: The setups of the comparison with the same number of nodes.
        count: Function that runs a setup.
    """
    costs: list[CostModel] = []
    for _, _, cells in plan:
        setup = next(iter(cells.values()))
        llm.speculate(SpeculativeConfig(setup.drafters, "1", setup.verification, setup.drawing))
        assert llm.drafter is not None
        found = measure_costs(llm.target, llm.drafter, _MAX_SECONDS)
        target = costs[0].target if costs else found.target
        costs.append(CostModel(target, found.draft_level, found.read_token, found.draft_start))
    most = max(config.nodes)
    seconds = max(float(costs[0].step(1, most, min(most, MAX_DEPTH))), *(float(one.step(1, 1, 1)) for one in costs))
    rows = []
    for (_, label, cells), one in zip(plan, costs, strict=True):
        best = {
            column: max(
                (count(_with_tree(setup, *shape)) for shape in fitting_trees(one, seconds, most_nodes(config))),
                key=lambda counts: counts.tokens_per_pass.value,
            )
            for column, setup in cells.items()
        }
        rule = next(iter(cells.values())).verification
        rows.append(Row(f"best first, steps of {1e3 * seconds:.2f} ms, verified by {rule}", label, best))
    return tuple(rows)


def most_nodes(config: AcceptanceConfig) -> int:
    """Return the number of nodes of the largest trees; lookups could fill the time with useless ones."""
    return min(2 * max(config.nodes), MAX_TREE_NODES)


def fitting_trees(costs: CostModel, seconds: float, most: int) -> list[tuple[int, int]]:
    """Return (nodes, depth) of the largest trees of some depths whose steps take no longer, at least one.

    Args:
        most: Largest number of nodes.
    """
    found = []
    for depth in (depth for depth in _DEPTHS if depth <= most):
        nodes = depth
        while nodes < most and float(costs.step(1, nodes + 1, depth)) <= seconds:
            nodes += 1
        if float(costs.step(1, nodes, depth)) <= seconds:
            found.append((nodes, depth))
    return found or [(1, 1)]


def _with_tree(setup: Setup, num_nodes: int, depth: int) -> Setup:
    tree = f"{BEST_FIRST}:{num_nodes}:{depth}"
    return Setup(setup.drafters, setup.verification, setup.drawing, tree, setup.temperature)
