"""Counts of drafted and accepted tokens, and the statistics computed from them. No times are included.

Tokens per pass is all tokens over all passes. Its standard error, and that of a ratio of two arms, is the jackknife
estimate over prompts: prompts differ much more than runs of one prompt, and both arms use the same prompts.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specinfer.bench.acceptance_options import AcceptanceConfig
from specinfer.bench.comparisons import numbers_by_kind
from specinfer.reporting.environment import Environment

SAME_TIME = "drafters_same_time"  # the rows of the drafters part with trees that take the same time
COMPARED = ("table3", "rules", "drafters", SAME_TIME)  # parts that compare their rows with a base row
TOP = 5  # number of ranks in Table 1 and of widths in Table 2


@dataclass(frozen=True, slots=True)
class Estimate:
    """Number with its standard error, which is None if there was only one prompt."""

    value: float
    error: float | None

    def as_dict(self) -> dict[str, object]:
        return {"value": self.value, "standard_error": self.error}


def jackknife(estimate: Callable[[Sequence[int]], float], num_prompts: int) -> Estimate:
    """Return the estimate from all prompts, and its jackknife standard error.

    Args:
        estimate: Function that returns the estimate for the prompts with the given numbers.
    """
    whole = range(num_prompts)
    if num_prompts < 2:
        return Estimate(estimate(whole), None)
    without = np.asarray([estimate([i for i in whole if i != left_out]) for left_out in whole])
    spread = ((without - without.mean()) ** 2).sum()
    return Estimate(estimate(whole), math.sqrt((num_prompts - 1) / num_prompts * float(spread)))


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to draft and verify.

    Attributes:
        drafters: Names under which `LLM` loaded the drafters.
        tree: Value of the option of this name.
    """

    drafters: tuple[str, ...]
    verification: str
    drawing: str
    tree: str
    temperature: float


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of one setup for each prompt."""

    setup: Setup
    generated: tuple[int, ...]  # tokens
    passes: tuple[int, ...]
    guessed: tuple[int, ...]  # drafted nodes
    seconds: float = math.nan  # of all prompts at once, with reading them

    @property
    def tokens_per_second(self) -> float:
        return sum(self.generated) / self.seconds

    @property
    def tokens_per_pass(self) -> Estimate:
        return jackknife(self._rate, len(self.generated))

    @property
    def guessed_per_pass(self) -> float:
        return sum(self.guessed) / sum(self.passes)

    def rate_of(self, prompts: Collection[int]) -> float | None:
        """Return tokens per pass on the prompts with these numbers, or None if there are none."""
        return self._rate(prompts) if prompts else None

    def over(self, other: "Counts") -> Estimate:
        """Return these tokens per pass as a multiple of the other's, on the same prompts."""
        return jackknife(lambda prompts: self._rate(prompts) / other._rate(prompts), len(self.generated))

    def _rate(self, prompts: Collection[int]) -> float:
        return sum(self.generated[i] for i in prompts) / sum(self.passes[i] for i in prompts)

    def as_dict(self) -> dict[str, object]:
        setup = self.setup
        return {
            "drafters": list(setup.drafters),
            "verification": setup.verification,
            "drawing": setup.drawing,
            "tree": setup.tree,
            "temperature": setup.temperature,
            "tokens_per_pass": self.tokens_per_pass.as_dict(),
            "guessed_per_pass": self.guessed_per_pass,
            "tokens_per_second": None if math.isnan(self.seconds) else self.tokens_per_second,
            "num_tokens": list(self.generated),
            "num_passes": list(self.passes),
        }


@dataclass(frozen=True, slots=True)
class HitRates:
    """Share of positions at which the target's next token is among a drafter's best 1, 2, ... tokens.

    Attributes:
        ranks: For each prompt and each token of the target's text, the number of tokens the drafter ranks higher.
    """

    drafter: str
    temperature: float
    ranks: tuple[tuple[int, ...], ...]

    def share(self, k: int, prompts: Iterable[int]) -> float:
        """Return the share of positions of these prompts at which the token is among the best k."""
        ranks = [rank for prompt in prompts for rank in self.ranks[prompt]]
        return sum(rank < k for rank in ranks) / len(ranks)

    def within(self, k: int) -> Estimate:
        return jackknife(lambda prompts: self.share(k, prompts), len(self.ranks))

    def as_dict(self) -> dict[str, object]:
        return {
            "drafter": self.drafter,
            "temperature": self.temperature,
            "hit_rates": [self.within(k).as_dict() for k in range(1, TOP + 1)],
            "num_tokens": sum(map(len, self.ranks)),
        }


@dataclass(frozen=True, slots=True)
class Row:
    """Row of a table, with one arm in each column.

    Attributes:
        group: Heading that all rows of one table share, such as "temperature 1, 32 nodes".
        cells: Counts of each arm by its column heading.
    """

    group: str
    label: str
    cells: Mapping[str, Counts]

    def as_dict(self) -> dict[str, object]:
        cells = {name: counts.as_dict() for name, counts in self.cells.items()}
        return {"group": self.group, "label": self.label, "cells": cells}


@dataclass(frozen=True, slots=True)
class Counted:
    """Results of all requested parts; the others are empty.

    Attributes:
        hit_rates: Entries of Table 1.
        parts: Rows of the parts "table2", "table3", "rules" and "drafters", and those of `SAME_TIME`.
        drafters: Description of each drafter by the name under which it was loaded.
        kinds: Kind of each chat prompt; empty if the prompts are texts to continue.
    """

    hit_rates: tuple[HitRates, ...]
    parts: Mapping[str, tuple[Row, ...]]
    drafters: Mapping[str, str]
    config: AcceptanceConfig
    environment: Environment
    kinds: tuple[str, ...] = ()

    @property
    def groups(self) -> list[tuple[str, str, list[Row]]]:
        """(part, group, rows) of each table."""
        return [
            (part, group, [row for row in rows if row.group == group])
            for part, rows in self.parts.items()
            for group in dict.fromkeys(row.group for row in rows)
        ]

    def by_kind(self, counts: Counts) -> dict[str, float | None]:
        """Return the tokens per pass of an arm on the prompts of each kind."""
        return {kind: counts.rate_of(prompts) for kind, prompts in numbers_by_kind(self.kinds).items()}

    def as_dict(self) -> dict[str, object]:
        """Return the numbers of the report, ready for JSON."""
        by_kind = {
            name: [
                {"group": row.group, "label": row.label, "of": column, "tokens_per_pass": self.by_kind(counts)}
                for row in rows
                for column, counts in row.cells.items()
            ]
            for name, rows in self.parts.items()
        }
        return {
            **({"by_kind": by_kind} if self.kinds else {}),
            "table1": [rates.as_dict() for rates in self.hit_rates],
            **{name: [row.as_dict() for row in rows] for name, rows in self.parts.items()},
            "ratios": {
                name: [
                    {"group": row.group, "label": row.label, "of": column, **counts.over(base).as_dict()}
                    for row, column, counts, base in ratios(name, rows)
                ]
                for name, rows in self.parts.items()
                if name in COMPARED
            },
            "drafters": dict(self.drafters),
        }


def ratios(part: str, rows: Sequence[Row]) -> list[tuple[Row, str, Counts, Counts]]:
    """Return (row, column, arm, base arm) for all rows of each group except the base row.

    The base row of the drafters part is the best single drafter. Elsewhere it is the first row, which is naive
    sampling or coupled verification.
    """
    found = []
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group]
        for column in dict.fromkeys(column for row in members for column in row.cells):
            there = [row for row in members if column in row.cells]
            base = there[0]
            if part in ("drafters", SAME_TIME):
                single = [row for row in there if len(row.cells[column].setup.drafters) == 1]
                base = max(single, key=lambda row: row.cells[column].tokens_per_pass.value)
            found += [(row, column, row.cells[column], base.cells[column]) for row in there if row is not base]
    return found
