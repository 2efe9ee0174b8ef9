"""A short soak of the embedded pair: no wrong answer, nothing left behind. `tests/support/soak.py` is the long one.

`tests/support/crowd.py` is a crowd of clients that never complete what they begin.
"""

import socket

import pytest

from crowd import DESCRIPTORS, press
from soak import soak


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_a_short_soak() -> None:
    report = soak(4.0, 8, port=_free_port(), num_each=1)
    assert not report.failed
    assert not report.wrong
    assert report.num_responses > 10
    assert report.num_aborted > 0
    end = report.samples[-1]
    assert (end["running"], end["waiting"], end["kv_used"]) == (0, 0, 0)
    assert report.growth("num_threads") <= 2


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "tls"), [(60, False), (60, True)])
def test_more_idle_and_slow_clients_than_descriptors_lock_nobody_out(seconds: float, tls: bool) -> None:
    report = press(seconds, _free_port(), tls=tls)
    assert report.num_connections > DESCRIPTORS
    assert max(report.health_seconds) < max(1.0, 20 * max(report.quiet_seconds)), "more if the machine is busy"
    assert report.num_lines < 10
    assert report.num_files[1] <= report.num_files[0] + 8, "nothing is left of them"
    assert report.answer_seconds < 5
