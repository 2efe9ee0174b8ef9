"""A short soak of the embedded pair: no wrong answer, nothing left behind. `tests/support/soak.py` is the long one."""

import socket

from soak import soak


def test_a_short_soak() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    report = soak(4.0, 8, port=port, num_each=1)
    assert not report.failed
    assert not report.wrong
    assert report.num_responses > 10
    assert report.num_aborted > 0
    end = report.samples[-1]
    assert (end["running"], end["waiting"], end["kv_used"]) == (0, 0, 0)
    assert report.growth("num_threads") <= 2
