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

from specinfer.bench import schedule_work
from specinfer.bench.report import Pass, Run
from specinfer.bench.schedule import run_schedule
from specinfer.bench.schedule_plans import AUTO, FIXED, LEARNED, OFF_NAME, ScheduleConfig, schedule, split_arm
from specinfer.bench.schedule_report import MIX, ScheduleArm, ScheduleReport
from specinfer.bench.schedule_table import print_schedule
from specinfer.bench.schedule_work import PARTS
from specinfer.cli.app import app
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
    assert [arm.name for arm in report.arms] == [OFF_NAME, *ARMS, AUTO, LEARNED]
    for arm in report.arms:
        assert sorted(arm.parts) == sorted(2 * PARTS)
        assert all(len(run.token_ids) == 9 for run in arm.runs)
        assert report.partings(arm.name) == 0
    assert report.arm(OFF_NAME).tokens_per_pass(MIX) == 1.0
    assert sum(report.fallbacks.values()) > 0
    assert report.arm(ARMS[3]).nodes(MIX) <= 7
    numbers = json.loads((tmp_path / "it.json").read_text())
    assert set(numbers["learned_over_best_fixed"]) == {*PARTS, MIX}
    assert numbers["arms"][LEARNED]["num_partings"] == 0
    console = Console(file=io.StringIO(), width=100)
    print_schedule(report, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(name in shown for name in (*ARMS, LEARNED, "repetition"))
    assert max(map(len, shown.splitlines())) <= 100


def _run(prompt: int, seconds: float) -> Run:
    return Run(prompt, 0, 0.1, seconds, tuple(range(11)), (Pass(1, 4, 1, 0.0, 0.1),) * 5)


def test_numbers_follow_from_what_was_timed() -> None:
    """Two parts; the mix is all tokens over all seconds."""

    def arm(name: str, *seconds: float) -> ScheduleArm:
        return ScheduleArm(name, tuple(_run(i, s) for i, s in enumerate(seconds)), ("code", "prose"))

    arms = (arm(OFF_NAME, 4, 4), arm("1,1", 1, 3), arm("3", 2, 1), arm(AUTO, 1, 2), arm(LEARNED, 1, 1))
    report = ScheduleReport(arms, ("code", "prose"), {}, {}, None)  # type: ignore[arg-type]
    assert report.arm("1,1").tokens_per_second(MIX) == 20 / 4
    assert report.best_fixed.name == "3"
    assert report.ratio(LEARNED, "3", MIX) == pytest.approx(1.5)
    assert report.ratio(LEARNED, "3", "code") == pytest.approx(2.0)
    assert report.paired(LEARNED, "3", MIX).median == pytest.approx(1.5)
    assert report.arm("3").tokens_per_pass("code") == 2.0
    assert report.arm("3").nodes("code") == 4.0


def test_arms_take_turns_in_an_order_that_rotates(folders: tuple[str, str, str]) -> None:
    config = make_config(folders, repeats=2, warmup=1)
    turns = list(schedule(config, 6))
    measured = [turn for turn in turns if turn[1] >= 0]
    assert len(measured) == 2 * 6 * len(config.arms)
    assert {turn[2] for turn in turns[: len(config.arms)]} == set(config.arms)
    firsts = [turn[2] for turn in measured[:: len(config.arms)]]
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
    result = CliRunner().invoke(app, ["bench", "schedule", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "no file" in result.stderr
