"""Chat prompts of several kinds: what they are, how answers to them are measured, and what is refused."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reports import shown
from specinfer.bench.acceptance import run_acceptance
from specinfer.bench.acceptance_options import AcceptanceConfig
from specinfer.bench.comparisons import ArmRow, Compared
from specinfer.bench.latency import latency_page, run_latency
from specinfer.bench.options import PLAIN, LatencyConfig, ThroughputConfig
from specinfer.bench.prompts import PromptSet, chat_token_ids, find_prompts, kinds_for
from specinfer.bench.throughput import run_throughput
from specinfer.cli.app import app
from specinfer.core.sampling import SamplingParams
from specinfer.demo.pair import demo_folders
from specinfer.inputs.chat.samples import ALL, FUNCTIONS, KINDS, chat_prompts
from specinfer.llm import LLM
from specinfer.reporting.report import Report
from tiny import save_model, save_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
TWO = ("questions", "lists")
MAX_TOKENS = 12
SEED = 2  # of a model whose answer does not repeat one token from its start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A chat model that ends an answer: its end is a token that it generates in time after the first prompt."""
    made = save_model(tmp_path_factory.mktemp("chat"), seed=SEED, max_position_embeddings=2048)
    save_tokenizer(made, TEMPLATE)
    with LLM(made, drafters=[], device="cpu") as llm:
        ids = chat_token_ids(made, 1, TWO).token_ids[0]
        (output,) = llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    tokens = output.outputs[0].token_ids
    end = [token for place, token in enumerate(tokens) if token not in tokens[:place]][-1]
    assert 1 < tokens.index(end) < MAX_TOKENS - 1
    for name in ("config.json", "generation_config.json"):
        file = made / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": end}))
    return str(made)


@pytest.fixture(scope="module")
def report(folder: str) -> Report[Compared]:
    config = LatencyConfig(
        model=folder, drafters="suffix", trees=("1,1", "2"), device="cpu", kinds=TWO, num_prompts=4,
        max_tokens=MAX_TOKENS, repeats=2,
    )  # fmt: skip
    return run_latency(config)


# ------------------------------------------------------------------------------------------ prompts


def test_every_kind_has_a_dozen_prompts_and_none_is_there_twice() -> None:
    written = chat_prompts()
    assert tuple(written) == (*KINDS, FUNCTIONS)
    assert all(len(prompts) >= 12 for prompts in written.values())
    everything = [prompt for prompts in written.values() for prompt in prompts]
    assert len(set(everything)) == len(everything)


def test_what_is_to_be_rewritten_is_part_of_the_prompt() -> None:
    for prompt in chat_prompts()["rewriting"]:
        task, _, text = prompt.partition("\n\n")
        assert 3 <= len(task.split()) <= 40
        assert 100 <= len(text.split()) <= 250


def test_kinds_come_in_turn_and_go_through_the_chat_template(folder: str) -> None:
    found = chat_token_ids(Path(folder), 5, TWO)
    assert found.kinds == ("questions", "lists", "questions", "lists", "questions")
    with LLM(folder, drafters=[], device="cpu") as llm:
        third = [{"role": "user", "content": chat_prompts()["questions"][1]}]
        assert found.token_ids[2] == llm.chat_prompt(third)


def test_functions_are_asked_twice_in_each_turn(folder: str) -> None:
    found = chat_token_ids(Path(folder), 35, kinds_for(Path(folder), (ALL,)))
    assert {kind: found.kinds.count(kind) for kind in KINDS} == dict.fromkeys(KINDS, 5)
    assert found.kinds.count(FUNCTIONS) == 10
    assert len(set(map(tuple, found.token_ids))) == 35
    assert chat_token_ids(Path(folder), 3, (*KINDS, FUNCTIONS)).kinds == KINDS[:3]


def test_functions_can_be_run_and_have_a_description() -> None:
    for prompt in chat_prompts()[FUNCTIONS]:
        code = prompt.split("```")[1].removeprefix("python\n")
        scope: dict[str, Any] = {}
        exec(code, scope)
        (function,) = (value for name, value in scope.items() if name != "__builtins__")
        assert ">>>" in function.__doc__


def test_models_with_a_chat_template_are_given_chat_prompts_unasked(folder: str, tmp_path: Path) -> None:
    without = save_model(tmp_path)
    assert kinds_for(Path(folder), None) == KINDS
    assert kinds_for(without, None) == kinds_for(demo_folders().target, None) == ()
    assert kinds_for(without, TWO) == TWO
    assert kinds_for(Path(folder), None, ("given",)) == ()


@pytest.mark.parametrize("config", [LatencyConfig, ThroughputConfig, AcceptanceConfig])
@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (("riddles",), "kinds: 'riddles' is not known; use questions, rewriting, code, lists, stories"),
        ((), "kinds: none given; give at least one"),
        (("all", "code"), "kinds: 'all' stands for all of them; leave the others out"),
        (("code", "code"), "kinds: code, code given; .* none twice"),
    ],
)
def test_kinds_that_cannot_be_used_are_refused(config: Any, kinds: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(kinds=kinds)


def test_prompts_and_kinds_are_not_given_together() -> None:
    with pytest.raises(ValueError, match="kinds: prompts are given, and have none"):
        LatencyConfig(prompts=("one",), kinds=TWO)


def test_more_prompts_than_there_are_and_models_without_template_are_refused(
    folder: str, model_folder: Callable[..., Path]
) -> None:
    with pytest.raises(ValueError, match=r"num_prompts: 100 are needed, and there are 13 chat prompts of code; "):
        find_prompts(Path(folder), 4, ("code",), count=100)
    with pytest.raises(ValueError, match=r"kinds: .* cannot be given chat prompts: .*no chat template"):
        find_prompts(model_folder(tokenizer=True), 4, TWO, count=1)
    with pytest.raises(ValueError, match=r"max_tokens: 2000 after a prompt of .* do not fit"):
        find_prompts(Path(folder), 2000, KINDS, count=5)


def test_a_bad_kind_is_named_on_the_command_line() -> None:
    for command in (["latency"], ["throughput"], ["acceptance"]):
        result = CliRunner().invoke(app, ["bench", *command, "--kind", "riddles"])
        assert result.exit_code == 2
        assert "--kind: 'riddles' is not known" in result.output


# ------------------------------------------------------------------------------------------ answers


def test_answers_end_where_plain_decoding_ends_them(folder: str, report: Report[Compared]) -> None:
    lengths = {run.prompts[0]: len(run.token_ids) for run in report.measured.result.plain.runs}
    assert lengths[0] < MAX_TOKENS
    with LLM(folder, drafters=[], device="cpu", enable_prefix_caching=False) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in chat_token_ids(Path(folder), 4, TWO).token_ids]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
    for number, output in enumerate(outputs):
        tokens = tuple(output.outputs[0].token_ids)
        assert {
            run.token_ids for arm in report.measured.result.arms for run in arm.runs if run.prompts[0] == number
        } == {tokens}


def test_texts_to_continue_do_not_end(folder: str) -> None:
    params = [SamplingParams(max_tokens=9, ignore_eos=True)]
    assert PromptSet([[5, 6]]).end_answers(None, params) == params  # type: ignore[arg-type]


def test_no_arm_can_look_up_what_was_generated_before_it(folder: str) -> None:
    """Sampled text hardly repeats itself: with what an earlier run generated at hand, a suffix would be kept whole."""
    config = LatencyConfig(
        model=folder, drafters="suffix", trees=("1,1,1,1",), device="cpu", prompts=((5, 6, 7), (8, 9)), max_tokens=40,
        temperature=1.0, repeats=3,
    )  # fmt: skip
    report = run_latency(config)
    passes = [len(run.steps) for run in report.measured.result.trees[0].runs]
    assert passes[:2] == passes[2:4] == passes[4:]
    together = run_throughput(
        ThroughputConfig(
            model=folder, drafters="suffix", trees=("1,1,1,1",), device="cpu", prompts=config.prompts, max_tokens=40,
            temperature=1.0, repeats=3, batch_sizes=(1,),
        )
    )  # fmt: skip
    steps = [len(run.steps) for run in together.measured.results[0].trees[0].runs]
    assert steps == passes


# ------------------------------------------------------------------------------------- by kind


def test_latency_by_kind_is_that_of_the_kind_alone(report: Report[Compared]) -> None:
    parts = report.measured.by_kind()
    assert tuple(parts) == TWO
    assert [run.prompts[0] for run in parts["lists"].result.plain.runs] == [1, 3, 1, 3]
    assert sum(part.result.trees[0].num_passes for part in parts.values()) == report.measured.result.trees[0].num_passes
    numbers: Any = json.loads(json.dumps(report.as_dict()))
    for kind, part in parts.items():
        assert numbers["by_kind"][kind]["num_prompts"] == 2
        assert set(numbers["by_kind"][kind]["arms"]) == {PLAIN, "1,1", "2"}
        assert numbers["by_kind"][kind]["arms"]["2"]["speedup"] == part.result.speedup_of(part.result.trees[1]).median
    assert "by_kind" not in latency_page(replace(report.measured, kinds=())).as_dict()
    text = shown(report, 80)
    assert re.search(r"By kind of prompt\n.*\n.*\nquestions +off .*\n +1,1 ", text)
    tables = text.partition("medians")[2].partition("Sampled steps")[0]
    assert max(map(len, tables.splitlines())) <= 80


def test_throughput_by_kind_counts_each_request(folder: str) -> None:
    config = ThroughputConfig(
        model=folder, drafters="suffix", trees=("1,1",), device="cpu", kinds=TWO, num_prompts=4, batch_sizes=(1, 4),
        max_tokens=MAX_TOKENS, repeats=1,
    )  # fmt: skip
    report = run_throughput(config)
    for result in report.measured.results:
        (arm,) = result.trees
        for run in arm.runs:
            assert [answer.num_tokens for answer in run.answers] == [len(tokens) - 1 for tokens in run.outputs]
        by_kind = report.measured.kinds_of(ArmRow(result, arm))
        assert tuple(by_kind) == TWO
        answers = [(prompt, one) for run in arm.runs for prompt, one in zip(run.prompts, run.answers, strict=True)]
        lists = [one for prompt, one in answers if prompt % 2]
        expected = sum(one.num_tokens for one in lists) / sum(one.num_passes for one in lists)
        assert by_kind["lists"][0] == pytest.approx(expected)
    numbers: Any = json.loads(json.dumps(report.as_dict()))
    assert set(numbers["batches"][1]["by_kind"]["1,1"]) == set(TWO)
    text = shown(report, 80)
    assert re.search(r"1 +1,1 +\d\.\d\d \d+\.\d\d +\d\.\d\d \d+\.\d\d", text)


def test_acceptance_by_kind_adds_up_to_the_whole(folder: str) -> None:
    config = AcceptanceConfig(
        model=folder, drafters=("suffix", "ngram"), parts=("drafters",), device="cpu", kinds=TWO, num_prompts=4,
        max_tokens=MAX_TOKENS, nodes=(4,), temperatures=(0.0,),
    )  # fmt: skip
    report = run_acceptance(config)
    assert sorted(report.measured.kinds) == sorted(2 * TWO)
    counts = report.measured.parts["drafters"][0].cells["temperature 0"]
    assert not config.sampling_params(0, 0.0).ignore_eos  # answers end
    assert AcceptanceConfig().sampling_params(0, 0.0).ignore_eos
    by_kind = report.measured.by_kind(counts)
    for kind, rate in by_kind.items():
        numbers = [i for i, own in enumerate(report.measured.kinds) if own == kind]
        assert rate == sum(counts.generated[i] for i in numbers) / sum(counts.passes[i] for i in numbers)
    written: Any = json.loads(json.dumps(report.as_dict()))
    assert written["by_kind"]["drafters"][0]["tokens_per_pass"] == by_kind
    assert "By kind of prompt: tokens per pass, temperature 0" in shown(report, 80)
