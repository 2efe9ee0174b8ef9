"""Schedulers compared: every arm runs every prompt, the numbers follow from what was timed, bad input is refused."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.program import app
from benchmarks.schedule import work as schedule_work
from benchmarks.schedule.plans import AUTO, FIXED, LEARNED, ScheduleConfig, schedule, split_arm
from benchmarks.schedule.report import MIX, ScheduleReport, print_schedule, rate_of
from benchmarks.schedule.run import run_schedule
from benchmarks.schedule.work import PARTS
from specinfer.bench.comparisons import Comparison
from specinfer.bench.options import PLAIN
from specinfer.bench.results import Arm, Run
from specinfer.core.step_record import StepRecord
from specinfer.policy.features import feature_names
from specinfer.policy.network import PolicyNetwork, make_configurations
from tiny import save_model, save_tokenizer

ARMS = ("best-first:7:7", "1,1", "best-first:15:15@lookups", "best-first:7:6@models")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A target, a drafter, and a scheduler that was never trained."""
    root = tmp_path_factory.mktemp("pair")
    target, small = save_model(root / "target"), save_model(root / "small", noise=0.2)
    save_tokenizer(target)
    slots = ("model", "suffix")
    names, menu = feature_names(slots), make_configurations(slots)
    ones, zeros = np.ones(len(names)), np.zeros(len(names))
    bias = np.random.default_rng(0).normal(size=3 * len(menu))
    layers = ((np.zeros((len(names), len(bias))), bias),)
    PolicyNetwork(slots, names, menu, -100 * ones, 100 * ones, zeros, ones, layers, {}).save(root / "scheduler")
    return str(target), str(small), str(root / "scheduler")


@pytest.fixture(autouse=True)
def _short_lead_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_work, "_LEAD_IN", 5)


def make_config(folders: Sequence[str], **changes: Any) -> ScheduleConfig:
    target, small, scheduler = folders
    options: dict[str, Any] = {
        "scheduler": scheduler, "model": target, "drafters": (small, "suffix"), "fixed": ARMS, "device": "cpu",
        "num_prompts": 2, "prompt_tokens": 12, "max_tokens": 9,
    }  # fmt: skip
    return ScheduleConfig(**(options | changes))


def test_every_arm_runs_every_part_with_the_same_tokens(folders: tuple[str, str, str], tmp_path: Path) -> None:
    config = make_config(folders, json=tmp_path / "it.json")
    report = run_schedule(config)
    assert [arm.name for arm in report.arms] == [PLAIN, *ARMS, AUTO, LEARNED]
    for arm in report.arms:
        assert sorted(report.parts[run.prompts[0]] for run in arm.runs) == sorted(2 * PARTS)
        assert all(len(run.token_ids) == 9 for run in arm.runs)
        assert report.num_partings(arm.name) == 0
    assert report.arm(PLAIN).tokens_per_pass == 1.0
    assert sum(report.fallbacks.values()) > 0
    assert report.arm(ARMS[3]).nodes <= 7
    numbers = json.loads((tmp_path / "it.json").read_text())
    assert set(numbers["learned_over_best_fixed"]) == {*PARTS, MIX}
    assert numbers["arms"][LEARNED]["num_partings"] == 0
    console = Console(file=io.StringIO(), width=100)
    print_schedule(report, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(name in shown for name in (*ARMS, LEARNED, "repetition"))
    assert max(map(len, shown.splitlines())) <= 100


def _run(prompt: int, seconds: float) -> Run:
    step = StepRecord(1, 5, 4, 1, 2, 0, 0.0, 0.1, 0.0)
    return Run(0, (prompt,), 0.1, seconds, 0.1 + seconds, (tuple(range(11)),), (step,) * 5)


def test_numbers_follow_from_what_was_timed() -> None:
    """Two parts; the mix is all tokens over all seconds."""

    def arm(name: str, *seconds: float) -> Arm:
        return Arm(name, tuple(_run(i, s) for i, s in enumerate(seconds)))

    arms = (arm(PLAIN, 4, 4), arm("1,1", 1, 3), arm("3", 2, 1), arm(AUTO, 1, 2), arm(LEARNED, 1, 1))
    parts = ("code", "prose")
    report = ScheduleReport(Comparison(arms[0], arms[1:]), parts, parts, {}, {}, None)  # type: ignore[arg-type]
    assert rate_of(report.arm("1,1")) == 20 / 4
    assert report.best_fixed.name == "3"
    assert report.ratio(LEARNED, "3", MIX) == pytest.approx(1.5)
    assert report.ratio(LEARNED, "3", "code") == pytest.approx(2.0)
    assert report.paired(LEARNED, "3", MIX).median == pytest.approx(1.5)
    assert report.arm("3", "code").tokens_per_pass == 2.0
    assert report.arm("3", "code").nodes == 4.0


def test_arms_take_turns_in_an_order_that_rotates(folders: tuple[str, str, str]) -> None:
    config = make_config(folders, repeats=2, warmup=1)
    turns = list(schedule(config, 6))
    measured = [turn for turn in turns if turn.repeat >= 0]
    assert len(measured) == 2 * 6
    assert all(sorted(turn.arms) == sorted(config.arms) for turn in turns)
    firsts = [turn.arms[0] for turn in measured]
    assert len(set(firsts)) > 4


def test_the_drafter_is_named_after_an_at_sign() -> None:
    assert split_arm("best-first:7:7") == ("best-first:7:7", "all")
    assert split_arm("1,1@models") == ("1,1", "models")
    assert len(set(FIXED)) == len(FIXED)
    with pytest.raises(ValueError, match="must end in one of @all, @models"):
        split_arm("1,1@nobody")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fixed": ()}, "fixed: none given"),
        ({"fixed": ("1", "1")}, "none twice"),
        ({"fixed": ("off",)}, "always measured"),
        ({"fixed": ("1@suffix",)}, "must end in one of"),
        ({"drafters": ("suffix",), "fixed": ("1@models",)}, "asks models, and no drafter is one"),
        ({"num_prompts": 0}, "num_prompts must be a whole number"),
        ({"max_tokens": 1}, "max_tokens must be"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    folders: tuple[str, str, str], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(folders, **changes)


def test_what_is_found_out_before_anything_is_measured(folders: tuple[str, str, str], tmp_path: Path) -> None:
    config = make_config(folders)
    for wrong, message in (
        (replace(config, scheduler=tmp_path / "none"), "speculation_policy: no file"),
        (replace(config, max_tokens=250), "do not fit into the context"),
        (replace(config, num_prompts=10_000), "num_prompts"),
        (replace(config, drafters=("suffix",), fixed=("1",)), "was trained with drafters"),
    ):
        with pytest.raises(ValueError, match=message):
            run_schedule(wrong)
    result = CliRunner().invoke(app, ["schedule", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "no file" in result.stderr
