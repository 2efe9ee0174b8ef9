"""The verification rules, by the names that users give them: one table for options, dispatch and tests."""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """A verification rule, and its implementations.

    A rule with random numbers runs everywhere by its algorithm, on the host. A walk makes it faster: without one for
    CPUs the algorithm runs instead, and without one for GPUs its requests take no steps on a device.

    Attributes:
        draft_samplings: Kinds of draft sampling that it supports, its own first.
        algorithm: The paper's algorithm as "module:function", imported when it is used, for a rule with random numbers.
            None if trees are walked along the tokens of plain decoding.
        cpu_walk: Number of its walk in the native code (`stochastic_walk.h`), or None.
        gpu_walk: Name of its walk among the operations of a device, or None.

    Raises:
        ValueError: There is a walk without an algorithm. `verify.check_rule` checks that all three exist.
    """

    draft_samplings: tuple[str, ...]
    algorithm: str | None
    cpu_walk: int | None = None
    gpu_walk: str | None = None

    def __post_init__(self) -> None:
        if self.algorithm is None and (self.cpu_walk, self.gpu_walk) != (None, None):
            raise ValueError("a rule with a walk needs its algorithm, which runs where the walk does not")

    def verify(self, *args: Any) -> Any:
        """Run the algorithm; arguments and result are those of `verify.verify_multi_step`."""
        return self.find_algorithm()(*args)

    def find_algorithm(self) -> Any:
        """Return the function of the algorithm.

        Raises:
            AttributeError: Its module has no such function.
            ImportError: There is no such module.
        """
        assert self.algorithm is not None
        return _imported(self.algorithm)


@cache
def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


AUTO = "auto"  # verification: for each request the faster of two rules; draft sampling: that of the rule
MULTI_STEP, TRAVERSAL = "multi-step", "traversal"
# Rules with random numbers need the distributions that draft tokens were really drawn from, with separate noise.
_DRAWN = ("without-replacement", "iid", "hybrid", "top-k")
RULES: dict[str, Rule] = {
    "coupled": Rule(("shared-noise", "top-k", "without-replacement", "iid", "hybrid"), algorithm=None),
    MULTI_STEP: Rule(_DRAWN, "specinfer.verify.algorithms:verify_multi_step", 0, "walk_multi_step"),
    TRAVERSAL: Rule(_DRAWN, "specinfer.verify.algorithms:verify_traversal", 1, "walk_traversal"),
    "target-only": Rule(("top-k", "without-replacement", "iid", "hybrid"), algorithm=None),
}
DRAFT_SAMPLINGS = RULES["coupled"].draft_samplings


def is_random(rule: str | None) -> bool:
    """Return whether a rule uses random numbers. None and "auto" are no rules.

    Raises:
        ValueError: There is no such rule.
    """
    if rule is None or rule == AUTO:
        return False
    if rule not in RULES:
        raise ValueError(f"there is no verification rule {rule!r}; use {', '.join(RULES)}, or add it to RULES")
    return RULES[rule].algorithm is not None


def random_rules() -> tuple[str, ...]:
    """Return the names of the rules that use random numbers."""
    return tuple(name for name in RULES if is_random(name))
