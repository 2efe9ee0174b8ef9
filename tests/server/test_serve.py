"""The server as a process: from the taken port to the last word of every stream, and what connections may do."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving import error_of, events_of, slow_steps
from specinfer.core.errors import ModelError
from specinfer.core.limits import QueueLimits
from specinfer.delivery import Delivery
from specinfer.engine.engine import Engine
from specinfer.inputs.jobs import JobReader
from specinfer.llm import LLM
from specinfer.server import connection, process
from specinfer.server.config import ServerConfig
from specinfer.server.listening import listening
from specinfer.server.process import Service
from tests.server.served_command import status_of
from worlds import await_that

LONG = {"prompt": "the end", "max_tokens": 200, "ignore_eos": True, "temperature": 0.0, "stream": True}
Work = Callable[[httpx.Client], Any]


@pytest.fixture(scope="module")
def llm(model_folder: Callable[..., Path]) -> LLM:
    return LLM(model_folder(tokenizer=True), drafters=["ngram"], tree="1,1", max_num_seqs=8)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch)


def run(
    load: Callable[[], LLM],
    work: Work,
    *,
    ends: bool = True,
    waits: bool = True,
    left: list[int] | None = None,
    limits: QueueLimits | None = None,
    **config: Any,
) -> tuple[int, Any]:
    """Serves in this thread while `work` calls from another one; the exit code, and what `work` made of it.

    Args:
        ends: Whether the server is told to end when the work is done.
        waits: Whether the work begins when the server is ready.
        left: Gets the code with which the process would leave a thread behind.
    """
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    settings = ServerConfig(**({"port": port, "shutdown_timeout": 5.0} | config))
    service = Service(load, "tiny", ("tiny",), settings, limits or QueueLimits(), ([] if left is None else left).append)

    def call() -> Any:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20.0) as client:
            try:
                if waits:
                    await_that(lambda: status_of(client) == 200, 60)
                return work(client)
            finally:
                if ends:
                    os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        code = process.run(service)
        return code, future.result(20)


def streams(client: httpx.Client, count: int, pool: ThreadPoolExecutor) -> Callable[[], list[httpx.Response]]:
    """Begins so many streams; call it for their answers."""
    futures = [pool.submit(client.post, "/v1/completions", json=LONG) for _ in range(count)]
    await_that(lambda: client.get("/load").json()["num_running"] == count, 60)
    return lambda: [future.result(20) for future in futures]


# ---------------------------------------------------------------------------------------------- ends


@pytest.mark.usefixtures("slow")
def test_streams_end_in_time_or_with_an_error_when_the_server_is_stopped(llm: LLM) -> None:
    def work(client: httpx.Client) -> list[httpx.Response]:
        with ThreadPoolExecutor(8) as pool:
            answers = streams(client, 8, pool)
            os.kill(os.getpid(), signal.SIGTERM)
            await_that(lambda: status_of(client) == 503, 60)
            assert client.get("/health").status_code == 200
            refused = client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503
            assert error_of(refused)["code"] == "shutting_down"
            assert "retry-after" in refused.headers
            return answers()

    begun, observers = time.monotonic(), list(llm.engine.observers)
    code, answers = run(lambda: llm, work, ends=False, shutdown_timeout=0.2)
    assert code == 0
    assert time.monotonic() - begun < 30
    for answer in answers:
        said = events_of(answer.text)
        assert said[-1]["error"]["code"] == "engine_unavailable"
        assert len(said) < 200
    code, answers = run(lambda: llm, work, ends=False, shutdown_timeout=20.0)
    assert code == 0
    for answer in answers:
        assert events_of(answer.text)[-1]["choices"][0]["finish_reason"] == "length"
    assert llm.engine.observers == observers  # nothing of a server stays with its model


@pytest.mark.usefixtures("slow")
def test_a_second_signal_ends_at_once(llm: LLM) -> None:
    def work(client: httpx.Client) -> list[httpx.Response]:
        with ThreadPoolExecutor(2) as pool:
            answers = streams(client, 2, pool)
            os.kill(os.getpid(), signal.SIGINT)
            await_that(lambda: status_of(client) == 503, 60)
            os.kill(os.getpid(), signal.SIGINT)
            return answers()

    begun = time.monotonic()
    code, _ = run(lambda: llm, work, ends=False, shutdown_timeout=60.0)
    assert code == 1
    assert time.monotonic() - begun < 30


def test_a_pass_that_takes_long_is_left_behind_by_a_second_signal(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, computes, goes_on = Engine.step, threading.Event(), threading.Event()

    def long(self: Engine) -> Any:
        computes.set()
        assert goes_on.wait(30)
        return step(self)

    monkeypatch.setattr(Engine, "step", long)
    monkeypatch.setattr(Delivery, "deliver", lambda *_: None)  # the loop is closed when the pass ends

    def work(client: httpx.Client) -> None:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.post, "/v1/completions", json=LONG)
            assert computes.wait(10)
            os.kill(os.getpid(), signal.SIGINT)
            await_that(lambda: status_of(client) == 503, 60)
            os.kill(os.getpid(), signal.SIGINT)
            with contextlib.suppress(httpx.HTTPError):
                answer.result(20)

    left: list[int] = []
    code, _ = run(lambda: llm, work, ends=False, left=left, shutdown_timeout=60.0)
    (thread,) = [one for one in threading.enumerate() if one.name == "specinfer-engine"]
    goes_on.set()
    thread.join(10)
    assert code == 1
    assert left == [1]


def test_a_prompt_that_takes_long_to_read_is_left_behind_at_the_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a schema of many patterns under `allOf` does: its compilation takes minutes, and cannot be interrupted."""
    read, reads, goes_on = JobReader.read, threading.Event(), threading.Event()

    def long(self: JobReader, *args: Any) -> Any:
        reads.set()
        assert goes_on.wait(60)
        return read(self, *args)

    monkeypatch.setattr(JobReader, "read", long)
    monkeypatch.setattr(connection, "_FLUSH_SECONDS", 1)

    def work(client: httpx.Client) -> None:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.post, "/v1/completions", json=LONG | {"bad_words": ["a"]})
            assert reads.wait(10)
            os.kill(os.getpid(), signal.SIGTERM)
            with contextlib.suppress(httpx.HTTPError):
                answer.result(20)

    left: list[int] = []
    begun = time.monotonic()
    code, _ = run(lambda: llm, work, ends=False, left=left, shutdown_timeout=0.2)
    took = time.monotonic() - begun
    goes_on.set()
    assert code == 0, "a client cannot make the server's end a failure"
    assert left == [0], "the process does not wait for the thread"
    assert took < 15


def test_an_engine_that_fails_ends_the_server(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step
    steps = 0

    def failing(self: Engine) -> Any:
        nonlocal steps
        steps += 1
        if steps > 20:
            raise MemoryError("no more")
        return step(self)

    monkeypatch.setattr(Engine, "step", failing)

    def work(client: httpx.Client) -> httpx.Response:
        return client.post("/v1/completions", json=LONG)

    code, answer = run(lambda: llm, work, ends=False)
    assert code == 1
    said = events_of(answer.text)
    assert said[-1]["error"]["type"] == "server_error"


def test_a_step_that_hangs_ends_the_server(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, left = threading.Event(), []
    step = Engine.step

    def hanging(self: Engine) -> Any:
        goes_on.wait(30)
        return step(self)

    monkeypatch.setattr(Engine, "step", hanging)

    def work(client: httpx.Client) -> None:
        with contextlib.suppress(httpx.TransportError):  # the process ends with the stream unfinished
            client.post("/v1/completions", json=LONG)

    code, _ = run(lambda: llm, work, ends=False, limits=QueueLimits(max_step_seconds=0.5), left=left)
    goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "specinfer-engine":
            thread.join(20)  # it frees what the request holds
    assert code == 1
    assert left == [1], "the process does not wait for the step"


def test_systemd_is_told_when_the_server_is_ready_well_and_stopping(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    heard: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "20000")

        def work(client: httpx.Client) -> None:
            while heard.count("WATCHDOG=1") < 3:
                heard.append(systemd.recv(100).decode())

        assert run(lambda: llm, work)[0] == 0
        systemd.settimeout(0.1)
        with contextlib.suppress(TimeoutError):
            while True:
                heard.append(systemd.recv(100).decode())
    assert heard[0] == "READY=1"
    assert set(heard[heard.index("STOPPING=1") + 1 :]) <= {"WATCHDOG=1"}


# --------------------------------------------------------------------------------------------- starts


def test_the_port_answers_while_the_model_loads(llm: LLM) -> None:
    ready = threading.Event()

    def load() -> LLM:
        assert ready.wait(20)
        return llm

    def work(client: httpx.Client) -> None:
        await_that(lambda: status_of(client, "/health") == 503, 60)
        assert error_of(client.get("/health"))["code"] == "loading"
        refused = client.post("/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        ready.set()
        await_that(lambda: status_of(client) == 200, 60)

    assert run(load, work, waits=False)[0] == 0


def test_a_signal_while_the_model_loads_ends_the_server() -> None:
    never = threading.Event()

    def load() -> LLM:
        never.wait(60)
        raise ModelError("given up")

    def work(client: httpx.Client) -> None:
        await_that(lambda: status_of(client, "/health") == 503, 60)

    left: list[int] = []
    try:
        begun = time.monotonic()
        assert run(load, work, waits=False, left=left)[0] == 0
        assert time.monotonic() - begun < 30
        assert left == [0]
    finally:
        never.set()


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def load() -> LLM:
        raise ModelError("no such model")

    with pytest.raises(ModelError, match="no such model"):
        run(load, lambda client: None, ends=False, waits=False)


def test_an_address_that_cannot_be_listened_on_is_named_by_its_setting(tmp_path: Path) -> None:
    def refusal(**settings: Any) -> str:
        with pytest.raises(OSError, match="cannot listen on") as refused, listening(ServerConfig(**settings)):
            pass
        return str(refused.value)

    with listening(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        assert refusal(port=port) == (
            f"port: cannot listen on 127.0.0.1:{port}: Address already in use; choose another, or 0 for a free one"
        )
    assert refusal(host="192.0.2.1", insecure=True).startswith("host: cannot listen on 192.0.2.1:8000: Cannot assign")
    assert refusal(uds=str(tmp_path / "no" / "socket")).endswith("No such file or directory; choose another")


def test_a_unix_socket_is_for_its_owner_and_removed_at_the_end(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as left:  # as a process that was killed leaves it
        left.bind(str(path))
    config = ServerConfig(uds=str(path), shutdown_timeout=1.0)

    def call() -> int:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            await_that(lambda: status_of(client) == 200, 60)
            mode = path.stat().st_mode & 0o777
            with pytest.raises(OSError, match="in use"), listening(config):
                pass
            os.kill(os.getpid(), signal.SIGTERM)
            return mode

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        assert process.run(Service(lambda: llm, "tiny", ("tiny",), config, QueueLimits())) == 0
        assert future.result(5) & 0o007 == 0
    assert not path.exists()
