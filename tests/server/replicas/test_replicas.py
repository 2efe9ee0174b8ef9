"""Several engines behind one port, with Ray: they answer as one does, and none of them may be missed."""

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hostile import MALFORMED
from serving import events_of
from specinfer import LLM, SamplingParams
from tests.server.served_command import HOME, PATIENCE, ServedCommand
from worlds import children_of, is_alive, listening_places

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs specinfer[ray]"),
    pytest.mark.timeout(4 * 300),  # Ray alone takes a minute to start where others compute, too
]
TITLE = "ray::ServeReplica:specinfer:Engine"
SETTINGS: dict[str, object] = {
    "replica-cpus": 0.5, "scale-requests": 4, "scale-up-seconds": 1, "scale-down-seconds": 3, "shutdown-timeout": 120
}  # fmt: skip
PROMPTS = ["Once upon a time", "def add(a, b):", "The quick brown", "# A list of"]


# Runs when a Python process starts: the first replica that comes to the phase named in a file ends itself there.
ENDING = """
import os, sys, threading, time
from pathlib import Path

WANTED = Path(__file__).with_name("wanted")

def ended(phase, inner):
    count = 0
    def called(*args, **kwargs):
        nonlocal count
        if WANTED.exists():
            wanted, number, signal = WANTED.read_text().split()
            count += wanted == phase
            if wanted == phase and count == int(number):
                WANTED.rename(WANTED.with_name("ended"))
                os.kill(os.getpid(), int(signal))
                time.sleep(60)
        return inner(*args, **kwargs)
    return called

def change():
    while not hasattr(sys.modules.get("specinfer.engine.host_executor"), "HostExecutor"):
        time.sleep(0.01)
    owner = sys.modules["specinfer.engine.host_executor"].HostExecutor
    for phase, name in (("prefill", "begin"), ("draft", "_draft"), ("verify", "_verify")):
        setattr(owner, name, ended(phase, getattr(owner, name)))

if any("default_worker" in word for word in sys.orig_argv):
    threading.Thread(target=change, daemon=True).start()
"""


class Server(ServedCommand):
    """The command with replicas."""

    def __init__(self, folder: Path, replicas: str, **settings: object) -> None:
        self.load_seconds = 0.0
        self.ending = folder / "ending"
        self.ending.mkdir()
        (self.ending / "sitecustomize.py").write_text(ENDING)
        self._settings = SETTINGS | settings
        self.config = folder / "serve.yaml"
        self.configure(replicas)
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(self.ending), HOME))}
        super().__init__("demo", "--config", str(self.config), log=folder / "log.txt", environment=environment)

    def configure(self, replicas: str) -> None:
        """What is read at the start, and again on SIGUSR1."""
        self.config.write_text(json.dumps({"replicas": replicas} | self._settings))  # JSON is YAML, too

    def num_serving(self) -> int:
        """Replicas that answer."""
        lines = self.client.get("/metrics").text.splitlines()
        return int(float(next(line for line in lines if line.startswith("specinfer:replicas{")).split()[-1]))

    def counts_ended(self, reason: str) -> list[float]:
        """Outputs that ended for this reason, one number for each replica that had some."""
        lines = [
            line for line in self.client.get("/metrics").text.splitlines() if f'finished_reason="{reason}"' in line
        ]
        return [float(line.split()[-1]) for line in lines if line.startswith("specinfer:request_success_total")]

    def num_ended(self, reason: str) -> float:
        return sum(self.counts_ended(reason))

    def replica_pids(self) -> list[int]:
        """Processes of replicas that descend from this one."""
        found = []
        for pid in self.process_ids():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(TITLE.encode()):
                    found.append(pid)
        return found

    def process_ids(self) -> list[int]:
        """This one and all that descend from it."""
        parents = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        return [pid for pid in parents if self._descends(pid, parents)]

    def _descends(self, pid: int, parents: dict[int, int]) -> bool:
        while pid in parents and pid != self.process.pid:
            pid = parents[pid]
        return pid == self.process.pid


@contextlib.contextmanager
def serving(folder: Path, replicas: str, **settings: object) -> Iterator[Server]:
    started = Server(folder, replicas, **settings)
    try:
        started.load_seconds = started.wait(started.is_up)
        yield started
    finally:
        if started.process.poll() is None:
            started.process.terminate()
        started.process.wait(PATIENCE)
        started.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("replicas"), "2") as started:
        yield started


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo")


def body(number: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPTS[number % len(PROMPTS)], "seed": number, "max_tokens": 24, "ignore_eos": True} | fields


def told(llm: LLM, number: int, **fields: Any) -> str:
    """What one process says."""
    asked = body(number, **fields)
    params = {name: asked[name] for name in ("seed", "max_tokens", "ignore_eos")}
    (output,) = llm.generate([asked["prompt"]], SamplingParams(**params))
    return output.outputs[0].text


def at_once(server: Server, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.client.base_url, timeout=PATIENCE, limits=limits) as client:
            return await work(client)

    return asyncio.run(run())


def send_nonsense(ports: list[int]) -> None:
    """Send each of Ray's ports what a stranger of this machine may send, and leave the connections open meanwhile."""
    http2, tls = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    with contextlib.ExitStack() as opened:
        for port in ports:
            for sent in (*MALFORMED, http2 + b"\xff" * 2000, tls + bytes(300), b"\xff" * 5000, b""):
                with contextlib.suppress(OSError):  # some ports take a single connection
                    stranger = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.5))
                    stranger.sendall(sent)


@pytest.mark.distributed
def test_one_replica_serves_as_one_process_does(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command to its end."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))  # the paths of sockets must be short
    monkeypatch.setenv("TMPDIR", str(place))
    with serving(place, "1") as server:
        for number in range(4):
            answer = server.client.post("/v1/completions", json=body(number, stream=number % 2 == 1))
            assert _how(answer, told(llm, number), stream=number % 2 == 1) == "right"
        (replica,) = server.replica_pids()
        processes = server.process_ids()
        assert len(processes) > 5  # Ray's own, too
        places = {(host.removeprefix("::ffff:"), port) for pid in processes for host, port in listening_places(pid)}
        assert {host for host, _ in places} == {"127.0.0.1"}
        send_nonsense([port for _, port in places if port != server.port])
        answer = server.client.post("/v1/completions", json=body(0))
        assert _how(answer, told(llm, 0), stream=False) == "right"
        assert server.replica_pids() == [replica]
        assert not [pid for pid in processes if not is_alive(pid)]
        server.process.terminate()
        assert server.process.wait(PATIENCE) == 0
        assert not is_alive(replica)
        assert not list(place.glob("specinfer-ray-*"))


@pytest.mark.distributed
def test_answers_are_those_of_one_process_whichever_replica_gives_them(server: Server, llm: LLM) -> None:
    async def work(client: httpx.AsyncClient) -> list[httpx.Response]:
        asked = [body(number, stream=number % 2 == 1) for number in range(16)]
        return await asyncio.gather(*[client.post("/v1/completions", json=one) for one in asked])

    answers = at_once(server, work)
    for number, answer in enumerate(answers):
        assert answer.status_code == 200
        said = events_of(answer.text) if number % 2 == 1 else [answer.json()]
        assert "".join(one["choices"][0]["text"] for one in said) == told(llm, number)
    counts = server.counts_ended("length")
    assert len(counts) == 2  # both took part
    assert sum(counts) == 16


@pytest.mark.distributed
def test_a_client_that_leaves_ends_its_request(server: Server) -> None:
    before = server.num_ended("abort")
    # So much that it cannot have ended by itself: a fast machine makes 900 tokens before it is asked for its load.
    with server.client.stream("POST", "/v1/completions", json=body(0, max_tokens=900, n=32, stream=True)) as answer:
        next(answer.iter_bytes())
    server.wait(lambda: server.num_ended("abort") > before, 60.0)
    server.wait(lambda: not server.client.get("/load").json()["server_load"], 60.0)


@pytest.mark.distributed
def test_beginnings_that_are_alike_go_to_one_replica(server: Server) -> None:
    prompt = "All happy families are alike; each unhappy family is unhappy in its own way. " * 8
    cached = []
    for number in range(6):
        answer = server.client.post("/v1/completions", json=body(0, prompt=f"{prompt} {number}")).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0
    assert min(cached[1:]) > 100


@pytest.mark.distributed
def test_a_replica_that_is_killed_takes_no_request_with_it_unseen(server: Server, llm: LLM) -> None:
    expected = [told(llm, number, max_tokens=48) for number in range(16)]
    hows: list[str] = []  # answers ended

    async def caller(client: httpx.AsyncClient, number: int, enough: asyncio.Event) -> None:
        while not enough.is_set():
            stream = number % 2 == 1
            answer = await client.post("/v1/completions", json=body(number % 16, max_tokens=48, stream=stream))
            hows.append(_how(answer, expected[number % 16], stream=stream))
            number += 16 + 1

    async def rate() -> float:
        """Answers a second, of the next 32."""
        enough = len(hows) + 32
        return 32 / await asyncio.to_thread(server.wait, lambda: len(hows) >= enough)

    async def work(client: httpx.AsyncClient) -> tuple[float, float, float]:
        enough = asyncio.Event()
        callers = [asyncio.ensure_future(caller(client, number, enough)) for number in range(16)]
        before = await rate()
        os.kill(server.replica_pids()[0], signal.SIGKILL)
        gone = await asyncio.to_thread(server.wait, lambda: server.num_serving() == 1)
        replaced = gone + await asyncio.to_thread(server.wait, lambda: server.num_serving() == 2)
        after = await rate()
        enough.set()
        await asyncio.gather(*callers)
        return before, replaced, after

    before, replaced, after = at_once(server, work)
    assert set(hows) <= {"right", "reported"}, hows
    assert hows.count("reported") <= 16  # those that had begun
    print(
        f"{len(hows)} answers, {hows.count('told')} of them told of the loss; replaced in {replaced:.1f} s; "
        f"{before:.1f} answers/s before, {after:.1f}/s after"
    )


def _how(answer: httpx.Response, expected: str, *, stream: bool) -> str:
    """Whether an answer is right, or tells its reader that it is not."""
    if answer.status_code != 200:
        assert answer.status_code == 503
        return "reported" if answer.json()["error"]["code"] == "engine_unavailable" else "wrong"
    said = events_of(answer.text) if stream else [answer.json()]
    if "error" in said[-1]:
        return "reported"
    return "right" if "".join(one["choices"][0]["text"] for one in said) == expected else "wrong"


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSEGV])
def test_a_replica_that_dies_while_nothing_runs_is_replaced(server: Server, llm: LLM, kind: signal.Signals) -> None:
    before = server.replica_pids()
    os.kill(before[0], kind)
    begun = time.monotonic()
    for number in range(4):
        assert (
            _how(server.client.post("/v1/completions", json=body(number)), told(llm, number), stream=False) == "right"
        )
    print(f"four answers {time.monotonic() - begun:.1f} s after its end")
    server.wait(lambda: not is_alive(before[0]))
    server.wait(lambda: server.num_serving() == 2 and len(server.replica_pids()) == 2)
    assert before[0] not in server.replica_pids()


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.parametrize(("phase", "number"), [("prefill", 1), ("draft", 3), ("verify", 3)])
def test_requests_of_a_replica_that_ends_in_any_phase_end_soon_and_it_is_replaced(
    server: Server, llm: LLM, phase: str, number: int, kind: signal.Signals
) -> None:
    server.wait(lambda: server.num_serving() == 2)
    before = server.replica_pids()
    others = {pid: children_of(pid) for pid in before}
    expected = [told(llm, i, max_tokens=48) for i in range(8)]
    server.ending.joinpath("ended").unlink(missing_ok=True)
    server.ending.joinpath("wanted").write_text(f"{phase} {number} {kind:d}")

    async def ask(client: httpx.AsyncClient, i: int) -> tuple[str, float]:
        answer = await client.post("/v1/completions", json=body(i, max_tokens=48, stream=True))
        return _how(answer, expected[i], stream=True), time.monotonic()

    async def ended() -> float:
        await asyncio.to_thread(server.wait, lambda: any(not is_alive(pid) for pid in before))
        return time.monotonic()

    async def work(client: httpx.AsyncClient) -> tuple[float, list[tuple[str, float]]]:
        ending = asyncio.ensure_future(ended())
        answers = await asyncio.gather(*[ask(client, i) for i in range(8)])
        return await ending, answers

    end, answers = at_once(server, work)
    assert {how for how, _ in answers} <= {"right", "reported"}
    lost = [when - end for how, when in answers if how == "reported"]
    assert lost or phase == "prefill", "streams that had begun"
    assert max(lost, default=0.0) < 5
    server.wait(lambda: server.num_serving() == 2)
    took = time.monotonic() - end
    print(f"{len(lost)} of 8 told after {max(lost, default=0.0):.1f} s; replaced in {took:.1f} s")
    assert took < server.load_seconds + 5
    (dead,) = (pid for pid in before if not is_alive(pid))
    server.wait(lambda: not any(map(is_alive, others[dead])))
    assert len(server.replica_pids()) == 2


@pytest.mark.distributed
def test_new_settings_replace_replicas_without_a_failure_and_follow_the_load(server: Server) -> None:
    statuses: list[int] = []

    async def caller(client: httpx.AsyncClient, number: int, enough: asyncio.Event) -> None:
        while not enough.is_set():
            answer = await client.post("/v1/completions", json=body(number, max_tokens=100))
            statuses.append(answer.status_code)

    async def work(client: httpx.AsyncClient) -> float:
        enough = asyncio.Event()
        callers = [asyncio.ensure_future(caller(client, number, enough)) for number in range(12)]
        server.configure("1:3")
        before = set(server.replica_pids())
        server.process.send_signal(signal.SIGUSR1)
        gone = await asyncio.to_thread(server.wait, lambda: not before & set(server.replica_pids()))
        there = await asyncio.to_thread(server.wait, lambda: server.num_serving() == 3)
        enough.set()
        await asyncio.gather(*callers)
        return gone + there

    grown = at_once(server, work)
    assert set(statuses) == {200}
    took = server.wait(lambda: server.num_serving() == 1)
    print(f"{len(statuses)} answers; three replicas after {grown:.0f} s, one {took:.0f} s after")
    assert server.client.post("/v1/completions", json=body(1)).status_code == 200


@pytest.mark.distributed
def test_it_ends_in_order_on_a_signal(server: Server) -> None:
    async def work(client: httpx.AsyncClient) -> list[httpx.Response]:
        asked = [client.post("/v1/completions", json=body(number, max_tokens=200, stream=True)) for number in range(8)]
        running = [asyncio.ensure_future(one) for one in asked]
        while (await client.get("/load")).json()["num_running"] < 8:
            await asyncio.sleep(0.01)
        server.process.terminate()
        while (await client.get("/health/ready")).status_code == 200:
            await asyncio.sleep(0.01)
        assert (await client.post("/v1/completions", json=body(0))).json()["error"]["code"] == "shutting_down"
        return await asyncio.gather(*running)

    pids = server.replica_pids()
    for answer in at_once(server, work):
        assert events_of(answer.text)[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(PATIENCE) == 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists()]


@pytest.mark.distributed
def test_a_replica_may_be_several_ranks_and_none_may_be_missed(llm: LLM, tmp_path: Path) -> None:
    with serving(tmp_path, "1", **{"tensor-parallel-size": 2}) as server:
        for number in range(2):
            answer = server.client.post("/v1/completions", json=body(number, max_tokens=8)).json()
            assert answer["choices"][0]["text"] == told(llm, number, max_tokens=8)
        (replica,) = server.replica_pids()
        (rank,) = children_of(replica)
        os.kill(rank, signal.SIGKILL)
        server.wait(lambda: not is_alive(replica) and bool(server.replica_pids()))
        server.wait(server.is_up)
        answer = server.client.post("/v1/completions", json=body(2, max_tokens=8)).json()
        assert answer["choices"][0]["text"] == told(llm, 2, max_tokens=8)
        (replica,) = server.replica_pids()
        ranks = children_of(replica)
        server.process.terminate()
        assert server.process.wait(PATIENCE) == 0
        assert not any(map(is_alive, (replica, *ranks)))
