"""Latency: the numbers follow from what was timed, and bad input is refused before anything is."""

import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reports import shown, written
from specinfer.bench import loop
from specinfer.bench.comparisons import Compared
from specinfer.bench.latency import latency_page, run_latency
from specinfer.bench.loop import schedule
from specinfer.bench.models import find_models
from specinfer.bench.options import PLAIN, LatencyConfig
from specinfer.llm import LLM
from specinfer.reporting.report import Report
from specinfer.reporting.spread import Spread, first_difference
from tiny import VOCAB, save_model

TREES = ("1,1,1", "2,1")
MAX_TOKENS = 12
PROMPTS = ((1, 2, 3, 4), (5, 6, 7, 8, 9))
COUNTERS: list[dict[str, Any]] = []  # of each request that was streamed, in order


def make_config(folders: tuple[str, str], **changes: Any) -> LatencyConfig:
    target, drafter = folders
    options = {"model": target, "drafters": (drafter,), "trees": TREES, "device": "cpu", "prompts": PROMPTS,
               "max_tokens": MAX_TOKENS, "repeats": 3}  # fmt: skip
    return LatencyConfig(**(options | changes))


@pytest.fixture(scope="module")
def report(folders: tuple[str, str]) -> Iterator[Report[Compared]]:
    stream = LLM.stream

    def spy(self: LLM, *args: Any) -> Iterator[Any]:
        for chunk in stream(self, *args):
            if chunk.output is not None:
                COUNTERS.append(chunk.output.metrics.speculative_decoding)
            yield chunk

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLM, "stream", spy)
        yield run_latency(make_config(folders))


def test_the_type_of_keys_and_values_is_measured_and_reported(folders: tuple[str, str]) -> None:
    report = run_latency(make_config(folders, kv_cache_dtype="fp8", trees=TREES[:1], repeats=1, prompts=PROMPTS[:1]))
    assert report.measured.environment.kv_cache_dtype == "float8_e4m3fn"
    assert report.measured.environment.precision == "float32, KV cache float8_e4m3fn"
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of auto"):
        make_config(folders, kv_cache_dtype="int8")


def test_prompts_are_read_once_if_asked(folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    stream, cached = LLM.stream, list[int]()

    def spy(self: LLM, *args: Any) -> Iterator[Any]:
        for chunk in stream(self, *args):
            if chunk.output is not None:
                cached.append(chunk.output.num_cached_tokens)
            yield chunk

    monkeypatch.setattr(LLM, "stream", spy)
    prompt = tuple(i % VOCAB for i in range(40))
    for is_kept, expected in ((True, [0, 39, 39, 39]), (False, [0, 0, 0, 0])):
        cached.clear()
        run_latency(make_config(folders, trees=TREES[:1], repeats=1, prompts=(prompt,), enable_prefix_caching=is_kept))
        assert cached == expected, "two runs of each arm, one to warm up"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_replay_accepts_all_its_draft_tokens(folders: tuple[str, str], temperature: float) -> None:
    """It shows what the engine takes with the best drafter there could be, whatever drafters are loaded."""
    options: dict[str, Any] = {"trees": ("1",), "replays": (2, 5), "repeats": 1, "temperature": temperature}
    result = run_latency(make_config(folders, **options)).measured.result
    _, tree, short, long = result.arms
    assert (tree.name, short.name, long.name) == ("1", "replay:2", "replay:5")
    for arm, num_nodes in ((short, 2), (long, 5)):
        assert result.partings(arm) == []
        assert arm.accepted_per_pass.keys() == {"prediction"}
        decoded = MAX_TOKENS - 1  # after the first; the last pass may need fewer draft tokens
        assert [len(run.steps) for run in arm.runs] == [-(-decoded // (num_nodes + 1))] * len(PROMPTS)
    for arm in (result.plain, tree):
        assert "prediction" not in arm.accepted_per_pass


@pytest.mark.parametrize(("replays", "message"), [((0,), "replay"), ((4, 4), "none twice"), ((2000,), "1 to 1024")])
def test_impossible_replays_are_refused(replays: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"replay.*{message}|{message}"):
        LatencyConfig(replays=replays)


def refuse_to_load(*_: object, **__: object) -> None:
    raise AssertionError("the long work began")


def test_every_arm_runs_on_every_prompt_in_every_repeat(report: Report[Compared]) -> None:
    places = [(run.repeat, run.prompts[0]) for run in report.measured.result.plain.runs]
    assert places == [(repeat, prompt) for repeat in range(3) for prompt in range(2)]
    for arm in report.measured.result.trees:
        assert [(run.repeat, run.prompts[0]) for run in arm.runs] == places
        assert [run.token_ids for run in arm.runs] == [run.token_ids for run in report.measured.result.plain.runs]
        assert report.measured.result.partings(arm) == []
    assert all(len(run.token_ids) == MAX_TOKENS for run in report.measured.result.plain.runs)


def test_the_arms_take_turns_in_going_first() -> None:
    config = LatencyConfig(repeats=3, warmup=1, num_prompts=2)
    turns = schedule(config, 2, ["off", "a"])
    order = [(*turn.prompts, turn.repeat, name) for turn in turns for name in turn.arms]
    assert order[:2] == [(0, -1, "off"), (0, -1, "a")]
    firsts = {(prompt, repeat): name for prompt, repeat, name in reversed(order)}
    firsts_in_order = [firsts[prompt, repeat] for repeat in range(3) for prompt in range(2)]
    assert firsts_in_order == ["off", "a", "a", "off", "off", "a"]


def test_speedup_is_the_median_ratio_of_the_recorded_times(report: Report[Compared]) -> None:
    numbers: Any = report.as_dict()
    plain = numbers["arms"][PLAIN]["runs"]
    for arm in report.measured.result.trees:
        runs = numbers["arms"][arm.name]["runs"]
        ratios = [a["decode_ms"] / b["decode_ms"] for a, b in zip(plain, runs, strict=True)]
        assert numbers["arms"][arm.name]["speedup"] == pytest.approx(statistics.median(ratios))
        assert numbers["arms"][arm.name]["speedup_spread"]["max"] == pytest.approx(max(ratios))
        whole = [
            (a["prompt_ms"] + a["decode_ms"]) / (b["prompt_ms"] + b["decode_ms"])
            for a, b in zip(plain, runs, strict=True)
        ]
        assert numbers["arms"][arm.name]["request_speedup"] == pytest.approx(statistics.median(whole))
    assert numbers["speedup"] == numbers["arms"][TREES[0]]["speedup"]
    assert numbers["tokens_per_pass"] == numbers["arms"][TREES[0]]["tokens_per_pass"]


def test_passes_are_those_the_requests_counted(report: Report[Compared]) -> None:
    counted = COUNTERS[len(report.measured.result.arms) :]  # the warm-up runs came first
    runs = [run for arm in report.measured.result.arms for run in arm.runs]
    assert len(counted) == len(runs)
    # The first token is said by a pass of its own, outside the clock.
    assert sum(c["num_target_passes"] - 1 for c in counted) == sum(len(run.steps) for run in runs)
    accepted = sum(step.num_generated - 1 for run in runs for step in run.steps)
    assert sum(c["num_accepted_draft_tokens"] for c in counted) == accepted > 0
    assert report.measured.result.plain.tokens_per_pass == 1.0
    for run in runs:
        assert sum(step.num_generated for step in run.steps) == run.num_decoded == run.num_tokens - 1


def test_a_perfect_drafter_is_always_right(report: Report[Compared]) -> None:
    arm = report.measured.result.trees[0]
    assert arm.acceptance_by_depth == [1.0, 1.0, 1.0]
    assert [step.num_levels for step in arm.runs[0].steps] == [3, 3, 2]  # 11 tokens; the last pass needs no more
    assert arm.tokens_per_pass == pytest.approx(11 / 3)
    assert report.measured.result.plain.acceptance_by_depth == []


def test_the_parts_of_a_pass_sum_to_the_time(report: Report[Compared]) -> None:
    for arm in report.measured.result.arms:
        total = 1000 * sum(run.time for run in arm.runs) / arm.num_passes
        assert arm.ms_per_pass == pytest.approx(total)
        assert sum(arm.split.values()) == pytest.approx(total)
        assert min(arm.split["target"], arm.split["rest"]) > 0
    assert report.measured.result.plain.split["draft"] < report.measured.result.trees[0].split["draft"]


def test_spread() -> None:
    assert Spread.from_values([4.0, 1.0, 2.0, 3.0, 5.0]) == Spread(3.0, 2.0, 4.0, 1.0, 5.0)
    assert Spread.from_values([2.0]) == Spread(2.0, 2.0, 2.0, 2.0, 2.0)
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert first_difference([1, 2], [1, 2]) == 2


def test_what_is_written_and_shown(report: Report[Compared], folders: tuple[str, str], tmp_path: Path) -> None:
    numbers = json.loads(json.dumps(report.as_dict()))
    assert {"speedup", "tokens_per_pass", "tree", "arms", "options", "environment", "num_prompts"} <= set(numbers)
    assert set(numbers["arms"]) == {PLAIN, *TREES}
    assert {"cpu", "num_threads", "torch", "transformers", "commit", "dtype", "date"} <= set(numbers["environment"])
    parameters = numbers["environment"]["target_parameters"]
    assert numbers["environment"]["drafter_parameters"] == {"drafter": parameters}
    for suffix in (".png", ".svg"):
        report.draw(tmp_path / f"plot{suffix}")
        assert (tmp_path / f"plot{suffix}").stat().st_size > 1000
    assert f"{numbers['speedup']:.2f}" in shown(report)
    assert "the same tokens as plain decoding in all 6 runs" in shown(report)


def test_rules_that_draw_other_tokens_than_plain_decoding_say_so(report: Report[Compared]) -> None:
    """With the coupled rule, tokens that differ come from rounding."""
    measured = report.measured

    def fidelity(**changes: Any) -> str:
        return replace(measured, config=replace(measured.config, **changes)).fidelity()[0]

    other = fidelity(temperature=1.0, verification="traversal")
    assert other.endswith("other tokens than plain decoding, of the same distribution, as with traversal verification")
    for changes in ({"temperature": 1.0}, {"verification": "traversal"}):
        assert "the same tokens as plain decoding" in fidelity(**changes)


def test_drafters_without_weights_of_their_own_are_named(report: Report[Compared], folders: tuple[str, str]) -> None:
    models = find_models(folders[0], ("self:int8", "suffix", folders[1]))
    environment = replace(report.measured.environment, drafter_parameters=models.drafter_parameters)
    page = latency_page(replace(report.measured, environment=environment))
    assert "drafters: self:int8, suffix, drafter 0.0 M parameters;" in shown(page)


def test_files_asked_for_and_sampling_and_an_automatic_tree(folders: tuple[str, str], tmp_path: Path) -> None:
    paths = {"json": tmp_path / "numbers.json", "plot": str(tmp_path / "plot.svg")}
    config = make_config(folders, trees=("auto",), temperature=0.8, repeats=1, warmup=0, dtype="bfloat16", **paths)
    report = run_latency(config)
    written(report, tmp_path / "numbers.json")
    assert Path(paths["plot"]).read_text().lstrip().startswith("<?xml")
    assert report.measured.environment.dtype == "bfloat16"


@pytest.mark.distributed
def test_a_target_over_two_processes_generates_the_same_tokens(
    report: Report[Compared], folders: tuple[str, str]
) -> None:
    split = run_latency(make_config(folders, repeats=1, warmup=0, tensor_parallel_size=2))
    assert [run.token_ids for run in split.measured.result.plain.runs] == [
        run.token_ids for run in report.measured.result.plain.runs[:2]
    ]
    assert split.measured.environment.target_parameters == report.measured.environment.target_parameters
    assert split.options["tensor_parallel_size"] == 2


def test_a_changed_output_is_an_error_in_float32(folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = LLM.stream
    calls = iter(range(99))

    def lie(self: LLM, *args: Any) -> Iterator[Any]:
        second = next(calls) == 1
        for chunk in stream(self, *args):
            if second:
                chunk.token_ids[:] = [(token + 1) % VOCAB for token in chunk.token_ids]
            yield chunk

    monkeypatch.setattr(LLM, "stream", lie)
    with pytest.raises(RuntimeError, match="prompt 0: with tree 1, output token 0 is another"):
        run_latency(make_config(folders, trees=("1",), warmup=0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_prompts": 0}, "num_prompts must be"),
        ({"max_tokens": 1}, "max_tokens must be"),
        ({"max_tokens": 300}, "max_tokens: 300 after a prompt of 5 tokens do not fit into the context of 256"),
        ({"repeats": True}, "repeats must be"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"seed": -1}, "seed must be"),
        ({"dtype": "int3"}, "dtype must be one of"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be from 1"),
        ({"pipeline_parallel_size": "2"}, "pipeline_parallel_size must be a whole number"),
        ({"trees": ()}, "trees: none given"),
        ({"trees": ("1", "1")}, "trees: 1, 1 given"),
        ({"trees": ("off",)}, "trees: plain decoding is always measured"),
        ({"trees": ("0",)}, "tree: a level of '0' has no children"),
        ({"drafters": ()}, "drafters: empty"),
        ({"drafters": ("suffix",), "enable_prefix_caching": True}, "enable_prefix_caching: .* name other drafters"),
        ({"kv_cache_memory_bytes": "4x"}, "kv_cache_memory_bytes: '4x' is not a size"),
        ({"prompts": ()}, "prompts: one is empty, or there are none"),
        ({"prompts": ("text",)}, "prompts: .* has no tokenizer"),
        ({"prompts": ((1, VOCAB),)}, "prompts: token id 96 is not in the vocabulary"),
        ({"plot": "x.bmp"}, "plot: x.bmp must end in one of"),
        ({"plot": "/no/such/folder/x.png"}, "plot: /no/such/folder/x.png cannot be written"),
        ({"json": "."}, "json: . cannot be written"),
    ],
)
def test_bad_input_is_refused_before_the_long_work(
    folders: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr(loop, "LLM", refuse_to_load)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if changes.get("model") == "opt":
        changes = changes | {"model": str(save_model(tmp_path / "opt", "opt"))}
    with pytest.raises(ValueError, match=message):
        run_latency(make_config(folders, **changes))
    assert not list(tmp_path.glob("specinfer/*"))
