"""`specinfer tune` as a user runs it, on tiny random models: its files, its output and its errors."""

import json
import logging
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from specinfer.cli.app import app
from specinfer.core.sampling import SamplingParams
from specinfer.learning import trainable
from specinfer.learning.batches import collate
from specinfer.learning.tune import report as report_module
from specinfer.learning.tune.collection import load
from specinfer.learning.tune.initial_weights import InitialWeights, build, parse_initial_weights
from specinfer.llm import LLM
from specinfer.setup.model_names import find_drafter
from tests.learning.outputs import check_same_output, save_prompts
from tiny import random_prompts, save_model, save_tokenizer

SMALL = (
    *("--num-prompts", "70", "--num-held-out", "6", "--max-tokens", "6", "--epochs", "1.5", "--batch-tokens", "64"),
    *("--device", "cpu", "--mixed-precision", "no"),
)
THREE = ("--drafter", "layers:1", "--drafter", "new:1", "--drafter", "new:1x16")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tokenizer(save_model(tmp_path_factory.mktemp("target"), num_hidden_layers=3)))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_prompts(tmp_path_factory.mktemp("data") / "prompts.jsonl", random_prompts([6] * 150)))


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """accelerate keeps what a process was first asked for."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def run(*words: str, code: int = 0) -> Any:
    root = logging.getLogger()
    for handler in root.handlers[:]:  # another test's, whose stream is closed by now
        if getattr(getattr(handler, "stream", None), "closed", False):
            root.removeHandler(handler)
    result = CliRunner().invoke(app, ["tune", *words])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def refusal(*words: str) -> str:
    """The one line that ends a run that cannot be."""
    result = run(*words, code=2)
    assert result.stdout == ""
    line = str(result.stderr.splitlines()[-1])
    assert line.startswith("specinfer: error: ")
    assert sum("error" in line for line in result.stderr.splitlines()) == 1
    return line


def weights(folder: Path) -> dict[str, bytes]:
    """The weights of all drafters that a run made."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.glob("*/model.safetensors"))}


@pytest.fixture(scope="module")
def done(target: str, data: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A finished run with all that it can make, and what it printed."""
    folder = tmp_path_factory.mktemp("done")
    more = ("--control", "--json", str(folder / "r.json"), "--plot", str(folder / "r.png"))
    result = run(target, *THREE, "--data", data, "--out", str(folder / "run"), *SMALL, *more)
    AcceleratorState._reset_state(reset_partial_state=True)
    return folder, result


# -------------------------------------------------------------------------------- what a run makes


def test_each_drafter_is_an_ordinary_folder_that_drafts_for_the_target(target: str, done: tuple[Path, Any]) -> None:
    folders = [done[0] / "run" / f"drafter-{i}" for i in (1, 2, 3)]
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert all(bool(weight.isfinite().all()) for weight in model.parameters())
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=2)
    check_same_output(target, folders, "1,1,1", random_prompts([5, 9], seed=8), params)


def test_drafters_learned_and_the_second_otherwise_than_alone(target: str, done: tuple[Path, Any]) -> None:
    folder = done[0] / "run"
    batch = collate(load(folder / "examples-held-out"))
    with torch.no_grad():
        made_of = {"drafter-1": "layers:1", "control-2": "new:1", "control-3": "new:1x16"}
        for seed, (name, start) in enumerate(made_of.items()):
            before, after = (
                float(drafter.loss(drafter.eval()(batch), batch))
                for drafter in (
                    build(parse_initial_weights(start), Path(target), seed),
                    build(InitialWeights(name, folder / name), Path(target), 0),
                )
            )
            assert after < before, name
    made = weights(folder)
    assert len(made) == 5  # three, and two controls
    assert made["drafter-2/model.safetensors"] != made["control-2/model.safetensors"]


def test_a_drafter_with_a_token_map_keeps_the_target_s_embeddings_and_predicts_mapped_tokens_only(
    target: str, data: str, tmp_path: Path
) -> None:
    more = ("--token-map", "24", "--freeze-embeddings")
    run(target, "--drafter", "layers:1", "--data", data, "--out", str(tmp_path / "run"), *SMALL, *more)
    folder = tmp_path / "run" / "drafter-1"
    token_map = json.loads((folder / "token_map.json").read_text())
    assert token_map == sorted(set(token_map))
    assert len(token_map) == 24
    start, tuned = (
        build(each, Path(target), 0).model for each in (parse_initial_weights("layers:1"), InitialWeights("", folder))
    )
    assert torch.equal(start.get_input_embeddings().weight, tuned.get_input_embeddings().weight)
    changed = [name for name, weight in start.named_parameters() if not torch.equal(weight, tuned.get_parameter(name))]
    assert any(".layers.0." in name for name in changed)
    llm = LLM(target, drafters=[folder], tree="2,2", dtype="float32")
    output = llm.generate([{"prompt_token_ids": random_prompts([6])[0]}], SamplingParams(max_tokens=8, temperature=0))
    assert len(output[0].outputs[0].token_ids) == 8


def test_a_new_hybrid_learns_and_drafts_for_the_target(target: str, data: str, tmp_path: Path) -> None:
    options = ("--num-prompts", "40", "--epochs", "4", "--learning-rate", "0.01", "--no-tensorboard")
    run(target, "--drafter", "new:hybrid:2x64", "--data", data, "--out", str(tmp_path / "run"), *SMALL, *options)
    folder = tmp_path / "run/drafter-1"
    batch = collate(list(load(tmp_path / "run/examples-held-out")))
    losses = []
    for start in (parse_initial_weights("new:hybrid:2x64"), InitialWeights("tuned", folder)):
        with torch.no_grad():
            drafter = build(start, Path(target), 0).eval()
            losses.append(float(drafter.loss(drafter(batch), batch)))
    assert losses[1] < 0.8 * losses[0], losses
    params = SamplingParams(temperature=0.0, max_tokens=12)
    check_same_output(target, [folder], "2,1,1", random_prompts([5, 9], seed=8), params)


def test_an_untuned_drafter_predicts_all_tokens_though_the_others_have_a_token_map(
    target: str, data: str, done: tuple[Path, Any], tmp_path: Path
) -> None:
    beside = ("--beside", str(done[0] / "run" / "drafter-1"))
    found = []
    for name, more in (("whole", ()), ("mapped", ("--token-map", "24"))):
        out = tmp_path / name
        run(target, "--drafter", "layers:1", *beside, "--data", data, "--out", str(out), *SMALL, *more)
        AcceleratorState._reset_state(reset_partial_state=True)
        found.append((out / "beside-1.marks.safetensors").read_bytes())
    assert found[0] == found[1]


def test_the_report_has_every_part_and_finite_numbers_only(done: tuple[Path, Any]) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in the report")

    report = json.loads((done[0] / "r.json").read_text(), parse_constant=refuse)
    assert json.loads((done[0] / "run" / "report.json").read_text()) == report
    assert list(report["folders"]) == ["drafter-1", "drafter-2", "drafter-3"]
    assert list(report["training"]) == ["drafter-1", "drafter-2", "drafter-3", "control-2", "control-3"]
    for numbers in report["training"].values():
        assert all(math.isfinite(value) for value in numbers.values())
        assert numbers["loss"] >= 0
    for one in report["foresight"]:
        assert one["hit_rates"] == sorted(one["hit_rates"])
        assert all(0 <= rate <= 1 for rate in one["hit_rates"])
    for one in report["shares"]:
        assert one["added"] <= one["alone"] + 1e-9
    for one in report["passes"]:
        assert one["tokens_per_pass"] >= 1
    arms = {(one["arm"]["kind"], len(one["arm"]["drafters"])) for one in report["passes"]}
    assert arms == {(kind, count) for kind in ("boosted", "independent") for count in (1, 2, 3)}


def test_the_plot_is_drawn_and_the_tables_name_the_folders(done: tuple[Path, Any]) -> None:
    folder, result = done
    assert (folder / "r.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "r.png").stat().st_size > 10_000
    for part in (
        "Training",
        "Greedy held-out text",
        "Sampled held-out text",
        "tokens per target pass",
        str(folder / "run" / "drafter-3"),
    ):
        assert part in result.stdout


def test_progress_on_a_pipe_is_a_line_now_and_then(done: tuple[Path, Any]) -> None:
    lines = done[1].stderr.splitlines()
    for stage in (
        "examples: the target generates",
        "start-1: measuring",
        "drafter-2: tuning",
        "drafter-2: predicting",
        "control-3: tuning",
    ):
        of_stage = [line for line in lines if line.startswith(f"{stage}: ")]
        assert 2 <= len(of_stage) <= 14
        total = of_stage[0].rsplit(" ", 1)[1]
        assert of_stage[-1].startswith(f"{stage}: {total} of {total}")
    assert "\x1b" not in done[1].stderr
    assert any("loss" in line and "tokens/s" in line for line in lines)


def test_curves_can_be_read(done: tuple[Path, Any]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    report = json.loads((done[0] / "r.json").read_text())
    for name, numbers in report["training"].items():
        events = accumulator.EventAccumulator(str(done[0] / "run" / "tensorboard" / name)).Reload()
        points = events.Scalars("loss")
        assert [point.step for point in points] == list(range(1, int(numbers["steps"]) + 1))
        assert points[-1].value == pytest.approx(numbers["loss"], rel=1e-5)
        assert {"learning rate", "gradient norm", "tokens per second"} <= set(events.Tags()["scalars"])


def test_a_finished_run_that_is_started_again_reports_the_same_without_measuring(
    target: str, data: str, done: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = done[0] / "run"
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*.safetensors")}
    events = sorted(folder.rglob("events*"))
    known = json.loads((folder / "report.json").read_text())
    monkeypatch.setattr(report_module, "count_passes", lambda *_: pytest.fail("measured again"))
    assert run(target, *THREE, "--data", data, "--out", str(folder), *SMALL, "--control").stdout == done[1].stdout
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*.safetensors")} == before
    assert sorted(folder.rglob("events*")) == events
    again = json.loads((folder / "report.json").read_text())
    for part in ("foresight", "shares", "passes", "training", "num_examples"):
        assert again[part] == known[part]


def test_a_drafter_that_got_worse_is_named_after_its_training_and_where_it_is_used(
    target: str, data: str, done: tuple[Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained, out = done[0] / "run" / "drafter-1", tmp_path / "run"
    words = (target, "--drafter", str(trained), "--data", data, "--out", str(out), *SMALL, "--learning-rate", "0.5")
    assert re.search(r"drafter-1 got worse: 0\.\d\d times the tokens\s+per pass", run(*words).stdout)
    find_drafter(str(out / "drafter-1"))
    assert "its training made it worse (0." in caplog.text
    caplog.clear()
    find_drafter(str(trained))
    assert not caplog.text


def test_plain_text_and_a_second_drafter(target: str, done: tuple[Path, Any], tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text(" ".join(f"the {one}{other} sea" for one in "abcdefghijklm" for other in "nopqrstuvwxyz"))
    folder = str(done[0] / "run" / "drafter-1")
    run(target, "--drafter", "new:1", "--beside", folder, "--data", str(text), "--out", str(tmp_path / "run"), *SMALL,
        "--num-texts", "9", "--prompt-tokens", "8", "--no-tensorboard", "--boosting", "prompts")  # fmt: skip
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert {one["drafter"] for one in report["shares"]} == {"beside-1", "drafter-1"}
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert list((tmp_path / "run" / "examples").glob("read-*.safetensors"))


# ------------------------------------------------------------------------------- kill, and go on


def command(target: str, data: str, out: Path) -> list[str]:
    words = [target, *THREE, "--data", data, "--out", str(out), *SMALL, "--control", "--save-every", "0"]
    return [sys.executable, "-m", "specinfer", "tune", *words]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def killed_at(words: list[str], is_there: Callable[[], bool], delay: float = 0.0) -> bool:
    """Starts a command and kills it once something is there; whether it was alive still."""
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not is_there():
        time.sleep(0.002)
    time.sleep(delay)
    was_alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return was_alive


# What is in the folder when it is killed: all stages, most of them at once after their file appears.
MOMENTS = (
    "run.json", "examples/generated-00000.safetensors", "examples-held-out/generated-00000.safetensors",
    "start-2.held-out.safetensors", "drafter-1.checkpoint.pt", "drafter-1", "drafter-1.held-out.safetensors",
    "drafter-1.marks.safetensors", "drafter-2.checkpoint.pt", ".drafter-2-partial", "drafter-3.checkpoint.pt",
    "control-2.checkpoint.pt", "control-3",
)  # fmt: skip


def check_resumed(target: str, data: str, out: Path, reference: Path) -> None:
    subprocess.run(command(target, data, out), env=environment(), check=True, capture_output=True, timeout=200)
    check_same(out, reference)


def check_same(out: Path, reference: Path) -> None:
    assert weights(out) == weights(reference)
    known, found = (json.loads((folder / "report.json").read_text()) for folder in (reference, out))
    for part in ("foresight", "shares", "passes", "num_examples", "num_left"):
        assert found[part] == known[part]
    assert not list(out.rglob(".*"))  # no litter of what was cut off


@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(
    target: str, data: str, done: tuple[Path, Any], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert killed_at(command(target, data, out), lambda: (out / "drafter-1.checkpoint.pt").exists())
    run(*command(target, data, out)[4:])
    check_same(out, done[0] / "run")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_each_stage(target: str, data: str, done: tuple[Path, Any], tmp_path: Path) -> None:
    for number, moment in enumerate(MOMENTS):
        out = tmp_path / str(number)
        killed_at(command(target, data, out), lambda moment=moment, out=out: (out / moment).exists())
        check_resumed(target, data, out, done[0] / "run")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_random_moments(target: str, data: str, done: tuple[Path, Any], tmp_path: Path) -> None:
    source = torch.Generator().manual_seed(0)
    for number in range(4):
        out = tmp_path / str(number)
        for _ in range(3):
            delay = float(torch.rand(1, generator=source)) * 1.5
            killed_at(command(target, data, out), lambda out=out: out.exists(), delay)
        check_resumed(target, data, out, done[0] / "run")


# --------------------------------------------------------------------------------------- bad input


# The words of a run, in which capitals are files and folders, and what is wrong with it.
_RUN = "--drafter new:1 --data DATA --out OUT"
BAD = {
    "--data DATA --out OUT": "drafter: 0 given; name one",
    "--drafter new:1 --out OUT": "data: none given",
    "--drafter new:1 --data DATA": "out: name a folder with --out",
    f"{'--drafter new:1 ' * 16}{_RUN}": "drafter: 17 given",
    "--drafter ngram --data DATA --out OUT": "'ngram' looks tokens up and learns nothing",
    "--drafter layers:0 --data DATA --out OUT": "the number of layers, 0, is not from 1",
    "--drafter layers:9 --data DATA --out OUT": "the target has 3 layers",
    "--drafter demo --data DATA --out OUT": "drafter: demo has other tokens",
    f"--beside new:1 {_RUN}": "has no weights yet",
    f"--data demo {_RUN}": "give it alone",
    "--drafter new:1 --data EMPTY --out OUT": "give 0 prompts",
    "--drafter new:1 --data NONE --out OUT": "no file",
    f"--held-out NONE {_RUN}": "no file",
    f"--boosting all {_RUN}": "boosting must be one of tokens, prompts, none, not 'all'",
    f"--epochs nan {_RUN}": "epochs must be a finite number",
    f"--epochs 0 {_RUN}": "epochs must be above 0",
    f"--learning-rate 2 {_RUN}": "--learning-rate must be above 0 and at most 1",
    f"--temperature 3 {_RUN}": "temperature must be from 0 to 2",
    f"--seed -1 {_RUN}": "seed must be from 0",
    f"--max-tokens 256 {_RUN}": "--max-tokens: 256 leave no space for a prompt in the context of 256 tokens",
    f"--device abacus {_RUN}": "device",
    f"--plot a.unknown {_RUN}": "plot",
    f"--json /none/a.json {_RUN}": "json: /none/a.json cannot be written",
}


@pytest.mark.parametrize("words", BAD)
def test_what_cannot_be_used_is_one_line_before_any_work(target: str, data: str, tmp_path: Path, words: str) -> None:
    (tmp_path / "empty.txt").touch()
    out = tmp_path / "run"
    names = {"DATA": data, "OUT": str(out), "NONE": str(tmp_path / "none"), "EMPTY": str(tmp_path / "empty.txt")}
    assert BAD[words] in refusal(target, *SMALL, *(names.get(word, word) for word in words.split()))
    assert not out.exists()


def test_prompts_longer_than_a_drafters_context_are_cut_and_counted(
    target: str, tmp_path: Path, model_folder: Callable[..., Path]
) -> None:
    path = save_prompts(tmp_path / "a.jsonl", random_prompts([40] * 9))
    start = model_folder("gpt2", tokenizer=True, n_positions=32)
    words = ("--drafter", str(start), "--data", str(path), "--out", str(tmp_path / "run"), *SMALL)
    result = run(target, *words)
    assert "9 prompts were too long and were cut to their ends" in result.stdout
    context = refusal(target, *words[:-8], "--max-tokens", "32")
    assert "context of 32 tokens" in context


def test_out_that_is_something_else(target: str, data: str, tmp_path: Path, done: tuple[Path, Any]) -> None:
    words = (target, "--drafter", "new:1", "--data", data, *SMALL, "--out")
    file, full, broken = tmp_path / "file", tmp_path / "full", tmp_path / "broken"
    file.touch()
    full.mkdir()
    (full / "thesis.tex").touch()
    broken.mkdir()
    (broken / "run.json").write_text("{")
    assert "exists and has no run" in refusal(*words, str(file))
    assert "exists and has no run" in refusal(*words, str(full))
    assert "cannot be written" in refusal(*words, str(file / "below"))
    assert "cannot be written" in refusal(*words, "/proc/none")
    assert "run.json cannot be read" in refusal(*words, str(broken))
    before = weights(done[0] / "run")
    assert "has a run with another drafters, control" in refusal(*words, str(done[0] / "run"))
    assert weights(done[0] / "run") == before


def test_a_run_whose_data_have_changed_is_another_run(target: str, data: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    shutil.copyfile(data, mine)
    words = (target, "--drafter", "new:1", "--data", str(mine), *SMALL, "--out", str(tmp_path / "run"))
    run(*words)
    mine.write_text(mine.read_text() + '{"prompt_token_ids": [1, 2, 3]}\n')
    assert "has a run with another content of the data" in refusal(*words)


@pytest.mark.parametrize("name", ["accelerate", "tensorboard"])
def test_extras_that_are_missing(
    target: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("specinfer.cli.tune.find_spec", lambda wanted: None if wanted == name else find_spec(wanted))
    line = refusal(target, "--drafter", "new:1", "--data", data, "--out", str(tmp_path / "run"))
    assert f"tune needs {name}, which is missing; pip install 'specinfer[tune]'" in line


# ------------------------------------------------------------------------- what goes wrong on the way


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_the_checkpoint(
    target: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary, steps = trainable.training_loss, []

    def broken(*args: Any) -> Any:
        steps.append(1)
        return ordinary(*args) * (torch.nan if len(steps) == 5 else 1.0)

    monkeypatch.setattr(trainable, "training_loss", broken)
    words = (target, "--drafter", "new:1", "--data", data, *SMALL, "--out", str(tmp_path / "run"), "--save-every", "0")
    line = refusal(*words)
    assert "the loss or its gradient is not finite at step 4: lower --learning-rate" in line
    path = tmp_path / "run" / "drafter-1.checkpoint.pt"
    assert str(path) in line
    state = torch.load(path, weights_only=True)
    assert state["progress"]["step"] == 4
    assert all(bool(weight.isfinite().all()) for weight in state["model"].values())
    run(*words)  # it goes on from there


@pytest.mark.parametrize(
    "stage",
    ["marks", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("examples", "checkpoint", "model"))],
)
def test_a_full_disk_ends_the_run_in_one_line_and_it_resumes_when_there_is_space(
    target: str, data: str, done: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    words = (target, *THREE, "--data", data, *SMALL, "--control", "--out", str(tmp_path / "run"))
    if stage != "examples":  # they and the first drafter are there
        shutil.copytree(done[0] / "run", tmp_path / "run", ignore=shutil.ignore_patterns("*-[23]*", "report.json"))
    with monkeypatch.context() as patch:
        place = {
            "examples": "specinfer.learning.examples.save_file",
            "checkpoint": "torch.save",
            "marks": "specinfer.learning.tune.boosting.save_arrays",
            "model": "transformers.PreTrainedModel.save_pretrained",
        }[stage]
        patch.setattr(place, full)
        line = refusal(*words)
    assert "free some space" in line
    assert "No space left on device" in line
    assert not list((tmp_path / "run").rglob(".*"))
    AcceleratorState._reset_state(reset_partial_state=True)
    run(*words)
    assert weights(tmp_path / "run") == weights(done[0] / "run")


@pytest.mark.slow
def test_a_disk_that_is_full_indeed(target: str, data: str, tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        words = (target, *THREE, "--data", data, *SMALL, "--out", str(place / "run"), "--no-tensorboard")
        assert "free some" in refusal(*words)  # before the run
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("specinfer.learning.tune.run.check_disk_space", lambda *_: None)
            AcceleratorState._reset_state(reset_partial_state=True)
            assert "free some space" in refusal(*words)  # during the run
        for file in (place / "run").rglob("*.safetensors"):
            assert file.stat().st_size
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("name", ["examples/generated-00001.safetensors", "drafter-1.marks.safetensors",
                                  "start-1.held-out.safetensors", "drafter-2.checkpoint.pt"])  # fmt: skip
def test_a_damaged_file_of_the_run_is_named(
    target: str, data: str, done: tuple[Path, Any], tmp_path: Path, name: str
) -> None:
    shutil.copytree(done[0] / "run", tmp_path / "run")
    file = tmp_path / "run" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    line = refusal(target, *THREE, "--data", data, "--out", str(tmp_path / "run"), *SMALL, "--control")
    assert str(file) in line
    assert "delete it" in line


# --------------------------------------------------------------------------- several processes, a terminal


def launched(target: str, data: str, out: Path) -> list[str]:
    """The same run in two processes."""
    words = command(target, data, out)
    return [words[0], "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words[1:]]


@pytest.mark.distributed
def test_two_processes_make_one_set_of_drafters(target: str, data: str, done: tuple[Path, Any], tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = subprocess.run(
        launched(target, data, out), env=environment(), check=True, capture_output=True, text=True, timeout=280
    )
    assert ended.stdout.count("Training") == 1  # one of them reports
    assert ended.stderr.count("drafter-2: predicting: 70 of 70") == 1
    for file in (done[0] / "run" / "examples").iterdir():
        assert (out / "examples" / file.name).read_bytes() == file.read_bytes()
    known, found = (json.loads((folder / "report.json").read_text()) for folder in (done[0] / "run", out))
    for name, numbers in known["training"].items():
        assert found["training"][name]["steps"] == numbers["steps"]
        assert found["training"][name]["tokens"] == numbers["tokens"]
        assert found["training"][name]["loss"] == pytest.approx(numbers["loss"], rel=0.3)


@pytest.mark.distributed
@pytest.mark.parametrize("stage", ["drafter-1.checkpoint.pt", "start-1.held-out.safetensors"])
def test_an_error_in_one_process_ends_the_other(target: str, data: str, tmp_path: Path, stage: str) -> None:
    # Where the first process alone would write there is a folder.
    (tmp_path / "run" / f".{stage}-partial").mkdir(parents=True)
    ended = subprocess.run(
        launched(target, data, tmp_path / "run"), env=environment(), capture_output=True, text=True, timeout=280
    )
    assert ended.returncode != 0
    assert "specinfer: error: " in ended.stderr


@pytest.mark.slow
def test_a_terminal_shows_a_bar(target: str, data: str, tmp_path: Path) -> None:
    if shutil.which("script") is None:
        pytest.skip("no script to make a terminal")
    words = shlex.join([word for word in command(target, data, tmp_path / "run") if word != "--control"])
    shown = subprocess.run(
        ["script", "-qec", words, os.devnull], env=environment() | {"TERM": "xterm-256color", "COLUMNS": "120"},
        check=True, capture_output=True, text=True, timeout=280,
    ).stdout  # fmt: skip
    assert "━" in shown
    assert "tokens/s" in shown
    assert "drafter-3: tuning: " not in shown
