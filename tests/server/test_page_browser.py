"""The page in a real browser, before an API that says what the test tells it to."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from browser import CHROMIUM, Browser
from serving import served_on_port
from specinfer import LLM, SamplingParams
from specinfer.server import page
from specinfer.server.config import ServerConfig
from specinfer.server.state import ServerState

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: no chromium or google-chrome is on the path"),
]

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
    llm = SimpleNamespace(max_model_len=512)
    engine: Any = SimpleNamespace(llm=llm)
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


_AXE = find_spec("axe_core_python")


def send(browser: Browser, prompt: str = "def f(") -> None:
    fill(browser, "prompt", prompt)
    browser.click("#send")


def fill(browser: Browser, name: str, value: str) -> None:
    browser.run(f"document.getElementById({json.dumps(name)}).value = {json.dumps(value)}")
    browser.run(f"document.getElementById({json.dumps(name)}).dispatchEvent(new Event('change', {{bubbles: true}}))")


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


def test_text_is_marked_by_its_origin(browser: Browser, api: Api) -> None:
    send(browser)
    finish(browser)
    assert texts(browser, "#transcript")[0] == "def f(" + "".join(TEXTS)
    assert texts(browser, ".token.by-0[data-step]") == ["self", " one"]
    assert texts(browser, ".token.by-1[data-step]") == ["):"]
    assert texts(browser, ".token.by-target[data-step]") == ["\n    ", "return", " more"]
    assert texts(browser, "#legend > span") == ["● demo", "■ ngram", "◎ the target itself"]
    asked = api.asked[0]
    assert (asked["prompt"], asked["stream"], asked["trace"], asked["model"]) == ("def f(", True, True, "tiny")
    assert (asked["temperature"], asked["top_p"], asked["max_tokens"]) == (0.7, 1, 160)
    assert {"seed", "stop", "speculative"}.isdisjoint(asked)
    assert re.fullmatch(r"Done: 6 tokens in \d+\.\d seconds, the most allowed\.", texts(browser, "#status")[0])


def test_the_tree_of_a_step_is_drawn(browser: Browser) -> None:
    send(browser)
    finish(browser)
    assert texts(browser, ".node.kept .label") == ["\u2068·one\u2069"]
    assert texts(browser, ".node.left .label") == ["\u2068·two\u2069", "\u2068<b>\u2069"]
    assert texts(browser, ".node.target .label") == ["\u2068·more\u2069"]
    assert texts(browser, ".node.root .label") == ["\u2068return\u2069"]
    assert browser.run("document.querySelectorAll('.edge.kept').length") == 1
    assert texts(browser, "#step-words") == ["step 3 of 3 · 1 of 3 draft tokens accepted · 2 tokens"]
    assert texts(browser, ".passes g.current") == [""]
    assert texts(browser, ".bar-value") == ["100% of 2", "50% of 2"]
    assert texts(browser, "[data-number=pass]") == ["2.00"]
    assert texts(browser, "[data-number=kept]") == ["50%"]


def test_keys_go_through_steps_and_nodes(browser: Browser) -> None:
    fill(browser, "prompt", "def f(")
    browser.run("document.getElementById('prompt').focus()")
    browser.press("Enter", ctrl=True)
    finish(browser)
    browser.run("document.activeElement.blur()")
    browser.press("ArrowLeft")
    assert "step 2 of 3" in texts(browser, "#step-words")[0]
    browser.press("ArrowLeft")
    settle(browser)
    assert texts(browser, ".token.current") == ["self", "):", "\n    "]
    assert browser.run("document.getElementById('newest').getAttribute('aria-pressed')") == "false"
    browser.run("document.querySelector('.node[tabindex=\"0\"]').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowDown")
    assert "x: rejected, drafted by demo" in browser.run("document.activeElement.getAttribute('aria-label')")
    browser.press("Enter", text="\r")
    assert "rejected" in texts(browser, "#details")[0]
    assert "step 1 of 3" in texts(browser, "#step-words")[0]  # arrows in the tree leave the step alone


def test_steps_are_played(browser: Browser) -> None:
    send(browser)
    finish(browser)
    browser.run("document.activeElement.blur()")
    browser.press("p", text="p")
    assert "step 1 of 3" in texts(browser, "#step-words")[0]
    assert browser.run("document.getElementById('play').getAttribute('aria-label')") == "Pause"
    browser.wait("document.getElementById('step-words').textContent.startsWith('step 3 of 3')")
    assert browser.run("document.getElementById('play').getAttribute('aria-label')") == "Play"


def test_a_node_and_a_token_lead_to_their_particulars(browser: Browser) -> None:
    send(browser)
    finish(browser)
    browser.click(".token.by-1[data-step]")
    assert "step 1 of 3" in texts(browser, "#step-words")[0]
    browser.click(".node.is-1")
    names = dict(zip(texts(browser, "#details dt"), texts(browser, "#details dd"), strict=True))
    assert names["token"] == "):"
    assert names["drafter"] == "ngram"
    assert names["depth"] == "2"
    assert names["path"] == "( self ):"
    assert names["q, the drafter\u2019s confidence"] == "0.4000 (40%)"
    assert names["p, the target\u2019s probability"] == "0.5000 (50%)"


def test_output_of_a_model_is_shown_as_text(browser: Browser, api: Api) -> None:
    evil = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    made = step("(", [guess(evil, accepted=True), guess("\u202eabc"), guess("\x00\x1b[2J")], [1], "🙂")
    api.say = lambda body: [chunk(evil + "🙂", [made], 6, reason="stop")]
    send(browser, evil)
    finish(browser)
    browser.click(".node.kept")
    assert texts(browser, "#transcript")[0] == evil + evil + "🙂"
    assert browser.run("document.querySelectorAll('main img, main script').length") == 0
    assert browser.run("document.title") == "tiny · SpecInfer"
    assert texts(browser, ".node.left .label") == ["\u2068\u2039202e\u203aabc\u2069", "\u2068␀␛[2J\u2069"]


def test_a_character_made_of_several_tokens_is_shown_once(browser: Browser, api: Api) -> None:
    parts = step("(", [guess("\ufffd", accepted=True), guess("\ufffd", 1, accepted=True)], [1, 2], " ok")
    api.say = lambda body: [chunk("", [parts], 3), chunk("🙂 ok", [], 6, reason="stop")]
    send(browser)
    finish(browser)
    assert texts(browser, ".token[data-step]") == ["🙂", " ok"]


def test_an_empty_answer_is_reported(browser: Browser, api: Api) -> None:
    own = step("(", [], [], "<end>")
    api.say = lambda body: [chunk("", [own], 1, reason="stop")]
    send(browser)
    finish(browser, "1")
    assert texts(browser, "#status") == ["The model ended its answer at once: there is no text."]
    assert texts(browser, ".node .label") == ["\u2068(\u2069", "\u2068<end>\u2069"]


def test_a_large_tree_is_dragged_and_sized(browser: Browser, api: Api) -> None:
    nodes = [guess("word", parent) for parent in range(40)] + [guess("word", 5) for _ in range(40)]
    api.say = lambda body: [chunk("x", [step("(", nodes, [], "x")], 6, reason="stop")]
    send(browser)
    finish(browser)
    width = "document.querySelector('.tree').getBoundingClientRect().width"
    place = "document.getElementById('tree-view')"
    before = browser.run(width)
    assert browser.run(f"{place}.scrollWidth > {place}.clientWidth")
    x, y = browser.run(f"(b => [b.x + b.width / 2, b.y + b.height - 40])({place}.getBoundingClientRect())")
    browser.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", clickCount=1)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x - 150, y=y, button="left")
    browser.call("Input.dispatchMouseEvent", type="mouseReleased", x=x - 150, y=y, button="left", clickCount=1)
    assert browser.run(f"{place}.scrollLeft") == 150
    browser.click("#zoom-in")
    assert browser.run(width) > before
    browser.click("#zoom-fit")
    assert browser.run(width) == before


def test_stop_ends_the_request(browser: Browser, api: Api) -> None:
    api.pause = 0.2
    api.say = lambda body: answer() * 50
    send(browser)
    browser.wait("document.querySelectorAll('.passes g').length > 1")
    assert browser.run("document.getElementById('stop').hidden") is False
    browser.press("Escape")
    browser.wait("!document.body.classList.contains('running')")
    assert texts(browser, "#status") == ["Stopped."]
    browser.wait("document.getElementById('send').disabled === false")
    for _ in range(100):
        if api.num_left:
            break
        browser.run("new Promise(done => setTimeout(done, 50))")
    assert api.num_left == 1


def refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "t", "param": None, "code": "c"}}, status)


@pytest.mark.parametrize(
    ("status", "message", "shown"),
    [
        (400, "max_tokens: use at most 7", "Max_tokens: use at most 7"),
        (429, "9 requests wait already", "The server is busy: 9 requests wait already."),
        (503, "it is going down", "The server cannot answer now: It is going down."),
        (500, "", "The server answered with status 500."),
    ],
)
def test_refusals_are_shown_in_words(browser: Browser, api: Api, status: int, message: str, shown: str) -> None:
    api.say = lambda body: refusal(status, message)
    send(browser)
    browser.wait("!document.getElementById('error').hidden")
    assert texts(browser, "#error")[0].lower() == shown.lower()
    assert texts(browser, "#transcript")[0] == "def f("
    browser.complaints = [line for line in browser.complaints if str(status) not in line]


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_failure_in_the_middle_is_reported(browser: Browser, api: Api, is_cut: bool) -> None:
    api.is_cut = is_cut
    failed = {"error": {"message": "the engine failed", "code": "c"}}
    api.say = lambda body: answer()[:2] + ([] if is_cut else [failed])
    send(browser)
    browser.wait("!document.getElementById('error').hidden")
    told = "The answer broke off: the connection ended early." if is_cut else "The engine failed"
    assert texts(browser, "#error") == [told]
    assert browser.run("document.getElementById('status').textContent") == ""
    assert "self):" in texts(browser, "#transcript")[0]


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(chromium: Browser, api: Api) -> None:
    api.say = lambda body: answer() if api.keys[-1] == "Bearer secret" else refusal(401, "no key")
    chromium.go(api.url)
    chromium.wait("!document.getElementById('error').hidden")
    assert texts(chromium, "#error") == ["The server wants an API key. Enter it under Settings."]
    assert chromium.run("document.getElementById('settings').open") is True
    fill(chromium, "key", "secret")
    chromium.wait("document.title === 'tiny · SpecInfer'")
    assert chromium.run("document.getElementById('error').hidden") is True
    send(chromium)
    finish(chromium)
    assert chromium.run("Object.values(sessionStorage).join() + '|' + Object.values(localStorage).join()") == "secret|"
    assert chromium.run("document.cookie") == ""
    fill(chromium, "key", "")


def test_settings_are_sent(browser: Browser, api: Api) -> None:
    values = {"temperature": "0", "top_p": "0.5", "max_tokens": "7", "seed": "11", "stop-strings": "\\n\\n\nEND"}
    for name, value in (values | {"tree": "own", "expansion": "2,1"}).items():
        fill(browser, name, value)
    send(browser)
    finish(browser)
    asked = api.asked[0]
    assert (asked["temperature"], asked["top_p"], asked["max_tokens"], asked["seed"]) == (0, 0.5, 7, 11)
    assert asked["stop"] == ["\n\n", "END"]
    assert asked["speculative"] == {"tree": "2,1"}


def test_a_value_that_cannot_be_sent_is_named(browser: Browser, api: Api) -> None:
    fill(browser, "top_p", "7")
    fill(browser, "prompt", "x")
    browser.run("document.getElementById('form').noValidate = true")
    browser.click("#send")
    browser.wait("!document.getElementById('error').hidden")
    assert texts(browser, "#error")[0].startswith("top_p: ")
    assert not api.asked


def test_a_conversation_goes_on(browser: Browser, api: Api) -> None:
    api.say = lambda body: answer(chat=True)
    browser.click("#mode label:nth-of-type(2) span")
    fill(browser, "system", "be brief")
    send(browser, "hello")
    finish(browser)
    send(browser, "again")
    browser.wait("document.querySelectorAll('.message').length === 4")
    finish(browser)
    said = "".join(TEXTS)
    assert api.asked[1]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "again"},
    ]
    assert texts(browser, ".message .words") == ["hello", said, "again", said]


def test_the_newest_of_a_long_text_is_in_view(browser: Browser, api: Api) -> None:
    own = [step("(", [], [], f"line {i}\n") for i in range(200)]
    api.say = lambda body: [chunk(made["next"]["text"], [made], i + 1, chat=True) for i, made in enumerate(own)]
    browser.click("#mode label:nth-of-type(2) span")
    inside = """(span => (({top, bottom}) => (view => top >= view.top && bottom <= view.bottom)(
        document.getElementById('transcript').getBoundingClientRect()))(span.getBoundingClientRect()))"""
    for _ in range(2):
        send(browser, "hello")
        finish(browser, "200")
        assert browser.run(f"{inside}([...document.querySelectorAll('.token')].at(-2))")
    browser.run("document.activeElement.blur()")
    browser.press("Home")
    assert browser.run(f"{inside}(document.querySelector('.token.current'))")
    assert texts(browser, ".token.current") == ["line 0\n"]


def test_a_refused_message_is_given_back(browser: Browser, api: Api) -> None:
    api.say = lambda body: refusal(400, "messages: too long")
    browser.click("#mode label:nth-of-type(2) span")
    send(browser, "hello")
    browser.wait("!document.getElementById('error').hidden")
    browser.wait("document.getElementById('prompt').value === 'hello'")
    assert texts(browser, ".message") == []
    browser.complaints = [line for line in browser.complaints if "400" not in line]


def test_without_a_tokenizer_the_page_reports_it(chromium: Browser, api: Api) -> None:
    api.has_tokenizer = False
    chromium.go(api.url)
    chromium.wait("!document.getElementById('error').hidden")
    assert texts(chromium, "#error") == [
        "This model has no tokenizer: it takes token ids, and this page has text only."
    ]
    assert chromium.run("document.getElementById('send').disabled") is True


def test_without_a_template_chat_is_off_with_a_reason(chromium: Browser, api: Api) -> None:
    api.template = None
    chromium.go(api.url)
    chromium.wait("!document.getElementById('chat-reason').hidden")
    assert chromium.run("document.querySelector('#mode input[value=chat]').disabled") is True
    assert "no chat template" in texts(chromium, "#chat-reason")[0]


def test_a_race_asks_twice_for_the_same_and_compares(browser: Browser, api: Api) -> None:
    api.pause = 0.02
    browser.click("#race")
    send(browser)
    browser.wait("!document.getElementById('verdict').hidden")
    *warming, first, second = api.asked
    assert [body["max_tokens"] for body in warming] == [4, 4]
    assert [body["speculative"] for body in warming] == [first["speculative"], second["speculative"]]
    assert len({body["cache_salt"] for body in api.asked}) == 4
    assert (first["speculative"], second["speculative"]) == ({"tree": "auto"}, {"tree": "off"})
    differ = ("speculative", "cache_salt")
    assert {k: v for k, v in first.items() if k not in differ} == {k: v for k, v in second.items() if k not in differ}
    assert isinstance(first["seed"], int)
    assert "trace" not in first
    assert f"The texts are equal, all {len(''.join(TEXTS))} characters." in texts(browser, "#verdict")[0]
    assert texts(browser, ".lanes [data-text]") == ["".join(TEXTS)] * 2


@pytest.mark.parametrize("order", ["turns", "at-once"])
@pytest.mark.parametrize("refused", ["warm-up", "race"])
def test_a_race_that_is_refused_ends_on_both_sides(browser: Browser, api: Api, order: str, refused: str) -> None:
    def say(body: Event) -> list[Event] | Response:
        is_refused = (body["max_tokens"] == 4) == (refused == "warm-up") and body["speculative"]["tree"] != "off"
        return refusal(400, "no such tree") if is_refused else answer() * 20

    api.say, api.pause = say, 0.02
    browser.click("#race")
    fill(browser, "race-order", order)
    send(browser)
    browser.wait("!document.getElementById('error').hidden")
    browser.wait("document.querySelector('[data-lane=plain] [data-words]').textContent.startsWith('stopped')")
    assert texts(browser, "[data-lane=tree] [data-words]") == ["refused"]
    assert browser.run("document.getElementById('verdict').hidden") is True
    browser.complaints = [line for line in browser.complaints if "400" not in line]


def test_a_race_that_is_stopped_no_longer_warms_up(browser: Browser, api: Api) -> None:
    api.pause, api.say = 0.1, lambda body: answer() * 50
    browser.click("#race")
    send(browser)
    browser.wait("document.querySelector('[data-words]').textContent === 'warms up'")
    browser.press("Escape")
    browser.wait("!document.body.classList.contains('running')")
    assert texts(browser, ".lanes [data-words]") == ["stopped", "stopped"]


def test_texts_of_a_race_that_differ_are_reported(browser: Browser, api: Api) -> None:
    api.say = lambda body: [chunk("one" if body["speculative"]["tree"] == "off" else "onto", [], 3, reason="stop")]
    browser.click("#race")
    send(browser)
    browser.wait("!document.getElementById('verdict').hidden")
    assert "The texts part after 2 characters" in texts(browser, "#verdict")[0]


@pytest.mark.parametrize("is_race", [False, True])
def test_nothing_is_wider_than_a_phone(browser: Browser, is_race: bool) -> None:
    browser.resize(360, 740, phone=True)
    if is_race:
        browser.click("#race")
    send(browser, "def a_function_with_a_name_that_is_far_too_long_for_a_phone_to_show_in_one_line(argument):")
    browser.wait("!document.body.classList.contains('running')")
    browser.run("document.getElementById('settings').open = true")
    settle(browser)
    assert browser.run("document.documentElement.scrollWidth") == 360


def test_dark_and_light(browser: Browser) -> None:
    shade = "getComputedStyle(document.body).backgroundColor"
    light = browser.run(shade)
    browser.prefer(prefers_color_scheme="dark")
    dark = browser.run(shade)
    assert dark != light
    browser.click("#theme")
    assert browser.run(shade) == light
    browser.click("#theme")
    browser.prefer(prefers_color_scheme="light")
    assert browser.run(shade) == dark


_CONTRAST = """(() => {
  const pen = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const light = (color) => {
    pen.fillStyle = color; pen.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map((v) => v / 255)
      .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const shade = (name) => light(getComputedStyle(document.documentElement).getPropertyValue(name));
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const inks = ['--ink', '--soft', '--by-target', '--by-0', '--by-1', '--by-2', '--by-3', '--by-4'];
  const grounds = ['--paper', '--raised', '--faint'];
  return Math.min(...inks.flatMap((ink) => grounds.map((on) => ratio(shade(ink), shade(on)))));
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_ink_can_be_read(browser: Browser, scheme: str) -> None:
    browser.prefer(prefers_color_scheme=scheme)
    assert browser.run(_CONTRAST) >= 4.5  # WCAG AA


_LAYOUT = """import('/static/layout.js').then(({layOut, HEIGHT}) => {
  let seed = 7;
  const random = (n) => (seed = (seed * 48271) % 2147483647) % n;
  for (let round = 0; round < 60; round++) {
    const count = round ? random(256) : 256;
    const nodes = [], depths = [0];
    for (let i = 1; i <= count; i++) {
      const parent = random(i);
      depths.push(depths[parent] + 1);
      const drafters = ['a', 'b'].slice(0, 1 + random(2));
      nodes.push({token: i, text: 'x'.repeat(random(20)), parent, drafters, p: 0.1});
    }
    const path = [];
    const after = (at) => nodes.findIndex((node) => node.parent === at) + 1;
    for (let at = after(0); at && random(4); at = after(at)) path.push(at);
    const step = {root: {token: 0, text: '('}, nodes, path, next: round % 2 ? {token: 1, text: 'end', p: 0.5} : null};
    const {nodes: placed, width, height} = layOut(step);
    if (placed.length !== count + 1 + (step.next ? 1 : 0)) return 'some are missing';
    for (const a of placed) {
      if (a.x < 0 || a.y < 0 || a.x + a.width > width || a.y + HEIGHT > height) return 'outside';
      for (const b of placed) {
        if (a !== b && a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + HEIGHT && b.y < a.y + HEIGHT)
          return `${a.place} lies on ${b.place}`;
      }
    }
    if (placed.some((node) => node.kind === 'kept' && node.y !== placed[0].y)) return 'the accepted path bends';
  }
  return 'fine';
})"""


def test_no_node_lies_on_another(browser: Browser) -> None:
    assert browser.run(_LAYOUT) == "fine"


def test_a_long_answer_stays_quick(browser: Browser, api: Api) -> None:
    nodes = [guess("w", parent, p=0.01) for parent in range(200)]
    many = [chunk("ab", [step("a", [*nodes, guess("b", accepted=True)], [201], "a")], 2 * i + 2) for i in range(600)]
    api.say = lambda body: many
    send(browser)
    browser.wait("document.querySelector('[data-number=tokens]').textContent === '1200'", 60)
    finish(browser, "1200")
    assert browser.run("document.querySelectorAll('.passes g').length") == 400
    browser.run("document.activeElement.blur()")
    browser.press("ArrowLeft")
    assert "step 599 of 600" in texts(browser, "#step-words")[0]


def test_a_model_that_can_chat_is_met_in_chat_mode(chromium: Browser, api: Api) -> None:
    chromium.go(api.url)
    chromium.wait("document.title === 'tiny · SpecInfer'")
    assert texts(chromium, "#send") == ["Send"]


def test_the_reason_for_no_guesses_is_shown(browser: Browser, api: Api) -> None:
    reason = "auto: plain decoding, a pass over 2 tokens costs 1.9 of one here"
    last = {"choices": [], "usage": {"completion_tokens": 6}, "metrics": {"speculative_decoding": {"reason": reason}}}
    api.say = lambda body: [*answer()[:-1], last]
    send(browser)
    finish(browser)
    assert texts(browser, "#status")[0].endswith(f"the most allowed. No guesses: {reason}.")
    browser.click("#race")
    browser.click("#send")
    browser.wait("!document.getElementById('verdict').hidden")
    assert f"No guesses: {reason}." in texts(browser, "#verdict")[0]


def test_an_example_is_sent_by_a_click(browser: Browser, api: Api) -> None:
    browser.click("#examples button:nth-of-type(1)")
    finish(browser)
    assert api.asked[0]["prompt"] == "def fibonacci(n):"


def test_trees_of_the_list_are_sent_as_they_are_named(browser: Browser, api: Api) -> None:
    fill(browser, "tree", "best-first:16")
    send(browser)
    finish(browser)
    assert api.asked[0]["speculative"] == {"tree": "best-first:16"}


def test_the_columns_of_passes_have_axes(browser: Browser) -> None:
    send(browser)
    finish(browser)
    assert texts(browser, ".axis .tick") == ["1", "2", "3"]
    assert texts(browser, ".passes > svg:not(.axis) .tick") == ["1"]
    assert texts(browser, ".scale span") == ["0", "50", "100%"]


def test_an_answer_on_a_phone_is_in_view_while_it_is_written(browser: Browser, api: Api) -> None:
    browser.resize(390, 844, phone=True)
    api.pause, api.say = 0.1, lambda body: answer() * 50
    send(browser)
    browser.wait("document.querySelectorAll('.passes g').length > 2")
    box = browser.run("(b => [b.top, b.bottom])(document.getElementById('transcript').getBoundingClientRect())")
    assert 0 <= box[0] < box[1] <= 844
    browser.click("#stop")
    browser.wait("!document.body.classList.contains('running')")


def test_a_trace_is_shared_in_the_address_alone(browser: Browser, api: Api) -> None:
    send(browser)
    finish(browser)
    browser.click("#share")
    browser.wait("location.hash.startsWith('#trace=1.')")
    link = browser.run("location.href")
    browser.call("Page.navigate", url="about:blank")
    browser.go(link)
    browser.wait("document.querySelectorAll('.passes g').length === 3")
    settle(browser)
    assert texts(browser, "#transcript")[0] == "def f(" + "".join(TEXTS)
    assert texts(browser, ".token.by-1[data-step]") == ["):"]
    assert "step 1 of 3" in texts(browser, "#step-words")[0]
    assert "A shared trace of tiny, 3 steps" in texts(browser, "#status")[0]
    assert len(api.asked) == 1
    browser.wait("document.title === 'tiny · SpecInfer'")
    send(browser, "new")
    finish(browser)
    assert browser.run("location.hash") == ""


_PACK = """(async (value) => {
  const stream = new Blob([typeof value === "string" ? value : JSON.stringify(value)]).stream();
  const bytes = await new Response(stream.pipeThrough(new CompressionStream("deflate-raw"))).bytes();
  location.hash = "#trace=1." + btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
})"""
_NODE = [1, "a", 0, [0], 0.5, 0.5]


@pytest.mark.parametrize(
    "value",
    [
        "null",
        "{",
        {"__proto__": []},
        ["m", False, "p", "t", ["d"]],
        ["m", False, "p", {"toString": 1}, ["d"], []],
        ["m", False, "p", "t", ["d"], [[[1, "r"], [[1, "a", 1, [0], 0.5, 0.5]], [], None]]],  # its own parent
        ["m", False, "p", "t", ["d"], [[[1, "r"], [[1, "a", 0, [1], 0.5, 0.5]], [], None]]],  # no such drafter
        ["m", False, "p", "t", ["d"], [[[1, "r"], [[1, "a", 0, [0], 7, 0.5]], [], None]]],
        ["m", False, "p", "t", ["d"], [[[1, "r"], [_NODE, _NODE], [1, 2], None]]],  # siblings are no path
        ["m", False, "p", "t", ["d"], [[[1, "r"], [_NODE] * 1025, [], None]]],
        ["m", False, "p", "t" * (4 << 20), [], []],
    ],
)
def test_a_link_with_anything_else_is_refused(browser: Browser, value: Any) -> None:
    browser.run(f"{_PACK}({json.dumps(value)})")
    browser.wait("!document.getElementById('error').hidden")
    assert texts(browser, "#error") == ["The trace in this link is damaged. Was the link cut?"]
    assert browser.run("document.querySelectorAll('.node').length") == 0


def test_markup_in_a_link_stays_text(browser: Browser) -> None:
    evil = "<img src=x onerror=\"document.title='taken'\">"
    value = [evil, True, evil, evil, [evil], [[[1, evil], [[1, evil, 0, [0], 0.5, None]], [1], None]]]
    browser.run(f"{_PACK}({json.dumps(value)})")
    browser.wait("document.querySelectorAll('.node').length === 2")
    settle(browser)
    assert texts(browser, ".message .words") == [evil, evil]
    assert browser.run("document.querySelectorAll('main img').length") == 0


@pytest.mark.skipif(_AXE is None, reason="needs axe-core-python")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_axe_finds_nothing_serious(browser: Browser, scheme: str, width: int) -> None:
    assert _AXE is not None
    assert _AXE.origin is not None
    axe = Path(_AXE.origin).with_name("axe.min.js").read_text(encoding="utf-8")
    browser.prefer(prefers_color_scheme=scheme)
    browser.resize(width, 844, phone=width < 800)
    browser.run(f"{axe}; 0")
    found = """axe.run().then(({violations}) => violations
        .filter(({impact}) => ['serious', 'critical'].includes(impact))
        .map(({id, nodes}) => `${id}: ${nodes.map((node) => node.html.slice(0, 120)).join(' ')}`))"""
    assert browser.run(found) == []
    send(browser)
    finish(browser)
    browser.run("document.getElementById('settings').open = true")
    assert browser.run(found) == []
    browser.click("#race")
    assert browser.run(found) == []


def test_the_server_generates_what_the_library_does(chromium: Browser) -> None:
    prompt, params = "class Stack:\n", SamplingParams(max_tokens=40, temperature=0.7, seed=3, tree="3,2,1")
    with LLM("demo") as llm:
        expected = llm.generate([prompt], params)[0].outputs[0].text
        with served_on_port(llm) as url:
            chromium.complaints.clear()
            chromium.go(url)
            chromium.wait("document.title === 'tiny · SpecInfer'")
            chromium.click("#mode label:nth-of-type(1) span")
            for name, value in {"seed": "3", "max_tokens": "40", "tree": "own", "expansion": "3,2,1"}.items():
                fill(chromium, name, value)
            send(chromium, prompt)
            finish(chromium, "40")
            assert texts(chromium, "#transcript")[0] == prompt + expected
            assert "".join(texts(chromium, ".token[data-step]")) == expected
            assert chromium.run("document.querySelectorAll('.passes rect').length") == 40
            chromium.click("#race")
            chromium.click("#send")
            chromium.wait("!document.getElementById('verdict').hidden")
            assert "The texts are equal" in texts(chromium, "#verdict")[0]
            assert texts(chromium, ".lanes [data-text]") == [expected, expected]
            chromium.click("#race")
            chromium.click("#mode label:nth-of-type(2) span")
            send(chromium, "a function that adds")
            chromium.wait("document.querySelectorAll('.passes rect').length > 0")
            chromium.wait("!document.body.classList.contains('running')")
            assert len(texts(chromium, ".message")) == 2
            assert chromium.complaints == []
