"""Throughput: a batch runs together, the numbers follow from what was timed, and bad input is refused."""

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from full_disk import limited_files
from reports import shown, written
from specinfer.bench import loop
from specinfer.bench.comparisons import Compared
from specinfer.bench.loop import open_session, schedule
from specinfer.bench.options import PLAIN, ThroughputConfig
from specinfer.bench.prompts import PromptSet
from specinfer.bench.results import PARTS
from specinfer.bench.throughput import run_throughput
from specinfer.cli.app import app
from specinfer.llm import LLM
from specinfer.model.batch import Piece
from specinfer.model.runner import ModelRunner
from specinfer.reporting.progress_bar import stage_bar
from specinfer.reporting.report import Report
from tiny import VOCAB, random_prompts, save_model, save_tokenizer

TREES = ("1,1,1", "2,1")
SIZES = (1, 3)
MAX_TOKENS = 10
PROMPTS = tuple(map(tuple, random_prompts((4, 9, 2, 30))))  # of different lengths


def make_config(folders: tuple[str, str], **changes: Any) -> ThroughputConfig:
    target, drafter = folders
    options = {"model": target, "drafters": (drafter,), "trees": TREES, "device": "cpu", "prompts": PROMPTS,
               "batch_sizes": SIZES, "max_tokens": MAX_TOKENS, "repeats": 2}  # fmt: skip
    return ThroughputConfig(**(options | changes))


@pytest.fixture(scope="module")
def report(folders: tuple[str, str]) -> Report[Compared]:
    return run_throughput(make_config(folders))


def test_a_replay_of_a_batch_accepts_all_its_draft_tokens(folders: tuple[str, str]) -> None:
    options: dict[str, Any] = {"trees": ("1",), "replays": (4,), "repeats": 1, "batch_sizes": (3,)}
    result = run_throughput(make_config(folders, **options)).measured.result
    replay = result.arm("replay:4")
    assert result.partings(replay) == []
    assert all(len(run.steps) == 2 for run in replay.runs), "9 tokens after the first, 5 in a pass"


def test_every_arm_runs_every_batch_in_every_repeat(report: Report[Compared]) -> None:
    assert [result.size for result in report.measured.results] == list(SIZES)
    assert report.measured.names == (PLAIN, *TREES)
    batches = {1: [(0,), (1,), (2,), (3,)], 3: [(0, 1, 2), (3, 0, 1)]}
    for result in report.measured.results:
        for arm in result.arms:
            made = [(run.repeat, run.prompts) for run in arm.runs]
            assert made == [(repeat, batch) for repeat in range(2) for batch in batches[result.size]]
            assert [run.outputs for run in arm.runs] == [run.outputs for run in result.plain.runs]
            assert result.partings(arm) == []
            assert all(len(tokens) == MAX_TOKENS for run in arm.runs for tokens in run.outputs)
        assert result.num_outputs == sum(map(len, batches[result.size])) * 2


def test_a_prompt_gets_the_same_tokens_in_every_batch(report: Report[Compared]) -> None:
    said: dict[int, set[tuple[int, ...]]] = {}
    for result in report.measured.results:
        for run in result.plain.runs:
            for prompt, tokens in zip(run.prompts, run.outputs, strict=True):
                said.setdefault(prompt, set()).add(tokens)
    assert sorted(said) == [0, 1, 2, 3]
    assert all(len(outputs) == 1 for outputs in said.values())


def test_the_arms_take_turns_in_going_first() -> None:
    config = ThroughputConfig(trees=("1",), batch_sizes=(2, 4), num_prompts=4, repeats=2)
    turns = list(schedule(config, 4))
    assert [(turn.repeat, turn.prompts) for turn in turns[:2]] == [(-1, (0, 1)), (-1, (0, 1, 2, 3))]
    measured = [turn for turn in turns if turn.repeat >= 0]
    assert [(turn.repeat, turn.prompts, turn.arms[0]) for turn in measured] == [
        (0, (0, 1), PLAIN), (0, (2, 3), "1"), (0, (0, 1, 2, 3), PLAIN),
        (1, (0, 1), "1"), (1, (2, 3), PLAIN), (1, (0, 1, 2, 3), "1"),
    ]  # fmt: skip
    assert all(sorted(turn.arms) == ["1", PLAIN] for turn in turns)


def test_decoding_begins_when_all_prompts_are_read(report: Report[Compared]) -> None:
    for result in report.measured.results:
        for run in result.plain.runs:
            # All prompts fit into one pass, in which each request says its first token.
            assert len(run.steps) == MAX_TOKENS - 1
            assert all(step.num_requests == step.num_generated == step.num_rows == result.size for step in run.steps)
        for arm in result.arms:
            for run in arm.runs:
                assert run.num_decoded == result.size * (MAX_TOKENS - 1)
                assert run.num_tokens == result.size * MAX_TOKENS
                assert min(run.prompt_time, run.time) > 0
                assert run.prompt_time + run.time <= run.total_time


def test_prompts_beyond_one_pass_are_read_without_guesses(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_MAX_READ", 16)
    report = run_throughput(make_config(folders, trees=("1,1",), batch_sizes=(4,), repeats=1, warmup=0))
    (result,) = report.measured.results
    for arm in result.arms:
        (run,) = arm.runs
        # The longest prompt takes four passes; in each of them the three others said a token.
        assert run.num_decoded == 3 * (MAX_TOKENS - 4) + MAX_TOKENS - 1
        assert run.num_tokens == 4 * MAX_TOKENS


def test_ratios_are_of_the_recorded_times_pair_by_pair(report: Report[Compared]) -> None:
    numbers: Any = report.as_dict()
    for result, batch in zip(report.measured.results, numbers["batches"], strict=True):
        plain = batch["arms"][PLAIN]["runs"]
        for arm in result.trees:
            runs = batch["arms"][arm.name]["runs"]
            ratios = [a["decode_ms"] / b["decode_ms"] for a, b in zip(plain, runs, strict=True)]
            assert batch["arms"][arm.name]["speedup"] == pytest.approx(statistics.median(ratios))
            assert batch["arms"][arm.name]["speedup_spread"]["max"] == pytest.approx(max(ratios))
            whole = [a["total_ms"] / b["total_ms"] for a, b in zip(plain, runs, strict=True)]
            assert batch["arms"][arm.name]["total_speedup"] == pytest.approx(statistics.median(whole))


def test_the_parts_sum_to_the_time_of_decoding(report: Report[Compared]) -> None:
    for result in report.measured.results:
        for arm in result.arms:
            assert list(arm.shares) == list(PARTS)
            assert sum(arm.shares.values()) == pytest.approx(1.0)
            assert min(arm.shares[part] for part in ("target", "verify", "host")) > 0
            for run in arm.runs:
                assert sum(run.seconds.values()) == pytest.approx(run.time)
    # Of all sizes, because other programs lengthen any part of so short a run.
    least = min(result.plain.shares["draft"] for result in report.measured.results)
    assert least < max(result.trees[0].shares["draft"] for result in report.measured.results)


def test_a_perfect_drafter_is_always_right(report: Report[Compared]) -> None:
    for result in report.measured.results:
        assert (result.plain.nodes, result.plain.tokens_per_pass) == (0.0, 1.0)
        assert result.plain.requests_per_pass == result.size
        arm = result.trees[0]
        assert arm.tokens_per_pass == 3.0  # 4, 4 and the last one, of 9
        assert arm.nodes == pytest.approx(6 / 3)


def test_what_is_written_and_shown(report: Report[Compared], tmp_path: Path) -> None:
    numbers = json.loads(json.dumps(report.as_dict()))
    assert {"batches", "options", "environment"} <= set(numbers)
    for batch in numbers["batches"]:
        assert set(batch["arms"]) == {PLAIN, *TREES}
        arm = batch["arms"][TREES[0]]
        assert {"tokens_per_second", "total_tokens_per_second", "speedup", "speedup_spread", "nodes", "tokens_per_pass",
                "requests_per_pass", "percent_of_time", "tokens_before_parting"} <= set(arm)  # fmt: skip
    assert {"cpu", "num_threads", "torch", "commit", "dtype"} <= set(numbers["environment"])
    for suffix in (".png", ".svg"):
        report.draw(tmp_path / f"plot{suffix}")
        assert (tmp_path / f"plot{suffix}").stat().st_size > 1000
    tables = shown(report, 140).partition("medians of batches")[2]
    assert f"{report.measured.results[1].speedup_of(report.measured.results[1].trees[1]).median:.2f}" in tables
    assert "the same tokens as plain decoding in all 20 outputs" in tables
    rows = [line for line in tables.splitlines() if line.startswith(("batch", "1 ", "3 ", "  "))]
    assert len(rows) >= 2 * (1 + 6)
    assert max(map(len, rows)) <= 80


def test_files_asked_for_and_sampling_and_an_automatic_tree(folders: tuple[str, str], tmp_path: Path) -> None:
    paths = {"json": tmp_path / "numbers.json", "plot": str(tmp_path / "plot.svg")}
    report = run_throughput(
        make_config(folders, trees=("auto", "2"), temperature=0.8, repeats=1, warmup=0, dtype="bfloat16", **paths)
    )
    written(report, tmp_path / "numbers.json")
    assert Path(paths["plot"]).read_text().lstrip().startswith("<?xml")
    assert report.measured.environment.dtype == "bfloat16"


def test_heldout_texts_are_as_many_as_the_largest_batch(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def prompts(*_: object, count: int, **__: object) -> PromptSet:
        asked.append(count)
        return PromptSet([list(prompt) for prompt in PROMPTS][:count])

    monkeypatch.setattr(loop, "find_prompts", prompts)
    options = {"prompts": None, "num_prompts": 2, "repeats": 1, "warmup": 0, "trees": ("1",)}
    report = run_throughput(make_config(folders, batch_sizes=(1, 4), **options))
    assert asked == [4]
    assert [[run.prompts for run in result.plain.runs] for result in report.measured.results] == [
        [(0,), (1,)],
        [(0, 1, 2, 3)],
    ]


def test_each_size_has_a_policy_of_its_own_that_goes_on_learning(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = loop.make_policies
    policies: dict[tuple[int, str], Any] = {}

    def spy(config: ThroughputConfig, llm: LLM) -> Any:
        policies.update(made(config, llm))
        return policies

    monkeypatch.setattr(loop, "make_policies", spy)
    run_throughput(make_config(folders, trees=("auto",), repeats=1))
    one, other = (policies[size, "auto"]._default.costs for size in SIZES)
    assert one is not other
    assert one.rest > 0 < other.rest


def test_a_request_that_fails_ends_the_run_by_name(folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ModelRunner.forward
    calls = iter(range(99))

    def failing(self: ModelRunner, pieces: Sequence[Piece]) -> Tensor:
        logits = forward(self, pieces).clone()
        if next(calls) == 3:
            logits[1] = torch.nan
        return logits

    monkeypatch.setattr(ModelRunner, "forward", failing)
    message = "3 requests together, prompt 1: the model computed values that are not"
    with pytest.warns(RuntimeWarning, match="request 1 failed"), pytest.raises(RuntimeError, match=message):
        run_throughput(make_config(folders, batch_sizes=(3,), warmup=0))


def test_a_changed_output_is_an_error_in_float32(folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    generate = LLM.generate
    calls = iter(range(99))

    def lie(self: LLM, *args: Any, **kwargs: Any) -> Any:
        outputs = generate(self, *args, **kwargs)
        if next(calls) == 1:
            outputs[2].outputs[0].token_ids[3] = (outputs[2].outputs[0].token_ids[3] + 1) % VOCAB
        return outputs

    monkeypatch.setattr(LLM, "generate", lie)
    with pytest.raises(RuntimeError, match="3 requests together, prompt 2: with tree 1, output token 3 is another"):
        run_throughput(make_config(folders, trees=("1",), batch_sizes=(3,), warmup=0))


def refuse_to_load(*_: object, **__: object) -> Iterator[None]:
    raise AssertionError("the long work began")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_sizes": ()}, "batch_sizes: none given"),
        ({"batch_sizes": (1, 1)}, "batch_sizes: 1, 1 given; give at least one, and none twice"),
        ({"batch_sizes": (0,)}, "batch_sizes must be a whole number from 1 to 1024, not 0"),
        ({"batch_sizes": (1, 2000)}, "batch_sizes must be a whole number from 1 to 1024, not 2000"),
        ({"batch_sizes": (5,)}, "prompts: 4 given for 5 requests together"),
    ],
)
def test_bad_input_is_refused_before_the_long_work(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(loop, "LLM", refuse_to_load)
    with pytest.raises(ValueError, match=message):
        run_throughput(make_config(folders, **changes))


def test_batches_that_memory_cannot_hold_are_refused(folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specinfer.model.capacity._memory", lambda *_: 60 * 2**10)
    with pytest.raises(ValueError, match="batch_sizes: 3 requests of 40 tokens and their trees need 312 slots"):
        run_throughput(make_config(folders))
    with (
        stage_bar(None) as progress,
        open_session(make_config(folders, kv_cache_memory_bytes="1MiB"), progress) as session,
    ):
        assert session.llm.target.cache.num_slots >= 312


def test_the_command_takes_its_options(tmp_path: Path, folders: tuple[str, str]) -> None:
    target = str(save_tokenizer(save_model(tmp_path / "target", max_position_embeddings=1024)))
    file = tmp_path / "numbers.json"
    words = ["bench", "throughput", target, "--drafter", "ngram", "--tree", "1", "--batch", "1", "--batch", "2",
             "--num-prompts", "2", "--max-tokens", "4", "--repeats", "1", "--json", str(file)]  # fmt: skip
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert [batch["batch_size"] for batch in json.loads(file.read_text())["batches"]] == [1, 2]
    assert "tokens/s" in result.stdout
    assert "drafters: ngram" in result.stdout
    refused = CliRunner().invoke(app, [*words, "--batch", "0"])
    assert refused.exit_code == 2
    assert refused.stderr.startswith("specinfer: error: --batch must be a whole number")


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_the_table_is_printed_even_if_a_file_cannot_be_written(flag: str, tmp_path: Path) -> None:
    target, file = str(save_tokenizer(save_model(tmp_path / "m", max_position_embeddings=1024))), tmp_path / "full.svg"
    file.symlink_to("/dev/full")
    words = ["bench", "throughput", target, "--drafter", "ngram", "--tree", "1", "--batch", "1",
             "--num-prompts", "1", "--max-tokens", "2", "--repeats", "1", flag, str(file)]  # fmt: skip
    result = CliRunner().invoke(app, words)
    assert "tokens/s" in result.stdout
    assert f"{flag}: {file} cannot be written (No space left on device); free some space" in result.stderr
    assert result.exit_code == 2


def test_a_full_disk_is_found_before_the_measurement(tmp_path: Path, folders: tuple[str, str]) -> None:
    file = tmp_path / "numbers.json"
    with limited_files(1000), pytest.raises(ValueError, match=r"^json: .*numbers.json cannot be written \(File too "):
        run_throughput(make_config(folders, json=file))
    assert not list(tmp_path.iterdir())
