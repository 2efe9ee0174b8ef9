"""The setups that each table of the acceptance measurement compares."""

from collections.abc import Callable, Sequence
from pathlib import Path

from specinfer.bench.acceptance_options import AcceptanceConfig
from specinfer.bench.acceptance_report import TOP, Setup
from specinfer.core import rules
from specinfer.core.rules import AUTO
from specinfer.core.tree_shape import BEST_FIRST

# (rule, drawing) of each row: every rule with its default drawing, and other drawings for rules that accept at random.
RULES = (
    ("coupled", "shared-noise"),
    ("multi-step", "without-replacement"),
    ("multi-step", "iid"),
    ("multi-step", "hybrid"),
    ("traversal", "without-replacement"),
    ("traversal", "hybrid"),
    ("target-only", "top-k"),
)
_PAPER_DEPTH = 8
MAX_DEPTH = 16  # of best-first trees; deeper tokens are hardly ever accepted
_WIDE = 4  # paths of the wide tree
MODES = {"greedy": 0.0, "sampled": 1.0}  # the paper's two modes, with their temperatures


Plan = list[tuple[str, str, dict[str, Setup]]]  # group, label, column -> setup


def paper_widths(k: int, depth: int = _PAPER_DEPTH) -> tuple[int, ...]:
    """Return the paper's children per level: one on the first two levels, then k, then one down to `depth`."""
    return (1, 1, k, *[1] * (depth - 3))


def expansion(widths: Sequence[int]) -> str:
    return ",".join(map(str, widths))


def shapes(num_nodes: int) -> dict[str, str]:
    """Return the largest tree of each kind that has at most `num_nodes` nodes."""
    found = {"chain": expansion([1] * num_nodes)}
    if num_nodes >= 4:
        # The paper's expansion has 2 + k * levels nodes. Of the closest fits, take the depth nearest to the paper's.
        pairs = [(k, (num_nodes - 2) // k) for k in range(2, num_nodes - 1)]
        k, levels = min(pairs, key=lambda p: (num_nodes - 2 - p[0] * p[1], abs(2 + p[1] - _PAPER_DEPTH)))
        found["paper"] = expansion(paper_widths(k, 2 + levels))
    if num_nodes >= 2 * _WIDE:
        found["wide"] = expansion([_WIDE, *[1] * (num_nodes // _WIDE - 1)])
    found[BEST_FIRST] = f"{BEST_FIRST}:{num_nodes}:{min(num_nodes, MAX_DEPTH)}"
    return found


def _rule_for(temperature: float, verification: str, drawing: str = "auto") -> tuple[str, str]:
    """Return the rule and drawing of an arm.

    All rules verify greedy text alike, and its drafts are chosen, not sampled, so one arm stands for all rules.
    """
    if temperature == 0:
        verification, drawing = "coupled", "auto"
    is_own = drawing == AUTO and verification != AUTO
    return verification, rules.RULES[verification].draft_samplings[0] if is_own else drawing


def _widths_plan(config: AcceptanceConfig, drafters: tuple[str, ...]) -> Plan:
    """Return the setups of Table 2."""
    rule = config.verification or "multi-step"
    return [
        (
            f"expansion <1,1,k,1,1,1,1,1>; sampled text at temperature 1, verified by {rule}",
            mode,
            {
                f"k={k}": Setup(drafters[:1], *_rule_for(temperature, rule), expansion(paper_widths(k)), temperature)
                for k in range(1, TOP + 1)
            },
        )
        for mode, temperature in MODES.items()
    ]


def _naive_plan(config: AcceptanceConfig, drafters: tuple[str, ...]) -> Plan:
    """Return the setups of Table 3: naive sampling of top-k drafts and of sampled drafts, then multi-step sampling."""
    tree = expansion(paper_widths(TOP))
    pairs = (("target-only", "top-k"), ("target-only", "without-replacement"), ("multi-step", "without-replacement"))
    return [
        (
            f"expansion <{tree}>, temperature 1",
            f"{rule}, {drawing}",
            {"tokens per pass": Setup(drafters[:1], rule, drawing, tree, 1.0)},
        )
        for rule, drawing in pairs
    ]


def _rules_plan(config: AcceptanceConfig, drafters: tuple[str, ...]) -> Plan:
    """Return the setups of the rules part: every rule on the given trees, or on trees of the same number of nodes."""
    given = {tree: tree for tree in config.trees}
    compared = {"": given} if given else {f", {count} nodes": shapes(count) for count in config.nodes}
    return [
        (
            f"temperature {temperature:g}{title}",
            "any rule" if temperature == 0 else f"{rule}, {drawing}",
            {
                shape: Setup(drafters[:1], *_rule_for(temperature, rule, drawing), tree, temperature)
                for shape, tree in trees.items()
            },
        )
        for temperature in config.temperatures
        for title, trees in compared.items()
        for rule, drawing in (RULES[:1] if temperature == 0 else RULES)
    ]


def _drafters_plan(config: AcceptanceConfig, drafters: tuple[str, ...]) -> Plan:
    """Return the setups of the drafters part, all with the same number of nodes.

    Each drafter runs alone, then the first two, three, ... run merged.
    """
    rule, most = config.verification or "coupled", max(config.nodes)
    merged = [drafters[:count] for count in range(2, len(drafters) + 1)]
    return [
        (
            f"best first, {most} nodes, verified by {rule}",
            Path(names[0]).name if len(names) == 1 else f"the first {len(names)}, merged",
            {
                f"temperature {temperature:g}": Setup(
                    names, *_rule_for(temperature, rule), shapes(most)[BEST_FIRST], temperature
                )
                for temperature in config.temperatures
            },
        )
        for names in [*((name,) for name in drafters), *merged]
    ]


PLANS: dict[str, Callable[[AcceptanceConfig, tuple[str, ...]], Plan]] = {
    "table2": _widths_plan,
    "table3": _naive_plan,
    "rules": _rules_plan,
    "drafters": _drafters_plan,
}
