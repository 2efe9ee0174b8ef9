"""Cost model: seconds of a step on this machine, measured at start-up (`cost_measurement`) and updated by every step.

A pass over n tokens costs less than n passes over one, because the weights are read once. How the cost grows with n
differs between machines, and decides which tree is worthwhile.

Example: passes over 1 and 5 rows take 1.0 and 1.4 s, and a draft level 0.1 s. A step of one request with a tree of 3
nodes in 2 levels has 4 rows: 1.3 s between the measured sizes, and 2 * 0.1 s of drafting, together 1.5 s.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from specinfer.core.step_record import StepRecord
from specinfer.core.tree_shape import MAX_TREE_NODES
from specinfer.model.graphs.sizes import power_of_two
from specinfer.policy import streamed_costs
from specinfer.policy.curves import FAST, LEARNING_RATE, MAX_RATIO, ContextCurve, Curve, Floats, learning_rate
from specinfer.policy.output_lengths import OutputLengths
from specinfer.policy.streamed_costs import StreamedCurve

_DOUBT = 1.3  # factor by which passes became slower or faster
_MOST_MOVED = 0.1  # share of the time of levels that one draft can show to be that of the start
# Passes without draft tokens: the largest factor of their difference, and the steps after a tree that show it. Later
# ones follow other load as well.
_MOST_PLAIN, _NEAR = 1.3, 2
_PROMPT_RATE = 0.3  # weight of the last pass that read prompts: each takes long, and contexts grow


class CostModel:
    """Seconds of the parts of a step, updated by observed steps.

    Args:
        target: Seconds of a target pass, by its number of tokens.
        draft_level: Seconds of growing the trees by one level, by its number of nodes.
        read_token: Seconds that the drafter takes to read one token of a prompt.
        draft_start: Seconds that the first level takes in addition to the time of a further one.

    Attributes:
        is_provisional: Whether other load distorted the measurement of these costs; set until passes are measured anew.
        max_rows: Most rows of a step, or None for no limit. Larger trees are cut, all alike. The number of requests is
            rounded up to a power of two.
        lengths: Lengths of outputs, which have to repay what is spent once on each.
        window: Tokens of a long prompt that the drafter reads at least, or None if it reads all.
    """

    def __init__(
        self,
        target: Curve | StreamedCurve,
        draft_level: Curve,
        read_token: float = 0.0,
        draft_start: float = 0.0,
    ) -> None:
        self.target = target
        self.draft_level = draft_level
        self.read_token = read_token
        self.draft_start = draft_start
        self.rest = 0.0
        self.max_rows: int | None = None
        self.window: int | None = None
        self.lengths = OutputLengths()
        self._plain = 1.0  # seconds of passes without draft tokens over those of the curve
        self._num_plain = 1  # passes that showed it, and one that is assumed
        self._reading = 1.0  # seconds of passes that read prompts over those of the curve
        self._since_tree = _NEAR  # steps since the last draft tokens
        self._usual_levels = 0.0  # mean of drafts so far, of which the last ones count most
        self._measured = target.seconds.copy() if isinstance(target, Curve) else None
        self.is_provisional = False

    @property
    def is_doubtful(self) -> bool:
        """True if the curve of passes may have another shape: they take another time than when they were measured, or
        other load distorted the measurement.
        """
        if self._measured is None:
            return False
        if self.is_provisional:
            return True
        change = median(np.log(self.target.seconds / self._measured).tolist())
        return bool(abs(change) > math.log(_DOUBT))

    def adopt(self, target: Curve) -> None:
        """Take over the seconds of passes that were measured anew."""
        assert isinstance(self.target, Curve)
        self.target.sizes, self.target.seconds, self._measured = target.sizes, target.seconds, target.seconds.copy()
        self.is_provisional = False

    def scale(self, passes: float, drafting: float) -> None:
        """Multiply the seconds of passes and of drafting, as on a machine of another speed."""
        assert isinstance(self.target, Curve)
        self.target.seconds = self.target.seconds * passes
        self._scale_drafting(drafting)

    def _scale_drafting(self, factor: float) -> None:
        self.draft_level = Curve(self.draft_level.sizes, self.draft_level.seconds * factor)
        self.draft_start *= factor
        self.read_token *= factor

    def most_nodes(self, num_requests: int) -> int:
        """Return the draft tokens that each of this many requests may have in a step."""
        if self.max_rows is None:
            return MAX_TREE_NODES
        return max(self.max_rows // power_of_two(num_requests) - 1, 0)

    def step(self, num_requests: int, num_nodes: npt.ArrayLike, num_levels: npt.ArrayLike) -> Floats:
        """Return the seconds of a whole step with this many draft tokens in all, in this many levels."""
        nodes = np.asarray(num_nodes)
        passes = self.target(num_requests + nodes) * np.where(nodes > 0, 1.0, self._plain)
        return np.asarray(self.draft(nodes, num_levels) + passes + self.rest)

    def reading(self, num_tokens: npt.ArrayLike) -> Floats:
        """Return the seconds of target passes that read prompts, by their number of tokens."""
        return np.asarray(self.target(num_tokens) * self._reading)

    def draft(self, num_nodes: npt.ArrayLike, num_levels: npt.ArrayLike) -> Floats:
        """Return the seconds of drafting this many nodes in all, in this many levels."""
        levels = np.asarray(num_levels)
        level = self.draft_level(np.asarray(num_nodes) / np.maximum(levels, 1))
        return np.asarray(levels * level + self.draft_start * np.minimum(levels, 1))

    def observe(self, step: StepRecord) -> None:
        """Learn from a step in which the target read no prompt."""
        self.follow(step.num_context, step.num_requests)
        # A lookup's long chain has no model levels, and would make levels seem free.
        num_levels = step.num_drafted_levels
        before = float(self.target(step.num_rows))
        self._observe_pass(step)
        if not num_levels and isinstance(self.target, Curve):
            # Drafting was not seen, and has become slower or faster with the machine: its ratio to a pass remains.
            self._scale_drafting(float(self.target(step.num_rows)) / before)
        self.rest += LEARNING_RATE * (step.rest_time - self.rest)
        if not num_levels:
            return
        expected = float(self.draft(step.num_guessed, num_levels))
        if step.num_read and step.draft_time >= FAST * expected:
            reading = max(step.draft_time - expected, 0.0) / step.num_read
            self.read_token += learning_rate(reading, self.read_token) * (reading - self.read_token)
        else:
            self._observe_drafting(step.num_guessed / num_levels, num_levels, step.draft_time, expected)

    def follow(self, num_context: int, num_requests: int) -> None:
        """Count with this many tokens of context, of this many requests, until the next step is observed."""
        if isinstance(self.target, ContextCurve):
            self.target.follow(num_context, num_requests)

    def without_context(self, step: StepRecord) -> StepRecord:
        """Return a step without the time of attention to its context."""
        if not isinstance(self.target, ContextCurve):
            return step
        parts = self.target.parts(step.num_rows)
        return replace(step, target_time=step.target_time * float(parts[0] / parts.sum()))

    def _observe_pass(self, step: StepRecord) -> None:
        """Learn from the seconds of a pass; without draft tokens they may differ from those of the curve.

        After drafting, the CPU's caches hold less of what a pass needs, and single sizes hardly move the curve.
        """
        if step.num_guessed or not isinstance(self.target, Curve):
            self._since_tree = 0
            self.target.observe(step.num_rows, step.target_time, step.waiting_time)
            return
        if self._since_tree < _NEAR:
            ratio = step.target_time / float(self.target(step.num_rows))
            self._num_plain += 1  # the first few count alike
            rate = max(LEARNING_RATE, 1.0 / self._num_plain)
            self._plain += rate * (min(max(ratio, 1.0 / _MOST_PLAIN), _MOST_PLAIN) - self._plain)
        self._since_tree += 1
        self.target.observe(step.num_rows, step.target_time / self._plain)

    def _observe_drafting(self, per_level: float, num_levels: int, seconds: float, expected: float) -> None:
        """Learn from the seconds of drafting, and how many of them were expected.

        Start and levels follow together, as with other load. How the time divides between them is learned only from
        drafts with more or fewer levels than usual. After a pass of the target no CPU cache has any of the drafter's
        data, so the start takes more than was measured.
        """
        ratio, level = min(seconds / expected, MAX_RATIO), float(self.draft_level(per_level))
        self.draft_start *= 1.0 + learning_rate(seconds, expected) * (ratio - 1.0)
        self.draft_level.observe(per_level, level * ratio)
        usual = self._usual_levels or num_levels
        self._usual_levels = usual + LEARNING_RATE * (num_levels - usual)
        moved = LEARNING_RATE * (ratio - 1.0) * expected * (1.0 - num_levels / self._usual_levels)
        all_levels = self._usual_levels * float(self.draft_level(per_level))
        moved = min(max(moved, -self.draft_start), _MOST_MOVED * all_levels)
        self.draft_start += moved
        self.draft_level = Curve(self.draft_level.sizes, self.draft_level.seconds * (1.0 - moved / all_levels))

    def observe_prompts(self, step: StepRecord) -> None:
        """Learn from a step in which prompts were read.

        Passes of streamed weights show where computing takes longer than reading. Other curves stay as they are: the
        largest measured size may be far below that of the pass, and its tokens have contexts of different lengths.
        """
        self.follow(step.num_context, step.num_requests)
        if isinstance(self.target, StreamedCurve):
            if step.num_rows <= streamed_costs.MOST_ROWS:
                self.target.observe(step.num_rows, step.target_time, step.waiting_time)
            return
        ratio = step.target_time / float(self.target(step.num_rows))
        self._reading += _PROMPT_RATE * (min(ratio, MAX_RATIO * self._reading) - self._reading)

    def as_dict(self) -> dict[str, object]:
        """Return plain numbers, to be stored in a file."""
        return {
            "target": self.target.as_dict() if isinstance(self.target, StreamedCurve) else _points(self.target),
            "draft_level": _points(self.draft_level),
            "read_token": self.read_token,
            "draft_start": self.draft_start,
            **({"is_provisional": True} if self.is_provisional else {}),
        }

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> "CostModel":
        """Make costs from the numbers of `as_dict`. Raises KeyError, TypeError or ValueError if they are not costs."""
        passes, draft_level = numbers["target"], _read_curve(*numbers["draft_level"])
        target = StreamedCurve.from_dict(passes) if isinstance(passes, dict) else _read_curve(*passes)
        read_token, draft_start = float(numbers["read_token"]), float(numbers["draft_start"])
        if not (0 <= read_token < math.inf and 0 <= draft_start < math.inf):
            raise ValueError("read_token or draft_start is not a time")
        costs = cls(target, draft_level, read_token, draft_start)
        costs.is_provisional = numbers.get("is_provisional") is True
        return costs


def _points(curve: Curve) -> list[list[float]]:
    return [curve.sizes.tolist(), curve.seconds.tolist()]


def _read_curve(sizes: Sequence[float], seconds: Sequence[float]) -> Curve:
    curve = Curve([float(size) for size in sizes], [float(second) for second in seconds])
    usable = len(curve.sizes) == len(curve.seconds) >= 1
    usable = usable and bool((np.diff(curve.sizes, prepend=0.0) > 0).all())
    if not (usable and bool((np.isfinite(curve.seconds) & (curve.seconds > 0)).all())):
        raise ValueError("no curve: sizes must grow, and each needs a time")
    return curve
