"""Plans for GPUs that are not here: hand-computed costs, and the command."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from specinfer.cli.app import app
from specinfer.core.lookups import SelfKind
from specinfer.model.load import load_model
from specinfer.model.recurrent.layers import state_bytes
from specinfer.planning.device_costs import StepCosts, StepDesign
from specinfer.planning.device_plan import DevicePlan, run_any_plan
from specinfer.planning.options import ACCELERATORS, Accelerator, PlanConfig
from specinfer.planning.target_shape import TargetShape
from specinfer.policy.offload_choice import BYTES_PER_WEIGHT

# 10 layers of 9,000 weights and a head of 10,000: 100,000 weights, of 2 bytes each.
SHAPE = TargetShape(10, 100, 4, 2, 9000, 2 * 100 * 50, 10_000, 2.0)
DEVICE = Accelerator("a GPU", bandwidth=1e6, flops=1e7, memory=1e6, num_cores=4)
EXACT = StepDesign(layer_kernel_seconds=1e-3, kernel_seconds=1e-3, read_share=1.0, compute_share=1.0)
RATES = (0.7, 0.1, 0.05)


@pytest.fixture(scope="module")
def plan() -> DevicePlan:
    return run_any_plan(PlanConfig("demo", device="h100", grow="7b", acceptance=RATES)).measured


def costs(context: int = 1, design: StepDesign = EXACT) -> StepCosts:
    return StepCosts(DEVICE, SHAPE, SHAPE, context, design)


def test_a_pass_reads_weights_or_computes_rows_whichever_takes_longer() -> None:
    one = costs().of_batch(1).target
    cache = 10 * 100 * 2 / 1e6  # keys and values of one token, 100 numbers in each layer
    kernels = 10 * 10 * 1e-3
    assert float(one(1)) == pytest.approx(0.2 + cache + kernels)
    assert float(one(10)) == pytest.approx(0.2 + cache + kernels)  # 2 * 100,000 * 10 operations take as long
    assert float(one(40)) == pytest.approx(0.8 + cache + kernels)


def test_each_request_has_its_context_read() -> None:
    one, eight = (float(costs(context=1000).of_batch(size).target(8)) for size in (1, 8))
    assert eight - one == pytest.approx(7 * 1000 * 10 * 100 * 2 / 1e6)


def test_a_draft_level_is_a_pass_of_the_drafter_and_the_kernels_beside_it() -> None:
    model = costs().of_batch(1)
    assert float(model.draft_level(1)) == pytest.approx(float(model.target(1)) + EXACT.level_kernels * 1e-3)
    assert model.draft_start == pytest.approx(EXACT.draft_kernels * 1e-3)
    assert model.rest == pytest.approx(EXACT.verify_kernels * 1e-3)


def test_lookups_have_no_passes() -> None:
    model = replace(costs(), drafter=None).of_batch(1)
    assert float(model.draft_level(8)) == pytest.approx(EXACT.level_kernels * 1e-3)
    assert model.read_token == 0.0


def test_a_level_of_a_copy_reads_the_weights_of_the_target_in_fewer_bits() -> None:
    options = PlanConfig("demo", device="h100", grow="7b", acceptance=RATES, drafters=("self:int4",))
    report = run_any_plan(options).measured
    assert report.drafter is not None
    assert report.drafter == replace(report.target, bytes_per_parameter=report.drafter.bytes_per_parameter)
    assert report.drafter.bytes_per_parameter == BYTES_PER_WEIGHT["int4"]
    for one in report.choices[:4]:
        assert 0.3 * one.pass_ms < one.level_ms < 0.5 * one.pass_ms


def test_a_copy_reads_no_prompts_and_has_no_cache() -> None:
    copied = replace(costs(context=10), copy=SelfKind("int4", is_sparse=False))
    assert copied.of_batch(1).read_token == 0.0 < costs().of_batch(1).read_token
    assert copied.fits(29)  # where two models with caches hold 14 requests
    assert not copied.fits(30)
    itself = replace(copied, copy=SelfKind(None, is_sparse=True))
    assert itself.fits(39), "its weights are the target's"
    assert not itself.fits(40)


def test_a_level_over_a_part_of_the_context_reads_less_of_it() -> None:
    options = PlanConfig("demo", device="h100", grow="7b", context=16_384, acceptance=RATES, drafters=("self:int4",))
    whole, part = (
        [one.level_ms for one in run_any_plan(replace(options, drafters=(name,))).measured.choices]
        for name in ("self:int4", "self:int4-sparse")
    )
    cache = [size * 15_360 / 16_384 for size in (1, 2, 4, 8)]
    gains = np.subtract(whole, part)[:4]
    assert gains / gains[0] == pytest.approx(np.divide(cache, cache[0]), rel=1e-6)
    assert part[3] < 0.5 * whole[3]


def test_what_follows_from_a_copy_concerns_the_copy_alone() -> None:
    """Of several drafters the largest is predicted."""
    options = PlanConfig("demo", device="h100", grow="7b", context=16_384, acceptance=RATES)
    names = ("demo", "self:int4-sparse")
    both, alone = (run_any_plan(replace(options, drafters=one)).measured for one in (names, names[1:]))
    assert both.drafter_name == names[1]
    assert both.choices == alone.choices
    assert "int4 weights" not in both.changes


def test_sparse_copies_are_refused_where_layers_need_all_tokens(
    model_folder: Callable[..., Path],
) -> None:
    options = PlanConfig(str(model_folder("lfm2")), device="h100", acceptance=RATES, drafters=("self:sparse",))
    with pytest.raises(ValueError, match="self:sparse leaves out tokens"):
        run_any_plan(options)


def test_memory_holds_weights_and_caches_of_both_models() -> None:
    # Weights take 400,000 of 1,000,000 bytes, and each request 2 * 2,000 bytes for a token of context.
    assert costs(context=10).fits(14)
    assert not costs(context=10).fits(15)


def test_a_request_of_recurrent_layers_has_states_and_what_they_store_of_its_tokens() -> None:
    shape = replace(SHAPE, state_bytes=3000, slot_numbers=50)
    with_states = replace(costs(context=10), target=shape)
    # Two states of 3,000 bytes are kept, and 50 numbers of 2 bytes for each of 10 tokens; before, 14 requests fit.
    assert with_states.fits(600_000 // (2 * 20_000 + 2 * 3000 + 10 * 50 * 2) - 1)
    assert not with_states.fits(14)
    # One state is read and one is written.
    gain = float(with_states.of_batch(8).target(1)) - float(costs(context=10).of_batch(8).target(1))
    assert gain == pytest.approx(8 * 2 * 3000 / 1e6)


@pytest.mark.parametrize(("family", "channels"), [("qwen3_5_text", 2 * 56), ("mamba2", 2 * 96), ("llama", 0)])
def test_states_are_counted_in_the_definition_of_a_folder(
    family: str, channels: int, model_folder: Callable[..., Path]
) -> None:
    folder = model_folder(family)
    shape = TargetShape.from_folder(folder, 2.0)
    assert shape.state_bytes == state_bytes(load_model(folder, torch.float32, torch.device("cpu")).model)
    assert (shape.state_bytes > 0) == (shape.slot_numbers > 0) == (family != "llama")
    assert shape.slot_numbers == channels


def test_trees_shrink_with_the_batch_and_beat_chains_everywhere(plan: DevicePlan) -> None:
    nodes = [one.choice.num_nodes for one in plan.choices]
    assert nodes == sorted(nodes, reverse=True)
    assert nodes[0] > nodes[-2] > nodes[-1] == 0, "a step has at most 256 rows"
    for one in plan.choices:
        choice = one.choice
        assert choice.num_requests * (1 + choice.num_nodes) <= 256
        assert one.step_ms == pytest.approx(
            1e3 * choice.num_requests * choice.tokens_per_pass / choice.tokens_per_second, rel=1e-6
        )
        assert one.step_ms >= one.pass_ms + choice.num_levels * one.level_ms
        assert one.choice.speedup >= 0.99 * max(*one.chains, 1.0)
    assert plan.changes["4 kernels a layer"][0] > 1.0 > plan.changes["142 kernels a draft level"][0]


def test_the_tables_in_the_docs_are_what_is_predicted(plan: DevicePlan) -> None:
    text = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")
    for one in plan.choices:
        choice = one.choice
        tree = f"{choice.num_nodes}/{choice.num_levels}" if choice.num_nodes else "off"
        times = " | ".join(f"{time:.2f}" for time in (one.pass_ms, one.level_ms, one.step_ms))
        speeds = " | ".join(f"{speed:.2f}" for speed in (choice.speedup, *one.chains))
        assert f"| {choice.num_requests} | {times} | {tree} | {choice.tokens_per_second:.0f} | {speeds} |\n" in text
    for name, gains in plan.changes.items():
        assert f"| {name} | {' | '.join(f'{gain:.2f}' for gain in gains)} |\n" in text


def test_a_faster_memory_makes_every_pass_faster() -> None:
    passes = [
        [
            one.pass_ms
            for one in run_any_plan(PlanConfig("demo", device=name, grow="1b", acceptance=RATES)).measured.choices
        ]
        for name in ("4090", "a100", "h200")
    ]
    assert all(slow > middle > fast for slow, middle, fast in zip(*passes, strict=True))


def test_the_command_fits_80_columns_and_writes_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "plan.json"
    words = ["plan", "demo", "--device", "4090", "--grow", "7b", "--acceptance", "0.7,0.1", "--json", str(file)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "not measured" in result.output
    assert "no memory" in result.output
    tables = [line for line in result.output.splitlines() if "   " in line]
    assert max(map(len, tables)) <= 80
    numbers = json.loads(file.read_text())
    assert not numbers["is_measured"]
    assert not numbers["choices"][-1]["fits"]


def test_the_command_says_what_batch_invariance_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one line, with the times of the tables; those without it are the same as before."""
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "plan.json"
    words = ["plan", "demo", "--device", "h200", "--grow", "7b", "--acceptance", "0.7,0.1", "--json", str(file)]
    results, numbers = [], []
    for more in ([], ["--batch-invariant"]):
        result = CliRunner().invoke(app, [*words, *more])
        assert result.exit_code == 0, result.output
        results.append(" ".join(result.output.split()))
        numbers.append(json.loads(file.read_text()))
    assert "batch_invariant" not in results[0]
    ratios = numbers[1]["batch_invariant_pass_ratios"]
    assert list(ratios) == ["1", "8", "32", "64"]
    said = ", ".join(f"{ratio:.2f} with {rows}" for rows, ratio in ratios.items())
    assert f"batch_invariant: a pass takes {said} rows, over the time without it" in results[1]
    plain, invariant = (each["choices"][0]["pass_ms"] for each in numbers)
    assert invariant / plain == pytest.approx(ratios["1"])
    assert 1.0 < ratios["1"] < ratios["64"] < 1.3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "h101"], 'use "auto", "cpu", "a100", "h100", "h200", "4090", "5090" or "cuda"'),
        (["--grow", "7b"], f"grow: it needs the name of a GPU as device: {', '.join(ACCELERATORS)}"),
        (["--device", "h100", "--grow", "7x"], "grow: size '7x'"),
        (["--device", "h100", "--offload", "disk"], "offload: it is not predicted"),
        (["--device", "h100", "--simulate"], "simulate: run python -m benchmarks simulate"),
        (["--device", "h100", "--context", "0"], "context"),
        (["--device", "h100", "--drafter", "demo-eagle3"], "reads the target's hidden states"),
        (["--device", "h100", "--drafter", "mtp"], "mtp reads the target's hidden states"),
        (
            ["--device", "h100", "--drafter", "self:int4", "--quantization", "int4"],
            "self:int4 is the target itself, which is int4 too",
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["plan", "demo", "--acceptance", "0.7,0.1", *words])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
