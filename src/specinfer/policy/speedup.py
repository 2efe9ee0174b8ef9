"""The speed of steps over that of plain decoding: what was expected, and what came."""

import logging

from specinfer.core.decayed_ratio import DecayedRatio
from specinfer.core.step_record import StepRecord

_FIRST_REPORT = 500  # tokens; each further report comes after twice as many
LOSES = 0.97  # a speed-up below this is a loss, beyond the noise
_MEMORY = 0.98  # of a plain step for the next
logger = logging.getLogger(__name__)


class Speedup:
    """A comparison of the steps of "auto" with plain decoding.

    Args:
        expected: Speed over that of plain decoding that was expected before the first step.
        remedy: What to do where drafting loses, or None if nothing is known.

    Attributes:
        num_tokens: Tokens that steps without prompts have emitted.
    """

    def __init__(self, expected: float, remedy: str | None = None) -> None:
        self.expected, self._remedy = expected, remedy
        self.num_tokens, self._seconds, self._plain_seconds = 0, 0.0, 0.0
        self._plain_steps = DecayedRatio(_MEMORY)  # seconds of plain steps over those that costs say
        self._report_at = _FIRST_REPORT

    @property
    def measured(self) -> float | None:
        """Speed over that of plain decoding, which takes what its passes cost at present; None before any step."""
        return self._plain_seconds / self._seconds if self._seconds else None

    def observe(self, step: StepRecord, plain_seconds: float) -> None:
        """Count a step in which no prompt was read.

        Args:
            plain_seconds: Seconds of a step of these requests without draft tokens.
        """
        self.num_tokens += step.num_generated
        self._seconds += step.time
        if not (step.num_guessed or step.num_drafted_levels):
            # Such a step is plain decoding, but for a look-up in vain, and shows what others are to be compared with.
            self._plain_steps.observe(step.time - step.draft_time, plain_seconds)
            self._plain_seconds += step.time - step.draft_time
        else:
            usual = self._plain_steps.value if self._plain_steps.denominator else 1.0
            self._plain_seconds += usual * plain_seconds * step.num_generated / step.num_requests
        if self.num_tokens >= self._report_at:
            self._report_at = 2 * self.num_tokens
            logger.info("auto: %s, after %d tokens", self.line(), self.num_tokens)

    def line(self) -> str:
        """Return what was expected and what came."""
        return self.beside(self.measured)

    def beside(self, measured: float | None) -> str:
        """Return what was expected beside a measured speed-up, and the remedy if drafting loses."""
        came = "nothing measured yet" if measured is None else f"measured {measured:.2f}"
        line = f"expected {self.expected:.2f} times the speed of plain decoding, {came}"
        if measured is None or measured >= LOSES:
            return line
        return f"{line}: drafting loses here" + ("" if self._remedy is None else f"; {self._remedy}")
