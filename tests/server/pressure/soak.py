"""A soak: many clients of all kinds at one server for a long time, each answer compared with plain decoding's.

    PYTHONPATH=tests/support python -m tests.server.pressure soak --minutes 20 --clients 12 --json soak.json

starts `specinfer serve demo` and ends with a report: answers, aborts and refusals; wrong answers; and the server's
memory, open files, threads and KV slots over time. Whoever wants no wrong answer and flat lines reads it; the exit
code says so, too. What is expected comes from an engine of its own without drafters and without a prefix cache, asked
through the same application, one request after the other.
"""

import asyncio
import json
import math
import os
import random
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from hostile import CHAT, TEXT
from tests.server.pressure.served import Body, events_of
from tests.server.served_command import serving

_HEADER = '"""Queues and stacks.\n\nThis module has the classes of a small library of containers."""\n\n' + "\n\n".join(
    f"class {name}:\n    def __init__(self, items=()):\n        self.items = list(items)\n\n    def __len__(self):\n"
    f"        return len(self.items)\n\n    def push_{name.lower()}(self, item):\n        self.items.append(item)"
    for name in ("Stack", "Queue", "Deque", "Heap", "Ring")
)
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["stack", "queue"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "make", "parameters": _SCHEMA}}


def cases(num_each: int = 4) -> list[tuple[str, Body]]:
    """Paths and bodies; all of them have one right answer. Of those that differ by a number there are `num_each`."""
    made: list[tuple[str, Body]] = []

    def complete(prompt: Any, **body: Any) -> None:
        made.append((TEXT, {"prompt": prompt, **body}))

    def chat(text: str, **body: Any) -> None:
        messages = [{"role": "system", "content": _HEADER[:400]}, {"role": "user", "content": text}]
        made.append((CHAT, {"messages": messages, **body}))

    for i in range(num_each):
        complete("def main(", max_tokens=8 + 40 * i, temperature=0)
        complete("import os\n", max_tokens=60, temperature=0.8, top_p=0.9, seed=i)
        complete(_HEADER + f"\n\nclass Extra{i}:", max_tokens=30 + 10 * i, temperature=i % 2, seed=i)
        complete(_HEADER[: 200 + 150 * i], max_tokens=24, temperature=1, seed=i, logprobs=i)
        chat(f"write function number {i}", max_tokens=40, temperature=i % 2, seed=i)
    complete("class A:\n", max_tokens=200, temperature=0, stop=["\n\n"])
    complete("for i in", max_tokens=50, temperature=1, seed=7, stop=[":", "zz"], presence_penalty=0.5, logprobs=2)
    complete(["x = ", "y = "], max_tokens=20, temperature=1, seed=3, n=2)
    complete([5, 6, 7, 8], max_tokens=20, temperature=1, seed=4, min_p=0.05, repetition_penalty=1.1)
    complete(_HEADER, max_tokens=1, temperature=0, echo=True, logprobs=0)
    complete(
        "# numbers\n", max_tokens=30, temperature=1, seed=2, structured_outputs={"regex": "[0-9]{3}( [0-9]{3}){2}"}
    )
    chat("a stack", max_tokens=60, temperature=1, seed=5, response_format=_format(_SCHEMA))
    chat("a queue", max_tokens=60, temperature=0, tools=[_TOOL], tool_choice="required")
    chat("both", max_tokens=60, temperature=1, seed=6, tools=[_TOOL], tool_choice="auto")
    prediction = {"type": "content", "content": _HEADER[:300]}
    chat(_HEADER[:300], max_tokens=60, temperature=0, prediction=prediction, speculative={"tree": "1,1,1,1"})
    complete(_HEADER[:500], max_tokens=50, temperature=0, speculative={"tree": "best-first:12"})
    complete(_HEADER[:700], max_tokens=50, temperature=1, seed=1, speculative={"tree": "off"})
    return made


def _format(schema: Body) -> Body:
    return {"type": "json_schema", "json_schema": {"name": "container", "schema": schema, "strict": True}}


def response_of(body: Body) -> list[Any]:
    """What must be the same each time: no ids, no times, no counters of speculation."""
    answer = []
    for choice in sorted(body["choices"], key=lambda choice: choice["index"]):
        message = choice.get("message", {})
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        text = choice.get("text", message.get("content"))
        answer.append((text, calls, choice["finish_reason"], choice.get("logprobs")))
    return json.loads(json.dumps(answer))  # type: ignore[no-any-return]


def agree(got: Any, want: Any, absolute: float = 1e-3, relative: float = 0.0) -> bool:
    """Log-probabilities may differ in their last digits, as sums depend on the shape of a pass; nothing else may."""
    if isinstance(got, float) and isinstance(want, float):
        return math.isclose(got, want, abs_tol=absolute, rel_tol=relative)
    if isinstance(got, dict) and isinstance(want, dict):
        return got.keys() == want.keys() and all(agree(got[key], want[key], absolute, relative) for key in got)
    if isinstance(got, list) and isinstance(want, list):
        pairs = zip(got, want, strict=False)
        return len(got) == len(want) and all(agree(a, b, absolute, relative) for a, b in pairs)
    return bool(got == want)


async def expected_answers(asked: list[tuple[str, Body]]) -> list[list[Any]]:
    """By plain decoding, one after the other."""
    from specinfer import LLM, AsyncLLM
    from specinfer.server.app import create_app
    from specinfer.server.config import ServerConfig
    from specinfer.server.state import ServerState

    llm = LLM("demo", drafters=[], tree="off", enable_prefix_caching=False, max_num_seqs=4)
    answers = []
    async with AsyncLLM(llm) as engine:
        app = create_app(ServerState(engine, ServerConfig(), ("demo",)))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1", timeout=None
        ) as client:
            for path, body in asked:
                plain = {key: value for key, value in body.items() if key not in ("speculative", "prediction")}
                response = await client.post(path, json=plain)
                assert response.status_code == 200, response.text
                answers.append(response_of(response.json()))
    return answers


@dataclass(slots=True)
class Report:
    """What came of it."""

    num_responses: int = 0
    num_aborted: int = 0
    num_refused: int = 0  # 429 and 503, which are answers too
    num_tokens: int = 0
    wrong: list[Body] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    samples: list[Body] = field(default_factory=list)  # of the server's process, over time

    def growth(self, name: str) -> float:
        """By how much the last third of the samples lies above the middle one; the first warms up."""
        values = [sample[name] for sample in self.samples]
        third = max(len(values) // 3, 1)
        middle, last = values[third : 2 * third] or values, values[2 * third :] or values
        return float(sorted(last)[len(last) // 2] - sorted(middle)[len(middle) // 2])

    @property
    def is_sound(self) -> bool:
        return bool(self.num_responses) and not self.wrong and not self.failed and not self.leaks()

    def lines(self) -> list[str]:
        """The report in words."""
        shown = self.samples[:: max(len(self.samples) // 10, 1)]
        return [
            f"{self.num_responses} answers, {self.num_tokens} tokens in whole ones, {self.num_aborted} left early,",
            f"{self.num_refused} refused, {len(self.wrong)} wrong, {len(self.failed)} failed",
            *self.failed[:5], *map(str, self.wrong[:3]), *self.leaks(),
            *(str({key: round(value, 3) for key, value in sample.items()}) for sample in shown),
        ]  # fmt: skip

    def leaks(self) -> list[str]:
        """What did not stay flat, in words."""
        memory = max(sample["rss_mib"] for sample in self.samples) if self.samples else 0
        limits = {"rss_mib": 0.03 * memory, "num_files": 4, "num_threads": 2, "num_tasks": 8}
        grown = [f"{name} grew by {self.growth(name):.1f}" for name, most in limits.items() if self.growth(name) > most]
        end = self.samples[-1] if self.samples else {}
        held = [f"{name} is {end[name]} at rest" for name in ("running", "waiting", "kv_used") if end.get(name)]
        return grown + held


class Soak:
    """Clients that ask at random until the time is over."""

    def __init__(self, url: str, pid: int, asked: list[tuple[str, Body]], answers: list[list[Any]], seed: int) -> None:
        self._url, self._pid = url, pid
        self._asked, self._answers = asked, answers
        self._random = random.Random(seed)
        self.report = Report()

    async def run(self, seconds: float, num_clients: int) -> Report:
        self._end = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=120, limits=limits) as client:
            watching = asyncio.create_task(self._watch(client, seconds / 60))
            await asyncio.gather(*(self._client(client) for _ in range(num_clients)))
            watching.cancel()
            await asyncio.sleep(1.0)  # what was aborted last ends within a step
            await self._sample(client)
        return self.report

    async def _client(self, client: httpx.AsyncClient) -> None:
        while time.monotonic() < self._end and len(self.report.failed) < 20:
            i = self._random.randrange(len(self._asked))
            path, body = self._asked[i]
            way = self._random.choices(["whole", "stream", "abort", "leave"], [4, 4, 2, 1])[0]
            try:
                if way == "whole":
                    await self._ask(client, i, path, body)
                elif way == "leave":  # while it waits, or reads, or speaks
                    with suppress(httpx.TimeoutException):
                        await client.post(path, json=body, timeout=self._random.uniform(0.001, 0.5))
                    self.report.num_aborted += 1
                else:
                    await self._stream(client, i, path, body, abort=way == "abort")
            except (httpx.HTTPError, KeyError, ValueError, AssertionError) as error:
                self.report.failed.append(f"{path} {way}: {type(error).__name__}: {error}")

    async def _ask(self, client: httpx.AsyncClient, i: int, path: str, body: Body) -> None:
        response = await client.post(path, json=body)
        if response.status_code in (429, 503):
            self.report.num_refused += 1
            await asyncio.sleep(0.2)
            return
        assert response.status_code == 200, response.text
        self._compare(i, response_of(response.json()))
        self.report.num_tokens += response.json()["usage"]["completion_tokens"]

    async def _stream(self, client: httpx.AsyncClient, i: int, path: str, body: Body, *, abort: bool) -> None:
        num_chunks, choices = self._random.randrange(1, 12), {}
        async with client.stream("POST", path, json=body | {"stream": True}) as response:
            if response.status_code in (429, 503):
                self.report.num_refused += 1
                return
            assert response.status_code == 200, (await response.aread()).decode()
            async for event in events_of(response):
                for choice in event["choices"]:
                    _join(choices.setdefault(choice["index"], {"index": choice["index"]}), choice)
                num_chunks -= 1
                if abort and not num_chunks:
                    self.report.num_aborted += 1
                    return
        got = response_of({"choices": list(choices.values())})
        want = [[*one] for one in self._answers[i]]
        for mine, right in zip(got, want, strict=True):
            mine[3] = right[3] = None  # their joining is for other tests
            mine[0], right[0] = mine[0] or "", right[0] or ""
        self._compare(i, got, want)

    def _compare(self, i: int, got: list[Any], want: list[Any] | None = None) -> None:
        self.report.num_responses += 1
        if not agree(got, want or self._answers[i]):
            self.report.wrong.append({"case": i, "asked": self._asked[i], "got": got, "want": want or self._answers[i]})

    async def _watch(self, client: httpx.AsyncClient, every: float) -> None:
        while True:
            await asyncio.sleep(every)
            await self._sample(client)

    async def _sample(self, client: httpx.AsyncClient) -> None:
        status = Path(f"/proc/{self._pid}/status").read_text()
        shown = (await client.get("/metrics")).text

        def number(name: str) -> float:
            found = re.search(rf"^specinfer:{name}{{[^}}]*}} (\S+)$", shown, re.MULTILINE)
            return float(found[1]) if found else -1.0

        self.report.samples.append(
            {
                "rss_mib": int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024,  # type: ignore[index]
                "num_threads": int(re.search(r"Threads:\s+(\d+)", status)[1]),  # type: ignore[index]
                "num_files": len(os.listdir(f"/proc/{self._pid}/fd")),
                "running": number("num_requests_running"),
                "waiting": number("num_requests_waiting"),
                "num_tasks": number("event_loop_tasks"),
                "kv_used": number("kv_cache_usage_perc"),
                "kv_kept": number("kv_cache_kept_perc"),
            }
        )


def _join(whole: Body, choice: Body) -> None:
    """A streamed choice put together as if it had come at once."""
    whole["finish_reason"] = choice["finish_reason"] or whole.get("finish_reason")
    if "text" in choice:
        whole["text"] = whole.get("text", "") + choice["text"]
        return
    delta, message = choice["delta"], whole.setdefault("message", {"content": "", "tool_calls": []})
    message["content"] += delta.get("content") or ""
    for call in delta.get("tool_calls") or ():
        while len(message["tool_calls"]) <= call["index"]:
            message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
        for key in ("name", "arguments"):
            message["tool_calls"][call["index"]]["function"][key] += call["function"].get(key) or ""


def soak(seconds: float, num_clients: int, *, port: int, seed: int = 0, num_each: int = 4) -> Report:
    """All of it: what is expected, the server, the clients."""
    asked = cases(num_each)
    answers = asyncio.run(expected_answers(asked))
    # A small cache and a short queue: prefixes are given up, requests put back, and some refused.
    options = ("--kv-cache-memory-bytes", "24M", "--max-num-queued-reqs", "16", "--log-level", "warning")
    with serving("demo", *options, port=port) as server:
        return asyncio.run(Soak(server.url, server.engine, asked, answers, seed).run(seconds, num_clients))
