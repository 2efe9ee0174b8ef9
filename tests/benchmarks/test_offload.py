"""Streamed targets: arms and peers in turns, the numbers follow from what was counted, bad input is refused."""

import dataclasses
import io
import itertools
import json
import os
import re
import statistics
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import disk, memory_cap
from benchmarks.offload import files as offload_files
from benchmarks.offload import run as offload_run
from benchmarks.offload import turns as offload_turns
from benchmarks.offload.engine import OwnAsk, OwnEngine, OwnSetup, answer
from benchmarks.offload.files import Need, check_room, needs_of, weight_bytes
from benchmarks.offload.own import OwnArms
from benchmarks.offload.plans import OffloadBenchConfig, schedule
from benchmarks.offload.report import (
    Loading,
    OffloadReport,
    ResidentCheck,
    bandwidth,
    disk_share,
    peak_of,
    waiting_share,
)
from benchmarks.offload.run import run_offload
from benchmarks.offload.turns import Turns, compare_resident
from benchmarks.offload.views import plot_offload, print_offload
from benchmarks.peers.names import LIBRARIES, Library
from benchmarks.peers.report import ratio_over
from benchmarks.program import app
from fake_peer import TOKEN
from late import LateLink
from specinfer.bench.comparisons import Comparison
from specinfer.bench.models import find_models, plan_growth
from specinfer.bench.options import PLAIN
from specinfer.bench.results import Arm, Run
from specinfer.core.step_record import StepRecord
from specinfer.model.offload.budget import Budget
from specinfer.reporting.environment import Environment
from tiny import random_prompts, save_model, save_tokenizer

TREES = ("1,1,1", "auto")
PROMPTS = tuple(map(tuple, random_prompts((4, 9, 2))))
MAX_TOKENS = 8
BUDGET = "3GiB"  # far more than a test needs: what a small one does is the engine's concern


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a drafter that is the target itself but for its name."""
    root = tmp_path_factory.mktemp("pair")
    return str(save_model(root / "target")), str(save_model(root / "drafter"))


def _stand_alone(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """No control groups are made, no caches of this machine dropped, and a peer is there that takes no time."""
    monkeypatch.setattr(memory_cap, "OWN_CGROUPS", folder / "none")
    monkeypatch.setattr(memory_cap, "SYSTEMD_MARK", folder / "none")
    monkeypatch.setattr(disk, "DROP_CACHES", folder / "dropped")
    floats = dict.fromkeys(("float32", "bfloat16", "float16"), "f32")
    fake = Library("fake_peer", {}, ("f32",), floats, needs_gguf=False, measurements=("offload",))
    absent = Library("fake_peer", {"no_such_module": "no-such-package"}, ("f32",), floats, measurements=("offload",))
    monkeypatch.setitem(LIBRARIES, "fake", fake)
    monkeypatch.setitem(LIBRARIES, "absent", absent)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"), prepend=os.pathsep)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _stand_alone(monkeypatch, tmp_path)


def make_config(folders: tuple[str, str], **changes: Any) -> OffloadBenchConfig:
    target, drafter = folders
    options = {"model": target, "drafters": (drafter,), "trees": TREES, "device": "cpu", "prompts": PROMPTS,
               "batch_sizes": (1, 3), "temperatures": (0.0, 0.8), "max_tokens": MAX_TOKENS, "peer_tokens": 4,
               "memory_budget": BUDGET, "disk_seconds": 0.01}  # fmt: skip
    return OffloadBenchConfig(**(options | changes))


# ------------------------------------------------------------------------------------- measurement


@pytest.fixture(scope="module")
def report(folders: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[OffloadReport]:
    with pytest.MonkeyPatch.context() as patch:
        _stand_alone(patch, tmp_path_factory.mktemp("alone"))
        peers = ("fake", "fake-draft", "accelerate", "absent", "accelerate-cpu")
        yield run_offload(make_config(folders, peers=peers, check_resident=True, repeats=2))


@pytest.mark.slow
def test_every_arm_runs_every_batch_at_every_temperature(report: OffloadReport) -> None:
    situations = [(result.size, result.situation["temperature"]) for result in report.results]
    assert situations == [(1, 0.0), (1, 0.8), (3, 0.0), (3, 0.8)]
    batches = {1: [(0,), (1,), (2,)], 3: [(0, 1, 2)]}
    for result in report.results:
        assert [arm.name for arm in result.arms] == [PLAIN, *TREES]
        for arm in result.arms:
            made = [(run.repeat, run.prompts) for run in arm.runs]
            assert made == [(repeat, batch) for repeat in range(2) for batch in batches[result.size]]
            assert [run.outputs for run in arm.runs] == [run.outputs for run in result.plain.runs]
            assert all(len(tokens) == MAX_TOKENS for run in arm.runs for tokens in run.outputs)
            assert all(run.counters["disk_rate"] > 0 for run in arm.runs)
            assert all(run.counters["peak_resident"] > 2**20 for run in arm.runs)
    assert report.resident is not None
    assert (report.resident.num_outputs, report.resident.partings) == (12, ())


@pytest.mark.slow
def test_a_perfect_drafter_is_always_right(report: OffloadReport) -> None:
    for result in report.results:
        arm = result.trees[0]
        assert result.plain.tokens_per_pass == 1.0
        assert arm.tokens_per_pass == 3.5  # 4 and the last 3, of 7


@pytest.mark.slow
def test_peers_take_turns_one_request_at_a_time(report: OffloadReport) -> None:
    assert [(peer.name, peer.details["temperature"]) for peer in report.peers] == [
        (name, temperature)
        for name in ("fake:f32", "fake-draft:f32", "accelerate:float32")
        for temperature in (0.0, 0.8)
    ]
    plain, draft, real = report.peers[::2]
    for peer in report.peers:
        places = [(run.repeat, run.prompts[0]) for run in peer.runs]
        assert places == [(repeat, prompt) for repeat in range(2) for prompt in range(3)]
        assert all(run.counters["peak_resident"] > 2**20 for run in peer.runs)
        assert (peer.details["cap"], peer.details["limit"]) == ("none", 0)
    assert [len(run.token_ids) for run in plain.runs] == [4] * 6  # fewer of those that say one a pass
    assert [len(run.token_ids) for run in draft.runs] == [MAX_TOKENS] * 6
    assert dict(draft.details["settings"]) == {"num_draft": 3}
    # 3 of 4 tokens are said within 4 seconds.
    assert plain.tokens_per_second.median == pytest.approx(3 / 4)
    ours = report.alone(plain)
    rates = [run.num_decoded / run.time for run in ours.plain.runs]
    assert ratio_over(ours.plain, plain).median == pytest.approx(statistics.median(rates) / (3 / 4))
    assert len(report.peer_partings(plain)) == 6
    assert report.peer_partings(real) == []
    assert dict(report.peers_skipped) == {
        "absent:f32": "pip install no-such-package",
        "accelerate-cpu:float32": "it keeps the layers of a model on a GPU in host memory; use --device cuda",
    }


@pytest.mark.slow
def test_what_is_written_and_shown(report: OffloadReport, tmp_path: Path) -> None:
    numbers = json.loads(json.dumps(report.as_dict()))
    assert numbers["memory_budget"] == 3 * 2**30
    assert numbers["peak_of_budget"] == pytest.approx(report.peak_resident / (3 * 2**30))
    assert set(numbers["disk_rates"]) == {"1 thread", "3 threads"}
    num_batches, num_arms = 2 * (3 + 1) * 2, 1 + len(report.options["trees"])
    # Before the first arm of ours in a turn and after each, and anew after a peer.
    for rates in numbers["disk_rates"].values():
        assert num_batches * (num_arms + 1) <= len(rates) <= num_batches * 2 * num_arms
    assert numbers["disk_bytes_per_second"] == max(max(rates) for rates in numbers["disk_rates"].values())
    arm = numbers["results"][3]["arms"]["auto"]
    assert {"speedup", "speedup_spread", "bytes_per_second", "disk_share", "peak_resident"} <= set(arm)
    assert len(arm["runs"]) == 2
    assert {entry["name"] for entry in numbers["peers"]} == {"fake:f32", "fake-draft:f32", "accelerate:float32"}
    assert {"tree_over_peer", "plain_over_peer", "cap", "peak_resident"} <= set(numbers["peers"][0])
    assert {"cpu", "commit", "dtype"} <= set(numbers["environment"])
    plot_offload(report, tmp_path / "plot.svg")
    assert "fake:f32" in (tmp_path / "plot.svg").read_text()
    text = shown(report)
    assert "the same tokens as plain decoding in all 24 outputs" in text
    assert "loaded whole: the same tokens in all 12 outputs" in text
    assert "peer accelerate:float32, accelerate" in text
    assert "without a limit of memory: the same tokens as our plain decoding in all 6 runs" in text
    assert "peer absent:f32 skipped: pip install no-such-package" in text


def shown(report: OffloadReport) -> str:
    text = io.StringIO()
    print_offload(report, Console(file=text, width=200))
    return text.getvalue()


@pytest.mark.slow
def test_a_peer_that_fails_is_out_and_the_run_goes_on(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAKE_PEER", "3 die")
    files = {"json": tmp_path / "numbers.json", "plot": tmp_path / "plot.svg"}
    config = make_config(folders, peers=("fake",), trees=("1",), batch_sizes=(1,), temperatures=(0.0,), **files)
    report = run_offload(config)
    assert report.peers == ()
    assert dict(report.peers_skipped) == {"fake:f32": "its process ended with status 3: last words"}
    assert len(report.results[0].plain.runs) == 3
    assert json.loads(files["json"].read_text()) == json.loads(json.dumps(report.as_dict()))
    assert files["plot"].stat().st_size > 1000
    assert (tmp_path / "dropped").read_text() == "1"


class FakeArms:
    """Says the same in every arm, but for one token of one; in no time and by no process."""

    def __init__(self, liar: str = "nobody", dtype: str = "float32") -> None:
        self.loaded = types.SimpleNamespace(dtype=dtype)
        self._liar = liar

    def __enter__(self) -> "FakeArms":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def measure(self, arm: str, repeat: int, numbers: Any, prompts: Any, params: Any) -> Any:
        said = [[number] * params[0].max_tokens for number in numbers]
        if arm == self._liar:
            said[-1][3] = -1
        run = made_up_run(1.0, 1, 10)
        return dataclasses.replace(run, prompts=tuple(numbers), outputs=tuple(map(tuple, said)))


def run_turns(own: FakeArms, config: OffloadBenchConfig, rates: Iterator[float] | None = None) -> Turns:
    rates = rates or itertools.repeat(1.0)
    prompts = [list(prompt) for prompt in PROMPTS]
    peers: Any = types.SimpleNamespace(names=[])
    turns = Turns(config, prompts, own, peers)  # type: ignore[arg-type]
    for turn in schedule(config, len(prompts)):
        turns.run(turn, lambda: next(rates), lambda _: None, lambda: None)
    return turns


def test_a_run_is_compared_with_the_speed_of_the_disk_before_and_after(folders: tuple[str, str]) -> None:
    config = make_config(folders, trees=("1",), batch_sizes=(3,), temperatures=(0.0,), repeats=1, warmup=0)
    (result,) = run_turns(FakeArms(), config, map(float, itertools.count())).results()
    assert [[run.counters["disk_rate"] for run in arm.runs] for arm in result.arms] == [[0.5], [1.5]]


def test_a_changed_output_is_an_error_in_float32_and_counted_in_other_types(folders: tuple[str, str]) -> None:
    config = make_config(folders, trees=("1",), batch_sizes=(3,))
    with pytest.raises(RuntimeError, match="3 requests together, prompt 2: with tree 1, output token 3 is another"):
        run_turns(FakeArms("1"), config)
    for result in run_turns(FakeArms("1", "bfloat16"), config).results():
        assert result.partings(result.trees[0]) == [3]


def test_plain_decoding_may_generate_fewer_tokens(folders: tuple[str, str]) -> None:
    config = make_config(folders, trees=("1",), batch_sizes=(3,), temperatures=(0.0,), plain_tokens=4)
    (result,) = run_turns(FakeArms(), config).results()
    assert [len(run.outputs[0]) for run in (*result.plain.runs, *result.trees[0].runs)] == [4, MAX_TOKENS]
    assert not result.partings(result.trees[0])
    with pytest.raises(RuntimeError, match="with tree 1, output token 3 is another"):
        run_turns(FakeArms("1"), config)


def test_the_output_of_the_target_in_memory_is_compared(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, prompts = make_config(folders, trees=("1",)), [list(prompt) for prompt in PROMPTS]
    results, job = run_turns(FakeArms(), config).results(), OwnSetup("", {}, ["1"], [], 0, {})
    monkeypatch.setattr(offload_turns, "OwnArms", lambda job: FakeArms())
    assert compare_resident(results, config, prompts, job) == ResidentCheck(12, ())
    monkeypatch.setattr(offload_turns, "OwnArms", lambda job: FakeArms(PLAIN))
    with pytest.raises(RuntimeError, match="prompt 0: streamed from the disk, output token 3 is another than in"):
        compare_resident(results, config, prompts, job)
    monkeypatch.setattr(offload_turns, "OwnArms", lambda job: FakeArms(PLAIN, "bfloat16"))
    assert compare_resident(results, config, prompts, job) == ResidentCheck(12, (3,) * 8)


@pytest.mark.slow
def test_heldout_texts_sampling_and_half_precision_by_the_command(tmp_path: Path, folders: tuple[str, str]) -> None:
    target = str(save_tokenizer(save_model(tmp_path / "target", max_position_embeddings=1024)))
    file = tmp_path / "numbers.json"
    words = ["offload", target, "--drafter", "ngram", "--tree", "1", "--batch", "2", "--temperature", "0.5",
             "--num-prompts", "2", "--max-tokens", "4", "--memory-budget", BUDGET, "--disk-seconds", "0.01",
             "--dtype", "bfloat16", "--json", str(file)]  # fmt: skip
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    (situation,) = json.loads(file.read_text())["results"]
    assert (situation["batch_size"], situation["temperature"]) == (2, 0.5)
    assert "of budget" in result.stdout
    refused = CliRunner().invoke(app, [*words, "--batch", "0"])
    assert refused.exit_code == 2


# ------------------------------------------------------------------------------------------ engine


@pytest.fixture
def engine() -> Iterator[OwnEngine]:
    """As the process of our arms has it, in this one."""
    engine = OwnEngine(torch.get_num_threads())
    yield engine
    if engine._llm is not None:
        engine._llm.shutdown()


def make_setup(folders: tuple[str, str], **changes: Any) -> OwnSetup:
    target, drafter = folders
    options = {"drafters": [drafter], "device": "cpu", "max_model_len": 32, "max_num_seqs": 4, "offload": "disk"}
    return dataclasses.replace(OwnSetup(target, options, ["1,1"], [(2, 0.0)], 64, {}), **changes)


def test_what_is_streamed_while_decoding_is_counted(
    tmp_path: Path, engine: OwnEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Budget, "spare", lambda *_: 0)  # no layer stays
    folders = [str(save_model(tmp_path / name, num_hidden_layers=5)) for name in ("target", "drafter")]
    loaded = answer(engine, {"do": "load", "job": dataclasses.asdict(make_setup((folders[0], folders[1])))})
    assert (loaded["num_layers"], loaded["num_resident"]) == (5, 0)
    each = loaded["bytes_per_pass"]
    assert each > 0
    said = {}
    for arm, num_passes in ((PLAIN, 7), ("1,1", 3)):
        ask = OwnAsk(arm, 0, 0.0, MAX_TOKENS, [4, 5], [[1, 2, 3], [4, 5]], [0, 1])
        said[arm] = json.loads(json.dumps(answer(engine, {"do": "measure", "ask": dataclasses.asdict(ask)})))
        run, streamed = said[arm], said[arm]["counters"]
        assert (run["prompts"], len(run["steps"])) == ([4, 5], num_passes)
        # Readers are ahead of the passes by no more than their ring holds, a pass here.
        assert abs(streamed["bytes_read"] - num_passes * each) <= each
        assert streamed["seconds_reading"] > 0
        assert 0 <= streamed["seconds_waiting"] <= run["time"]
    assert said[PLAIN]["outputs"] == said["1,1"]["outputs"]


def test_batches_that_the_cache_cannot_hold_are_refused(folders: tuple[str, str], engine: OwnEngine) -> None:
    said = answer(engine, {"do": "load", "job": dataclasses.asdict(make_setup(folders, num_slots=10**9))})
    assert not said["is_model"]
    assert "batch_sizes: 2 requests and their trees need 1000000000 slots of the KV cache, and" in said["refused"]


def test_a_model_that_cannot_be_used_is_refused_as_such(engine: OwnEngine, tmp_path: Path) -> None:
    said = answer(engine, {"do": "load", "job": dataclasses.asdict(OwnSetup(str(tmp_path), {}, [], [], 0, {}))})
    assert said["is_model"]
    assert str(tmp_path) in said["refused"]


# ------------------------------------------------------------------------------------------- turns


def test_arms_take_turns_in_going_first_and_peers_only_run_alone() -> None:
    config = OffloadBenchConfig(trees=("1",), batch_sizes=(1, 2), temperatures=(0.0, 1.0), num_prompts=2, repeats=2)
    turns = list(schedule(config, 2, ("other",)))
    warming = [turn for turn in turns if turn.repeat < 0]
    assert [(len(turn.prompts), turn.temperature) for turn in warming] == [(1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0)]
    assert all(sorted(turn.arms) == ["1", PLAIN] and turn.most_tokens for turn in warming)
    alone = [turn for turn in turns if turn.repeat >= 0 and len(turn.prompts) == 1]
    assert [turn.prompts for turn in alone] == [(0,), (0,), (1,), (1,)] * 2
    assert all(sorted(turn.arms) == ["1", PLAIN, "other"] and turn.most_tokens is None for turn in alone)
    firsts = [turn.arms[0] for turn in alone]
    assert set(firsts) == {"1", PLAIN, "other"}
    assert all(sorted(turn.arms) == ["1", PLAIN] for turn in turns if len(turn.prompts) == 2)


# ------------------------------------------------------------------------------------------ report


def made_up_run(seconds: float, num_passes: int, num_read: int, **changes: Any) -> Run:
    step = StepRecord(1, 1, 0, 0, 9 // num_passes, 0, 0.0, seconds / num_passes, 0.0)
    counters = {"bytes_read": num_read, "seconds_reading": 0.9 * seconds, "seconds_waiting": 0.5 * seconds,
                "peak_resident": 900 * 2**20, "disk_rate": 2e9}  # fmt: skip
    steps = (step,) * num_passes
    return Run(0, (0,), 1.0, seconds, 1.0 + seconds, ((1,) * 10,), steps, counters=counters | changes)


def made_up_report(**changes: Any) -> OffloadReport:
    plain = Arm(PLAIN, (made_up_run(9.0, 9, 9 * 10**9),))
    tree = Arm("1,1", (made_up_run(3.0, 3, 3 * 10**9, peak_resident=1100 * 2**20),))
    runs = (Run(0, (0,), 1.0, 30.0, 31.0, ((1, 1, 1, 2),), counters={"peak_resident": 2**30}),)
    details = {"temperature": 0.0, "drafts": False, "version": "other 1", "settings": {}, "cap": "cgroup v1",
               "limit": 2**30}  # fmt: skip
    peer = Arm("other:bf16", runs, details)
    environment = Environment(
        "now", "command", None, "1", "2", "3", "4", "cpu", 1, "cpu", "bfloat16", None, None, 1, 10**9, {}
    )
    fields: dict[str, Any] = {
        "results": (Comparison(plain, (tree,), {"temperature": 0.0}),),
        "loading": Loading(10, 2, 10**9, 950 * 2**20),
        "target_bytes": 3 * 2**30,
        "memory_budget": 2**30,
        "own_cap": "none",
        "disk_rates": {"1 thread": (1.5e9, 2e9), "2 threads": (1.6e9, 1.9e9)},
        "disk_is_direct": True,
        "options": {"max_tokens": 10, "model": "made-up", "offload": "disk"},
        "environment": environment,
        "peers": (peer,),
    }
    return OffloadReport(**(fields | changes))


def test_the_numbers_of_a_report() -> None:
    report = made_up_report()
    (result,) = report.results
    assert result.plain.spread(bandwidth).median == 1e9
    assert result.plain.spread(disk_share).median == 0.5
    assert waiting_share(result.plain) == 0.5
    assert peak_of(result.plain) == 900 * 2**20
    assert result.speedup_of(result.best).median == pytest.approx(3.0)
    assert report.disk_rate == 2e9
    assert report.peak_resident == 1100 * 2**20
    (peer,) = report.peers
    assert peer.tokens_per_second.median == pytest.approx(0.1)
    assert ratio_over(result.plain, peer).median == pytest.approx(10.0)
    assert ratio_over(result.best, peer).median == pytest.approx(30.0)
    assert report.peer_partings(peer) == [3]
    numbers: Any = report.as_dict()
    assert numbers["results"][0]["arms"][PLAIN]["disk_share"] == 0.5
    assert numbers["peers"][0]["tree_over_peer"] == pytest.approx(30.0)
    text = shown(report)
    assert "8 of 10 layers streamed, 1.00 GB a pass; disk 2.00 GB/s at best; own" in text
    assert re.search(r" 1,1 .* 1,100 +107%", text)
    rows = [line for line in text.splitlines() if line.startswith(("batch", "1 T=0", "peer ", "other:bf16"))]
    assert len(rows) == 2 + 2 + 2 + 1
    assert max(map(len, rows[:-1])) <= 80  # but for the last, a sentence
    assert "peer other:bf16, other 1, limited to 1,024 MiB by cgroup v1: 1 of 1 output part" in text
    cached = shown(made_up_report(disk_is_direct=False, resident=ResidentCheck(4, (7, 2))))
    assert "the file system has no direct reads" in cached
    link = shown(made_up_report(options={"max_tokens": 10, "model": "made-up", "offload": "cpu"}))
    assert "1.00 GB a pass; link 2.00 GB/s at best; own" in link
    assert re.search(r" 1,1 .* 1,100 +-\s", link)
    assert "loaded whole: 2 of 4 outputs part, the earliest after 2 tokens" in cached


# --------------------------------------------------------------------------------------- bad input


def refuse_to_load(*_: object, **__: object) -> None:
    raise AssertionError("the long work began")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_sizes": ()}, "batch_sizes: none given"),
        ({"batch_sizes": (0,)}, "batch_sizes must be a whole number from 1 to 1024, not 0"),
        ({"batch_sizes": (5,)}, "prompts: 3 given for 5 requests together"),
        ({"temperatures": ()}, "temperatures: none given"),
        ({"temperatures": (1.0, 1.0)}, "temperatures: 1.0, 1.0 given; give at least one, and none twice"),
        ({"temperatures": (-1.0,)}, "temperature must be"),
        ({"num_prompts": 0}, "num_prompts must be a whole number of at least 1"),
        ({"max_tokens": 1}, "max_tokens must be a whole number of at least 2"),
        ({"plain_tokens": 1}, "plain_tokens must be a whole number of at least 2"),
        ({"peer_tokens": 1}, "peer_tokens must be a whole number of at least 2"),
        ({"max_tokens": 300}, "max_tokens: 300 after a prompt of 9 tokens do not fit into the context of 256"),
        ({"disk_seconds": 0.0}, "disk_seconds must be above 0"),
        ({"offload": "cpu"}, "offload: the target runs on the CPU"),
        ({"offload": "ram"}, "offload must be one of disk, cpu, not 'ram'"),
        ({"memory_budget": "much"}, "memory_budget: 'much' is not a size"),
        ({"memory_budget": 0}, "memory_budget: 0 is nothing"),
        ({"offload_folder": ""}, "offload_folder: an empty name"),
        (
            {"peers": ("vllm",)},
            "peers: 'vllm' is not known; there are .*llama.cpp, llama.cpp-draft, llama.cpp-lookup, accelerate",
        ),
        ({"peers": ("transformers",)}, "peers: 'transformers' is not known"),
        ({"peers": ("accelerate-draft",)}, "peers: 'accelerate-draft' is not known"),
        ({"peers": ("accelerate",), "batch_sizes": (3,)}, "peers: they are measured one request at a time; add 1"),
        ({"seed": -1}, "seed must be"),
        ({"dtype": "int3"}, "dtype must be one of"),
        ({"quantization": "int3"}, "quantization must be one of"),
        ({"trees": ("off",)}, "trees: plain decoding is always measured"),
        ({"drafters": ()}, "drafters: empty"),
        ({"grow": "huge"}, "grow: size 'huge' is not a number"),
        ({"plot": "x.bmp"}, "plot: x.bmp must end in one of"),
        ({"json": "."}, "json: . cannot be written"),
    ],
)
def test_bad_input_is_refused_before_the_long_work(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(offload_run, "OwnArms", refuse_to_load)
    with pytest.raises(ValueError, match=message):
        run_offload(make_config(folders, **changes))


@pytest.mark.slow
def test_a_budget_that_is_too_small_is_bad_input(folders: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="memory_budget: "):
        run_offload(make_config(folders, memory_budget="1MiB"))


def test_a_process_that_its_cap_ends_is_a_budget_too_small() -> None:
    # The shell ends itself in the place of the system, before it would become the worker.
    cap = memory_cap.MemoryCap("cgroup v1", 300 * 2**20, ("sh", "-c", "kill -9 $$"))
    with pytest.raises(ValueError, match="memory_budget: our process needed more than the 300 MiB that the"):
        OwnArms(OwnSetup("", {}, [], [], 0, {}), cap)


def test_a_target_that_memory_cannot_hold_is_not_compared(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload_run, "OwnArms", refuse_to_load)
    monkeypatch.setattr(offload_run, "_MAX_SHARE", 0.0)
    with pytest.raises(ValueError, match=r"check_resident: the target's .* GiB do not fit into this machine's"):
        run_offload(make_config(folders, check_resident=True))


# ------------------------------------------------------------------------------------------- files


def test_the_budget_is_a_third_of_the_weights_if_none_is_given(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def note(job: Any, cap: Any) -> None:
        seen.append(job)
        raise ValueError("enough")

    monkeypatch.setattr(offload_run, "OwnArms", note)
    with pytest.raises(ValueError, match="enough"):
        run_offload(make_config(folders, memory_budget=None))
    num_bytes = sum(path.stat().st_size for path in Path(folders[0]).glob("*.safetensors"))
    assert seen[0].options["memory_budget"] == num_bytes // 3
    assert seen[0].options["offload"] == "disk"


def test_sizes_follow_the_types_asked_for(folders: tuple[str, str]) -> None:
    whole = weight_bytes(Path(folders[0]), "float32", None)
    assert weight_bytes(Path(folders[0]), "bfloat16", None) == whole / 2
    assert weight_bytes(Path(folders[0]), "float32", "int8") == whole / 4
    assert weight_bytes(Path(folders[0]), "auto", None) == pytest.approx(whole, rel=0.2)  # with the files' headers


def test_what_must_be_written_first(folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    floats = dict.fromkeys(("float32", "bfloat16"), "bf16")
    gguf = Library("fake_peer", {}, ("bf16",), floats, measurements=("offload",))
    monkeypatch.setitem(LIBRARIES, "fake", gguf)
    copy = tmp_path / "copy"
    config = make_config(
        folders, grow="10m", dtype="bfloat16", peers=("fake", "fake-draft"), offload_folder=copy, quantization="int8"
    )
    models = find_models(config.model, config.drafters)
    plan = plan_growth(models, "10m", "bfloat16")
    needs = {need.field: need for need in needs_of(config, models, plan, "bfloat16")}
    grown = plan.growths[folders[0]].num_bytes
    assert grown >= 2 * 10**7
    total = sum(growth.num_bytes for growth in plan.growths.values())
    drafter = (
        plan.growths[folders[1]].num_bytes
        if folders[1] in plan.growths
        else weight_bytes(Path(folders[1]), "bfloat16", None)
    )
    assert needs["grow"].num_bytes == total
    assert needs["peers"].num_bytes == grown + drafter  # the target's file is shared
    assert needs["offload_folder"] == Need("offload_folder", copy, grown // 2)
    made = plan.make()
    needs = {need.field: need for need in needs_of(config, models, plan, "bfloat16")}
    assert set(needs) == {"peers", "offload_folder"}
    assert needs["peers"].num_bytes == pytest.approx(weight_bytes(made.target, "auto", None) + drafter, rel=0.05)


def test_a_full_disk_is_refused_by_the_option_that_needs_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_files.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 5 * 10**9}))
    check_room([Need("grow", tmp_path / "a" / "b", 4 * 10**9)])
    with pytest.raises(ValueError, match=r"peers: 2\.0 GB would be written to .*c, and 0\.7 GB are free there"):
        check_room([Need("grow", tmp_path / "a", 4 * 10**9), Need("peers", tmp_path / "c", 2 * 10**9)])


@pytest.mark.slow
def test_threads_are_as_many_as_here(report: OffloadReport) -> None:
    assert report.environment.num_threads == torch.get_num_threads()
    assert report.environment.peak_memory == report.peak_resident  # not what this process holds
    assert report.peers[0].details["version"] == f"fake on {torch.get_num_threads()}"
    assert {token for run in report.peers[0].runs for token in run.token_ids} == {TOKEN}


@pytest.mark.parametrize("where", ["disk", "cpu"])
def test_what_layers_come_through_is_measured(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(offload_run, "CudaTransfer", lambda _: LateLink())
    config = make_config(folders, offload=where)
    yardstick = offload_run.yardstick_of(config, Path(config.model), torch.device("cpu"))
    assert yardstick.measure(0.01) > 0
    assert len(yardstick.rates) == {"disk": 2, "cpu": 1}[where]
    assert yardstick.is_direct or where == "disk"
    yardstick.close()
