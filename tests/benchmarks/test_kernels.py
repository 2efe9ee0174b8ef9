"""Costs of passes: every arm runs every pass in turns, the numbers follow from the times, and bad input is refused."""

import io
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from benchmarks.kernels import run as kernels
from benchmarks.kernels.attention import make_layout, time_attention
from benchmarks.kernels.report import (
    CONTEXT,
    LEVEL,
    PROMPT,
    TREE,
    Arm,
    KernelsReport,
    Pass,
    plot_kernels,
    print_kernels,
)
from benchmarks.kernels.run import KernelsConfig, find_arms, run_kernels
from benchmarks.program import app
from specinfer import ops as native_kernels
from specinfer.bench.bandwidth import Bandwidth
from specinfer.bench.models import find_models
from specinfer.bench.options import rotated
from specinfer.model.batch import Piece
from specinfer.model.kv_tensors import LayerShape
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load import load_model
from specinfer.model.pass_work import read_bytes
from specinfer.model.runner import ModelRunner
from specinfer.ops import PackedLinear
from specinfer.ops.tree_layout import unpack_bits
from tiny import VOCAB, save_model

CPU = torch.device("cpu")
ROWS = (4, 2)
ARMS = ("float32 native", "float32 torch", "bfloat16 native", "bfloat16 torch")
CALLS: list[tuple[int, int]] = []  # (model, rows) of each pass, in order


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("pair")
    target = save_model(root / "target", max_position_embeddings=600)
    return str(target), str(save_model(root / "drafter", num_hidden_layers=1))


def make_config(folders: tuple[str, str], **changes: Any) -> KernelsConfig:
    target, drafter = folders
    options = {"model": target, "drafters": (drafter,), "device": "cpu", "rows": ROWS, "context": 20, "repeats": 3}
    return KernelsConfig(**(options | changes))


@pytest.fixture(scope="module", autouse=True)
def _small_and_native() -> Any:
    """A small buffer to read; and native kernels are said to be there, whether they are built or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "Bandwidth", lambda device: Bandwidth(device, 2**20))
        patch.setattr(kernels.kernels, "describe", lambda: "AVX-512")
        yield


@pytest.fixture(scope="module")
def report(folders: tuple[str, str]) -> KernelsReport:
    forward = ModelRunner.forward

    def spy(self: ModelRunner, pieces: list[Piece]) -> Any:
        CALLS.append((id(self), len(pieces[0].tokens)))
        return forward(self, pieces)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "forward", spy)
        return run_kernels(make_config(folders, dtypes=("float32", "bfloat16")))


def test_every_arm_runs_every_pass_in_every_repeat(report: KernelsReport) -> None:
    assert [times.arm.name for times in report.arms] == list(ARMS)
    passes = [*(Pass(TREE, n) for n in (1, 2, 4)), Pass(PROMPT, 512), Pass(CONTEXT, 256),
              *(Pass(LEVEL, n) for n in (1, 4, 8))]  # fmt: skip
    for times in report.arms:
        assert list(times.seconds) == passes  # 4096 tokens are more than the model takes
        assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in times.seconds.values())


def test_passes_and_arms_take_turns(report: KernelsReport) -> None:
    sizes, num_arms = [1, 2, 4, 512, 1, 1, 4, 8], len(report.arms)
    assert len(CALLS) == 3 * len(sizes) * num_arms * 2
    assert CALLS[::2] == CALLS[1::2]  # each timed pass has one before it
    timed = iter(CALLS[::2])
    firsts = []
    for repeat in range(3):
        for place in range(len(sizes)):
            turn = [next(timed) for _ in range(num_arms)]
            assert {rows for _, rows in turn} == {sizes[(place + repeat) % len(sizes)]}
            assert len({model for model, _ in turn}) == num_arms
            firsts.append(turn[0][0])
    assert firsts[0] != firsts[1]
    assert len(set(firsts[:4])) == num_arms
    assert list(rotated("abc", 4)) == ["b", "c", "a"]


def test_numbers_follow_from_the_times(report: KernelsReport) -> None:
    numbers: Any = json.loads(json.dumps(report.as_dict()))
    assert {"bandwidth_gb_per_s", "bandwidth_by_way", "kernels", "arms", "options", "environment"} <= set(numbers)
    assert numbers["bandwidth_gb_per_s"] == max(numbers["bandwidth_by_way"].values())
    assert len(numbers["bandwidth_by_way"]) == 6
    best = [max(rates[repeat] for rates in report.bandwidth.values()) for repeat in range(3)]
    assert numbers["bandwidth_gb_per_s"] == pytest.approx(max(best) / 1e9)
    assert numbers["bandwidth_rounds"]["median"] == pytest.approx(statistics.median(best) / 1e9)
    for times in report.arms:
        arm = numbers["arms"][times.arm.name]
        one, four = times.seconds[Pass(TREE, 1)], times.seconds[Pass(TREE, 4)]
        row = arm["rows"][2]
        assert [entry["rows"] for entry in arm["rows"]] == [1, 2, 4]
        assert row["ms"] == pytest.approx(1000 * statistics.median(four))
        assert row["relative"] == pytest.approx(statistics.median(b / a for a, b in zip(one, four, strict=True)))
        assert arm["rows"][0]["relative"] == 1.0
        assert row["gb_per_s"] == pytest.approx(arm["weight_bytes"] / statistics.median(four) / 1e9)
        assert row["percent_of_bandwidth"] == pytest.approx(100 * row["gb_per_s"] / numbers["bandwidth_gb_per_s"])
        prompt = statistics.median(times.seconds[Pass(PROMPT, 512)])
        assert arm["prompt"]["tokens_per_second"] == pytest.approx(512 / prompt)
        assert [entry["nodes"] for entry in arm["draft_level"]] == [1, 4, 8]
        assert [entry["context"] for entry in arm["context"]] == [256]


def test_an_arm_is_compared_with_pytorch_in_its_own_dtype(report: KernelsReport) -> None:
    for native, own in ((0, 1), (2, 3)):
        for timed in report.arms[0].seconds:
            ratios = [
                b / a for a, b in zip(report.arms[native].seconds[timed], report.arms[own].seconds[timed], strict=True)
            ]
            over_torch = report.over_torch(report.arms[native], timed)
            assert over_torch is not None
            assert over_torch.median == pytest.approx(statistics.median(ratios))
            assert report.over_torch(report.arms[own], timed) is None
    assert Arm("bfloat16", native=True, quantization="int8").name == "bfloat16 int8 native"


def test_weights_that_are_read(report: KernelsReport, folders: tuple[str, str], tmp_path: Path) -> None:
    in_fp32, _, in_bf16, _ = report.arms
    parameters = report.environment.target_parameters
    # The input embedding of a model that is not tied gives only a row for each token.
    # Norms are not counted, and panels are filled up.
    assert in_fp32.weight_bytes == pytest.approx(4 * (parameters - VOCAB * 32), rel=0.02)
    assert in_bf16.weight_bytes == pytest.approx(in_fp32.weight_bytes / 2, rel=0.02)
    tied = load_model(save_model(tmp_path, tie_word_embeddings=True), torch.float32, CPU)
    assert read_bytes(tied) == pytest.approx(4 * tied.num_parameters, rel=0.02)


def test_a_model_is_loaded_without_native_kernels_on_demand(folders: tuple[str, str]) -> None:
    def kinds(native: bool) -> set[type]:
        loaded = load_model(Path(folders[0]), torch.float32, CPU, native=native)
        return {type(module) for module in loaded.model.modules()} & {nn.Linear, PackedLinear, FusedDecoder}

    assert kinds(native=False) == {nn.Linear}
    if native_kernels.library() is not None:
        assert nn.Linear not in kinds(native=True)


def test_where_there_are_no_native_kernels_pytorch_stands_alone(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models, config = find_models(*folders), make_config(folders)
    assert [arm.native for arm in find_arms(models, config, CPU)] == [True, False]
    assert [arm.native for arm in find_arms(models, config, torch.device("cuda"))] == [False]
    monkeypatch.setattr(native_kernels, "describe", lambda: "none")
    assert find_arms(models, config, CPU) == [Arm("float32", native=False)]
    report = run_kernels(make_config(folders, drafters=("ngram",), repeats=1))
    (times,) = report.arms
    assert times.sizes(LEVEL) == []
    assert report.kernels == "none"


def test_what_is_written_and_shown(report: KernelsReport, folders: tuple[str, str], tmp_path: Path) -> None:
    for suffix in (".png", ".svg"):
        plot_kernels(report, tmp_path / f"plot{suffix}")
        assert (tmp_path / f"plot{suffix}").stat().st_size > 1000
    shown = io.StringIO()
    print_kernels(report, Console(file=shown, width=140))
    tables = shown.getvalue().partition("Native kernels")[2]
    for words in (*ARMS, "of 1 row", "over torch", "GB/s", "level 8", "after 256"):
        assert words in tables
    rows = [line for line in tables.splitlines() if line.lstrip()[:2] in ("1 ", "2 ", "4 ") or line.startswith(ARMS)]
    assert len(rows) >= 4 * 3 + 4
    assert max(len(row) for row in rows if "before it" not in row) <= 80
    paths = {"json": tmp_path / "numbers.json", "plot": tmp_path / "other.png"}
    once = run_kernels(make_config(folders, repeats=1, **paths))
    assert json.loads(paths["json"].read_text()) == json.loads(json.dumps(once.as_dict()))
    assert paths["plot"].stat().st_size > 1000


def test_memory_is_read_in_several_ways() -> None:
    bandwidth = Bandwidth(CPU, 2**20)
    for _ in range(3):
        bandwidth.measure()
    assert len(bandwidth.rates) == 6
    assert all(len(rates) == 3 and min(rates) > 0 for rates in bandwidth.rates.values())


def test_a_pass_that_fails_ends_the_run_by_name(folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ModelRunner.forward

    def failing(self: ModelRunner, pieces: list[Piece]) -> Any:
        logits = forward(self, pieces)
        return logits * torch.nan if len(pieces[0].tokens) == 4 else logits

    monkeypatch.setattr(ModelRunner, "forward", failing)
    with pytest.raises(RuntimeError, match="float32 native: a tree of 4 gave values that are no numbers"):
        run_kernels(make_config(folders))


def test_grown_models_are_measured_in_bfloat16(
    folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = run_kernels(make_config(folders, grow="0.5m", repeats=1, rows=(1,)))
    assert [times.arm.name for times in report.arms] == ["bfloat16 native", "bfloat16 torch"]
    assert report.environment.target_parameters >= 500_000


def test_attention_of_one_layer(report: KernelsReport, folders: tuple[str, str]) -> None:
    """On a GPU it is a part of the report; the same code runs here, with PyTorch's twin."""
    shape, batches, nodes = LayerShape(2, 8, 6), (1, 2), (1, 4)
    times = time_attention(shape, 4, torch.float32, CPU, repeats=3, batches=batches, nodes=nodes, context=20)
    assert [(t.requests, t.nodes) for t in times] == [(1, 1), (1, 4), (2, 1), (2, 4)]
    assert times[3].num_bytes == 2 * 24 * 2 * 14 * 4
    assert all(len(t.seconds) == len(t.torch_seconds) == 3 and min(t.seconds) > 0 for t in times)
    median = statistics.median(times[0].seconds)
    assert times[0].of_floor(1e9) == pytest.approx(21 * 2 * 14 * 4 / 1e9 / median)
    assert report.attention == ()
    whole = replace(report, attention=times)
    (entry, *_) = json.loads(json.dumps(whole.as_dict()))["attention"]
    assert entry["us"] == pytest.approx(1e6 * median)
    assert entry["percent_of_bandwidth"] == pytest.approx(100 * times[0].of_floor(report.limit))
    shown = io.StringIO()
    print_kernels(whole, Console(file=shown, width=140))
    assert "Attention of one layer, 20 tokens before each tree" in shown.getvalue()


def test_layouts_that_are_timed_are_right() -> None:
    """Every node sees the prefix and its path; keys of PyTorch's arm are the same."""
    layout = make_layout(2, 5, 9, CPU, seed=1)
    seen = unpack_bits(layout.visible, 5)
    assert bool(seen.unflatten(0, (2, 5)).diagonal(dim1=1, dim2=2).all())
    assert torch.equal(layout.positions, (9 + seen.sum(dim=1) - 1).int())
    slots = torch.cat([layout.slot_table, layout.node_slots], dim=1)
    assert sorted(slots.flatten().tolist()) == list(range(2 * 14))


def refuse_to_load(*_: object, **__: object) -> None:
    raise AssertionError("the long work began")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": ()}, "rows: none given"),
        ({"rows": (2, 2)}, "rows: 2, 2 given; give at least one, and none twice"),
        ({"rows": (0,)}, "rows must be a whole number from 1 to 1024, not 0"),
        ({"rows": (1, 1025)}, "rows must be a whole number from 1 to 1024, not 1025"),
        ({"rows": (1.5,)}, "rows must be a whole number"),
        ({"rows": (64,), "context": 550}, "context: 550 tokens and a tree of 64 do not fit into the model's 600"),
        ({"context": -1}, "context must be a whole number from 0"),
        ({"repeats": 0}, "repeats must be"),
        ({"busy": -1}, "busy must be a whole number from 0"),
        ({"seed": -1}, "seed must be"),
        ({"dtypes": ("int3",)}, "dtype must be one of"),
        ({"dtypes": ()}, "dtype must be one of"),
        ({"dtypes": ("half", "float16")}, "dtype: half, float16 are float16, float16; name none twice"),
        ({"dtypes": ("auto", "float32")}, "dtype: auto, float32 are float32, float32"),
        ({"grow": "huge"}, "grow: size 'huge' is not a number"),
        ({"plot": "x.bmp"}, "plot: x.bmp must end in one of"),
        ({"json": "."}, "json: . cannot be written"),
    ],
)
def test_bad_input_is_refused_before_the_long_work(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(kernels, "load_model", refuse_to_load)
    with pytest.raises(ValueError, match=message):
        run_kernels(make_config(folders, **changes))


def test_the_command_takes_its_options(folders: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    words = ["kernels", folders[0], "--drafter", folders[1], "--dtype", "bfloat16", "--rows", "2", "--rows",
             "5", "--context", "8", "--repeats", "1", "--busy", "1", "--json", str(file)]  # fmt: skip
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    arm = json.loads(file.read_text())["arms"]["bfloat16 native"]
    assert [entry["rows"] for entry in arm["rows"]] == [1, 2, 5]
    assert "bfloat16 torch: a pass over a tree, 8 tokens before it" in result.stdout
    assert "With 1 other busy process\n" in result.stdout
    refused = CliRunner().invoke(app, [*words, "--context", "5000"])
    assert refused.exit_code == 2
    assert refused.stderr.startswith("specinfer: error: --context: 5000 tokens")


def test_quantized_arms(folders: tuple[str, str]) -> None:
    report = run_kernels(make_config(folders, quantizations=("int8", "int4"), repeats=1))
    first, *_, int8, int4 = report.arms
    assert [times.arm.quantization for times in (first, int8, int4)] == [None, "int8", "int4"]
    assert first.weight_bytes > int8.weight_bytes > int4.weight_bytes
    assert report.of_first(first).median == 1.0
    for wrong, said in ((("int7",), "quantization"), (("int8", "int8"), "quantization.*twice")):
        with pytest.raises(ValueError, match=said):
            run_kernels(make_config(folders, quantizations=wrong))
