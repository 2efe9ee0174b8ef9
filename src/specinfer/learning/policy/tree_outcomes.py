"""The yield of smaller trees, read off a logged tree: full information on every configuration.

A tree of one drafter is a part of the merged tree, and a smaller best-first tree is a prefix of a larger one: the nodes
with the highest path probability among those of the drafters that are used.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specinfer.core.lookups import LOOKUPS
from specinfer.drafters.growth.calibration import Calibration
from specinfer.policy.network import Configuration
from specinfer.policy.step_log import StepEntry, StepLog

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TreeOutcomes:
    """The yield of each logged step with each configuration; all arrays are [steps, configurations].

    Attributes:
        accepted: The number of accepted tokens.
        nodes: The number of drafted nodes.
        levels: The number of levels drafted by models.
        known: True where the logged tree was large enough to show it.
    """

    log: StepLog
    accepted: Floats
    nodes: Floats
    levels: Floats
    known: npt.NDArray[np.bool_]


def _levels(tree: "_Tree", taken: Ints, models: frozenset[int]) -> int:
    """Return the number of model passes: at least one, and one per level of the nodes that models drafted."""
    return max(1, int(tree.depths[taken][tree.made_by(models)[taken]].max(initial=0)))


def outcomes_of(log: StepLog, menu: Sequence[Configuration]) -> TreeOutcomes:
    """Return what every configuration would have yielded in every step of a log."""
    greedy = log.names.index("request.greedy")
    calibration = Calibration()
    for entry in log.entries:
        _count(calibration, entry, entry.features[greedy] > 0)
    shape = (len(log.entries), len(menu))
    accepted, nodes, levels = np.zeros((3, *shape))
    known = np.zeros(shape, dtype=np.bool_)
    models = frozenset(i for i, slot in enumerate(log.slots) if slot not in LOOKUPS)
    kinds = {configuration.slots: frozenset(map(log.slots.index, configuration.slots)) for configuration in menu}
    for i, entry in enumerate(log.entries):
        tree = _Tree(entry, calibration, entry.features[greedy] > 0)
        parts = {slots: tree.ordered(used) for slots, used in kinds.items()}
        for j, configuration in enumerate(menu):
            used = kinds[configuration.slots]
            known[i, j] = (
                used <= set(entry.used)
                and configuration.max_nodes <= entry.max_nodes
                and configuration.max_depth <= entry.max_depth
                and (not used or configuration.min_path_prob >= entry.min_path_prob)
            )
            order, quality = parts[configuration.slots]
            fits = (tree.depths[order] <= configuration.max_depth) & (quality >= configuration.min_path_prob)
            taken = order[fits][: configuration.max_nodes]
            accepted[i, j] = tree.is_accepted[taken].sum()
            nodes[i, j] = len(taken)
            if configuration.uses_model:
                levels[i, j] = _levels(tree, taken, models)
    return TreeOutcomes(log, accepted, nodes, levels, known)


def _sources(slot: int, greedy: bool) -> str:
    """Return the source name; greedy and sampled drafts have separate tables."""
    return f"{slot} {'greedy' if greedy else 'sampled'}"


def _ranks(entry: StepEntry) -> list[int]:
    """Return the rank of each draw among its drafter's at the same parent."""
    seen: dict[tuple[int, int], int] = {}
    ranks = []
    for node, slot, _ in entry.draws:
        key = (entry.parents[node - 1], slot)
        ranks.append(seen.get(key, 0))
        seen[key] = ranks[-1] + 1
    return ranks


def _count(calibration: Calibration, entry: StepEntry, greedy: bool) -> None:
    """Count the draws at each node that the target reached."""
    walk = {0, *entry.path}
    for (node, slot, confidence), rank in zip(entry.draws, _ranks(entry), strict=True):
        if entry.parents[node - 1] in walk:
            calibration.count(_sources(slot, greedy), rank, confidence, kept=node in walk)


class _Tree:
    """A logged tree as arrays, with the root at 0."""

    def __init__(self, entry: StepEntry, calibration: Calibration, greedy: bool) -> None:
        size = len(entry.parents) + 1
        self._parents = (-1, *entry.parents)
        depths = [0] * size
        for node in range(1, size):
            depths[node] = depths[self._parents[node]] + 1
        self.depths: Ints = np.asarray(depths)
        self.is_accepted = np.zeros(size, dtype=np.bool_)
        self.is_accepted[list(entry.path)] = True
        self._draws = np.asarray([node for node, _, _ in entry.draws], dtype=np.int64)
        self._slots = np.asarray([slot for _, slot, _ in entry.draws], dtype=np.int64)
        ranks, confidence = np.asarray(_ranks(entry), dtype=np.int64), np.asarray([draw[2] for draw in entry.draws])
        self._probs = np.zeros(len(self._draws))
        for slot in set(self._slots.tolist()):
            of = self._slots == slot
            self._probs[of] = calibration.acceptance_prob(_sources(slot, greedy), ranks[of], confidence[of])

    def made_by(self, slots: frozenset[int]) -> npt.NDArray[np.bool_]:
        """Return whether one of these drafters drafted a node, [nodes]."""
        made = np.zeros(len(self._parents), dtype=np.bool_)
        made[self._draws[np.isin(self._slots, list(slots))]] = True
        return made

    def ordered(self, slots: frozenset[int]) -> tuple[Ints, Floats]:
        """Return the nodes of these drafters and their path probabilities, highest first, parents before children."""
        of = np.isin(self._slots, list(slots))
        missed = np.ones(len(self._parents))
        np.multiply.at(missed, self._draws[of], 1.0 - self._probs[of])
        quality = (1.0 - missed).tolist()
        quality[0] = 1.0
        for node in range(1, len(quality)):
            quality[node] *= quality[self._parents[node]]
        values = np.asarray(quality)
        nodes = self.made_by(slots).nonzero()[0]
        # The sort is stable and parents have lower numbers, so on a tie the parent comes first.
        order = nodes[np.argsort(-values[nodes], kind="stable")]
        return order, values[order]
