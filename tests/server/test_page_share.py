"""Traces in the address of the page."""

import json
from typing import Any

import pytest

from tests.server.browser import Browser
from tests.server.page_api import NEEDS_CHROMIUM, TEXTS, Api, answer, finish, send, settle, texts

pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]


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


def test_a_thought_is_shared_with_its_answer(browser: Browser, api: Api) -> None:
    browser.click("#mode label:nth-of-type(2) span")
    thought = {"choices": [{"delta": {"reasoning_content": "Hm."}}], "usage": {"completion_tokens": 1}}
    api.say = lambda body: [thought, *answer(chat=True)]
    send(browser, "Why?")
    finish(browser)
    browser.click("#share")
    browser.wait("location.hash.startsWith('#trace=1.')")
    link = browser.run("location.href")
    browser.call("Page.navigate", url="about:blank")
    browser.go(link)
    browser.wait("document.querySelectorAll('.passes g').length === 3")
    settle(browser)
    assert texts(browser, ".thought > .words") == ["Hm."]
    assert texts(browser, ".message.assistant > .words") == ["".join(TEXTS)]
