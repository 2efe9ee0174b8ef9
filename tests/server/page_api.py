"""An API before which the page is tested: it answers what a test gives it and keeps what it was asked."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from specinfer.server import page
from specinfer.server.config import ServerConfig
from specinfer.server.state import ServerState
from tests.server.browser import CHROMIUM, Browser

NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: no chromium or google-chrome is on the path"
)

Event = dict[str, Any]


def guess(text: str, parent: int = 0, *, accepted: bool = False, by: str = "demo", p: float = 0.5) -> Event:
    node = {"token": len(text) + 10, "text": text, "parent": parent, "drafters": [by], "q": 0.4, "p": p}
    return node | {"accepted": accepted}


def step(root: str, nodes: list[Event], path: list[int], own: str | None) -> Event:
    said = None if own is None else {"token": 9, "text": own, "p": 0.75}
    return {"time": 1.0, "position": 3, "root": {"token": 8, "text": root}, "nodes": nodes, "path": path, "next": said}


STEPS = [
    step("(", [guess("self", accepted=True), guess("x"), guess("):", 1, accepted=True, by="ngram")], [1, 3], "\n    "),
    step("\n    ", [], [], "return"),
    step("return", [guess(" one", accepted=True), guess(" two"), guess("<b>", 2)], [1], " more"),
]


TEXTS = ["self):\n    ", "return", " one more"]


def chunk(text: str, steps: list[Event], num_tokens: int, *, reason: str | None = None, chat: bool = False) -> Event:
    said = {"delta": {"content": text}} if chat else {"text": text}
    usage = {"prompt_tokens": 3, "completion_tokens": num_tokens}
    event: Event = {"choices": [{"index": 0, **said, "finish_reason": reason}], "usage": usage}
    return event | ({"specinfer": {"steps": steps, "origins": []}} if steps else {})


def answer(*, chat: bool = False, traced: bool = True) -> list[Event]:
    counts = [3, 4, 6]
    events = [
        chunk(text, [made] if traced else [], count, chat=chat)
        for text, made, count in zip(TEXTS, STEPS, counts, strict=True)
    ]
    events[-1]["choices"][0]["finish_reason"] = "length"
    stats = {"speculative_decoding": {"tokens_per_pass": 2.0}}
    return [*events, {"choices": [], "usage": {"completion_tokens": 6}, "metrics": stats}]


def refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "t", "param": None, "code": "c"}}, status)


@dataclass
class Api:
    """What the server says, and what it was asked."""

    url: str = ""
    say: Callable[[Event], list[Event] | Response] = lambda body: answer(traced="trace" in body)
    template: str | None = "template"
    has_tokenizer: bool = True
    pause: float = 0.0
    is_cut: bool = False  # the connection ends without [DONE]
    asked: list[Event] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    num_left: int = 0  # readers who went before the end


def app_of(api: Api) -> FastAPI:
    app = FastAPI()
    llm = SimpleNamespace(max_model_len=512, drafter_choice=None)
    engine: Any = SimpleNamespace(llm=llm, put_quotas=lambda quotas: None)
    app.state.server = ServerState(engine, ServerConfig(), ("tiny",))
    app.include_router(page.router)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        llm.tokenizer = SimpleNamespace() if api.has_tokenizer else None
        llm.reader = SimpleNamespace(chat_template=api.template if api.has_tokenizer else None)
        api.keys.append(request.headers.get("authorization", ""))
        told = api.say({"models": True})
        return told if isinstance(told, Response) else JSONResponse({"data": [{"id": "tiny"}]})

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Response:
        body = await request.json()
        api.asked.append(body)
        api.keys.append(request.headers.get("authorization", ""))
        told = api.say(body)
        if isinstance(told, Response):
            return told
        return StreamingResponse(lines(told), media_type="text/event-stream")

    async def lines(events: list[Event]) -> AsyncIterator[str]:
        try:
            for event in events:
                yield f"data: {json.dumps(event)}\n\n"
                await asyncio.sleep(api.pause)
        except (asyncio.CancelledError, GeneratorExit):
            api.num_left += 1
            raise
        if not api.is_cut:
            yield "data: [DONE]\n\n"

    return app


@pytest.fixture(scope="module")
def served() -> Iterator[Api]:
    api = Api()
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app_of(api), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    api.url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
    yield api
    server.should_exit = True
    thread.join(10)
    listening.close()


@pytest.fixture
def api(served: Api) -> Api:
    """As it is without a test's wishes."""
    fresh = Api(url=served.url)
    served.__dict__.update(fresh.__dict__)
    return served


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser, api: Api) -> Iterator[Browser]:
    """At the page, which has met the model; nothing it did may be complained of."""
    chromium.resize(1400, 900)
    chromium.prefer()
    chromium.complaints.clear()
    chromium.go(api.url)
    chromium.run("sessionStorage.clear(), localStorage.clear()")
    chromium.go(api.url)
    chromium.wait("document.title === 'tiny · SpecInfer'")
    chromium.click("#mode label:nth-of-type(1) span")
    yield chromium
    assert chromium.complaints == []


def send(browser: Browser, prompt: str = "def f(") -> None:
    fill(browser, "prompt", prompt)
    browser.click("#send")


def fill(browser: Browser, name: str, value: str) -> None:
    browser.run(f"document.getElementById({json.dumps(name)}).value = {json.dumps(value)}")
    browser.run(f"document.getElementById({json.dumps(name)}).dispatchEvent(new Event('change', {{bubbles: true}}))")


def ask_tiny(browser: Browser, url: str) -> None:
    """Open the page of a server of the model `tiny`, and wait for an answer of 7 tokens."""
    browser.complaints.clear()
    browser.go(url)
    browser.wait("document.title === 'tiny · SpecInfer'")
    browser.run("document.getElementById('max_tokens').value = 7")
    send(browser, "the")
    browser.wait("document.getElementById('status').textContent.startsWith('Done: ')")
    settle(browser)
    assert texts(browser, "[data-number=tokens]")[0].isdecimal()


def finish(browser: Browser, name: str = "6") -> None:
    browser.wait(f"document.querySelector('[data-number=tokens]').textContent === '{name}'")
    browser.wait("!document.body.classList.contains('running')")
    settle(browser)


def settle(browser: Browser) -> None:
    """What is drawn with the next frame has been drawn."""
    browser.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")


def texts(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")
    return found
