"""The time that trials may lose: tests of the drafter, and passes over more rows than pay, to learn what they cost.

Example: after 100 s of steps trials may lose a second. A text that is expected to take 4 s may lose 0.08 s of it.
"""

import math
from collections.abc import Sequence

from specinfer.core.request import Span
from specinfer.policy.cost_model import CostModel
from specinfer.policy.optimizer import tokens_left

_SHARE = 0.01  # of the time of all steps
_SHARE_OF_TEXT = 0.02  # the most of the expected time of one text
_FIRST = 3.0  # passes that trials may lose before any step


class TrialAllowance:
    """The seconds that trials may still lose, in all and in the text of the one request at present.

    Args:
        costs: Costs of steps.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs, self._left = costs, _FIRST * float(costs.target(1))
        self._text_seconds, self._lost_in_text = 0.0, 0.0  # of this text so far

    def begin_text(self) -> None:
        """Note that the one request has just begun its text."""
        self._text_seconds, self._lost_in_text = 0.0, 0.0

    def note_step(self, seconds: float) -> None:
        """Add what a step of so many seconds allows."""
        self._left += _SHARE * seconds
        self._text_seconds += seconds

    def take(self, spans: Sequence[Span], seconds: float, *, is_overdue: bool = False) -> bool:
        """Return whether a trial may lose this much, and count it if so; one that is overdue may lose any time."""
        is_allowed = is_overdue or (seconds <= self._left and self._lost_in_text + seconds <= self._most_in_text(spans))
        if is_allowed:
            self._left -= seconds
            self._lost_in_text += seconds
        return is_allowed

    def _most_in_text(self, spans: Sequence[Span]) -> float:
        """Return the seconds that trials may lose in the text of one request; those of a batch have no common end."""
        if len(spans) != 1:
            return math.inf
        seconds_left = tokens_left(spans[0].request, self._costs) * float(self._costs.step(1, 0, 0))
        return _SHARE_OF_TEXT * (self._text_seconds + seconds_left)
