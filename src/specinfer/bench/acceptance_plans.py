"""Options of the acceptance measurement, and the setups that each of its tables compares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specinfer.bench.acceptance_report import TOP, Setup
from specinfer.bench.chat_prompts import check_kinds, kinds_for
from specinfer.bench.options import (
    bench_params,
    check_distinct,
    check_models,
    check_once,
    check_prompts,
    check_seed,
    check_whole,
)
from specinfer.bench.prompts import AnyPrompt
from specinfer.core.config import BEST_FIRST, DRAFT_SAMPLINGS, MAX_TREE_NODES, parse_select
from specinfer.core.sampling import SamplingParams

SHIFT = "shift"
PARTS = ("table1", "table2", "table3", "rules", "drafters", SHIFT)
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
_MAX_DEPTH = 16  # of best-first trees; deeper tokens are hardly ever accepted
_WIDE = 4  # paths of the wide tree
MODES = {"greedy": 0.0, "sampled": 1.0}  # the paper's two modes, with their temperatures


@dataclass(frozen=True, slots=True)
class AcceptanceConfig:
    """Options of the acceptance measurement.

    Attributes:
        model: A local folder, a hub name, or "demo".
        drafters: "auto", or folders, hub names, "ngram" and "suffix". Tables and rules use the first; the drafters
            part merges the first two, three, ... of them.
        parts: Names from `PARTS`. The default is all but shift.
        num_prompts: Number of held-out texts to continue, or of chat prompts. The shift part continues the same number
            of texts of the other domain after them.
        max_tokens: Tokens generated for each prompt. The end-of-text token ends answers to chat prompts only.
        kinds: Kinds of chat prompts to answer. None means all kinds if the model is "demo-chat", and texts to continue
            otherwise.
        temperatures: Temperatures of the rules and drafters parts. The paper's tables always use those of `MODES`.
        nodes: Numbers of nodes of the trees to compare. The drafters part uses the largest.
        verification: Verification rule for sampled text. None means the paper's multi-step rule for table 2, and the
            coupled rule for the drafters part.
        quantization: Quantization of the target ("int8", "int4" or "fp8"), or None for none.
        drafter_quantization: Quantization of the model drafters.
        select: Drafter selection that the shift part compares with using all drafters.
        shift_to: Text file of the domain that the shift part changes to, or None for Python's documentation.
        prompt_chars: Approximate length of the prompts in characters.
        prompts: Texts or token ids to continue in place of the held-out texts.
        json: File to write the numbers to.
        plot: File to write the plot to; its suffix sets the format.

    Raises:
        ValueError: A field is out of range. The message names it.
    """

    model: str = "demo"
    drafters: str | tuple[str, ...] = "auto"
    parts: tuple[str, ...] = PARTS[:-1]
    num_prompts: int = 8
    max_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    nodes: tuple[int, ...] = (32,)
    verification: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    drafter_quantization: str | None = None
    select: str = "hedge:1"
    shift_to: str | Path | None = None
    device: str = "auto"
    seed: int = 0
    prompt_chars: int = 600
    prompts: tuple[AnyPrompt, ...] | None = None
    kinds: tuple[str, ...] | None = None
    json: str | Path | None = None
    plot: str | Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 1), ("max_tokens", 2), ("prompt_chars", 1)):
            check_whole(name, getattr(self, name), least)
        check_seed(self.seed)
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise ValueError(f"part must be one of {', '.join(PARTS)}, not {unknown[0]!r}")
        for name in ("parts", "temperatures"):
            check_once(name, getattr(self, name))
        check_distinct("nodes", self.nodes, MAX_TREE_NODES)
        if parse_select(self.select) is None:
            raise ValueError('select: shift compares with "all" anyway; name a choice, such as "hedge:1"')
        if self.verification is not None and self.verification not in DRAFT_SAMPLINGS:
            raise ValueError(f"verification must be one of {', '.join(DRAFT_SAMPLINGS)}, not {self.verification!r}")
        check_models(self.dtype, self.quantization, self.drafter_quantization)
        check_prompts(self.prompts)
        check_kinds(self.kinds, self.prompts)
        for temperature in self.temperatures:
            self.sampling_params(0, temperature)

    @property
    def asked_kinds(self) -> tuple[str, ...]:
        """Kinds of the chat prompts to answer; empty if texts are continued."""
        return kinds_for(self.model, self.kinds, self.prompts)

    def sampling_params(self, prompt: int, temperature: float) -> SamplingParams:
        """Return the sampling parameters of a prompt, which are the same for every arm."""
        return bench_params(temperature, self.max_tokens, self.seed + prompt, ignore_eos=not self.asked_kinds)


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
    found[BEST_FIRST] = f"{BEST_FIRST}:{num_nodes}:{min(num_nodes, _MAX_DEPTH)}"
    return found


def _rule_for(temperature: float, verification: str, drawing: str = "auto") -> tuple[str, str]:
    """Return the rule and drawing of an arm.

    All rules verify greedy text alike, and its drafts are chosen, not sampled, so one arm stands for all rules.
    """
    if temperature == 0:
        verification, drawing = "coupled", "auto"
    return verification, DRAFT_SAMPLINGS[verification][0] if drawing == "auto" else drawing


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
    """Return the setups of the rules part: every rule on trees of the same number of nodes."""
    return [
        (
            f"temperature {temperature:g}, {num_nodes} nodes",
            "any rule" if temperature == 0 else f"{rule}, {drawing}",
            {
                shape: Setup(drafters[:1], *_rule_for(temperature, rule, drawing), tree, temperature)
                for shape, tree in shapes(num_nodes).items()
            },
        )
        for temperature in config.temperatures
        for num_nodes in config.nodes
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
