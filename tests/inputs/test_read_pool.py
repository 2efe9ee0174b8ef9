"""The pool of threads that read prompts: turns by tenant, callers that leave, and its end."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable

import pytest

from specinfer.core.bounded_process import BoundedProcesses
from specinfer.core.errors import EngineDeadError, QueueFullError
from specinfer.inputs.read_pool import ReadPool, ReadPools

SLEEPER = """
import time
from specinfer.core.bounded_process import answer_questions
def answer(question):
    time.sleep(int(question))
    return question
answer_questions(lambda job: answer, lambda size: 20, 1 << 30)
"""


def hold(gate: threading.Event) -> Callable[[], None]:
    return lambda: assert_true(gate.wait(10))


def assert_true(value: bool) -> None:
    assert value


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_one_tenant_leaves_a_thread_to_the_others() -> None:
    async def scenario() -> None:
        pool, gate = ReadPool(max_waiting=100, num_threads=2), threading.Event()
        greedy = [asyncio.ensure_future(pool.run(hold(gate), "greedy")) for _ in range(20)]
        await until(lambda: pool.age > 0)
        assert await asyncio.wait_for(pool.run(lambda: "read", "other"), 10) == "read"
        gate.set()
        await asyncio.gather(*greedy)
        assert pool.age == 0
        assert await pool.close(10)

    asyncio.run(scenario())


def test_tenants_take_turns() -> None:
    async def scenario() -> None:
        pool, gate, order = ReadPool(max_waiting=100, num_threads=2), threading.Event(), []
        holders = [asyncio.ensure_future(pool.run(hold(gate), f"holder {i}")) for i in range(4)]
        await asyncio.sleep(0)
        reads = [
            asyncio.ensure_future(pool.run(lambda name=name: order.append(name), name))
            for name in ("a", "a", "a", "b", "c")
        ]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*holders, *reads)
        assert set(order[:3]) == {"a", "b", "c"}, "nobody is served twice before all were served once"
        assert await pool.close(10)

    asyncio.run(scenario())


def test_a_caller_that_leaves_loses_its_turn() -> None:
    async def scenario() -> None:
        pool, gate, done = ReadPool(max_waiting=100, num_threads=2), threading.Event(), []
        first = asyncio.ensure_future(pool.run(hold(gate), "a"))
        rest = [asyncio.ensure_future(pool.run(lambda i=i: done.append(i), "a")) for i in range(8)]
        others = [asyncio.ensure_future(pool.run(hold(gate), f"other {i}")) for i in range(4)]
        await asyncio.sleep(0)
        for left in rest[:7]:
            left.cancel()
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, rest[7], *others)
        assert 7 in done
        assert len(done) < 8
        assert not pool._waiting
        assert not pool._num_running
        assert await pool.close(10)

    asyncio.run(scenario())


def test_the_work_for_a_caller_that_leaves_is_ended_a_moment_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("specinfer.inputs.read_pool._GRACE", 0.05)
    processes = BoundedProcesses(("-c", SLEEPER), b"", 2)

    async def scenario() -> None:
        pool = ReadPool(max_waiting=100, num_threads=1)
        assert await pool.run(lambda: processes.ask(b"0")) == b"0"
        left = asyncio.ensure_future(pool.run(lambda: processes.ask(b"15")))
        await until(lambda: pool.age > 0.02)
        left.cancel()
        assert await pool.run(lambda: processes.ask(b"0")) == b"0", "another process answers"
        ended = asyncio.ensure_future(pool.run(lambda: processes.ask(b"15")))
        await until(lambda: pool.age > 0.02)
        assert await pool.close(5), "the end of the pool ends the work for all"
        with pytest.raises(EngineDeadError):
            await ended

    start = time.monotonic()
    asyncio.run(scenario())
    processes.close()
    assert time.monotonic() - start < 10
    gc.collect()
    assert "asyncio" not in {record.name for record in caplog.records}, "an error that nobody reads is logged"


def test_a_failing_action_raises_in_its_caller_and_frees_its_thread() -> None:
    async def scenario() -> None:
        pool = ReadPool(max_waiting=100, num_threads=2)
        for _ in range(10):
            with pytest.raises(ZeroDivisionError):
                await pool.run(lambda: 1 / 0, "a")
        assert await pool.close(10)

    asyncio.run(scenario())


def test_too_many_waiting_actions_of_one_tenant_are_refused_and_others_are_not() -> None:
    async def scenario() -> None:
        pool, gate = ReadPool(max_waiting=3, num_threads=2), threading.Event()
        tasks = [asyncio.ensure_future(pool.run(hold(gate), "a")) for _ in range(10)]
        await asyncio.sleep(0.01)
        refused = [task for task in tasks if task.done()]
        assert refused
        assert all(isinstance(task.exception(), QueueFullError) for task in refused)
        assert await pool.run(lambda: 5, "b") == 5
        gate.set()
        await asyncio.gather(*(task for task in tasks if task not in refused))
        assert await pool.close(10)

    asyncio.run(scenario())


def test_a_closed_pool_refuses_what_waits_and_what_comes() -> None:
    async def scenario() -> None:
        pool, gate = ReadPool(max_waiting=100, num_threads=2), threading.Event()
        tasks = [asyncio.ensure_future(pool.run(hold(gate), "a")) for _ in range(10)]
        await asyncio.sleep(0.01)
        assert not await pool.close(0.01), "one is still at work"
        gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(result, EngineDeadError) for result in results)
        assert all(result is None or isinstance(result, EngineDeadError) for result in results)
        with pytest.raises(EngineDeadError):
            await pool.run(lambda: 1)

    asyncio.run(scenario())


def test_what_is_brief_runs_in_the_event_loop_and_waits_for_no_thread() -> None:
    async def scenario() -> None:
        pools, gate = ReadPools(max_waiting=100), threading.Event()
        others = [asyncio.ensure_future(pools.run(hold(gate), f"tenant {i}")) for i in range(20)]
        await until(lambda: pools.age > 0)
        assert await asyncio.wait_for(pools.run(threading.get_ident, is_brief=True), 10) == threading.get_ident()
        gate.set()
        await asyncio.gather(*others)
        assert await pools.close(10)

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", [{"num_bytes": 10**6}, {"has_grammar": True}], ids=str)
def test_long_texts_and_grammars_of_any_number_of_tenants_do_not_delay_short_texts(kind: dict[str, int]) -> None:
    async def scenario() -> None:
        pools, gate = ReadPools(max_waiting=100), threading.Event()
        others = [asyncio.ensure_future(pools.run(hold(gate), f"tenant {i}", **kind)) for i in range(20)]
        await until(lambda: pools.age > 0)
        assert await asyncio.wait_for(pools.run(lambda: "read", "tenant 0", num_bytes=100), 10) == "read"
        gate.set()
        await asyncio.gather(*others)
        assert await pools.close(10)

    asyncio.run(scenario())
