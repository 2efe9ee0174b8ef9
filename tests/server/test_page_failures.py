"""What the page reports when the server refuses or fails."""

import pytest

from tests.server.browser import Browser
from tests.server.page_api import NEEDS_CHROMIUM, Api, answer, chunk, fill, finish, refusal, send, step, texts

pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]


def test_an_empty_answer_is_reported(browser: Browser, api: Api) -> None:
    own = step("(", [], [], "<end>")
    api.say = lambda body: [chunk("", [own], 1, reason="stop")]
    send(browser)
    finish(browser, "1")
    assert texts(browser, "#status") == ["The model ended its answer at once: there is no text."]
    assert texts(browser, ".node .label") == ["\u2068(\u2069", "\u2068<end>\u2069"]


@pytest.mark.parametrize(
    ("status", "message", "shown"),
    [
        (400, "max_tokens: use at most 7", "max_tokens: use at most 7"),
        (429, "9 requests wait already", "The server is busy: 9 requests wait already."),
        (503, "it is going down", "The server cannot answer now: it is going down."),
        (400, "speculative.tree: no such tree", "speculative.tree: no such tree"),
        (400, "messages[0].content: empty", "messages[0].content: empty"),
        (404, "the model is not here", "The model is not here"),
        (500, "", "The server answered with status 500."),
    ],
)
def test_refusals_are_shown_in_words(browser: Browser, api: Api, status: int, message: str, shown: str) -> None:
    api.say = lambda body: refusal(status, message)
    send(browser)
    browser.wait("!document.getElementById('error').hidden")
    assert texts(browser, "#error") == [shown]
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


def test_a_value_that_cannot_be_sent_is_named(browser: Browser, api: Api) -> None:
    fill(browser, "top_p", "7")
    fill(browser, "prompt", "x")
    browser.run("document.getElementById('form').noValidate = true")
    browser.click("#send")
    browser.wait("!document.getElementById('error').hidden")
    assert texts(browser, "#error")[0].startswith("top_p: ")
    assert not api.asked


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
