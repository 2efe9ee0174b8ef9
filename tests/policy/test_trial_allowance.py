"""The allowance of trials: a share of all time, and of each text."""

from specinfer.policy.trial_allowance import TrialAllowance
from tests.policy.simulated_machines import make_costs, make_span


def test_trials_may_lose_a_hundredth_of_the_time() -> None:
    """And that of three passes before any step."""
    allowance, batch = TrialAllowance(make_costs()), [make_span()] * 2
    assert allowance.take(batch, 2.9)
    assert not allowance.take(batch, 0.9)
    allowance.note_step(100.0)
    assert allowance.take(batch, 0.9)
    assert not allowance.take(batch, 0.9)
    assert allowance.take(batch, 9.0, is_overdue=True)
    allowance.note_step(100.0)
    assert not allowance.take(batch, 0.9), "the one that was overdue counts"


def test_trials_may_lose_two_hundredths_of_one_text() -> None:
    allowance, span = TrialAllowance(make_costs()), make_span(max_tokens=51)  # 50 more tokens, of a second each
    allowance.note_step(1000.0)
    allowance.begin_text()
    assert not allowance.take([span], 1.1)
    assert allowance.take([span], 0.9)
    assert not allowance.take([span], 0.2), "both are of the same text"
    allowance.note_step(100.0)
    assert allowance.take([span], 0.2), "it became longer than expected"
    allowance.begin_text()
    assert allowance.take([span], 0.9)
