"""Each measurement, in small: what it runs, what it writes and shows, and what it refuses."""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks import hybrid, identity, kernels
from benchmarks.adapters import ADAPTED, AdaptersConfig, run_adapters
from benchmarks.adapters import PLAIN as NO_ADAPTERS
from benchmarks.attention import make_layout, time_attention
from benchmarks.host import GREEDY, STAGES, HostConfig, run_host
from benchmarks.hybrid import HybridConfig, run_hybrid
from benchmarks.identity import Differing, IdentityConfig, mixed_prompts, run_identity
from benchmarks.kernels import KernelsConfig, run_kernels
from benchmarks.loading import LOADING, READING, THEIRS, LoadingConfig, run_loading
from benchmarks.offload import OffloadConfig, run_offload
from benchmarks.program import app
from benchmarks.schedule import AUTO, LEARNED, ScheduleConfig, run_schedule
from benchmarks.shift import ShiftConfig, blocks_of, cut_text, other_domain, prose_prompts, run_shift
from quantized_files import save_quantized
from reports import shown, written
from specinfer.bench.ceilings import Bandwidth
from specinfer.bench.models import find_models
from specinfer.bench.options import PLAIN
from specinfer.core.rules import RULES
from specinfer.model.kv_tensors import LayerShape
from specinfer.ops.tree_layout import unpack_bits
from specinfer.policy.features import feature_names
from specinfer.policy.network import PolicyNetwork, make_configurations
from specinfer.reporting.report import Report, Table, Value
from specinfer.reporting.spread import Spread
from tests.model.gguf_files import write_model
from tiny import HYBRIDS, random_prompts, save_model, save_tokenizer

CPU = torch.device("cpu")
PROMPTS = tuple(map(tuple, random_prompts((4, 9, 6))))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a drafter that often agrees."""
    root = tmp_path_factory.mktemp("pair")
    target = save_model(root / "target", max_position_embeddings=600)
    save_tokenizer(target)
    return str(target), str(save_model(root / "drafter", noise=0.2, max_position_embeddings=600))


@pytest.fixture(autouse=True)
def _little_memory_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hybrid, kernels):
        monkeypatch.setattr(module, "Bandwidth", lambda device: Bandwidth(device, 2**17))


def test_a_table_shows_medians_and_writes_all() -> None:
    spread = Spread.from_values([1.0, 2.0, 4.0])
    values = (
        Value[int]("rows", lambda row: row),
        Value[int]("ms", lambda row: spread if row == 1 else None, "{:.1f}", "time"),
        Value[int]("hidden", lambda row: [row], None),
    )
    report = Report(["first"], [Table("it", "Title", values, [1, 2], "note")], numbers={"more": 3}, last=["last"])
    assert shown(report).split() == [
        "first",
        "Title",
        "rows",
        "time",
        *[shown(report).split()[4]],
        "1",
        "2.0",
        "2",
        "note",
        "last",
    ]
    first, second = report.as_dict()["it"]
    assert first == {"rows": 1, "ms": 2.0, "ms_spread": spread.as_dict(), "hidden": [1]}
    assert second == {"rows": 2, "ms": None, "hidden": [2]}
    assert report.value("it", "ms", rows=1) == 2.0
    assert report.as_dict()["more"] == 3


@pytest.mark.parametrize("words", [["--help"], [], ["latency", "--help"], ["offload", "--help"]])
def test_the_program_shows_its_commands_and_flags(words: list[str]) -> None:
    result = CliRunner().invoke(app, words, env={"NO_COLOR": "1", "COLUMNS": "100"})
    text = result.stdout
    expected = (
        ("--grow", "--peer" if words[0] == "latency" else "--offload") if len(words) == 2 else ("kernels", "simulate")
    )
    assert all(word in text for word in expected)


@pytest.mark.parametrize("page", ["offload", "simulate", "schedule", "kernels"])
def test_pages_without_a_plot_refuse_the_flag(page: str) -> None:
    result = CliRunner().invoke(app, [page, "demo", "--plot", "x.png"], env={"NO_COLOR": "1", "COLUMNS": "100"})
    assert result.exit_code == 2
    assert "--plot" in result.stderr


# ----------------------------------------------------------------------------------------- kernels


def test_kernels_times_every_pass_of_every_arm(folders: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    config = KernelsConfig(
        folders[0], folders[1:], rows=(2, 4), quantizations=("int8",), context=8, repeats=2, device="cpu", busy=1,
        json=file,
    )  # fmt: skip
    report = run_kernels(config)
    numbers = written(report, file)
    assert [(row["arm"], row["rows"]) for row in numbers["trees"]] == [
        (arm, rows) for arm in ("float32", "float32 int8") for rows in (1, 2, 4)
    ]
    assert report.value("trees", "relative", arm="float32", rows=1) == 1.0
    assert {(row["pass"], row["size"]) for row in numbers["others"]} == {
        ("prompt", 512), ("context", 256), ("level", 1), ("level", 4), ("level", 8)
    }  # fmt: skip
    row = numbers["trees"][2]
    assert row["of_memory"] == pytest.approx(row["gb_per_s"] / numbers["bandwidth_gb_per_s"])
    assert row["gb_per_s"] == pytest.approx(numbers["weight_bytes"]["float32"] / row["ms"] / 1e6)
    assert numbers["attention"] == []
    assert "with 1 other busy processes" in shown(report)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": ()}, "rows: none given"),
        ({"rows": (1, 1025)}, "rows must be a whole number from 1 to 1024, not 1025"),
        ({"rows": (64,), "context": 550}, "context: 550 tokens and a tree of 64 do not fit into the model's 600"),
        ({"context": -1}, "context must be"),
        ({"dtypes": ("int3",)}, "dtype must be one of"),
        ({"quantizations": ("int3",)}, "quantization must be one of"),
        ({"dtypes": ("auto", "float32")}, "dtype: auto, float32 are float32, float32"),
        ({"grow": "huge"}, "grow: size 'huge' is not a number"),
        ({"json": "."}, "json: . cannot be written"),
    ],
)
def test_kernels_refuses_bad_input(changes: dict[str, Any], message: str, folders: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=message):
        run_kernels(KernelsConfig(folders[0], folders[1:], device="cpu", **changes))


def test_kernels_times_passes_of_one_order_of_sums_beside_the_usual_ones(folders: tuple[str, str]) -> None:
    config = KernelsConfig(folders[0], ("ngram",), rows=(2,), context=8, repeats=1, device="cpu", batch_invariant=True)
    report = run_kernels(config)
    assert [(row["arm"], row["rows"]) for row in report.as_dict()["trees"]] == [
        (arm, rows) for arm in ("float32", "float32 batch-invariant") for rows in (1, 2)
    ]


def test_identity_counts_the_tokens_that_differ(folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """None do here; where an arm's third token is another, all from there on count."""
    config = IdentityConfig(
        *(folders[0], folders[1:]), trees=("2,1",), batch_sizes=(2,), prompts=PROMPTS, max_tokens=8, device="cpu",
        batch_invariant=True,
    )  # fmt: skip
    report = run_identity(config)
    numbers = report.as_dict()
    assert numbers["num_differing"] == 0
    assert numbers["batch_invariant"]
    assert [(row["temperature"], row["batch_size"], row["arm"]) for row in numbers["arms"]] == [
        (temperature, 2, arm) for temperature in (0.0, 1.0) for arm in (PLAIN, "2,1")
    ]
    assert {(row["num_outputs"], row["num_tokens"], row["num_parted"]) for row in numbers["arms"]} == {(3, 24, 0)}
    assert "0 tokens differ" in shown(report)
    measure = identity.measure_batch

    def changed(session: Any, turn: Any, *args: Any, **options: Any) -> Any:
        run = measure(session, turn, *args, **options)
        return replace(run, outputs=tuple((*o[:2], o[2] + 1, *o[3:]) for o in run.outputs)) if len(turn[1]) > 1 else run

    monkeypatch.setattr(identity, "measure_batch", changed)
    rows = run_identity(replace(config, temperatures=(0.0,))).measured
    assert {(row.num_parted, row.num_differing, row.earliest) for row in rows} == {(3, 3 * 6, 2)}


def test_identity_compares_texts_and_chat_prompts(tmp_path: Path) -> None:
    config = IdentityConfig("demo", num_prompts=60, batch_sizes=(8,), max_tokens=8)
    prompts = mixed_prompts(find_models("demo", ("ngram",)).target, config)
    assert len(prompts.token_ids) == 60
    assert not prompts.kinds, "answers do not end early"
    assert len({tuple(ids) for ids in prompts.token_ids}) == 60


def test_an_output_of_another_length_differs_to_its_end() -> None:
    counted = Differing.from_outputs(1.0, 8, "auto", [((1, 2, 3), (1, 2, 3)), ((1, 2, 3), (1, 2)), ((4, 5), (9, 5))])
    assert (counted.num_outputs, counted.num_tokens) == (3, 7)
    assert (counted.num_parted, counted.num_differing, counted.earliest) == (2, 1 + 2, 0)


@pytest.mark.parametrize(("temperatures", "message"), [((), "none given"), ((-1.0,), "temperature")])
def test_identity_refuses_bad_temperatures(temperatures: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IdentityConfig(temperatures=temperatures)


def test_attention_of_one_layer() -> None:
    """On a GPU it is a part of the report; the same code runs here."""
    times = time_attention(LayerShape(2, 8, 6), 4, torch.float32, CPU, 3, batches=(1, 2), nodes=(1, 4), context=20)
    assert [(t.requests, t.nodes) for t in times] == [(1, 1), (1, 4), (2, 1), (2, 4)]
    assert times[3].num_bytes == 2 * 24 * 2 * 14 * 4
    assert all(len(t.seconds) == len(t.torch_seconds) == 3 and min(t.seconds) > 0 for t in times)
    assert times[0].of_floor(1e9) == pytest.approx(21 * 2 * 14 * 4 / 1e9 / statistics.median(times[0].seconds))


def test_layouts_that_are_timed_are_right() -> None:
    """Every node sees the prefix and its path; keys of PyTorch's arm are the same."""
    layout = make_layout(2, 5, 9, CPU, seed=1)
    seen = unpack_bits(layout.visible, 5)
    assert bool(seen.unflatten(0, (2, 5)).diagonal(dim1=1, dim2=2).all())
    assert torch.equal(layout.positions, (9 + seen.sum(dim=1) - 1).int())
    slots = torch.cat([layout.slot_table, layout.node_slots], dim=1)
    assert sorted(slots.flatten().tolist()) == list(range(2 * 14))


# ---------------------------------------------------------------------------------- hybrid, loading


@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba"])
def test_hybrid_times_trees_and_prompts(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {name: value for name, value in HYBRIDS[family].items() if name != "layer_types"}
    monkeypatch.setitem(hybrid.FAMILIES, family, fields)
    file, compares = tmp_path / "numbers.json", family == "mamba"
    report = run_hybrid(
        HybridConfig(family, layers=4, rows=(3,), prompt=12, context=7, repeats=1, compares=compares, json=file)
    )
    numbers = written(report, file)
    expected = ["tree of 1", "tree of 3", "prompt of 12"] + (["transformers"] if compares else [])
    assert [row["pass"] for row in numbers["passes"]] == expected
    memory = {row["what"]: row["mib"] for row in numbers["memory"]}
    assert memory["states of 8 requests"] == pytest.approx(16 * memory["one state"])
    assert 0 < memory["slots of 8 trees of 16 nodes"] < memory["a state for each of these nodes instead"]


def test_hybrid_measures_a_new_drafter_as_tune_would_begin_with_it() -> None:
    report = run_hybrid(
        HybridConfig(drafter="new:hybrid:2x64", rows=(3,), prompt=5, context=7, repeats=1, compares=False)
    )
    assert report.lines[0].startswith("new:hybrid:2x64: 0.2 million random bfloat16 weights")
    with pytest.raises(ValueError, match="drafter: new:eagle3 reads hidden states"):
        HybridConfig(drafter="new:eagle3")
    with pytest.raises(ValueError, match="family must be one of"):
        HybridConfig("llama")


def test_load_times_each_part_of_each_load(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", kind="Q8_0", hidden_size=64, intermediate_size=64)
    source = save_model(tmp_path / "source", hidden_size=64, intermediate_size=96)
    save_quantized(source, tmp_path / "gptq", "GPTQ")
    file = run_loading(LoadingConfig(str(tmp_path / "m.gguf"), repeats=2))
    folder = run_loading(LoadingConfig(str(tmp_path / "gptq"), repeats=2, json=tmp_path / "load.json"))
    assert (file.numbers["types"], folder.numbers["types"]) == ("Q8_0", "int4")
    assert [row["what"] for row in file.as_dict()["times"]] == [READING, LOADING, THEIRS]
    assert [row["what"] for row in written(folder, tmp_path / "load.json")["times"]] == [READING, LOADING]
    assert "transformers does not load it" in shown(folder)  # its packages are not installed


def test_adapters_slow_a_batch_by_a_share(folders: tuple[str, str], tmp_path: Path) -> None:
    report = run_adapters(AdaptersConfig(folders[0], rank=2, max_tokens=4, repeats=2, json=tmp_path / "adapters.json"))
    found = written(report, tmp_path / "adapters.json")
    assert [row["what"] for row in found["rates"]] == [NO_ADAPTERS, ADAPTED]
    assert found["share"] > 0
    assert "of the speed without" in shown(report)


# -------------------------------------------------------------------------------------------- host


def test_host_times_every_stage_of_every_rule(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    report = run_host(HostConfig(num_requests=2, nodes=8, depth=3, vocab_size=128, repeats=2, json=file))
    numbers = written(report, file)
    assert [row["rule"] for row in numbers["medians"]] == [GREEDY, *RULES]
    assert all(row[stage] >= 0 for row in numbers["p90"] for stage in (*STAGES, "total"))
    with pytest.raises(ValueError, match="nodes must be"):
        HostConfig(nodes=0)


# ----------------------------------------------------------------------- offload, schedule, shift


def test_offload_streams_the_target_and_compares_reads_with_the_disk(folders: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    config = OffloadConfig(
        folders[0], folders[1:], ("1,1",), device="cpu", prompts=PROMPTS, batch_sizes=(1, 3), max_tokens=7,
        memory_budget="3GiB", disk_seconds=0.01, json=file,
    )  # fmt: skip
    report = run_offload(config)
    numbers = written(report, file)
    assert [(row["batch_size"], row["arm"]) for row in numbers["streamed"]] == [
        (size, arm) for size in (1, 3) for arm in (PLAIN, "1,1")
    ]
    assert all(row["peak_mib"] > 1 and row["tokens_before_parting"] == [] for row in numbers["streamed"])
    assert report.value("streamed", "speedup", arm=PLAIN) == 1.0
    assert (numbers["num_layers"], len(numbers["rates"])) == (2, 2)
    assert "tree 1,1: the same tokens as plain decoding" in shown(report)
    with pytest.raises(ValueError, match="offload must be one of disk, cpu"):
        OffloadConfig(offload=None)


def test_schedule_compares_the_learned_policy_with_auto_and_fixed_trees(
    folders: tuple[str, str], tmp_path: Path
) -> None:
    slots = ("model", "suffix")
    names, menu = feature_names(slots), make_configurations(slots)
    ones, zeros = np.ones(len(names)), np.zeros(len(names))
    bias = np.random.default_rng(0).normal(size=3 * len(menu))
    layers = ((np.zeros((len(names), len(bias))), bias),)
    PolicyNetwork(slots, names, menu, -100 * ones, 100 * ones, zeros, ones, layers, {}).save(tmp_path / "policy")
    options: dict[str, Any] = {
        "model": folders[0], "drafters": (folders[1], "suffix"), "trees": ("1,1",), "device": "cpu",
        "prompts": PROMPTS, "max_tokens": 9, "repeats": 1, "json": tmp_path / "it.json",
    }  # fmt: skip
    report = run_schedule(ScheduleConfig(speculation_policy=str(tmp_path / "policy"), **options))
    numbers = written(report, tmp_path / "it.json")
    assert [row["arm"] for row in numbers["arms"]] == [PLAIN, "1,1", AUTO, LEARNED]
    assert all(row["all"] > 0 for row in numbers["arms"])
    assert numbers["best_fixed"] in (PLAIN, "1,1")
    assert "learned: the same tokens as plain decoding" in shown(report)
    with pytest.raises(ValueError, match="speculation_policy: none"):
        ScheduleConfig(**options)


def test_shift_counts_along_a_change_of_the_domain(folders: tuple[str, str], tmp_path: Path) -> None:
    text = tmp_path / "other.txt"
    text.write_text("the cat sat on the mat\n" * 40)
    config = ShiftConfig(
        folders[0], (folders[1], "ngram"), shift_to=text, nodes=4, device="cpu", num_prompts=2, max_tokens=30,
        prompt_chars=60, prompts=PROMPTS, json=tmp_path / "it.json",
    )  # fmt: skip
    report = run_shift(config)
    numbers = written(report, tmp_path / "it.json")
    starts = [row["start"] for row in numbers["blocks"]]
    assert starts == sorted(starts)
    assert starts[0] < 0 <= starts[-1]
    assert {"ngram", "drafter", "all, merged"} <= numbers["blocks"][0].keys()
    assert "tokens from the shift" in shown(report)


def test_passes_are_cut_into_blocks_from_the_shift_on() -> None:
    # Passes begin 130, 70, 10 and 5 tokens before the shift, at it, and 95 tokens after it.
    assert blocks_of([60, 60, 5, 5, 95, 10], -130) == {-200: 60.0, -100: pytest.approx(70 / 3), 0: 52.5}
    for texts in (prose_prompts(20, 500), other_domain(__file__, 6, 500)):
        assert len(set(texts)) == len(texts) >= 6
        assert all(200 < len(text) <= 500 for text in texts)
    assert cut_text("ab" * 50, 5, 20) == ["abababababababababab"] * 5, "without lines"
    for changes, message in (
        ({"select": "all"}, 'select: it is compared with "all" anyway'),
        ({"select": "hedge:0"}, "select: 'hedge:0' is not understood"),
    ):
        with pytest.raises(ValueError, match=message):
            ShiftConfig(**changes)
    with pytest.raises(ValueError, match="shift_to: /no/such/file cannot be read"):
        other_domain("/no/such/file", 2, 10)
    with pytest.raises(ValueError, match="num_prompts: the documentation has"):
        other_domain(None, 900, 600)
