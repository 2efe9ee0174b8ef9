"""Tokens that grammars force, from a request to its output: the text is that of plain decoding, in fewer passes."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, RequestOutput, SamplingParams
from specinfer.core.lookups import GRAMMAR
from specinfer.core.rules import RULES
from specinfer.demo.pair import demo_folders
from specinfer.model.definition import load_tokenizer
from tiny import EOS, save_model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["alpha", "beta", "alpine"]},
        "is_known": {"type": "boolean"},
        "size": {"type": "object", "properties": {"width": {"enum": [1, 20]}}, "required": ["width"]},
    },
    "required": ["name", "kind", "is_known", "size"],
}
ASKED: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"choice": ["def main", "def other(x)", "class A"]},
    {"regex": r"import (os|sys)\nimport [a-z]{1,3}\n"},
    {"grammar": 'start: "x = " ("one" | "two" | "twenty") "\\n" more*\nmore: "y = " /[a-c]/ "\\n"'},
]
PROMPTS = ["def f(x):\n", "class a", "x = 1", "import"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Random models with the demo pair's tokenizer, which has the signs of JSON."""
    tokenizer = load_tokenizer(demo_folders().target)
    assert tokenizer is not None
    made = []
    for noise in (0.0, 0.15):
        folder = save_model(
            tmp_path_factory.mktemp("forced"), "llama", 0, noise, vocab_size=2056, eos_token_id=tokenizer.eos_token_id
        )
        tokenizer.save_pretrained(folder)
        made.append(folder)
    return made


@pytest.fixture(scope="module")
def load(folders: list[Path]) -> Callable[..., LLM]:
    loaded: dict[str, LLM] = {}

    def make(**options: Any) -> LLM:
        key = repr(options)
        if key not in loaded:
            loaded[key] = LLM(folders[0], device="cpu", **options)
        return loaded[key]

    return make


@contextmanager
def _without_grammars() -> Iterator[None]:
    """Let no tokens be forced."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("merge.guarded", "lookup.grammar"):
            patch.setattr(f"specinfer.drafters.{module}.has_forced", lambda request: False)
        yield


def _generate(llm: LLM, params: Any, prompts: Any = PROMPTS) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert not any(output.error for output in outputs)
    return outputs


def _ends(outputs: list[RequestOutput]) -> list[Any]:
    return [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for out in outputs for one in out.outputs]


def _passes(outputs: list[RequestOutput]) -> int:
    return sum(int(str(output.metrics.speculative_decoding["num_target_passes"])) for output in outputs)


@pytest.mark.covering(2)
@pytest.mark.parametrize("asked", range(len(ASKED)))
@pytest.mark.parametrize("tree", ["best-first:12", "2,2,1", "auto"])
@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_text_is_that_of_plain_decoding(
    asked: int, tree: str, with_model: bool, temperature: float, load: Callable[..., LLM], folders: list[Path]
) -> None:
    drafters = ["suffix", str(folders[1])] if with_model else ["ngram"]
    params = SamplingParams(temperature=temperature, max_tokens=60, n=2, seed=3, structured_outputs=ASKED[asked])
    plain, forced = (_generate(load(drafters=drafters, tree=each), params) for each in ("off", tree))
    assert _ends(forced) == _ends(plain)


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("tree", ["best-first:12", "2,1,1"])
def test_every_rule_keeps_to_greedy_text_and_to_the_grammar(
    rule: str, with_model: bool, tree: str, load: Callable[..., LLM], folders: list[Path]
) -> None:
    drafters = [str(folders[1])] if with_model else ["suffix"]
    llm, plain = load(drafters=drafters, tree=tree, verification=rule), load(drafters=drafters, tree="off")
    greedy, drawn = (
        [SamplingParams(temperature=temperature, max_tokens=60, seed=4, structured_outputs=asked) for asked in ASKED]
        for temperature in (0.0, 1.0)
    )
    assert _ends(_generate(llm, greedy)) == _ends(_generate(plain, greedy))
    outputs = _generate(llm, drawn)
    if outputs[0].outputs[0].finish_reason == "stop":
        assert json.loads(outputs[0].outputs[0].text).keys() == SCHEMA["properties"].keys()  # type: ignore[attr-defined]
    assert outputs[1].outputs[0].text in ASKED[1]["choice"]


@pytest.mark.parametrize("verification", ["coupled", "traversal"])
def test_grammars_save_passes_under_any_drafter(verification: str, load: Callable[..., LLM]) -> None:
    llm = load(drafters=["ngram"], tree="best-first:12", verification=verification)
    params = [SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=asked) for asked in ASKED]
    outputs = _generate(llm, params)
    with _without_grammars():
        without = _generate(llm, params)
    assert _ends(outputs) == _ends(without)
    assert _passes(outputs) < 0.75 * _passes(without)


def test_several_grammars_share_a_batch_with_requests_without_one(load: Callable[..., LLM]) -> None:
    params = [SamplingParams(temperature=0.7, max_tokens=40, seed=6, structured_outputs=asked) for asked in ASKED]
    params += [SamplingParams(temperature=0.7, max_tokens=40, seed=6)]
    llm = load(drafters=["suffix"], tree="best-first:8")
    together = _generate(llm, params, [*PROMPTS, "it"])
    alone = [_generate(llm, each, [prompt])[0] for each, prompt in zip(params, [*PROMPTS, "it"], strict=True)]
    assert _ends(together) == _ends(alone)


@pytest.mark.parametrize("limit", range(1, 16, 2))
def test_a_limit_within_forced_text_ends_it_where_plain_decoding_ends(limit: int, load: Callable[..., LLM]) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=limit, structured_outputs=asked) for asked in ASKED]
    plain, forced = (_generate(load(drafters=["ngram"], tree=tree), params) for tree in ("off", "best-first:12"))
    assert _ends(forced) == _ends(plain)
    assert all(len(output.outputs[0].token_ids) <= limit for output in forced)


@pytest.mark.parametrize("stop", ['"kind', 'nd":', "is_kn", "ma", "twen", "import o"])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_within_forced_text(stop: str, include: bool, load: Callable[..., LLM]) -> None:
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=60, stop=[stop], include_stop_str_in_output=include, structured_outputs=asked
        )
        for asked in ASKED
    ]
    plain, forced = (_generate(load(drafters=["ngram"], tree=tree), params) for tree in ("off", "best-first:12"))
    assert _ends(forced) == _ends(plain)


def test_penalties_and_forbidden_tokens_next_to_a_grammar(load: Callable[..., LLM]) -> None:
    params = [
        SamplingParams(
            temperature=0.8, seed=2, max_tokens=50, repetition_penalty=1.3, bad_words=["al"], structured_outputs=asked
        )
        for asked in ASKED
    ]
    plain, forced = (_generate(load(drafters=["ngram"], tree=tree), params) for tree in ("off", "best-first:12"))
    assert _ends(forced) == _ends(plain)


def test_the_source_of_forced_tokens_has_a_name(load: Callable[..., LLM]) -> None:
    llm = load(drafters=["ngram"], tree="best-first:12")
    params = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=ASKED[0])
    origins: list[str | None] = []
    for chunk in llm.stream(PROMPTS[0], params):
        origins += chunk.origins
    assert origins.count(GRAMMAR) > len(origins) / 4


def test_a_request_that_asks_for_no_tree_gets_none(load: Callable[..., LLM]) -> None:
    llm = load(drafters=["ngram"], tree="best-first:12")
    params = SamplingParams(temperature=0.0, max_tokens=20, tree="off", structured_outputs=ASKED[0])
    (output,) = _generate(llm, params, PROMPTS[:1])
    assert _passes([output]) == len(output.outputs[0].token_ids)


def test_a_merged_token_across_the_end_of_forced_text(model_folder: Callable[..., Path]) -> None:
    """The text after a forced `t` may go on with `h`, which the tokenizer merges with it."""
    folder = model_folder("llama", tokenizer=True, eos_token_id=EOS)
    asked = {"regex": "(an )?t[a-z]{1,3}( and t[a-z]{1,3})*"}
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=30, n=4, structured_outputs=asked)
    options: dict[str, Any] = {"device": "cpu", "drafters": ["ngram"]}
    plain, forced = (
        _generate(LLM(folder, tree=tree, **options), params, ["the cat", "in it"]) for tree in ("off", "best-first:8")
    )
    assert _ends(forced) == _ends(plain)
