"""Short runs of the programs of `tests/server/pressure`: no wrong answer, nobody locked out, nothing left behind."""

import time

import pytest

from tests.server.pressure.attack import Report, attack
from tests.server.pressure.crowd import DESCRIPTORS, press
from tests.server.pressure.faults import hurt
from tests.server.pressure.soak import soak
from tests.server.pressure.steady import TOGETHER, attack_in_turn, table
from worlds import free_port


@pytest.mark.slow
def test_a_short_soak() -> None:
    report = soak(2.0, 8, port=free_port(), num_each=1)
    assert not report.failed
    assert not report.wrong
    assert report.num_responses > 2  # on a busy machine
    assert report.num_aborted > 0
    end = report.samples[-1]
    assert (end["running"], end["waiting"], end["kv_used"]) == (0, 0, 0)
    assert report.growth("num_threads") <= 2


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "tls"), [(60, False), (60, True)])
def test_more_idle_and_slow_clients_than_descriptors_lock_nobody_out(seconds: float, tls: bool) -> None:
    report = press(seconds, free_port(), tls=tls)
    assert report.num_connections > DESCRIPTORS
    assert max(report.health_seconds) < max(1.0, 20 * max(report.quiet_seconds)), "more if the machine is busy"
    assert report.num_lines < 10
    assert report.num_files[1] <= report.num_files[0] + 8, "nothing is left of them"
    assert report.answer_seconds < 5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_honest_clients_are_served_as_before_beside_hostile_ones_and_memory_stays_flat() -> None:
    report = attack(240.0, port=free_port())
    assert not report.failed
    assert not report.wrong
    assert report.num_hostile > 100
    assert report.ratio < 2.0, "1.3 on a machine without other work"
    assert report.growth() < 15.0, "in MiB a minute; less in longer runs"
    assert max(report.reader_mib) < 1024, "360 while one long text is tokenized; it must not add up"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_steady_attack_reports_an_honest_keys_times_and_loses_no_answer() -> None:
    reports, begun = dict[str, Report](), time.monotonic()
    attack_in_turn("demo", begun + 60.0, ["logprobs", TOGETHER], reports, port=free_port())
    assert time.monotonic() - begun < 70.0
    for report in reports.values():
        assert not report.wrong
        assert not report.failed
        assert report.quiet
        assert report.attacked
        assert len(report.attacked_gaps) >= 10
    lines = table(reports)
    assert [line[:16].strip() for line in lines[2:]] == ["logprobs", TOGETHER]
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_is_hurt_comes_back_and_leaves_no_request_without_an_end() -> None:
    report = hurt("demo", time.monotonic() + 240.0, port=free_port(), pause=3.0)
    assert not report.faults()
    assert report.recoveries
