"""The plan: trees by batch size, from measured costs and acceptance, and drafters for streamed targets."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from specinfer.bench.models import find_models
from specinfer.cli.app import app
from specinfer.core.config import OffloadConfig
from specinfer.core.sampling import SamplingParams
from specinfer.llm import LLM
from specinfer.model.offload.stream import Stream
from specinfer.planning import plan
from specinfer.planning.device_plan import run_any_plan
from specinfer.planning.offload_plan import offload_choices
from specinfer.planning.options import PlanConfig
from specinfer.planning.plan_page import bar
from specinfer.policy import cost_cache
from specinfer.policy.acceptance import AcceptanceModel, expected_tokens
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.policy.streamed_costs import Pass, StreamedCurve
from tiny import save_model

PROMPTS = ((1, 2, 3, 4), (5, 6, 7, 8, 9))
CHEAP = CostModel(Curve((1, 512), (1.0, 1.0)), Curve((1, 64), (0.01, 0.01)), 0.001)  # passes of any size alike
MEASURED: list[int] = []


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from or written to the user's cache, and nothing is timed."""

    def measure(*_: object, **__: object) -> CostModel:
        MEASURED.append(1)
        return CostModel.from_dict(CHEAP.as_dict())

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cost_cache, "measure_costs", measure)
    MEASURED.clear()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a drafter that is the target itself but for its name."""
    root = tmp_path_factory.mktemp("pair")
    return str(save_model(root / "target")), str(save_model(root / "drafter"))


def make_config(folders: tuple[str, str], **changes: Any) -> PlanConfig:
    options = {"model": folders[0], "drafters": (folders[1],), "device": "cpu", "prompts": PROMPTS, "max_tokens": 16}
    return PlanConfig(**(options | changes))


def test_auto_uses_what_was_kept(folders: tuple[str, str]) -> None:
    for _ in range(2):
        LLM(folders[0], drafters=[folders[1]], device="cpu")
    assert len(MEASURED) == 1


def test_a_good_drafter_gets_deep_trees_and_a_bad_one_none(folders: tuple[str, str]) -> None:
    good = run_any_plan(make_config(folders, acceptance=(0.9, 0.05), batch_sizes=(1, 512))).measured
    bad = run_any_plan(make_config(folders, acceptance=(0.01,), batch_sizes=(1, 32))).measured
    assert good.choices[0].num_levels > 4
    assert good.choices[0].speedup == pytest.approx(good.choices[0].tokens_per_second / good.choices[0].plain_rate)
    assert good.choices[0].speedup > 3
    assert good.choices[1].num_nodes == 0  # beyond 512 tokens each token costs its full share
    assert [(choice.num_nodes, choice.speedup) for choice in bad.choices] == [(0, 1.0)] * 2
    assert good.by_rank == pytest.approx((0.9, 0.05))


def test_acceptance_is_measured_if_none_is_assumed(folders: tuple[str, str]) -> None:
    report = run_any_plan(make_config(folders))
    assert report.measured.by_rank[0] > 0.8  # the drafter is the target itself; the prior counts a little
    assert sum(report.measured.by_rank) <= 1.0


def test_passes_for_which_a_lookup_finds_nothing_count(folders: tuple[str, str]) -> None:
    report = run_any_plan(make_config(folders, drafters=("ngram",), batch_sizes=(1,)))
    (choice,) = report.measured.choices
    always = expected_tokens(
        np.asarray(report.measured.by_rank), np.asarray([choice.num_nodes]), np.asarray([choice.num_levels])
    )
    assert choice.num_nodes > 0
    assert 1 < choice.tokens_per_pass < 0.95 * always[0]


def test_remeasuring(folders: tuple[str, str]) -> None:
    for remeasure in (False, False, True):
        run_any_plan(make_config(folders, acceptance=(0.5,), remeasure=remeasure))
    assert len(MEASURED) == 2


def test_what_is_written_and_shown(folders: tuple[str, str], tmp_path: Path) -> None:
    paths = {"json": tmp_path / "plan.json", "plot": str(tmp_path / "plan.svg")}
    report = run_any_plan(make_config(folders, **paths))
    numbers = json.loads(paths["json"].read_text())
    assert numbers == json.loads(json.dumps(report.as_dict()))
    assert [choice["num_requests"] for choice in numbers["choices"]] == [1, 2, 4, 8, 16, 32]
    assert numbers["acceptance_measured"] is True
    assert numbers["target_ms"] == [[1, 1000.0], [512, 1000.0]]
    assert Path(paths["plot"]).read_text().lstrip().startswith("<?xml")
    report.draw(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000
    shown = io.StringIO()
    report.print(Console(file=shown, width=80))
    assert "Trees that auto chooses" in shown.getvalue()
    assert f"{report.measured.choices[0].speedup:.2f}" in shown.getvalue()
    assert max(map(len, shown.getvalue().splitlines())) <= 80


def test_bars() -> None:
    assert bar(1.0, 4) == "████"
    assert bar(0.0, 4) == ""
    assert bar(0.5625, 4) == "██▎"
    assert bar(7.0, 2) == "██"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"acceptance": ()}, "acceptance: nothing given"),
        ({"acceptance": (0.7, 0.4)}, "acceptance: 0.7, 0.4 given"),
        ({"acceptance": (-0.1,)}, "acceptance: -0.1 given"),
        ({"acceptance": (float("nan"),)}, "acceptance: nan given"),
        ({"acceptance": (0.1,) * 9}, "acceptance: .* given"),
        ({"num_prompts": 0}, "num_prompts must be"),
        ({"max_tokens": 1}, "max_tokens must be"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"batch_sizes": (0,)}, "batch_sizes must be"),
        ({"batch_sizes": ()}, "batch_sizes must be"),
        ({"dtype": "int3"}, "dtype must be one of"),
        ({"drafters": ()}, "drafters: empty"),
        ({"plot": "x.bmp"}, "plot: x.bmp must end in one of"),
        ({"json": "."}, "json: . cannot be written"),
        ({"memory_budget": "2GiB"}, "memory_budget: it is for targets that are streamed"),
    ],
)
def test_bad_input_is_refused_before_the_long_work(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    def refuse_to_load(*_: object, **__: object) -> None:
        raise AssertionError("the long work began")

    monkeypatch.setattr(plan, "LLM", refuse_to_load)
    with pytest.raises(ValueError, match=message):
        run_any_plan(make_config(folders, **changes))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--acceptance", "much"], "acceptance: 'much' cannot be read"),
        (["--acceptance", "2"], "acceptance: 2.0 given"),
        (["--json", "/no/such/folder/x.json"], "json: /no/such/folder/x.json cannot be written"),
    ],
)
def test_the_command_refuses_in_one_line(
    folders: tuple[str, str], words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["plan", folders[0], *words])
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert message in said.err
    assert len(said.err.splitlines()) == 1


def test_the_command_prints_the_plan(folders: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["plan", folders[0], "--drafter", folders[1], "--device", "cpu", "--acceptance", "0.8,0.1"])
    assert ended.value.code == 0
    assert "assumed): 80%, 10%" in capsys.readouterr().out


# ------------------------------------------------------------------------------------ targets that are streamed


def _stream_all_but(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this much of a target stay in memory; all of so small a one would."""
    monkeypatch.setattr(Stream, "settle", lambda self, _num_bytes, real=Stream.settle: real(self, num_bytes))


def test_bytes_read_by_a_pass_of_a_streamed_target_are_reported(
    folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve = StreamedCurve([Pass(1, 4.0, 3.9), Pass(128, 4.0, 2.0)])

    def measure(*_: object, **__: object) -> CostModel:
        return CostModel(curve, Curve((1, 64), (0.01, 0.01)))

    monkeypatch.setattr(cost_cache, "measure_costs", measure)
    _stream_all_but(0, monkeypatch)
    target = str(save_model(tmp_path / "deep", num_hidden_layers=5))
    config = make_config(folders, model=target, offload="disk", acceptance=(0.7, 0.1), json=tmp_path / "plan.json")
    report = run_any_plan(config)
    told = json.loads((tmp_path / "plan.json").read_text())["streaming"]
    assert (told["num_layers"], told["num_resident_layers"], told["seconds_per_pass"]) == (5, 0, 4.0)
    assert told["bytes_per_pass"] > 0
    assert told["bend"] == pytest.approx(curve.bend)
    alone, many = report.measured.choices[0], report.measured.choices[-1]
    assert alone.num_nodes > 64 > many.num_nodes
    console = Console(record=True, width=80)
    report.print(console)
    said = " ".join(console.export_text().split())
    assert "0 of 5 layers stay; a pass reads" in said
    assert f"computing takes longer from {curve.bend:.0f} rows on" in said
    given = next(one for one in report.measured.offload_choices if one.candidate.drafters == (folders[1],))
    assert given.candidate.is_measured
    assert given.candidate.num_bytes > 0
    assert (given.num_resident, given.tokens_per_second) == (0, pytest.approx(alone.tokens_per_second))
    choices = json.loads((tmp_path / "plan.json").read_text())["offload_choices"]
    assert [one["drafters"] for one in choices] == [[], [folders[1]], ["self:int8"], ["self:int4"]]
    assert [one["is_best"] for one in choices].count(True) == 1
    assert report.measured.command is not None
    assert report.measured.command in " ".join(said.split())


def test_a_budget_that_streams_the_embedded_target_shows_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _stream_all_but(3_000_000, monkeypatch)
    words = ["plan", "demo", "--offload", "disk", "--offload-folder", str(tmp_path / "packed"), "--acceptance", "0.6"]
    with pytest.raises(SystemExit) as ended:
        app([*words, "--json", str(tmp_path / "plan.json")])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "Drafters within the memory budget" in said
    assert "Acceptance is assumed for self:int8 and self:int4" in said
    plan = json.loads((tmp_path / "plan.json").read_text())
    plain, given, *copies = plan["offload_choices"]
    assert plain["speedup"] == 1.0
    assert given["is_measured"]
    assert [one["drafters"] for one in copies] == [["self:int8"], ["self:int4"]]
    assert plan["command"].startswith("specinfer serve demo --offload disk")
    assert plan["command"] in said
    assert max(len(line) for line in said.splitlines() if not line.startswith("specinfer ")) <= 80


@pytest.mark.parametrize("family", ["llama", "granitemoehybrid", "qwen3_moe"])
def test_a_copy_takes_the_memory_that_the_plan_of_a_streamed_target_expects(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are not rounded, and layers differ in size."""
    _stream_all_but(0, monkeypatch)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
    if family == "granitemoehybrid":
        types = ["mamba", "attention", "mamba", "mamba", "attention"]
        sizes |= {"mamba_d_head": 64, "shared_intermediate_size": 128, "layer_types": types}
    target = save_model(tmp_path / "model", family, num_hidden_layers=5, **sizes)
    options: dict[str, Any] = {"offload": "disk", "offload_folder": tmp_path / "packed", "memory_budget": "8GiB"}
    with LLM(target, drafters=["self:int8"], **options) as llm:
        llm.generate([{"prompt_token_ids": list(PROMPTS[0])}], SamplingParams(max_tokens=2))
        (copy,) = llm.small_models.values()
        assert copy.loaded.stream is not None
        taken = copy.loaded.stream.num_layers * copy.loaded.stream.buffer_bytes
        models = find_models(str(target), ("ngram",), OffloadConfig(**options), None)
        costs = CostModel(Curve((1, 64), (0.1, 0.2)), Curve((1, 64), (0.01, 0.01)))
        choices = offload_choices(llm, models, costs, AcceptanceModel.assumed((0.5,)))
    found = next(one.candidate.num_bytes for one in choices if one.candidate.drafters == ("self:int8",))
    assert found == pytest.approx(taken, rel=0.1)
