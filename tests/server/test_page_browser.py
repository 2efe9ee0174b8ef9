"""The page in a real browser, before an API that answers what the test gives it."""

import re

import pytest

from serving import served_on_port
from specinfer import LLM, SamplingParams
from tests.server.browser import Browser
from tests.server.page_api import (
    NEEDS_CHROMIUM,
    TEXTS,
    Api,
    Event,
    answer,
    chunk,
    fill,
    finish,
    guess,
    send,
    step,
    texts,
)

pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]


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


def _thinks(text: str, reason: str | None = None) -> Event:
    choice = {"index": 0, "delta": {"reasoning_content": text}, "finish_reason": reason}
    return {"choices": [choice], "usage": {"completion_tokens": 3}, "specinfer": {"steps": [THOUGHT], "origins": []}}


THOUGHT = step("(", [guess("<think>", accepted=True), guess("Hm", 1, accepted=True)], [1, 2], ".</think>")


def test_a_thought_is_folded_above_the_answer(browser: Browser, api: Api) -> None:
    browser.click("#mode label:nth-of-type(2) span")
    api.say = lambda body: [_thinks("Hm."), *answer(chat=True)]
    send(browser, "Why?")
    finish(browser)
    assert texts(browser, ".message.assistant > .words") == ["".join(TEXTS)]
    assert texts(browser, "details.thought > .words") == ["Hm."]
    assert re.fullmatch(r"Thought for \d+\.\d seconds", texts(browser, "details.thought summary")[0])
    shown = "document.querySelector('details.thought .token').checkVisibility()"
    assert not browser.run(shown)
    browser.run("document.querySelector('details.thought summary').focus()")
    browser.press("Enter", text="\r")
    assert browser.run(shown)
    assert texts(browser, ".thought .token.by-0[data-step]") == ["Hm"]
    browser.click(".thought .token.by-0[data-step]")
    assert "step 1 of 4" in texts(browser, "#step-words")[0]
    send(browser, "And?")
    browser.wait("document.querySelectorAll('.message').length === 4")
    assert api.asked[1]["messages"][1] == {
        "role": "assistant", "content": "".join(TEXTS), "reasoning_content": "Hm.",
    }  # fmt: skip


def test_an_answer_of_a_thought_alone_is_explained(browser: Browser, api: Api) -> None:
    browser.click("#mode label:nth-of-type(2) span")
    api.say = lambda body: [_thinks("Hm.", "length")]
    send(browser, "Why?")
    finish(browser, "3")
    assert texts(browser, "#status") == ["Done: all 3 tokens are a thought. Raise max_tokens for an answer."]
