"""What steps cost, as far as steps have shown it."""

import pytest

from specinfer.core.request import ScoringTime
from specinfer.core.sampling import SamplingParams
from specinfer.engine.step_seconds import StepSeconds
from tests.policy.simulated_machines import make_record
from tiny import make_request


def _seen(**seconds: float) -> StepSeconds:
    """Return what passes over some numbers of rows show: `_4=1.0` is one over 4 rows that took a second."""
    known = StepSeconds()
    for name, took in seconds.items():
        known.observe(make_record(num_rows=int(name[1:]), target_time=took), ScoringTime())
    return known


def test_passes_cost_what_was_seen_and_a_share_of_it_elsewhere() -> None:
    known = _seen(_2=0.012, _16=0.04)
    assert known.of_pass(4) == pytest.approx(0.016)
    assert known.of_pass(1) == pytest.approx(0.006)
    assert known.of_pass(32) == pytest.approx(0.08)
    for num_rows in (1, 2, 4, 15, 16, 40):
        assert known.rows_within(known.of_pass(num_rows)) == pytest.approx(num_rows)
    assert not StepSeconds().is_known


def test_a_pass_that_other_load_slowed_is_not_taken_as_its_cost_for_ever() -> None:
    known = _seen(_1=0.01, _8=0.02, _64=10.0)
    assert known.of_pass(64) == pytest.approx(0.16), "no more than eight passes over eight rows"
    known = _seen(_1=5.0, _8=0.02)
    assert known.of_pass(1) == pytest.approx(0.02), "no more than a larger pass"


def test_all_sizes_follow_a_machine_that_becomes_slower_or_faster() -> None:
    for factor in (0.2, 4.0):
        known = _seen(_1=0.01, _16=0.04)
        for _ in range(100):
            known.observe(make_record(num_rows=1, target_time=0.01 * factor), ScoringTime())
        assert known.of_pass(1) == pytest.approx(0.01 * factor, rel=0.05)
        assert known.of_pass(16) == pytest.approx(0.04 * factor, rel=0.3)


def test_measured_passes_are_taken_over_where_no_step_was_seen() -> None:
    known = _seen(_1=0.01)
    known.expect(lambda num_rows: 0.02 + 0.001 * num_rows)
    assert known.of_pass(1) == pytest.approx(0.01)
    assert known.of_pass(64) == pytest.approx(0.084)


def test_a_pass_that_was_captured_shows_nothing() -> None:
    known = StepSeconds()
    known.observe(make_record(num_rows=1, target_time=9.0, is_first_of_size=True), ScoringTime())
    assert not known.is_known


def test_drafting_reading_and_log_probabilities_have_costs_of_their_own() -> None:
    known = StepSeconds()
    known.observe(make_record(num_rows=11, num_guessed=10, draft_time=0.05, target_time=0.1), ScoringTime())
    assert known.of_node == pytest.approx(0.005)
    assert known.of_reading(100) == pytest.approx(known.of_pass(100)), "no prompt was read by a drafter"
    known.observe(make_record(num_rows=11, num_guessed=10, num_read=50, draft_time=0.1, target_time=0.1), ScoringTime())
    assert known.of_reading(100) == pytest.approx(0.1)
    known.observe(make_record(num_rows=2, target_time=0.08, rest_time=0.42), ScoringTime(0.44, 44))
    request = make_request("a", range(3), SamplingParams(logprobs=20, max_tokens=5))
    assert known.on_host(request) == pytest.approx(0.21)
    assert known.of_pass(2) == pytest.approx(0.06), "without the log-probabilities"
