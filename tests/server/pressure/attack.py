"""Hostile clients at a server for minutes, and two honest keys that must not notice.

    PYTHONPATH=tests/support python -m tests.server.pressure attack --minutes 10 --json attack.json

starts `specinfer serve demo` with a key file that limits the hostile keys, measures the honest keys alone and under
attack in turns, and reports their answers, their times to the first token, the server's memory and the size of its log.
The hostile clients have a process of their own, at the lowest priority: on one machine, what they cost themselves must
not count as what they cost the server.
"""

import asyncio
import functools
import multiprocessing
import os
import queue
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from hostile import BOMBS, CHAT, MALFORMED, TEXT
from tests.server.pressure.served import Body, events_of
from tests.server.served_command import serving

_LIMITS = "max-num-seqs=1 max-num-queued-reqs=4 max-tokens-per-minute=6000 max-connections=8 max-incoming-bytes=8000000"
_ROUNDS = 6  # in each, quiet time and then an attack of three times that length
_AFTER_ERROR = 0.5  # seconds until a client asks again
_PATIENCE = 5.0  # seconds for the hostile clients to end
_HANGS = 1.0  # seconds without an event after which a request that is cut off counts with what it has waited
_SETTLED = 0.5  # seconds until the hostile requests of a round are there, or gone
# A cache that is full soon: pages of a larger one become memory when they are used first, which looks like a leak.
_OPTIONS = ("--kv-cache-memory-bytes", "50M")
_READERS = {"specinfer.inputs.text_reader", "specinfer.core.grammar.trial"}  # modules run as processes
_HONEST = ("honest-key-1", "honest-key-2")
_MIXTURE = (
    "bombs", "long_prompts", "many_outputs", "texts_to_read", "slow_reader", "leaver", "silent", "malformed",
)  # fmt: skip
_SCHEMAS = [BOMBS[name] for name in ("patterns of one string", "3,000 optional properties", "references in a circle")]
_PROMPTS = ("def main(", "import os\n", "class Stack:\n", "for i in ", "# numbers\n", "def read(self, size):", "x = ")
_GREEDY = _PROMPTS[::2]


@dataclass(slots=True)
class Report:
    """What came of it; times in seconds."""

    quiet: list[float] = field(default_factory=list)  # to the first token
    attacked: list[float] = field(default_factory=list)
    quiet_gaps: list[float] = field(default_factory=list)  # between the events of a stream
    attacked_gaps: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    num_cut: int = 0  # honest requests that had not ended when their phase did
    num_interrupted: int = 0  # honest requests that ended with an error while they might
    statuses: dict[str, int] = field(default_factory=dict)  # of the hostile clients' requests
    memory_mib: list[tuple[float, float]] = field(default_factory=list)  # with times; of the server and its engine
    reader_mib: list[float] = field(default_factory=list)  # of the processes that read for strangers, which have limits
    log_bytes: int = 0

    def growth(self) -> float:
        """The slope in MiB a minute over the last two thirds of what is kept, the least in each tenth of them."""
        last = self.memory_mib[len(self.memory_mib) // 3 :]
        size = -(-len(last) // 10)
        kept = [min(last[i : i + size], key=lambda sample: sample[1]) for i in range(0, len(last), size)]
        return 60 * statistics.linear_regression(*zip(*kept, strict=True)).slope

    @property
    def is_sound(self) -> bool:
        return not self.wrong and not self.failed

    @property
    def ratio(self) -> float:
        """The median time to the first token under attack divided by the one without."""
        return statistics.median(self.attacked) / statistics.median(self.quiet)

    @property
    def num_hostile(self) -> int:
        """The number of the hostile clients' requests."""
        return sum(self.statuses.values())

    def lines(self) -> list[str]:
        """The report in words."""
        times = [(name, sorted(values)) for name, values in (("quiet", self.quiet), ("under attack", self.attacked))]
        shown = [
            f"first token {name}: median {1e3 * statistics.median(values):.1f} ms, "
            f"p95 {1e3 * values[len(values) * 95 // 100]:.1f} ms, {len(values)} answers"
            for name, values in times
            if values
        ]
        most, most_read = max(mib for _, mib in self.memory_mib), max(self.reader_mib)
        memory = (
            f"memory: at most {most:.0f} MiB, which grow by {self.growth():+.1f} MiB a minute; processes that read for "
            f"strangers: at most {most_read:.0f} MiB"
        )
        return [
            *shown, f"ratio of medians {self.ratio:.2f}; {len(self.wrong)} wrong, {len(self.failed)} failed", memory,
            f"log: {self.log_bytes / 1e6:.2f} MB; hostile requests by status: {self.statuses}",
            *self.wrong[:5], *self.failed[:5],
        ]  # fmt: skip


@dataclass(slots=True)
class Answer:
    """A stream that is read, with the seconds before each of its events."""

    text: str = ""
    seconds: list[float] = field(default_factory=list)
    last: float = field(default_factory=time.monotonic)

    def add(self, text: str) -> None:
        """Note an event."""
        now = time.monotonic()
        self.seconds.append(now - self.last)
        self.last, self.text = now, self.text + text

    def cut(self) -> None:
        """Count the wait under way, if it is long: a phase that ends must not hide that nothing comes."""
        waited = time.monotonic() - self.last
        if waited > _HANGS:
            self.seconds.append(waited)


class Honest:
    """Honest clients of one server, one for each key, and its memory.

    Args:
        may_fail: Whether a request that began at a time may end with an error, or without an answer.
    """

    def __init__(
        self, port: int, pid: int, seed: int, keys: Sequence[str] = _HONEST, num_rounds: int = _ROUNDS,
        may_fail: Callable[[float], bool] = lambda begun: False,
    ) -> None:  # fmt: skip
        self._keys, self._num_rounds, self._may_fail = keys, num_rounds, may_fail
        self._url = f"http://127.0.0.1:{port}"
        self._server, self._random = psutil.Process(pid), random.Random(seed)
        self._expected: dict[str, str] = {}
        self.asking = set[asyncio.Task[None]]()  # requests under way
        self.report = Report()

    async def run(self, seconds: float, is_attacked: Any) -> Report:
        """Measure for this time in all; `is_attacked`, a multiprocessing event, is set by turns."""
        begun, part = time.monotonic(), seconds / (4 * self._num_rounds)
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as self._client:
            await asyncio.wait_for(self._learn(), seconds)
            watching = asyncio.create_task(self._watch(seconds / 200))
            for i in range(self._num_rounds):
                await self._honest(begun + (4 * i + 1) * part, self.report.quiet, self.report.quiet_gaps)
                is_attacked.set()
                await asyncio.sleep(_SETTLED)
                await self._honest(
                    begun + 4 * (i + 1) * part - _SETTLED, self.report.attacked, self.report.attacked_gaps
                )
                is_attacked.clear()
                await asyncio.sleep(_SETTLED)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        return self.report

    async def _learn(self) -> None:
        """Ask for each text once, alone, and remember the answers."""
        for prompt in _PROMPTS:
            answer = Answer()
            await self._ask(self._keys[0], prompt, answer, tree="off")
            self._expected[prompt] = answer.text

    async def load(self, end: float, hostile: Callable[[], None]) -> None:
        """Ask until a time by `time.monotonic`, and call a function once the answers are known."""
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as self._client:
            await self._learn()
            hostile()
            await self._honest(end, self.report.attacked, self.report.attacked_gaps)

    async def _honest(self, end: float, firsts: list[float], gaps: list[float]) -> None:
        """Ask until a time by `time.monotonic`, and cut off what has not ended by then."""

        async def client(key: str) -> None:
            while time.monotonic() < end and len(self.report.failed) < 20:
                prompt, answer, begun = self._random.choice(_PROMPTS), Answer(), time.monotonic()
                asking = asyncio.create_task(self._ask(key, prompt, answer))
                self.asking.add(asking)
                try:
                    await asking
                    if answer.text != self._expected[prompt]:
                        self.report.wrong.append(f"{prompt!r}: {answer.text!r} instead of {self._expected[prompt]!r}")
                except (httpx.HTTPError, AssertionError, ValueError) as error:
                    if self._may_fail(begun) and not isinstance(error, httpx.TimeoutException):
                        self.report.num_interrupted += 1
                        await asyncio.sleep(_AFTER_ERROR)
                    else:
                        self.report.failed.append(f"{type(error).__name__}: {error}")
                except asyncio.CancelledError:
                    self.report.num_cut += 1
                    if not asking.cancelled() or _current().cancelling():
                        asking.cancel()
                        answer.cut()
                        raise
                finally:
                    self.asking.discard(asking)
                    firsts.extend(answer.seconds[:1])
                    gaps.extend(answer.seconds[1:])
                await asyncio.sleep(self._random.uniform(0.1, 0.4))

        await _end_at(end, map(client, self._keys))

    async def _ask(self, key: str, prompt: str, answer: "Answer", **speculative: str) -> None:
        """Read a stream that is greedy or seeded."""
        sampling = {"temperature": 0.0} if prompt in _GREEDY else {"temperature": 0.8, "seed": 5}
        body = {"prompt": prompt, "max_tokens": 32, "stream": True, "speculative": speculative, **sampling}
        async with self._client.stream("POST", TEXT, json=body, headers=bearer(key)) as response:
            assert response.status_code == 200, (await response.aread()).decode()
            async for event in events_of(response):
                answer.add(event["choices"][0]["text"] if event["choices"] else "")

    async def _watch(self, every: float) -> None:
        start = time.monotonic()
        while True:
            mib = {"kept": 0.0, "reader": 0.0}
            for process in [self._server, *self._server.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    kind = "kept" if _READERS.isdisjoint(process.cmdline()) else "reader"
                    mib[kind] += process.memory_full_info().uss / 2**20
            self.report.memory_mib.append((time.monotonic() - start, mib["kept"]))
            self.report.reader_mib.append(mib["reader"])
            await asyncio.sleep(every)


Attack = tuple[str, Callable[[random.Random], Body], bool]  # path, body, and whether its answer is read
Arm = str | tuple[str, Attack]  # a method of `Hostile`, or a request with its name


class Hostile:
    """Hostile clients of one server: one for each arm, which take the keys in turn."""

    def __init__(self, port: int, seed: int, keys: Sequence[str], arms: Sequence[Arm]) -> None:
        self._port, self._url = port, f"http://127.0.0.1:{port}"
        self._random = random.Random(seed)
        self._keys, self._arms = keys, arms

    async def run(self, is_attacked: Any, is_over: Any) -> dict[str, int]:
        """Attack whenever one event is set, until the other one is; return how often each arm got which status."""
        counts: Counter[str] = Counter()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=120, limits=limits) as self._client:
            while not is_over.is_set():
                await _until(lambda: is_attacked.is_set() or is_over.is_set())
                acting = [self._repeat(arm, i, counts) for i, arm in enumerate(self._arms)]
                await _end_when(lambda: not is_attacked.is_set() or is_over.is_set(), acting)
        return dict(counts)

    async def _repeat(self, arm: Arm, i: int, counts: Counter[str]) -> None:
        name = arm if isinstance(arm, str) else arm[0]
        act = getattr(self, f"_{arm}") if isinstance(arm, str) else functools.partial(self._send, arm[1])
        headers = bearer(self._keys[i % len(self._keys)])
        while True:
            try:
                counts[f"{name} {await act(headers)}"] += 1
            except (OSError, httpx.HTTPError) as error:
                counts[f"{name} {type(error).__name__}"] += 1
            except asyncio.CancelledError:
                counts[f"{name} cut off"] += 1
                raise
            await asyncio.sleep(0.01)

    async def _send(self, attack: Attack, headers: dict[str, str]) -> int:
        path, body, is_read = attack
        async with self._client.stream("POST", path, json=body(self._random), headers=headers) as response:
            if is_read:
                await response.aread()
            else:
                await asyncio.sleep(2.0)
        return response.status_code

    async def _post(self, path: str, body: Body, headers: dict[str, str]) -> int:
        return (await self._client.post(path, json=body, headers=headers)).status_code

    async def _bombs(self, headers: dict[str, str]) -> int:
        """Grammars, patterns, schemas, references and templates."""
        bodies = [
            {"structured_outputs": {"regex": "((((a{1,99}){1,99}){1,99}){1,99})"}},
            {"structured_outputs": {"grammar": 'root ::= root root | "a" root'}},
            *(
                {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": s}}}
                for s in _SCHEMAS
            ),
            {"chat_template": "{% for i in range(10**9) %}a{% endfor %}"},
        ]
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, **self._random.choice(bodies)}
        return await self._post(CHAT, body, headers)

    async def _long_prompts(self, headers: dict[str, str]) -> int:
        text = "".join(self._random.choices("abcdefgh \n", k=500))
        return await self._post(TEXT, {"prompt": [text] * 4, "max_tokens": 200}, headers)

    async def _many_outputs(self, headers: dict[str, str]) -> int:
        body = {"prompt": "a", "n": self._random.choice((1, 5, 128)), "max_tokens": 400, "ignore_eos": True}
        return await self._post(TEXT, body, headers)

    async def _texts_to_read(self, headers: dict[str, str]) -> int:
        return await self._post("/tokenize", {"prompt": "a b " * 250_000}, headers)

    async def _slow_reader(self, headers: dict[str, str]) -> int:
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 20}
        async with self._client.stream("POST", TEXT, json=body, headers=headers) as response:
            async for _ in response.aiter_raw(64):
                await asyncio.sleep(0.5)
                if self._random.random() < 0.1:
                    break
        return response.status_code

    async def _leaver(self, headers: dict[str, str]) -> int:
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
        with suppress(httpx.TimeoutException):
            await self._client.post(TEXT, json=body, headers=headers, timeout=self._random.uniform(0.001, 0.3))
        return 0

    async def _silent(self, headers: dict[str, str]) -> int:
        """Connections that send nothing, or half a head."""
        opened = [await asyncio.open_connection("127.0.0.1", self._port) for _ in range(20)]
        for _, writer in opened[::2]:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: ")
        await asyncio.sleep(2.0)
        for _, writer in opened:
            writer.transport.abort()
        return 0

    async def _malformed(self, headers: dict[str, str]) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(self._random.choice(MALFORMED))
        with suppress(OSError, TimeoutError):
            await asyncio.wait_for(reader.read(), 5)
        writer.transport.abort()
        return 0


def _current() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.05)


async def _end_at(end: float, clients: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run clients until a time by `time.monotonic`."""
    await _end_when(lambda: time.monotonic() >= end, clients)


async def _end_when(condition: Callable[[], bool], clients: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run clients until something is so, and cancel them."""
    pending = {asyncio.create_task(client) for client in clients}
    try:
        while pending and not condition():
            _, pending = await asyncio.wait(pending, timeout=0.05)
    finally:
        while pending:  # a task that is in the middle of a timeout can miss being cancelled
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=0.5)


def _attack(hostile: Hostile, is_attacked: Any, is_over: Any, counts: Any) -> None:
    """The hostile clients' process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that measures ends this one
    os.nice(19)
    counts.put(asyncio.run(hostile.run(is_attacked, is_over)))


@contextmanager
def attacking(hostile: Hostile, report: Report) -> Iterator[Any]:
    """Run hostile clients in a process of their own; they attack while the event that is yielded is set."""
    is_attacked, is_over = multiprocessing.Event(), multiprocessing.Event()
    counts: Any = multiprocessing.Queue()
    process = multiprocessing.Process(target=_attack, args=(hostile, is_attacked, is_over, counts))
    process.start()
    try:
        yield is_attacked
    finally:
        is_over.set()
        try:
            report.statuses = counts.get(timeout=_PATIENCE)
        except queue.Empty:
            report.failed.append(f"the hostile clients did not end within {_PATIENCE:g} s")
            process.kill()
        process.join()


def measure(honest: Honest, hostile: Hostile, seconds: float) -> Report:
    """Measure honest clients without and with hostile ones, in turns; the honest ones' report has what is seen."""
    with attacking(hostile, honest.report) as is_attacked:
        try:
            return asyncio.run(honest.run(seconds, is_attacked))
        except (TimeoutError, httpx.HTTPError, AssertionError, ValueError) as error:
            honest.report.failed.append(f"not measured: {type(error).__name__} {error}")
    return honest.report


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def attack(seconds: float, *, port: int, seed: int = 0) -> Report:
    """All of it: the keys, the server, the clients."""
    with TemporaryDirectory() as name:
        keys, log = Path(name) / "keys", Path(name) / "log"
        hostile = [f"hostile-key-{i}" for i in range(len(_MIXTURE))]
        limited = [f"{key} generate name={key} {_LIMITS}" for key in hostile]
        keys.write_text("\n".join([*_HONEST, *limited]) + "\n")
        with serving("demo", *_OPTIONS, "--api-key-file", str(keys), port=port, log=log) as server:
            honest = Honest(port, server.process.pid, seed)
            report = measure(honest, Hostile(port, seed, hostile, _MIXTURE), seconds)
        report.log_bytes = log.stat().st_size
    return report
