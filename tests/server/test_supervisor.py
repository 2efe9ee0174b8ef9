"""The parent of the server: engines that die by any signal, at any moment, while the port stays open."""

import contextlib
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.served_command import HOME, ServedCommand, group_of, serving
from worlds import await_that, children_of, is_alive, listening_places

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")

# ------------------------------------------------------------------- the parent, with children of a few lines

PROGRAM = """
import os, signal, socket, sys, time
from specinfer.server import supervisor

listener = socket.create_server(("127.0.0.1", 0))
os.environ["WATCHDOG_PID"] = str(os.getpid())  # as systemd does
stops = []

def show(*words):
    print(*words, flush=True)

def serve(parent):
    parent.on_stop(stops.append)
{body}

show("port", listener.getsockname()[1])
sys.exit(supervisor.supervise(serve, listener))
"""


@contextlib.contextmanager
def supervised(body: str, *, program: str = PROGRAM, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """A program whose function `serve` has this body; it leads a group of processes, none of which outlives it."""
    indented = "\n".join(f"    {line}" for line in body.strip().splitlines())
    environment = os.environ | {"PYTHONPATH": HOME} | settings.pop("env", {})
    command = [sys.executable, "-c", program.format(body=indented)]
    process = subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, env=environment, start_new_session=True, **settings
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("port ")
            yield process
        finally:
            process.kill()
            await_that(lambda: not group_of(process.pid), 5)


def lines_of(process: subprocess.Popen[str]) -> Iterator[list[str]]:
    assert process.stdout is not None
    return (line.split() for line in process.stdout)


def test_a_child_that_dies_is_followed_by_another_until_too_many_have_failed() -> None:
    body = """
show(parent.last_end.replace(" ", "_") or "-", parent.delay)
parent.report("READY=1")
os.kill(os.getpid(), signal.SIGSEGV)
"""
    with supervised(body, stderr=subprocess.PIPE) as process:
        seen = list(lines_of(process))
        assert process.wait(10) == 128 + signal.SIGSEGV
        assert process.stderr is not None
        log = process.stderr.read().splitlines()
    assert [float(delay) for _, delay in seen] == [0, 0, 1, 2, 4, 8, 16, 30]
    assert [end for end, _ in seen] == ["-"] + 7 * ["ended_by_SIGSEGV"]
    assert len(log) == 8
    assert "the engine ended by SIGSEGV; its requests are lost, and the model is loaded again" in log[0]
    assert log[-1].startswith("CRITICAL ")


def test_lines_of_the_parent_have_the_format_of_the_log() -> None:
    body = """
show("start")
if not parent.last_end:
    os.kill(os.getpid(), signal.SIGSEGV)
return 0
"""
    program = PROGRAM.replace("listener))", 'listener, log_format="json"))')
    with supervised(body, program=program, stderr=subprocess.PIPE) as process:
        assert process.wait(10) == 0
        assert process.stderr is not None
        line = json.loads(process.stderr.read())
    assert (line["level"], line["logger"]) == ("error", "specinfer.server.supervisor")
    assert line["message"].startswith("the engine ended by SIGSEGV")


def test_a_child_that_was_ready_and_is_stopped_is_followed_by_another() -> None:
    body = """
show(parent.last_end.replace(" ", "_") or "-")
if parent.last_end:
    return 0
parent.report("READY=1")
for _ in range(8):
    time.sleep(0.25)
    parent.report("WATCHDOG=1")
show("well")
os.kill(os.getpid(), signal.SIGSTOP)
"""
    program = PROGRAM.replace("listener))", "listener, max_silence=1.5))")
    with supervised(body, program=program, stderr=subprocess.PIPE) as process:
        seen = [words[0] for words in lines_of(process)]
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert "the engine has not reported for 2 s, and is killed" in process.stderr.read()
    assert seen[:2] == ["-", "well"]
    assert seen[2].startswith("ended_by_SIGKILL")


def test_a_child_that_reports_a_fault_of_the_user_ends_the_command_with_its_code() -> None:
    with supervised("return 2", stderr=subprocess.PIPE) as process:
        assert process.wait(10) == 2
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_code_after_a_child_was_ready_is_a_failure_like_others() -> None:
    body = """
show("start")
if not parent.last_end:
    parent.report("READY=1")
return 0 if "exit code 7" in parent.last_end else 7
"""
    with supervised(body) as process:
        assert len(list(lines_of(process))) == 2
        assert process.wait(10) == 0


@pytest.mark.parametrize("count", [1, 2])
def test_a_key_at_the_terminal_counts_once_though_both_processes_get_the_signal(count: int) -> None:
    body = """
show("up")
while not stops:
    time.sleep(0.01)
show("first")
time.sleep(0.3)
return 10 + len(stops)
"""
    with supervised(body) as process:
        lines = lines_of(process)
        assert next(lines) == ["up"]
        os.killpg(process.pid, signal.SIGINT)
        assert next(lines) == ["first"]
        if count == 2:
            os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(10) == 10 + count


def test_a_terminal_that_closes_ends_no_server_that_was_started_to_outlive_it() -> None:
    body = """
show("up")
time.sleep(0.3)
return 10 + len(stops)
"""
    program = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + PROGRAM  # as nohup does
    with supervised(body, program=program) as process:
        assert next(lines_of(process)) == ["up"]
        os.killpg(process.pid, signal.SIGHUP)
        assert process.wait(10) == 10


def test_a_signal_before_the_child_serves_ends_both() -> None:
    program = PROGRAM.replace("    parent.on_stop(stops.append)\n", "")
    with supervised("show('loading'); time.sleep(60)", program=program) as process:
        assert next(lines_of(process)) == ["loading"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0


def test_programs_that_the_child_starts_can_be_ended() -> None:
    """A signal that is ignored stays so in programs that are started."""
    body = """
import subprocess
with subprocess.Popen(["sleep", "60"]) as started:
    time.sleep(0.2)
    started.terminate()
    return started.wait() + 100
"""
    with supervised(body) as process:
        assert process.wait(10) == 100 - signal.SIGTERM


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_child_ends_with_a_parent_that_is_killed(is_stopped: bool) -> None:
    with supervised("show(os.getpid()); time.sleep(60)") as process:
        child = int(next(lines_of(process))[0])
        if is_stopped:
            os.kill(child, signal.SIGSTOP)
        process.kill()
        await_that(lambda: not is_alive(child), 5)


SLOW_START = """
import select
if not parent.last_end:
    parent.report("ACCEPTING=1")
    time.sleep(0.5)
    parent.report("READY=1")
    show("ready")
    time.sleep(60)
show("loading")
sys.stdin.readline()
parent.report("ACCEPTING=1")
served = []
while True:
    select.select([listener], [], [])
    try:
        served.append(listener.accept()[0])
        served[-1].sendall(b"served")
    except OSError:  # the parent was first, or the client is gone
        pass
"""


def test_the_parent_answers_while_no_child_accepts_and_hands_connections_over_to_the_next() -> None:
    with supervised(SLOW_START, stdin=subprocess.PIPE) as process:
        lines = lines_of(process)
        assert next(lines) == ["ready"]
        (child,) = children_of(process.pid)
        ((_, port),) = listening_places(process.pid)
        silent = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(100)]
        os.kill(child, signal.SIGKILL)
        for path in ("/health", "/v1/completions"):
            begun = time.monotonic()
            answer = httpx.post(f"http://127.0.0.1:{port}{path}", content=bytes(300_000), trust_env=False)
            assert time.monotonic() - begun < 10
            assert answer.status_code == 503
            assert answer.headers["retry-after"] in ("1", "2", "3")
            error = answer.json()["error"]
            assert error["code"] == "loading"
            assert error["message"].startswith(
                "the engine ended by SIGKILL (which the system sends if memory runs out)"
            )
            assert error["message"].endswith(f"again in {answer.headers['retry-after']} s")
        assert next(lines) == ["loading"]
        for each in silent:
            each.close()
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        await_that(lambda: _first_bytes(port) == b"served", 10)


def test_encrypted_connections_wait_for_the_next_child() -> None:
    program = PROGRAM.replace("(serve, listener)", "(serve, listener, has_tls=True)")
    with supervised(SLOW_START, program=program, stdin=subprocess.PIPE) as process:
        assert next(lines_of(process)) == ["ready"]
        ((_, port),) = listening_places(process.pid)
        os.kill(*children_of(process.pid), signal.SIGKILL)
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert connection.recv(10) == b"served"


def _first_bytes(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        return connection.recv(6)


def test_the_main_process_speaks_to_systemd_and_keeps_its_watchdog_quiet_while_a_model_loads(tmp_path: Path) -> None:
    body = """
if not parent.last_end:
    parent.report("READY=1")
    parent.report("STOPPING=1")  # a failed engine ends, but the service does not
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.2)
parent.report("READY=1")
while not stops:
    time.sleep(0.01)
parent.report("STOPPING=1")
return 0
"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        systemd.settimeout(10)
        with supervised(body, env={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "100000"}) as process:
            heard: list[str] = []
            while heard.count("READY=1") < 2:
                text, extra, *_ = systemd.recvmsg(200, 100)
                heard.append(text.decode())
                assert struct.unpack("3i", extra[0][2])[0] == process.pid, "systemd ignores all others"
            assert "STOPPING=1" not in heard
            loading = heard[heard.index("READY=1") + 1 :]
            assert loading.count("WATCHDOG=1") >= 2
            reason = "ended by SIGKILL (which the system sends if memory runs out)"
            assert f"STATUS=the engine {reason} and is being loaded again" in loading
            process.terminate()
            assert process.wait(10) == 0
        while heard[-1] != "STOPPING=1":
            heard.append(systemd.recv(200).decode())


def test_a_log_that_nobody_reads_does_not_keep_the_next_child_waiting() -> None:
    body = """
show("up", parent.last_end)
parent.report("READY=1")
time.sleep(60)
"""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, bytes(65536))
    os.set_blocking(write, True)
    with supervised(body, stderr=write) as process:
        lines = lines_of(process)
        assert next(lines) == ["up"]
        os.kill(*children_of(process.pid), signal.SIGKILL)
        assert next(lines)[1] == "ended"
    os.close(read)
    os.close(write)


# ------------------------------------------------------------------------------------------ the whole program

BODY = {"prompt": "the end", "n": 4, "max_tokens": 220, "ignore_eos": True, "temperature": 1.0, "stream": True}
LOAD_SECONDS = 120.0  # with what else the machine does
Served = Callable[..., contextlib.AbstractContextManager[ServedCommand]]


@pytest.fixture
def served(model_folder: Callable[..., Path], tmp_path: Path) -> Served:
    """Call it for a server of a tiny model."""

    def run(*flags: str, is_ready: bool = True, key: str = "") -> contextlib.AbstractContextManager[ServedCommand]:
        words = (str(model_folder(tokenizer=True)), "--drafter", "ngram", "--tree", "2,1", *flags)
        environment = {"OMP_NUM_THREADS": "1"} | ({"SPECINFER_API_KEY": key} if key else {})
        return serving(*words, is_ready=is_ready, log=tmp_path / "log", environment=environment)

    return run


def _end(server: ServedCommand, number: signal.Signals) -> None:
    """End the engine by a signal, and see that the port answers with the reason until the model is loaded again."""
    os.kill(server.engine, number)
    server.wait(lambda: f"the engine ended by {number.name}" in server.client.get("/health").text, 5)
    server.wait(server.is_up, LOAD_SECONDS)


def _answers(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"prompt": "the end", "max_tokens": 3})
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_the_command_serves_and_an_engine_that_faults_is_followed_by_another_at_the_same_port(
    served: Served, tmp_path: Path
) -> None:
    key, flags = "a-long-key-of-one", ("--trace", str(tmp_path / "trace.jsonl"), "--served-model-name", "tiny")
    with served(*flags, key=key) as server:
        process, client = server.process, server.client
        assert client.get("/v1/models").status_code == 401
        client.headers["authorization"] = f"Bearer {key}"
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        _answers(client)
        assert "specinfer:generation_tokens_total" in client.get("/metrics").text
        with client.stream("POST", "/v1/completions", json=BODY) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            begun = time.monotonic()
            os.kill(server.engine, signal.SIGSEGV)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
            assert time.monotonic() - begun < 30
        waiting = client.get("/health")  # connected while no engine ran
        assert waiting.status_code == 503
        assert "the engine ended by SIGSEGV and is being loaded again" in waiting.json()["error"]["message"]
        server.wait(server.is_up, LOAD_SECONDS)
        _answers(client)
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert "\nThreads:\t1\n" in status
        assert int(status.split("VmRSS:")[1].split()[0]) < 48 * 1024  # KiB
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    text = (tmp_path / "log").read_text()
    assert "ended by SIGSEGV" in text
    assert f"startup complete: {server.url}" in text
    assert key not in text
    assert "environment: api_key=***" in text
    assert "Traceback" not in text
    for name in ("trace.jsonl", "trace.1.jsonl"):  # that of the engine that died is kept
        assert (tmp_path / name).read_text().startswith('{"type":"trace",')


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.parametrize("moment", ["prefill", "draft", "verify", "idle", "load"])
def test_service_is_back_after_any_end_at_any_moment(
    number: signal.Signals, moment: str, served: Served, model_folder: Callable[..., Path]
) -> None:
    """An engine that reads prompts token by token, or drafts chains of many levels, does that nearly all the time."""
    flags = ["--max-num-batched-tokens", "1"]
    if moment == "draft":
        flags += ["--drafter", str(model_folder(tokenizer=True)), "--tree", ",".join("1" * 16)]
    started = time.monotonic()
    with served(*flags, is_ready=moment != "load") as server:
        client = server.client
        load_seconds = LOAD_SECONDS if moment == "load" else time.monotonic() - started
        failures: list[tuple[type[Exception], float]] = []
        busy = []

        def ask(token: int, own: httpx.Client) -> None:
            """Ask again and again until a request fails."""
            prompt = [token] * (230 if moment == "prefill" else 1)  # another for each: no hit in the prefix cache
            body = BODY | {"prompt": prompt, "n": 1, "max_tokens": 240 - len(prompt), "stream": False}
            try:
                with own:
                    for salt in itertools.count():
                        own.post("/v1/completions", json=body | {"cache_salt": str(salt)}).raise_for_status()
            except httpx.HTTPError as error:
                failures.append((type(error), time.monotonic()))

        if moment in ("prefill", "draft", "verify"):
            # Made before: that takes as long as a request.
            clients = [httpx.Client(base_url=client.base_url, timeout=LOAD_SECONDS) for _ in range(8)]
            busy = [threading.Thread(target=ask, args=(5 + i, own)) for i, own in enumerate(clients)]
            for thread in busy:
                thread.start()

            def is_serving() -> bool:
                assert not failures
                return bool(client.get("/load").json()["num_running"])

            await_that(is_serving, LOAD_SECONDS)
        begun = time.monotonic()
        _end(server, number)
        took = time.monotonic() - begun
        for thread in busy:
            thread.join(5)
            assert not thread.is_alive()
        assert len(failures) == len(busy)
        kinds = {kind for kind, _ in failures}  # one that asks at this moment is told, or not connected
        assert kinds <= {httpx.RemoteProtocolError, httpx.ReadError, httpx.HTTPStatusError, httpx.ConnectError}
        assert not busy or kinds & {httpx.RemoteProtocolError, httpx.ReadError}, "some were being served"
        assert all(when - begun < 5 for _, when in failures)
        _answers(client)
        assert took < load_seconds + 5


@pytest.mark.slow
def test_an_engine_of_several_ranks_is_started_again_with_all_of_them(served: Served) -> None:
    with served("-tp", "2", "--dtype", "float32") as server:
        engine = server.engine
        ranks = children_of(engine)
        assert len(ranks) == 1
        _end(server, signal.SIGKILL)
        assert not any(map(is_alive, (engine, *ranks)))
        _answers(server.client)
