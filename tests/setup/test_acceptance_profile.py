"""Acceptance that is measured before served text: on which prompts, when, and how it is kept."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, SamplingParams
from specinfer.core.config import SpeculativeConfig
from specinfer.policy.acceptance import AcceptanceModel, AcceptanceProfile
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.setup import acceptance_profile, drafter_setup
from specinfer.setup.acceptance_profile import CHAT_PROMPTS, TREE
from tiny import save_model, save_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed: a draft level costs a hundredth of a pass."""
    costs = CostModel(Curve((1, 512), (0.1, 0.1)), Curve((1, 64), (0.001, 0.001)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(drafter_setup, "cached_costs", lambda *_, **__: CostModel.from_dict(costs.as_dict()))
    monkeypatch.setattr(acceptance_profile, "_MAX_SECONDS", 600.0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A chat model, and a drafter that is the target itself but for its name."""
    made = [save_model(tmp_path_factory.mktemp(name), max_position_embeddings=2048) for name in ("target", "drafter")]
    return str(save_tokenizer(made[0], TEMPLATE)), str(save_tokenizer(made[1], TEMPLATE))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """The prompts of each measurement."""
    prompts: list[list[list[int]]] = []
    usual = acceptance_profile.measure_acceptance

    def measure(engine: Any, asked: Any, *args: Any) -> AcceptanceProfile | None:
        prompts.append(list(asked))
        return usual(engine, asked, *args)

    monkeypatch.setattr(acceptance_profile, "measure_acceptance", measure)
    return prompts


def load(pair: tuple[str, str], **options: Any) -> LLM:
    settings: dict[str, Any] = {"drafters": [pair[1]], "tree": "auto", "device": "cpu", "max_num_seqs": 8}
    return LLM(pair[0], **(settings | options))


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "specinfer").glob("acceptance-*.json"))


def test_a_start_measures_answers_to_chat_prompts_once(
    pair: tuple[str, str], measured: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "specinfer"):
        first = load(pair)
    (path,) = kept(tmp_path)
    profile = AcceptanceProfile.from_dict(json.loads(path.read_text())["acceptance"])
    assert profile.by_rank[0] > 0.9, "the drafter is the target itself; the prior counts a little"
    assert profile.text == CHAT_PROMPTS
    assert profile.coverage > 0.8
    assert "expected by what was accepted on chat prompts" in caplog.text
    (prompts,) = measured
    assert first.chat_prompt([{"role": "user", "content": "?"}])[:2] == prompts[0][:2], "in the target's template"
    load(pair)
    assert len(measured) == 1
    path.write_text("{")
    load(pair)
    assert len(measured) == 2


def test_what_a_plan_measured_is_used_at_the_next_start(pair: tuple[str, str], measured: list[Any]) -> None:
    llm = load(pair, tree="1")
    prompt = llm.chat_prompt([{"role": "user", "content": "the end"}])
    profile = llm.measure_acceptance([prompt], SamplingParams(temperature=0, max_tokens=20), CHAT_PROMPTS, keep=True)
    assert profile is not None
    speedup = load(pair).engine.policy.speedup
    assert speedup is not None
    assert speedup.expected > 1.5
    assert not measured


def test_nothing_that_was_measured_stays_in_the_cache_or_in_the_drafter(pair: tuple[str, str]) -> None:
    llm = load(pair, drafters=[pair[1], "suffix"])
    assert llm.target.cache.num_available == llm.target.cache.num_slots
    assert llm.engine.metrics.num_steps == 0
    asked = SamplingParams(temperature=0, max_tokens=20)
    (output,) = llm.chat([{"role": "user", "content": "the end"}], asked, use_tqdm=False)
    (plain,) = load(pair, tree="off").chat([{"role": "user", "content": "the end"}], asked, use_tqdm=False)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids


def test_without_a_chat_template_or_where_passes_are_slow_acceptance_is_assumed(
    pair: tuple[str, str], measured: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    model_folder: Callable[..., Path], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with caplog.at_level(logging.INFO, "specinfer"):
        load((str(model_folder(tokenizer=True)), pair[1]))
    assert "expected if drafts are accepted as usual" in caplog.text
    slow = CostModel(Curve((1, 512), (9.0, 9.0)), Curve((1, 64), (0.1, 0.1)))
    monkeypatch.setattr(drafter_setup, "cached_costs", lambda *_, **__: slow)
    load(pair)
    load(pair, tree="2,1")
    assert not measured
    assert not kept(tmp_path)


def test_a_lookup_that_finds_little_promises_little(pair: tuple[str, str], tmp_path: Path) -> None:
    """It was expected to draft in each step, and to be right as often as a model."""
    llm = load(pair, drafters=["ngram"])
    speedup = llm.engine.policy.speedup
    assert speedup is not None
    if not kept(tmp_path):
        pytest.fail("nothing was measured")
    profile = AcceptanceProfile.from_dict(json.loads(kept(tmp_path)[0].read_text())["acceptance"])
    most = 1.0 + profile.coverage * 12 * profile.share
    assert 1.0 <= speedup.expected <= most
    llm.speculate(SpeculativeConfig(tree=TREE))
    assert llm.engine.policy.speedup is None


def test_an_error_while_measuring_ends_no_start(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("prompt 0: values that are not numbers")

    monkeypatch.setattr(acceptance_profile, "measure_acceptance", fail)
    llm = load(pair)
    assert "acceptance is assumed, because measuring it failed: prompt 0" in caplog.text
    assert llm.generate("the", SamplingParams(max_tokens=4), use_tqdm=False)[0].error is None


@pytest.mark.parametrize(
    "change", [{"by_rank": []}, {"by_rank": [1.5]}, {"share": float("nan")}, {"coverage": -1}, {"text_shares": 3}]
)
def test_a_damaged_profile_is_refused(change: dict[str, Any]) -> None:
    numbers = AcceptanceProfile((0.7, 0.1), 0.9, (0.8, 1.0), 0.5, 30, CHAT_PROMPTS).as_dict()
    assert AcceptanceProfile.from_dict(json.loads(json.dumps(numbers))).as_dict() == numbers
    with pytest.raises((ValueError, TypeError)):
        AcceptanceProfile.from_dict(numbers | change)


def test_a_model_expects_what_was_measured() -> None:
    model = AcceptanceModel.from_profile(AcceptanceProfile((0.7, 0.1), 0.9, (0.8, 1.0), 0.5, 30, CHAT_PROMPTS))
    assert model.by_rank().tolist() == pytest.approx([0.7, 0.1])
    assert model.share == 0.9
    assert model.coverage == pytest.approx(0.5)


def test_a_model_of_the_users_needs_no_cache_folder(
    pair: tuple[str, str], measured: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    (output,) = load(pair).generate("a", SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2
    assert len(measured) == 1
