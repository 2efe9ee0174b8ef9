"""Health checks between ranks, with a store that is a dictionary."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from specinfer.core.config import EngineConfig, OffloadConfig
from specinfer.core.parallel_config import ParallelConfig, Place
from specinfer.model.sharding import worker
from specinfer.model.target import TargetConfig
from specinfer.parallel import health
from specinfer.parallel.health import Heartbeat, HeartbeatMonitor


class Store:
    """The part of a store of torch.distributed that health checks use; ranks count only where a test says so."""

    def __init__(self, **counts: int) -> None:
        self.counts = {name.replace("_", "/"): count for name, count in counts.items()}

    def add(self, key: str, amount: int) -> int:
        self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts[key]

    def set(self, key: str, value: str) -> None:
        raise AssertionError("nothing is to be set")

    def get(self, key: str) -> str | None:
        return None


def _watch(store: Store, limit: int = 3) -> HeartbeatMonitor:
    watch = HeartbeatMonitor(store, [1, 2])
    watch.limit = limit
    return watch


def test_a_rank_that_has_not_begun_is_waited_for() -> None:
    watch = _watch(Store())
    assert [watch.check() for _ in range(9)] == [None] * 9


def test_a_rank_whose_count_stops_is_named_after_the_limit() -> None:
    store = Store(beat_1=1, beat_2=1)
    watch = _watch(store)
    seen = []
    for _ in range(5):
        store.add("beat/1", 1)
        seen.append(watch.check())
    assert seen == [None] * 4 + ["rank 2 does not answer"]


def test_only_missed_beats_in_a_row_count() -> None:
    store = Store(beat_1=1, beat_2=1)
    watch = _watch(store)
    for look in range(30):
        if look % 4 == 0:  # three looks in a row find nothing new, which is the limit
            store.add("beat/1", 1)
            store.add("beat/2", 1)
        assert watch.check() is None


def test_a_lost_store_is_reported_once_though_both_threads_notice_it(monkeypatch: pytest.MonkeyPatch) -> None:
    noticed, is_over = threading.Event(), threading.Event()

    class SlowEvent(threading.Event):
        """An event that takes its time to be set, so that another thread can look at it meanwhile."""

        def set(self) -> None:
            noticed.set()
            is_over.wait(0.3)
            super().set()

    class Hanging(Store):
        def add(self, key: str, amount: int) -> int:
            assert noticed.wait(20)
            raise RuntimeError("connection closed")

    names = {name: getattr(threading, name) for name in ("Thread", "Lock")}
    monkeypatch.setattr(health, "threading", SimpleNamespace(Event=SlowEvent, **names))
    monkeypatch.setattr(health, "BEAT_SECONDS", 0.001)
    reports: list[str] = []
    heartbeat = Heartbeat(Hanging(), 1, reports.append)
    assert noticed.wait(20)
    for _ in range(200):
        if reports:
            break
        is_over.wait(0.05)
    is_over.wait(0.5)  # as long as the second report would take
    is_over.set()
    heartbeat.stop()
    assert len(reports) == 1


def test_an_error_of_nccl_is_in_the_log_of_its_rank_because_it_may_be_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Containers, for example, have little shared memory; the code of the process alone would not tell."""

    def fail(*_: Any) -> None:
        raise RuntimeError("NCCL error: unhandled system error\nLast error:\nNo space left on device")

    monkeypatch.setattr(worker, "Worker", fail)
    settings = TargetConfig("nowhere", "float32", "cpu", None, OffloadConfig(), EngineConfig())
    assert worker.work(settings, ParallelConfig(2), Place(1, 2, 1, 2), {}) == 1
    (record,) = caplog.records
    assert record.getMessage() == (
        "rank 1: another rank is gone, this one ends: NCCL error: unhandled system error Last error: "
        "No space left on device"
    )
