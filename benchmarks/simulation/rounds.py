"""Event simulation of the steps of a split target: when each stage computes, and what it waits for.

As in the engine, rank 0 drafts for one group of requests after the other and sends each pass to the first stage, until
as many passes are in flight as there are stages. Then it finishes the oldest pass (its own stage's part, verification,
commit) and drafts for that group again. A stage serves passes in the order in which they began. Everything is
deterministic, so after some rounds all rounds take equally long, which is the time of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.simulation.cluster import Split
from benchmarks.simulation.links import Floats

_MAX_ROUNDS = 200
_SAME = 1e-6  # relative difference below which two rounds count as equal


@dataclass(frozen=True, slots=True)
class GroupStep:
    """Seconds of the parts of one group's step. Every array is [trees], with a value for each candidate tree.

    Attributes:
        draft: Drafting on rank 0, and its time to send the pass to the other ranks.
        telling: Time until the first stage has received the pass.
        computing: Computing of each stage.
        reducing: All-reduce of each stage over its tensor ranks.
        handing: Transfer from each stage but the last to the next.
        finish: Work on rank 0 after the pass.
    """

    draft: Floats
    telling: Floats
    computing: tuple[Floats, ...]
    reducing: tuple[Floats, ...]
    handing: tuple[Floats, ...]
    finish: float

    @property
    def communication(self) -> Floats:
        """Total communication time of the step if nothing has to wait."""
        return np.asarray(self.telling + sum(self.reducing) + sum(self.handing))

    @property
    def alone(self) -> Floats:
        """Time of the step if the group has all stages to itself."""
        return np.asarray(self.draft + self.communication + sum(self.computing) + self.finish)


@dataclass(frozen=True, slots=True)
class Round:
    """One step of all groups in the steady state; arrays are [trees].

    Attributes:
        seconds: Seconds of the round, in which each request makes one step.
        communication: Share of the round that a group's messages are in transit, as a mean over groups.
        idle: Share of the round in which a stage has nothing to do, as a mean over stages. Drafting counts as work of
            the last stage, although only rank 0 drafts.
    """

    seconds: Floats
    communication: Floats
    idle: Floats


def group_step(split: Split, num_requests: int, num_nodes: npt.ArrayLike, num_levels: npt.ArrayLike) -> GroupStep:
    """Return the seconds of a step of `num_requests` requests with trees of these numbers of nodes and levels.

    Args:
        num_nodes, num_levels: Sizes of the candidate trees [trees].
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
    """Return the number of requests in each group: one group for each stage, of nearly equal sizes, none empty."""
    num_groups = min(num_requests, num_stages)
    each, more = divmod(num_requests, num_groups)
    return [each + (place < more) for place in range(num_groups)]


def simulate(groups: Sequence[GroupStep]) -> Round:
    """Simulate rounds of all groups until they take equally long, and return the last one.

    Args:
        groups: Steps of the groups, of which there are at most as many as stages.
    """
    num_stages, shape = len(groups[0].computing), np.shape(groups[0].draft)
    assert 1 <= len(groups) <= num_stages
    last = num_stages - 1
    free = np.zeros((num_stages, *shape))  # time at which each stage is free; the last stage is rank 0's
    arrival = np.zeros((len(groups), *shape))  # time at which each group's pass arrives at the last stage

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
