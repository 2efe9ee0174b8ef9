"""Measurement of target passes while requests are decoded, after the speed of the machine has changed.

Usual steps show the time of passes of one size only, so they scale the whole curve. But another speed of the memory
changes small passes, and another speed of computing large ones. So a few steps have trees of other sizes, from none
until a pass takes clearly longer. Trees of any size are exact, and their tokens are not lost.

Other load changes single passes as well. Such changes come and go from size to size, while those of a machine only grow
or only fall with the size. So passes are repeated until the changes do, and otherwise only the median change counts.
"""

from statistics import median

import numpy as np

from specinfer.core.step_record import StepRecord
from specinfer.core.tree import OFF, TreeBudget
from specinfer.policy.curves import Curve, Floats

_GROWTH = 2  # factor from one size to the next
_SLOWER = 2.0  # largest pass, in times of one without trees
_MOST_NODES = 240
_DEPTH = 4  # of the trees: levels take time
_ROUNDS, _MOST_ROUNDS = 2, 5
_SURE_ROUNDS = 3  # for a change that depends on the size
_MOST_STEPS = 60
_ALIKE = 1.2  # largest ratio of the changes of sizes that changed alike
_FALSE_TURN = 1.1  # factor by which a change may turn back from one size to the next


class Remeasurement:
    """A few steps, each with the tree of one request, that show the seconds of passes by their number of rows.

    Args:
        before: Seconds of passes before the change.
    """

    def __init__(self, before: Curve) -> None:
        self._before = Curve(before.sizes, before.seconds)
        self._seconds: dict[int, float] = {}  # by rows, of the fastest pass, because other load only adds time
        self.total = 0.0  # seconds of all its steps
        self._num_rows, self._round, self._num_steps = 0, 0, 0
        self._plain = np.inf  # seconds of the fastest pass without trees

    @property
    def is_done(self) -> bool:
        if self._round < _ROUNDS:
            return self._num_steps >= _MOST_STEPS
        is_sure = self._round >= _SURE_ROUNDS and self._has_one_direction
        return is_sure or self._changed_alike or self._round >= _MOST_ROUNDS or self._num_steps >= _MOST_STEPS

    def curve(self) -> Curve:
        """Return the seconds of passes now."""
        if not self._seconds:  # all steps read prompts
            return self._before
        if not self._changed_alike and self._has_one_direction:
            return self._before.adopting(self._seconds)
        return Curve(self._before.sizes, self._before.seconds * np.exp(median(self._changes.tolist())))

    @property
    def _changes(self) -> Floats:
        """Logarithms of the factors by which the passes of each size became slower, [sizes] from small to large."""
        known = sorted(self._seconds)
        return np.asarray(np.log([self._seconds[size] for size in known]) - np.log(self._before(known)))

    @property
    def _changed_alike(self) -> bool:
        return bool(np.ptp(self._changes) < np.log(_ALIKE))

    @property
    def _has_one_direction(self) -> bool:
        steps = np.diff(self._changes)
        return bool((steps > -np.log(_FALSE_TURN)).all() or (steps < np.log(_FALSE_TURN)).all())

    def budget(self, num_requests: int) -> TreeBudget:
        """Return the budget of the one request that gets a tree in this step."""
        self._num_steps += 1
        return self.next(num_requests)

    def next(self, num_requests: int) -> TreeBudget:
        """Return the budget that comes next."""
        num_nodes = min(max(self._num_rows - num_requests, 0), _MOST_NODES)
        return TreeBudget(num_nodes, _DEPTH) if num_nodes else OFF

    def observe(self, step: StepRecord) -> None:
        """Note the time of a step in which the target read no prompt, and go on to the next size."""
        self.total += step.time
        self._seconds[step.num_rows] = min(self._seconds.get(step.num_rows, np.inf), step.target_time)
        if not step.num_guessed:
            self._plain = min(self._plain, step.target_time)
        is_largest = step.target_time > _SLOWER * self._plain or step.num_guessed >= _MOST_NODES
        self._num_rows = _GROWTH * max(self._num_rows, step.num_requests)
        if is_largest:
            self.end_round()

    def end_round(self) -> None:
        """Begin again with the smallest size: larger ones show nothing more, or lose too much time."""
        self._num_rows = 0
        self._round += 1
