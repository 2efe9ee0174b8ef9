"""The page for all eyes, hands and screens: keys, contrast, phones, and what axe finds."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.server.browser import Browser
from tests.server.page_api import NEEDS_CHROMIUM, Api, answer, fill, finish, send, settle, texts

pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]


_AXE = find_spec("axe_core_python")


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
    cut = "[...document.querySelectorAll('.examples button')].filter(e => e.getBoundingClientRect().right > 360).length"
    assert browser.run(cut) == 0


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


def test_an_answer_on_a_phone_is_in_view_while_it_is_written(browser: Browser, api: Api) -> None:
    browser.resize(390, 844, phone=True)
    api.pause, api.say = 0.1, lambda body: answer() * 50
    send(browser)
    browser.wait("document.querySelectorAll('.passes g').length > 2")
    box = browser.run("(b => [b.top, b.bottom])(document.getElementById('transcript').getBoundingClientRect())")
    assert 0 <= box[0] < box[1] <= 844
    for name in ("newest", "slider"):  # Stop covers neither
        browser.run(f"document.getElementById('{name}').scrollIntoView({{block: 'nearest'}})")
        found = browser.run(
            f"(b => document.elementFromPoint(b.x + b.width / 2, b.y + b.height / 2).id)"
            f"(document.getElementById('{name}').getBoundingClientRect())"
        )
        assert found == name
    browser.click("#stop")
    browser.wait("!document.body.classList.contains('running')")


def test_enter_sends_and_shift_enter_makes_a_line_or_the_other_way_round(browser: Browser, api: Api) -> None:
    fill(browser, "prompt", "def f(")
    browser.run("document.getElementById('prompt').focus()")
    browser.press("Enter", text="\r", shift=True)
    composed = "new KeyboardEvent('keydown', {key: 'Enter', keyCode: 229, bubbles: true})"
    browser.run(f"document.getElementById('prompt').dispatchEvent({composed})")
    assert not api.asked, "a new line, and the end of a composed word"
    browser.press("Enter", text="\r")
    finish(browser)
    assert len(api.asked) == 1
    browser.run("document.getElementById('enter-sends').click()")
    browser.run("document.getElementById('prompt').focus()")
    browser.press("Enter", text="\r")
    assert len(api.asked) == 1
    browser.press("Enter", text="\r", shift=True)
    settle(browser)
    finish(browser)
    assert len(api.asked) == 2


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
