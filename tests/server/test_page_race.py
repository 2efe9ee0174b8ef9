"""The race between decoding with a tree and without."""

import pytest
from fastapi.responses import Response

from tests.server.browser import Browser
from tests.server.page_api import NEEDS_CHROMIUM, TEXTS, Api, Event, answer, chunk, fill, refusal, send, texts

pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]


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
