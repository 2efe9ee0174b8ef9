"""Replicas without Ray: the application at the port says what one process says, and what it does when one is lost."""

import asyncio
import dataclasses
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import Caller, error_of, events_of, slow_steps
from specinfer import AsyncLLM, EngineArgs, QueueLimits
from specinfer.server import logs
from specinfer.server.app import create_app
from specinfer.server.config import ServerConfig
from specinfer.server.replicas.engine import EngineReplica
from specinfer.server.replicas.messages import pack_response, prefix_digests
from specinfer.server.replicas.metrics import merged
from specinfer.server.replicas.router import NoReplicaError, ReplicaLostError, RouterState, create_router
from specinfer.server.replicas.settings import LoadPolicy, ReplicaSettings, Resources, Scaling, read_counts
from specinfer.server.state import ServerState

BODY = {"prompt": "the end", "max_tokens": 12, "seed": 3, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "the end"}], "max_tokens": 8, "seed": 5}


class LocalReplicaSet:
    """Replicas in this very process, the first first."""

    def __init__(self, replicas: Sequence[Any]) -> None:
        self.replicas = replicas
        self.asked: list[int] = []

    async def ask(self, scope: Any, body: bytes, digests: Sequence[str], avoid: Sequence[str]) -> AsyncGenerator[bytes]:
        index = len(avoid) if len(avoid) < len(self.replicas) else 0
        self.asked.append(index)
        async for part in self.replicas[index].answer(scope, body, digests, avoid):
            yield part

    async def everyone(self, method: str, seconds: float) -> list[Any]:
        return [await getattr(replica, method)() for replica in self.replicas]


Work = Callable[[httpx.AsyncClient, LocalReplicaSet], Awaitable[Any]]


def front_of(replica_set: LocalReplicaSet | None, **config: Any) -> tuple[Any, RouterState]:
    state = RouterState(ServerConfig(**config), "tiny")
    if replica_set is not None:
        state.put_replica_set(replica_set)
    return create_router(state), state


def through(replica_set: LocalReplicaSet | None, work: Work, **config: Any) -> Any:
    """What work makes of a client of the application at the port."""

    async def run() -> Any:
        transport = httpx.ASGITransport(front_of(replica_set, **config)[0], raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
            return await work(client, replica_set)

    return asyncio.run(run())


@pytest.fixture
def settings(model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> ReplicaSettings:
    monkeypatch.setattr(logs, "configure", lambda *_: None)  # of the whole process
    model = str(model_folder(tokenizer=True))
    return ReplicaSettings(EngineArgs(model, drafters=["ngram"], tree="1,1", max_num_seqs=8), ("tiny",))


def replicated(settings: ReplicaSettings, work: Work, count: int = 2, **config: Any) -> Any:
    async def run(client: httpx.AsyncClient, replica_set: LocalReplicaSet) -> Any:
        try:
            return await work(client, replica_set)
        finally:
            for replica in replica_set.replicas:
                await replica.close()

    replica_set = LocalReplicaSet([EngineReplica(settings, f"r{number}") for number in range(count)])
    return through(replica_set, run, **config)


# ------------------------------------------------------------------------------- as one process


def alike(text: str) -> str:
    """Without what differs between two runs of the same, such as how many tokens an event holds."""
    if text.startswith("data: "):
        events = events_of(text)
        said = "".join(event["choices"][0]["text"] for event in events)
        text = json.dumps([said, events[-1]["choices"][0]["finish_reason"], sorted(events[0])])
    text = re.sub(r"(cmpl|chatcmpl|resp|msg)[-_][0-9a-f]+", "ID", text)
    # Only of a process that reads and computes.
    text = re.sub(r',"reading_seconds":[^,]*,"compute_paths":{[^}]*}', "", text, count=1)
    return re.sub(r'"(created|created_at|completed_at|cached_tokens|num_target_passes)":\s*[0-9.]+', "", text)


TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }}\n{% endfor %}"
CALLS: list[tuple[str, str, Any]] = [
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/tiny", None),
    ("GET", "/v1/models/other", None),
    ("GET", "/version", None),
    ("GET", "/health", None),
    ("GET", "/health/ready", None),
    ("GET", "/ping", None),
    ("POST", "/ping", None),
    ("GET", "/load", None),
    ("HEAD", "/load", None),
    ("HEAD", "/health", None),
    ("DELETE", "/ping", None),
    ("POST", "/metrics", {}),
    ("GET", "/", None),
    ("GET", "/static/page.css", None),
    ("GET", "/page.json", None),
    ("GET", "/openapi.json", None),
    ("GET", "/nowhere", None),
    ("DELETE", "/v1/models", None),
    ("POST", "/v1/completions", BODY),
    ("POST", "/v1/completions", BODY | {"stream": True}),
    ("POST", "/v1/completions", BODY | {"n": 2, "logprobs": 2, "temperature": 0.5}),
    ("POST", "/v1/completions", BODY | {"max_tokens": 0, "echo": True, "logprobs": 1}),
    ("POST", "/v1/completions", BODY | {"temperature": -1}),
    ("POST", "/v1/completions", BODY | {"model": "other"}),
    ("POST", "/v1/completions", BODY | {"prompt": "the end " * 500}),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/responses", {"input": "the end", "max_output_tokens": 16, "temperature": 0}),
    ("POST", "/tokenize", {"prompt": "the end"}),
    ("POST", "/detokenize", {"tokens": [5, 6]}),
    ("POST", "/v1/completions", [1]),
]


def test_every_path_answers_as_one_process_does(settings: ReplicaSettings) -> None:
    server = ServerConfig(chat_template=TEMPLATE)
    with_chat = dataclasses.replace(settings, server=server)

    async def ask(client: httpx.AsyncClient, _: Any = None) -> list[httpx.Response]:
        return [await client.request(method, path, json=content) for method, path, content in CALLS]

    async def alone() -> list[httpx.Response]:
        async with AsyncLLM.from_engine_args(settings.engine) as engine:
            app = create_app(ServerState(engine, server, settings.names, str(settings.engine.model)))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await ask(client)

    own = {"date", "x-request-id", "content-length"}
    for call, one, many in zip(CALLS, asyncio.run(alone()), replicated(with_chat, ask), strict=True):
        assert (many.status_code, alike(many.text)) == (one.status_code, alike(one.text)), call
        assert {name for name in many.headers if name not in own} == {name for name in one.headers if name not in own}
        assert len(many.headers.get_list("x-request-id")) == 1


def test_keys_and_limits_hold_at_the_port(settings: ReplicaSettings) -> None:
    async def work(client: httpx.AsyncClient, replica_set: LocalReplicaSet) -> None:
        assert error_of(await client.post("/v1/completions", json=BODY))["code"] == "invalid_api_key"
        head = {"authorization": "Bearer secretsecret"}
        too_large = await client.post("/v1/completions", json=BODY | {"user": "x" * 4000}, headers=head)
        assert error_of(too_large)["code"] == "request_too_large"
        assert replica_set.asked == []
        answer = await client.post("/v1/completions", json=BODY, headers=head | {"x-request-id": "mine"})
        assert answer.status_code == 200
        assert answer.json()["id"] == "cmpl-mine"
        assert answer.headers["x-request-id"] == "mine"

    config: dict[str, Any] = {"api_keys": ("secretsecret",), "max_body_bytes": 1000}
    with_key = replace(settings, server=ServerConfig(**config))
    replicated(with_key, work, 1, **config)


def test_metrics_name_the_replica(settings: ReplicaSettings) -> None:
    async def work(client: httpx.AsyncClient, _: LocalReplicaSet) -> list[str]:
        await client.post("/v1/completions", json=BODY)
        await client.post("/v1/completions", json=BODY | {"top_p": 7})
        return (await client.get("/metrics")).text.splitlines()

    lines = replicated(settings, work)
    for replica, tokens in (("r0", "12.0"), ("r1", "0.0")):
        assert f'specinfer:generation_tokens_total{{replica="{replica}",model_name="tiny"}} {tokens}' in lines
    assert 'specinfer:replicas{replica="port",model_name="tiny"} 2.0' in lines
    assert sum(line.startswith("# TYPE specinfer:generation_tokens_total ") for line in lines) == 1


def test_a_client_that_leaves_ends_its_request(settings: ReplicaSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch)

    async def work(_: httpx.AsyncClient, replica_set: LocalReplicaSet) -> None:
        app, _ = front_of(replica_set)
        engine = replica_set.replicas[0]._engine
        for stream in (True, False):
            caller = Caller(app, "/v1/completions", BODY | {"max_tokens": 200, "stream": stream})
            while not engine.num_running:
                await asyncio.sleep(0.01)
            await caller.leave()
            async with asyncio.timeout(10):  # far sooner than the 200 slow steps would end
                while engine.num_live:
                    await asyncio.sleep(0.01)

    replicated(settings, work, 1)


def test_what_runs_at_the_end_ends_with_an_error(settings: ReplicaSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch)

    async def work(_: httpx.AsyncClient, replica_set: LocalReplicaSet) -> Caller:
        app, state = front_of(replica_set)
        caller = Caller(app, "/v1/completions", BODY | {"max_tokens": 200, "stream": True})
        while len(caller.sent) < 3:
            await asyncio.sleep(0.01)
        state.is_stopping = True
        refused = Caller(app, "/v1/completions", BODY)
        await refused.task
        assert refused.sent[0]["status"] == 503
        state.ended.set()
        await asyncio.wait_for(caller.task, 5)
        return caller

    caller = replicated(settings, work, 1)
    said = events_of(b"".join(message.get("body", b"") for message in caller.sent).decode())
    assert said[-1]["error"]["code"] == "engine_unavailable"


# ------------------------------------------------------------------------------- full, and lost


class Told:
    """A replica that answers so: parts of an answer, or an error in their place."""

    def __init__(self, *parts: bytes | Exception, name: str = "r0") -> None:
        self.parts, self.name = parts, name

    async def answer(self, *_: Any) -> AsyncGenerator[bytes]:
        for part in self.parts:
            if isinstance(part, Exception):
                raise part
            yield part


def start(status: int = 200, kind: str = "application/json", name: str = "r0", length: int | None = None) -> bytes:
    headers = [(b"content-type", kind.encode())]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    return pack_response({"status": status, "headers": headers}, name)


def refused(code: str, status: int = 429, name: str = "r0") -> Told:
    error = {"error": {"message": "no", "type": "x", "param": None, "code": code}}
    return Told(start(status, name=name) + json.dumps(error).encode(), name=name)


LOST = ReplicaLostError("gone")


async def post(client: httpx.AsyncClient, _: Any) -> httpx.Response:
    return await client.post("/v1/completions", json=BODY)


def test_a_full_replica_is_passed_over_and_all_being_full_is_reported() -> None:
    good = Told(start(name="r2") + b"{}", name="r2")
    replica_set = LocalReplicaSet([refused("queue_full"), refused("shutting_down", 503, "r1"), good])
    assert through(replica_set, post).status_code == 200
    assert replica_set.asked == [0, 1, 2]
    replica_set = LocalReplicaSet([refused("queue_full"), refused("queue_full", name="r1")])
    answer = through(replica_set, post)
    assert answer.status_code == 429
    assert error_of(answer)["code"] == "queue_full"
    assert replica_set.asked == [0, 1, 0]  # the first refused again


def test_what_waited_in_vain_does_not_wait_again() -> None:
    replica_set = LocalReplicaSet([refused("queue_timeout"), Told(start() + b"{}")])
    assert through(replica_set, post).status_code == 429
    assert replica_set.asked == [0]


def test_an_answer_that_has_not_begun_is_asked_again_once() -> None:
    replica = Told(LOST)
    answers = [Told(LOST), Told(start() + b"{}")]

    class Changing(LocalReplicaSet):
        async def ask(self, *args: Any) -> AsyncGenerator[bytes]:
            async for part in answers.pop(0).answer():
                yield part

    assert through(Changing([]), post).status_code == 200
    answer = through(LocalReplicaSet([replica]), post)
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "engine_unavailable"
    assert "retry-after" in answer.headers


def test_a_stream_that_has_begun_ends_with_an_error() -> None:
    answer = through(LocalReplicaSet([Told(start(kind="text/event-stream"), b"data: {}\n\n", LOST)]), post)
    said = events_of(answer.text)
    assert said[0] == {}
    assert said[-1]["error"]["code"] == "engine_unavailable"


def test_an_answer_that_is_whole_stays_so_if_its_replica_is_lost_then() -> None:
    answer = through(
        LocalReplicaSet([Told(start(kind="text/event-stream"), b"data: {}\n\n", b"data: [DONE]\n\n", LOST)]), post
    )
    assert events_of(answer.text) == [{}]
    answer = through(LocalReplicaSet([Told(start(length=2) + b"{", b"}", LOST)]), post)
    assert answer.text == "{}"


def test_an_answer_without_an_end_is_not_taken_for_a_whole_one() -> None:
    state = RouterState(ServerConfig(), "tiny")
    state.put_replica_set(LocalReplicaSet([Told(start(), b'{"half', LOST)]))

    async def run() -> Caller:
        caller = Caller(create_router(state), "/v1/completions", BODY)
        await caller.task
        return caller

    sent = asyncio.run(run()).sent
    assert all(message.get("more_body", True) for message in sent)  # the connection is closed before its end


def test_without_replicas_it_reports_that() -> None:
    answer = through(None, post)
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "loading"
    answer = through(LocalReplicaSet([Told(NoReplicaError())]), post)
    assert error_of(answer)["code"] == "engine_unavailable"

    async def health(client: httpx.AsyncClient, _: Any) -> httpx.Response:
        return await client.get("/health")

    assert error_of(through(LocalReplicaSet([]), health))["code"] == "engine_unavailable"


# --------------------------------------------------------------------------------------- pieces


def test_texts_of_metrics_become_one() -> None:
    text = '# HELP a:b What.\n# TYPE a:b counter\na:b{x="{1}"} 2.0\n# HELP c No labels.\n# TYPE c gauge\nc 1.0\n'
    assert merged({"r0": text, "r1": text}).splitlines() == [
        "# HELP a:b What.",
        "# TYPE a:b counter",
        'a:b{replica="r0",x="{1}"} 2.0',
        'a:b{replica="r1",x="{1}"} 2.0',
        "# HELP c No labels.",
        "# TYPE c gauge",
        'c{replica="r0"} 1.0',
        'c{replica="r1"} 1.0',
    ]


@given(st.text(max_size=3000), st.text(max_size=3000))
def test_texts_that_begin_alike_have_digests_in_common(first: str, second: str) -> None:
    digests = [prefix_digests({"prompt": text}, "") for text in (first, second)]
    for length in (256, 1024):
        alike = first[:length] == second[:length] and min(len(first), len(second)) >= length
        place = {256: -1, 1024: -2}[length]
        have = [one[place] if len(one) >= -place else None for one in digests]
        assert (have[0] is not None and have[0] == have[1]) == alike
    salted = prefix_digests({"prompt": first}, "somebody")
    assert not set(salted) & set(digests[0])


def test_scaling_goes_by_requests_and_by_first_tokens() -> None:
    class Context:
        current_num_replicas = 2

        def __init__(self, requests: float, ttft: float) -> None:
            self.total_num_requests = requests
            self.aggregated_metrics = {"ttft": {"r0": ttft, "r1": 0.1}}

    policy = LoadPolicy(4.0, 1.0)
    assert policy(Context(12, 0.5))[0] == 3
    assert policy(Context(2, 0.5))[0] == 0.5
    assert policy(Context(2, 1.5))[0] == 3
    assert policy(Context(0, 1.5))[0] == 0  # nobody waits
    assert LoadPolicy(4.0)(Context(2, 1.5))[0] == 0.5


@pytest.mark.parametrize("words", ["0", "-1", "two", "", "3:1", "1:2:3", "1.5", "0:2", ":3", "9999999"])
def test_numbers_of_replicas_are_checked(words: str) -> None:
    def read() -> Scaling:
        least, most = read_counts(words)
        return Scaling(min_replicas=least, max_replicas=most)

    with pytest.raises(ValueError, match="replicas"):
        read()


def test_resources_and_settings_are_checked() -> None:
    assert read_counts("1:3") == (1, 3)
    assert read_counts("2") == (2, 2)
    with pytest.raises(ValueError, match="replica_cpus"):
        Resources(cpus=0)
    with pytest.raises(ValueError, match="replica_gpus"):
        Resources(gpus=1.5)
    with pytest.raises(ValueError, match="scale_ttft"):
        Scaling(min_replicas=1, max_replicas=1, target_ttft=0)
    with pytest.raises(ValueError, match="adapt_dir"):
        ReplicaSettings(EngineArgs("m", adapt_drafters=True, adapt_dir="x"), ("m",))


def test_each_replica_writes_files_of_its_own() -> None:
    args = EngineArgs("m", step_log="/a/steps")
    settings = ReplicaSettings(args, ("m",), server=ServerConfig(trace="/a.b/trace.jsonl"))
    of_one = settings.of_replica("r7")
    assert of_one.server.trace == "/a.b/trace.r7.jsonl"
    assert of_one.engine.step_log == "/a/steps.r7"
    assert not of_one.server.access_log


def test_limits_reach_the_replica(settings: ReplicaSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch)
    few = replace(settings, engine=replace(settings.engine, max_num_seqs=1), limits=QueueLimits(max_num_queued_reqs=0))

    async def work(client: httpx.AsyncClient, replica_set: LocalReplicaSet) -> list[int]:
        asked = [client.post("/v1/completions", json=BODY | {"max_tokens": 50}) for _ in range(5)]
        return sorted([answer.status_code for answer in await asyncio.gather(*asked)])

    assert replicated(few, work) == [200, 200, 429, 429, 429]


def test_the_routers_metrics_follow_the_prefix() -> None:
    state = RouterState(ServerConfig(metrics_prefix="vllm"), "tiny")
    state.metrics.count_refusal("not_found")
    text = merged({"port": state.metrics.scrape(num_replicas=2, num_live=0)})
    assert 'vllm:replicas{replica="port",engine="0",model_name="tiny"} 2.0' in text
    assert "vllm:request_refused_total" in text
    assert "specinfer:" not in text
