"""Ranks that die or hang: requests end with an error in seconds, and no process is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from specinfer import LLM, EngineDeadError
from specinfer.engine import host_executor
from worlds import PARAMS, PROMPTS, SETTINGS, await_that, children_of, free_port, is_alive, sizes_of, tokens_of, workers

_LIMIT = 20.0  # seconds until every request has its end and no process is left: three, where nothing else runs
_ERROR_LIMIT = 5.0  # seconds from the death of a rank to the error
_BODY = {"prompt": "the ", "max_tokens": 200, "stream": True, "temperature": 1.0, "ignore_eos": True}


def _before(owner: Any, name: str, number: int, action: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """Does something just before the call of this number."""
    inner, count = getattr(owner, name), 0

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            action()
        return inner(*args, **kwargs)

    patch.setattr(owner, name, called)


def _check_end(llm: LLM, ids: list[int], started: float) -> None:
    assert time.monotonic() - started < _LIMIT
    with pytest.raises(EngineDeadError):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    cache = llm.target.cache
    llm.shutdown()
    await_that(lambda: not any(map(is_alive, ids)), _LIMIT)
    assert cache.is_balanced()


@pytest.mark.parametrize(
    ("moment", "number", "sizes", "kind"),
    [
        ("verify", 3, (1, 2), signal.SIGKILL),  # with every `make test`
        pytest.param("verify", 3, (2, 1), signal.SIGSEGV, marks=pytest.mark.distributed),
        pytest.param("prefill", 2, (2, 1), signal.SIGKILL, marks=pytest.mark.distributed),
        pytest.param("prefill", 2, (1, 2), signal.SIGSEGV, marks=pytest.mark.distributed),
        pytest.param("draft", 3, (1, 2), signal.SIGKILL, marks=pytest.mark.distributed),
        pytest.param("draft", 3, (2, 1), signal.SIGSEGV, marks=pytest.mark.distributed),
    ],
)
def test_a_rank_that_is_killed_in_a_pass_ends_it(
    moment: str,
    number: int,
    sizes: tuple[int, int],
    kind: signal.Signals,
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM(folder, **SETTINGS, **sizes_of(sizes))
    ids, killed = workers(llm), [0.0]

    def kill() -> None:
        killed[0] = time.monotonic()
        os.kill(ids[-1], kind)

    match moment:
        case "prefill":
            _before(llm.target, "begin", number, kill, monkeypatch)
        case "draft":
            _before(llm.drafter, "draft", number, kill, monkeypatch)
        case _:
            _before(llm.engine.host, "_verify", number, kill, monkeypatch)
    with pytest.raises(EngineDeadError, match=f"rank 1 has ended with code -{kind}"):
        tokens_of(llm)
    assert time.monotonic() - killed[0] < _ERROR_LIMIT
    _check_end(llm, ids, killed[0])


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_dies_while_nothing_runs_is_noticed(kind: signal.Signals, folder: str) -> None:
    llm = LLM(folder, **SETTINGS, pipeline_parallel_size=2)
    assert llm.failure is None
    ids, started = workers(llm), time.monotonic()
    os.kill(ids[0], kind)
    await_that(lambda: llm.failure is not None, _ERROR_LIMIT)
    assert str(llm.failure) == f"rank 1 has ended with code -{kind}"
    _check_end(llm, ids, started)


@pytest.mark.distributed
def test_the_rank_that_was_killed_is_named_and_not_one_that_ended_because_of_it(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 2 and 3 are one stage: the first meets a broken connection when the second is gone."""
    llm = LLM(folder, **SETTINGS, tensor_parallel_size=2, pipeline_parallel_size=2)
    ids, started = workers(llm), time.monotonic()
    _before(llm.target, "begin", 3, lambda: os.kill(ids[2], signal.SIGKILL), monkeypatch)
    with pytest.raises(EngineDeadError, match="rank 3 has ended with code -9"):
        tokens_of(llm)
    _check_end(llm, ids, started)


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_a_rank_that_hangs_ends_the_pass_and_is_ended(
    sizes: tuple[int, int], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(folder, **SETTINGS, **sizes_of(sizes))
    ids, stopped = workers(llm), [0.0]

    def stop() -> None:
        stopped[0] = time.monotonic()
        os.kill(ids[0], signal.SIGSTOP)

    _before(llm.target, "begin", 4, stop, monkeypatch)
    with pytest.raises(EngineDeadError, match="rank 1 does not answer"):
        tokens_of(llm)
    _check_end(llm, ids, stopped[0])


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_nothing_is_computed_after_a_failed_pass_that_nobody_waited_for(
    sizes: tuple[int, int], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other ranks sent for it would be taken for the next one's."""
    llm = LLM(folder, **SETTINGS, **sizes_of(sizes))
    ids, runner = workers(llm), llm.target.shard_runner  # type: ignore[union-attr]
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise RuntimeError("no memory for it")

    def forget() -> None:
        llm.engine._abandon()

    with monkeypatch.context() as patch:
        _before(runner, "run", 1, fail, patch)
        _before(llm.engine.host, "verify", 1, forget, patch)
        with pytest.raises(IndexError):
            tokens_of(llm)
        assert failed.wait(60)
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match="no memory"):
        tokens_of(llm)
    _check_end(llm, ids, started)


@pytest.mark.distributed
def test_an_interrupt_leaves_the_ranks_as_they_were(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on other ranks is ended in order, whenever somebody presses Control-C."""
    with LLM(folder, **SETTINGS, pipeline_parallel_size=2) as llm:
        expected = tokens_of(llm)
        for number in (1, 3, 6):
            with monkeypatch.context() as patch:
                _before(host_executor, "logits_by_tree", number, lambda: os.kill(os.getpid(), signal.SIGINT), patch)
                with pytest.raises(KeyboardInterrupt):
                    tokens_of(llm)
            assert tokens_of(llm) == expected


_SCRIPT = """
import sys, time
from specinfer import LLM
llm = LLM({folder!r}, **{settings!r}, tensor_parallel_size=2)
print("ready", flush=True)
time.sleep(100)
"""


def _process(command: list[str], **settings: Any) -> subprocess.Popen[str]:
    home = str(Path(__file__).parents[2] / "src")
    environment = os.environ | {"PYTHONPATH": home, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, env=environment, **settings)


@pytest.mark.distributed
def test_workers_end_with_a_process_that_is_killed_or_stopped_itself(folder: str, tmp_path: Path) -> None:
    """The script has no guard for its main module, and a worker that is stopped is ended, too."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.format(folder=folder, settings=SETTINGS))
    with _process([sys.executable, str(script)]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        children = children_of(process.pid)
        assert len(children) == 1
        os.kill(children[0], signal.SIGSTOP)
        process.kill()
        await_that(lambda: not any(map(is_alive, children)), _LIMIT)


@contextmanager
def _server(folder: str, *ranks: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    port = free_port()
    flags = ["--port", str(port), "--dtype", "float32", "--max-model-len", "256", "--tree", "best-first:4", *ranks]
    command = [sys.executable, "-m", "specinfer", "serve", folder, "--drafter", "ngram", *flags]
    with _process(command) as process, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        try:
            await_that(lambda: _status(client) == 200, 120)
            yield process, client
        finally:
            process.kill()


def _status(client: httpx.Client) -> int:
    try:
        return client.get("/health").status_code
    except httpx.TransportError:
        return 0


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "rank", "number"),
    [
        (["-tp", "2"], 1, signal.SIGSTOP),
        (["-tp", "2", "-pp", "2"], 3, signal.SIGSTOP),
        (["-tp", "2", "-pp", "2"], 2, signal.SIGKILL),
        (["-tp", "2"], 1, signal.SIGSEGV),
    ],
    ids=["one of two stopped", "rank 3 stopped", "rank 2 killed", "one of two crashed"],
)
def test_clients_of_a_server_get_an_error_and_it_exits(
    ranks: list[str], rank: int, number: signal.Signals, folder: str
) -> None:
    with _server(folder, "--single-process", *ranks) as (process, client):
        others = sorted(children_of(process.pid))
        with client.stream("POST", "/v1/completions", json=_BODY) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(others[rank - 1], number)
            started = time.monotonic()
            rest = list(lines)
            status = _status(client)
        assert time.monotonic() - started < _LIMIT
        assert any('"error"' in line for line in rest)
        assert status in (503, 0)  # 0: it has gone already
        assert process.wait(60) == 1
        await_that(lambda: not any(map(is_alive, others)), _LIMIT)


@pytest.mark.distributed
def test_all_ranks_end_with_a_server_that_is_killed(folder: str) -> None:
    with _server(folder, "-tp", "2", "-pp", "2") as (process, client):
        (engine,) = children_of(process.pid)
        ranks = children_of(engine)
        assert len(ranks) == 3
        with client.stream("POST", "/v1/completions", json=_BODY) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            process.kill()
            with pytest.raises(httpx.TransportError):
                list(lines)
        await_that(lambda: not any(map(is_alive, [engine, *ranks])), _LIMIT)


_FOLLOWER = """
import sys, time
from specinfer.setup.follower import follow
options = {{"nnodes": 2, "node_rank": 1, "master_addr": "127.0.0.1", "master_port": {port}, "insecure_cluster": True}}
code = follow({folder!r}, pipeline_parallel_size=2, **options)
time.sleep(2)
sys.exit(code + 5)
"""


@pytest.mark.distributed
def test_a_machine_that_followed_may_go_on_when_rank_0_has_gone(folder: str, tmp_path: Path) -> None:
    port = free_port()
    script = tmp_path / "script.py"
    script.write_text(_FOLLOWER.format(folder=folder, port=port))
    flags = ["--drafter", "ngram", "--tree", "2", "-pp", "2", "--nnodes", "2", "--master-addr", "127.0.0.1"]
    flags.append("--insecure-cluster")
    command = [sys.executable, "-m", "specinfer", "generate", folder, "x", *flags, "--master-port", str(port)]
    with _process([sys.executable, str(script)]) as follower, _process(command) as first:
        try:
            assert first.wait(120) == 0
            assert follower.wait(60) == 5
        finally:
            follower.kill()
            first.kill()


@pytest.mark.distributed
@pytest.mark.slow
def test_processes_that_were_all_stopped_for_a_while_go_on(folder: str, tmp_path: Path) -> None:
    """As a terminal does with Control-Z, or a machine that sleeps."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.format(folder=folder, settings=SETTINGS) + "print(llm.failure)")
    script.write_text(script.read_text().replace("time.sleep(100)", "sys.stdin.readline()"))
    with _process([sys.executable, str(script)], stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        everybody = [process.pid, *children_of(process.pid)]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for one in everybody:
                os.kill(one, number)
            time.sleep(17 if number == signal.SIGSTOP else 4)
        assert all(map(is_alive, everybody))
        assert process.communicate("\n", timeout=60)[0] == "None\n"
