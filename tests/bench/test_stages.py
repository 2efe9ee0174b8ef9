"""Floors follow from bytes and products, ceilings are measured, and stages are what was sampled of every arm."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reports import shown
from specinfer.bench.ceilings import Bandwidth, Ceilings, measure_ceilings
from specinfer.bench.comparisons import Compared
from specinfer.bench.latency import run_latency
from specinfer.bench.models import dtype_of
from specinfer.bench.options import LatencyConfig, ThroughputConfig
from specinfer.bench.stages import Roofline, Stages, StageSample
from specinfer.bench.throughput import run_throughput
from specinfer.core.step_record import StepRecord
from specinfer.engine.timer import STAGES
from specinfer.llm import LLM
from specinfer.model.load import load_model
from specinfer.model.pass_work import PassWork
from specinfer.reporting.report import Report
from tiny import VOCAB, random_prompts, save_model

CPU = torch.device("cpu")
SLOW = Ceilings(bytes_per_second=1000.0, flops_per_second=1e18)  # memory alone counts
POOR = Ceilings(bytes_per_second=1e18, flops_per_second=1000.0)  # arithmetic alone counts
PROMPTS = tuple(map(tuple, random_prompts((4, 9))))


@pytest.fixture(scope="module")
def report(folders: tuple[str, str]) -> Report[Compared]:
    target, drafter = folders
    return run_latency(
        LatencyConfig(target, (drafter,), ("1,1",), prompts=PROMPTS, max_tokens=12, repeats=1, warmup=0, device="cpu")
    )


# ----------------------------------------------------------------------------------------- floors


def test_a_pass_reads_its_weights_and_every_token_before_it(tmp_path: Path) -> None:
    """Of a Llama with 2 layers of 4 heads, 2 of them for keys and values, of 8 dimensions, in float32."""
    work = PassWork.from_loaded(load_model(save_model(tmp_path / "model"), "float32", CPU, native=False))
    assert work is not None
    hidden, mlp = 32, 48
    layer = hidden * 32 * 2 + hidden * 16 * 2 + 3 * hidden * mlp
    products = 2 * layer + hidden * VOCAB  # the head; of the input embedding rows are looked up
    norms = 5 * hidden
    rotary = 2 * 4  # frequencies, and those the model began with
    assert work.weight_bytes == 4 * (products + norms + rotary)
    assert work.token_bytes == 4 * 2 * 2 * (8 + 8)
    assert work.row_flops == 2 * (products + norms)
    assert work.pair_flops == 2 * 2 * 4 * (8 + 8)
    assert SLOW.seconds(*work.of_step(3, 10, 2)) == pytest.approx((work.weight_bytes + 13 * work.token_bytes) / 1000)
    assert POOR.seconds(*work.of_step(3, 10, 2)) == pytest.approx(3 * (work.row_flops + 5 * work.pair_flops) / 1000)


def test_a_tied_embedding_is_read_as_the_head(tmp_path: Path) -> None:
    apart, tied = (
        PassWork.from_loaded(
            load_model(save_model(tmp_path / name, tie_word_embeddings=ties), "float32", CPU, native=False)
        )
        for name, ties in (("apart", False), ("tied", True))
    )
    assert apart == tied


def test_experts_have_no_floor(tmp_path: Path) -> None:
    assert (
        PassWork.from_loaded(load_model(save_model(tmp_path / "model", "mixtral"), "float32", CPU, native=False))
        is None
    )


def test_floors_of_a_step(folders: tuple[str, str]) -> None:
    target, drafter = folders
    with LLM(target, drafters=[drafter, "ngram"], tree="1", device="cpu") as llm:
        roofline = Roofline(llm, SLOW)
        step = StepRecord(2, 10, 8, 4, 3, 0, 0.0, 0.0, 0.0, num_model_levels=4, num_context=30)
        work = PassWork.from_loaded(llm.target.loaded)
        assert work is not None
        floors = roofline.floors(step)
        assert floors["target"] == SLOW.seconds(*work.of_step(10, 30, 2))
        assert floors["draft"] == pytest.approx(4 * SLOW.seconds(*work.of_step(2, 30, 2)))
        assert floors["verify"] == 10 * VOCAB * 4 / 1000
        assert "rest" not in floors
        assert "draft" not in roofline.floors(replace(step, num_model_levels=0))


# --------------------------------------------------------------------------------------- ceilings


def test_ceilings_are_of_the_type_that_is_computed_in(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    assert dtype_of(folder, "auto") == torch.float32
    assert dtype_of(folder, "bfloat16") == torch.bfloat16
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    assert dtype_of(folder, "auto") == torch.float16


def test_ceilings_are_what_memory_and_products_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter((4.0, 7.0))

    def measure(self: Bandwidth) -> None:
        best = next(rounds)
        for number, rates in enumerate(self.rates.values()):
            rates.append(best - number)

    monkeypatch.setattr(Bandwidth, "measure", measure)
    ceilings = measure_ceilings(CPU, torch.bfloat16)
    assert ceilings.bytes_per_second == 7.0
    assert 1e6 < ceilings.flops_per_second < 1e15
    assert ceilings.seconds(14.0, 0) == 2.0
    assert Ceilings(7.0, 5.0).seconds(0, 15.0) == 3.0
    assert Ceilings(7.0, 5.0, code_ops_per_second=20.0).seconds(0, 40.0) == 2.0
    assert ceilings.code_ops_per_second is not None
    assert 1e9 < ceilings.code_ops_per_second < 1e14
    assert str(Ceilings(4.3e12, 7.88e14)) == "4,300 GB/s, 788 TFLOP/s"
    of_cpu = Ceilings(2.4e10, 1.5e11, 3.1e11)
    assert str(of_cpu) == "24 GB/s, 0.15 TFLOP/s, 0.31 TOP/s of codes"
    assert of_cpu.as_dict()["top_per_s_of_codes"] == pytest.approx(0.31)


# ----------------------------------------------------------------------------------------- stages


def test_numbers_of_stages() -> None:
    seconds = {"draft": 0.001, "target": 0.006, "verify": 0.0005, "rest": 0.0005}
    stages = Stages((
        StageSample(seconds, {"target": 0.003}),
        StageSample(seconds | {"target": 0.01}, {"target": 0.002, "draft": 0.0}),
    ))  # fmt: skip
    assert (stages.ms("draft"), stages.ms("target")) == (1.0, 8.0)
    assert stages.total == pytest.approx(10.0)
    assert stages.beside_target == pytest.approx(0.2)
    assert stages.over_floor("target") == pytest.approx(3.5)
    assert stages.over_floor("draft") is None
    numbers = stages.as_dict()
    assert numbers["over_floor"] == {"target": pytest.approx(3.5)}
    assert numbers["percent_beside_target"] == pytest.approx(20.0)
    assert [stages.cell(stage) for stage in STAGES] == ["1.00", "8.00 (29%)", "0.50", "0.50"]
    assert Stages(()).as_dict() == {}
    assert [Stages(()).cell(stage) for stage in STAGES] == ["-"] * 4


def test_a_stage_that_is_part_of_another_is_not_compared_with_its_floor() -> None:
    """In a step that is captured as a whole the walk has no time of its own."""
    seconds = {"draft": 0.001, "target": 0.006, "verify": 0.0, "rest": 0.0005}
    stages = Stages((StageSample(seconds, {"target": 0.003, "verify": 0.0001}),))
    assert stages.over_floor("verify") is None
    assert [stages.cell(stage) for stage in STAGES] == ["1.00", "6.00 (50%)", "0.00", "0.50"]
    assert stages.as_dict()["over_floor"] == {"target": pytest.approx(2.0)}


def test_latency_samples_the_steps_of_every_arm(report: Report[Compared]) -> None:
    numbers: Any = json.loads(json.dumps(report.as_dict()))
    measured = report.measured
    assert numbers["ceilings"] == measured.ceilings.as_dict()
    for arm in measured.result.arms:
        # Of each run all steps but the last, which has no end.
        assert len(arm.stages.samples) == arm.num_passes - len(arm.runs)
        assert all(set(sample.seconds) == set(STAGES) for sample in arm.stages.samples)
        stages = numbers["arms"][arm.name]["stages"]
        assert stages["num_sampled"] == len(arm.stages.samples)
        assert stages["over_floor"]["target"] > 0
        assert stages["total_ms"] == pytest.approx(arm.ms_per_pass, rel=0.9)
    assert "draft" not in numbers["arms"]["off"]["stages"]["over_floor"]
    assert numbers["arms"]["1,1"]["stages"]["over_floor"]["draft"] > 0
    table = shown(report).partition("Sampled steps: ")[2]
    assert table.count("%)") >= 5
    assert str(measured.ceilings) in table
    assert measured.floors_text().startswith("\ntarget's pass over its floor: off ")


def test_throughput_samples_once_all_prompts_are_read(folders: tuple[str, str]) -> None:
    target, drafter = folders
    options = {"prompts": PROMPTS, "batch_sizes": (2,), "max_tokens": 8, "repeats": 1, "warmup": 0, "device": "cpu"}
    report = run_throughput(ThroughputConfig(target, (drafter,), ("1,1",), **options))
    (result,) = report.measured.results
    for arm in result.arms:
        (run,) = arm.runs
        assert len(run.samples) == len(run.steps) - 1
    numbers: Any = json.loads(json.dumps(report.as_dict()))
    assert numbers["ceilings"]["gb_per_s"] > 0
    assert numbers["batches"][0]["arms"]["1,1"]["stages"]["percent_beside_target"] > 0
    rows = shown(report).partition("Sampled steps: ")[2].splitlines()
    assert max(len(row) for row in rows[:5]) <= 80
