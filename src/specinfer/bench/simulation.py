"""The steps of a split target, event by event: who computes when, and who waits for whom.

As in the engine, rank 0 drafts for one group of requests after the other and sends each pass on its way, until as many
are under way as there are stages; then it ends the oldest one (its own stage's part, verification, commit), and drafts
for that group again. A stage serves passes in the order in which they began. Everything is deterministic, so after some
rounds each takes as long as the one before it: that is the time of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specinfer.bench.cluster import Split
from specinfer.bench.network import Floats

_MAX_ROUNDS = 200
_SAME = 1e-6  # rounds that differ by less, relatively, are alike


@dataclass(frozen=True, slots=True)
class GroupStep:
    """The parts of one group's step, in seconds; every array is [trees], one for each tree that it could guess with.

    Attributes:
        draft: On rank 0, and its sending of the pass to the other ranks.
        telling: Until the first stage has it.
        computing: Of each stage.
        reducing: Of each stage: adding up over its tensor ranks.
        handing: From each stage but the last to the next.
        finish: On rank 0, when the pass is over.
    """

    draft: Floats
    telling: Floats
    computing: tuple[Floats, ...]
    reducing: tuple[Floats, ...]
    handing: tuple[Floats, ...]
    finish: float

    @property
    def communication(self) -> Floats:
        """In all, if nothing has to wait for its turn."""
        return np.asarray(self.telling + sum(self.reducing) + sum(self.handing))

    @property
    def alone(self) -> Floats:
        """The step of a group that has all stages for itself."""
        return np.asarray(self.draft + self.communication + sum(self.computing) + self.finish)


@dataclass(frozen=True, slots=True)
class Round:
    """All groups stepping once, when it has become steady; arrays are [trees].

    Attributes:
        seconds: That it takes; each request steps once.
        communication: Share of it that a group's messages are under way; the mean over groups.
        idle: Share of it in which a stage has nothing to do; the mean over stages. Rank 0 drafts meanwhile, the other
            ranks of its stage do not.
    """

    seconds: Floats
    communication: Floats
    idle: Floats


def group_step(split: Split, num_requests: int, num_nodes: npt.ArrayLike, num_levels: npt.ArrayLike) -> GroupStep:
    """What a step of so many requests takes, each with a tree of so many guesses in so many levels.

    Args:
        num_nodes, num_levels: [trees].
    """
    nodes, levels, step = np.asarray(num_nodes), np.asarray(num_levels), split.costs.step
    rows = num_requests * (1 + nodes)
    stages = range(split.pipeline)
    return GroupStep(
        draft=step.draft(num_requests * nodes, levels) + split.sending,
        telling=split.telling(num_requests, rows),
        computing=tuple(split.computing(stage, rows) for stage in stages),
        reducing=tuple(split.reducing(stage, rows) for stage in stages),
        handing=tuple(split.handing(stage, rows) for stage in stages[:-1]),
        finish=step.rest,
    )


def groups_of(num_requests: int, num_stages: int) -> list[int]:
    """How many requests each group has: as many groups as stages, as equal as can be, none empty."""
    num_groups = min(num_requests, num_stages)
    each, more = divmod(num_requests, num_groups)
    return [each + (place < more) for place in range(num_groups)]


def simulate(groups: Sequence[GroupStep]) -> Round:
    """Lets the groups step until rounds are alike.

    Args:
        groups: At most as many as stages.
    """
    num_stages, shape = len(groups[0].computing), np.shape(groups[0].draft)
    assert 1 <= len(groups) <= num_stages
    last = num_stages - 1
    free = np.zeros((num_stages, *shape))  # when each stage is done with what it has; the last one is rank 0's
    arrival = np.zeros((len(groups), *shape))  # of each group's pass at the last stage

    def begin(place: int) -> None:
        group = groups[place]
        free[last] += group.draft
        arrived = free[last] + group.telling
        for stage in range(last):
            free[stage] = np.maximum(free[stage], arrived) + group.computing[stage] + group.reducing[stage]
            arrived = free[stage] + group.handing[stage]
        arrival[place] = arrived

    def end(place: int) -> None:
        group = groups[place]
        free[last] = np.maximum(free[last], arrival[place]) + group.computing[last] + group.reducing[last]
        free[last] += group.finish

    for place in range(len(groups)):
        begin(place)
    seconds = np.zeros(shape)
    for _ in range(_MAX_ROUNDS):
        before = np.concatenate([free, arrival])
        for place in range(len(groups)):
            end(place)
            begin(place)
        took = np.concatenate([free, arrival]) - before
        seconds = took[last]
        if np.all(np.abs(took - seconds) <= _SAME * seconds):
            break
    busy = sum(sum(group.computing) + sum(group.reducing) + group.draft + group.finish for group in groups)
    communication = sum(group.communication for group in groups) / len(groups)
    return Round(seconds, np.asarray(communication / seconds), np.asarray(1 - busy / num_stages / seconds))
