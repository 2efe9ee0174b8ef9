"""The command line, run as a user runs it, on tiny random models: what is printed where, and with which exit code."""

import dataclasses
import inspect
import io
import json
import os
import re
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import specinfer
from adapters import save_adapter, save_merged
from benchmarks.growth.models import plan_growth
from specinfer.bench.models import find_models
from specinfer.bench.options import CompareConfig
from specinfer.cli.app import app
from specinfer.cli.chat import Chat, LocalPartner
from specinfer.cli.errors import UsageError
from specinfer.cli.measure import ConfigFlags
from specinfer.cli.sampling_options import SamplingOptions
from specinfer.cli.screen import Screen, stats_line
from specinfer.cli.stretches import Painter, WordWrap
from specinfer.cli.terminal import read_input
from specinfer.core.sampling import SamplingParams
from specinfer.demo.chat_model import INSTALL
from specinfer.demo.pair import DemoPair
from specinfer.drafters import NGramDrafter
from specinfer.engine.engine import Engine
from specinfer.engine_args import EngineArgs
from specinfer.inputs.chat.samples import KINDS
from specinfer.llm import LLM
from specinfer.setup.model_names import find_drafter, usual_drafters
from tiny import VOCAB, save_model, save_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
FIND_CHAT_MODEL = "specinfer.demo.chat_model.find_chat_model"
GREEDY = ("--temperature", "0", "--max-tokens", "24")
ANSI = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
TERMINAL = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": None}
Result = Any


@pytest.fixture(scope="module")
def target(model_folder: Callable[..., Path]) -> str:
    return str(model_folder(tokenizer=True))


@pytest.fixture(scope="module")
def drafter(model_folder: Callable[..., Path]) -> str:
    return str(model_folder(noise=0.3, tokenizer=True))


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tokenizer(save_model(tmp_path_factory.mktemp("chat"), max_position_embeddings=1024), TEMPLATE))


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def run(*words: str, stdin: str | None = None, code: int = 0, env: dict[str, str | None] | None = None) -> Result:
    result = CliRunner().invoke(app, list(words), input=stdin, env=env)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def records(*words: str, **settings: Any) -> list[dict[str, Any]]:
    parsed: list[dict[str, Any]] = json.loads(run("generate", *words, "--json", **settings).stdout)
    return parsed


def refusal(*words: str, **settings: Any) -> str:
    """The one line that a command which cannot be run leaves."""
    result = run(*words, code=2, **settings)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("specinfer: error: ")
    return str(line)


@pytest.mark.parametrize(("command", "alternative"), [("chat", "run"), ("complete", "generate")])
def test_a_command_that_takes_no_prompt_names_the_one_that_does(command: str, alternative: str) -> None:
    assert f"use specinfer {alternative} MODEL PROMPT, or --quick PROMPT" in refusal(command, "demo", "Hi there")


@pytest.mark.parametrize(
    ("flag", "about"),
    [
        ("--disable-sliding-window", "the window of a model is always applied"),
        ("--download-dir", "set HF_HOME"),
    ],
)
def test_a_flag_that_only_vllm_has_is_explained(flag: str, about: str) -> None:
    said = refusal("serve", "demo", flag, "somewhere")
    assert f"{flag} is a flag of vLLM; leave it out: " in said
    assert about in said


def test_flags_of_vllm_that_turn_on_what_is_on_have_no_effect() -> None:
    words = ("--enable-auto-tool-choice", "--enable-reasoning", "--trust-remote-code", "--swap-space", "4")
    said = refusal("serve", "demo", *words, "--port", "-1")
    assert "port" in said
    assert "vLLM" not in said


def test_lines_break_between_words_whatever_the_pieces() -> None:
    text = "one two  three\nfour  five sixteen-letters-x y"
    for size in (1, 2, 3, 7, len(text)):
        wrap = WordWrap(10)
        pieces = [(text[i : i + size], "ngram" if i % 2 else None) for i in range(0, len(text), size)]
        shown = [stretch for piece in pieces for stretch in wrap.add([piece])] + list(wrap.flush())
        assert "".join(part for part, _ in shown) == "one two \nthree\nfour  five\nsixteen-letters-x\ny"
        origins = [origin for part, origin in pieces for _ in part]
        assert [origin for part, origin in shown for _ in part] == origins


# ---------------------------------------------------------------------------------------- generate


def test_json_has_an_object_for_each_prompt(target: str, drafter: str) -> None:
    both = records(target, "the story", "and", "--drafter", drafter, "--tree", "2,1", *GREEDY)
    assert [record["index"] for record in both] == [0, 1]
    assert [record["prompt"] for record in both] == ["the story", "and"]
    for record in both:
        assert set(record) == {
            "index", "prompt", "text", "token_ids", "finish_reason", "stop_reason", "error", "metrics",
        }  # fmt: skip
        assert (record["finish_reason"], record["stop_reason"], record["error"]) == ("length", None, None)
        assert len(record["token_ids"]) == 24
        assert record["text"]
        assert 0 < record["metrics"]["time_to_first_token"] <= record["metrics"]["time"]
        assert record["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0


def test_speculation_leaves_the_output_as_it_is(target: str, drafter: str) -> None:
    plain = records(target, "the story", "--drafter", "none", "--max-tokens", "24", "--seed", "5")
    assert plain[0]["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    guessed = records(
        "--model", target, "the story", "--drafter", drafter, "--drafter", "ngram", "--tree", "2,1",
        "--max-tokens", "24", "--seed", "5",
    )  # fmt: skip
    assert guessed[0]["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert guessed[0]["token_ids"] == plain[0]["token_ids"]
    assert records(target, "the story", "--max-tokens", "24", "--seed", "6")[0]["token_ids"] != plain[0]["token_ids"]


def test_text_alone_is_printed_where_no_terminal_is(target: str) -> None:
    texts = [record["text"] for record in records(target, "the", "and", *GREEDY)]
    result = run("generate", target, "the", "and", *GREEDY)
    assert result.stdout == "".join(text + "\n" for text in texts)
    assert result.stderr == ""


def test_an_adapter_is_that_of_all_prompts(target: str, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", Path(target))
    merged = str(save_merged(tmp_path / "merged", Path(target), adapter))
    words, given = ["--dtype", "float32", *GREEDY], ["--lora", f"mine={adapter}"]
    prompts = ["the story", "and"]
    wanted = [record["token_ids"] for record in records(merged, *prompts, *words)]
    assert [record["token_ids"] for record in records(target, *prompts, *words, *given)] == wanted
    assert [record["token_ids"] for record in records(target, *prompts, *words)] != wanted
    text = run("generate", merged, "the story", *words).stdout
    assert run("generate", target, "the story", *words, *given).stdout == text
    assert ANSI.sub("", run("generate", target, "the story", *words, *given, env=TERMINAL).stdout) == text
    assert "lora: 'mine' is not an adapter; write NAME=FOLDER" in refusal("generate", target, "the", "--lora", "mine")
    for more in ([], ["--json"], ["and"]):
        assert "adapter_config.json" in refusal("generate", target, "the", *more, "--lora", f"mine={tmp_path}")


def test_several_outputs_and_logprobs_are_in_the_json(target: str) -> None:
    (record,) = records(target, "the", "--n", "2", "--logprobs", "1", "--max-tokens", "3")
    assert [output["index"] for output in record["outputs"]] == [0, 1]
    assert record["outputs"][0]["token_ids"] == record["token_ids"] != record["outputs"][1]["token_ids"]
    assert len(record["logprobs"]) == 3
    assert record["cumulative_logprob"] < 0
    assert "logprobs" in refusal("generate", target, "the", "--logprobs", "1")


def test_prompts_come_from_standard_input_line_by_line(target: str) -> None:
    piped = records(target, *GREEDY, stdin="the story\n\nand\r\n")
    assert [record["prompt"] for record in piped] == ["the story", "and"]
    assert piped[0]["token_ids"] == records(target, "the story", *GREEDY)[0]["token_ids"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("prompts.txt", "the\nand\n"),
        ("prompts.jsonl", '"the"\n\n{"prompt": "and"}\n'),
        ("prompts.json", '["the", {"prompt": "and"}]'),
    ],
)
def test_prompts_come_from_a_file(target: str, tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    read = records(target, "--file", str(file), *GREEDY)
    assert [record["prompt"] for record in read] == ["the", "and"]


def test_lines_of_a_file_have_their_own_sampling_parameters(chat_model: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "the story"}]
    lines: list[Any] = [
        "the",
        {"prompt": "the", "max_tokens": 3},
        {"prompt": "the", "temperature": 0.9, "seed": 4, "n": 2},
        {"prompt": "the", "temperature": 0.9, "seed": 4},
        {"messages": messages, "max_tokens": 5},
        {"prompt_token_ids": [5, 6], "stop_token_ids": [7], "min_tokens": 2},
        {"messages": [{"role": "nobody"}]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    result = run("generate", chat_model, "--file", str(file), "--json", *GREEDY, code=1)
    plain, short, drawn, again, chat, ids, refused = json.loads(result.stdout)
    assert short["token_ids"] == plain["token_ids"][:3]
    assert drawn["token_ids"] == again["token_ids"] != plain["token_ids"]
    assert len(drawn["outputs"]) == 2
    assert len(chat["token_ids"]) == 5
    assert run("chat", chat_model, "-q", "the story", "--temperature", "0", "--max-tokens", "5").stdout.startswith(
        chat["text"]
    )
    assert len(ids["token_ids"]) >= 2
    assert "message" in refused["error"]
    for line, part in (
        ({"prompt": "the", "top_pp": 1}, "line 1: 'top_pp' is not known; did you mean top_p?"),
        ({"prompt": "the", "top_p": 3}, "line 1: top_p must be"),
        ({"prompt": "the", "messages": messages}, "one of them"),
        ({"prompt": "the", "zzz": 1}, "'zzz' is not known; use fields of SamplingParams"),
    ):
        file.write_text(json.dumps(line))
        assert part in refusal("generate", chat_model, "--file", str(file))


def test_token_ids_serve_a_model_without_tokenizer(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
    words = (str(model_folder()), "--file", str(file), "--max-tokens", "4")
    (record,) = records(*words)
    assert record["prompt"] is None
    assert run("generate", *words).stdout.split() == [str(token) for token in record["token_ids"]]


def test_a_refused_prompt_does_not_stop_the_others(target: str, tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text(f'"the"\n{{"prompt_token_ids": [5, {VOCAB}]}}\n"and"\n')
    result = run("generate", target, "--file", str(file), *GREEDY, "--json", code=1)
    good, bad, last = json.loads(result.stdout)
    assert good["text"]
    assert last["text"]
    assert (bad["text"], bad["token_ids"], bad["finish_reason"]) == ("", [], "error")
    assert f"token id {VOCAB}" in bad["error"]
    assert result.stderr == f"specinfer: prompt 1: {bad['error']}\n"
    plain = run("generate", target, "--file", str(file), *GREEDY, "--stats", code=1)
    assert plain.stdout == f"{good['text']}\n{last['text']}\n"
    heads = [line.split(":")[0] for line in plain.stderr.splitlines()]
    # "auto" explains plain decoding, where the costs measured at the start made it choose that
    assert [head for head in heads if head != "auto" and "passes" not in head] == [
        "prompt 0", "prompt 2", "drafters chosen", "computed by target", "specinfer",
    ]  # fmt: skip
    file.write_text(f'{{"prompt_token_ids": [{VOCAB}]}}')
    assert f"token id {VOCAB}" in refusal("generate", target, "--file", str(file))


def test_json_has_an_object_for_each_prompt_even_if_all_are_refused(target: str, tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text(f'{{"prompt_token_ids": [{VOCAB}]}}\n""\n')
    result = run("generate", target, "--file", str(file), "--json", code=1)
    first, second = json.loads(result.stdout)
    assert f"token id {VOCAB}" in first["error"]
    assert "empty" in second["error"]
    assert (first["index"], second["index"], second["prompt"]) == (0, 1, "")
    assert first["finish_reason"] == second["finish_reason"] == "error"
    assert result.stderr == f"specinfer: prompt 0: {first['error']}\nspecinfer: prompt 1: {second['error']}\n"


def test_a_length_that_nobody_asked_for_ends_with_the_context(target: str, tmp_path: Path) -> None:
    words = ("--temperature", "0", "--ignore-eos", "--max-model-len", "140")
    file = tmp_path / "prompts.jsonl"
    ids = [5] * 100
    file.write_text(json.dumps({"prompt_token_ids": ids[:4]}) + "\n" + json.dumps({"prompt_token_ids": ids}))
    short, long = records(target, "--file", str(file), *words)
    assert (len(short["token_ids"]), len(long["token_ids"])) == (128, 40)
    text = "q" * 100
    (in_json,) = records(target, text, *words)
    assert 0 < len(in_json["token_ids"]) < 128
    assert run("complete", target, "-q", text, *words).stdout == in_json["text"] + "\n"
    streamed = run("generate", target, text, *words, env=TERMINAL).stdout
    streamed_without_styles = ANSI.sub("", streamed)
    assert streamed_without_styles == run("generate", target, text, *words).stdout == in_json["text"] + "\n"
    assert run("generate", target, text, *words, "--max-tokens", "128").stdout == streamed_without_styles


@pytest.mark.parametrize(("size", "limits"), [("min", (5, 4)), ("max", (2, 1))])
def test_one_ngram_size_that_contradicts_the_default_of_the_other(size: str, limits: tuple[int, int]) -> None:
    given = limits[0] if size == "min" else limits[1]
    assert refusal("generate", "any", "the", f"--prompt-lookup-{size}", str(given)) == (
        "specinfer: error: --prompt-lookup-min, --prompt-lookup-max: the shortest n-gram "
        f"({limits[0]}) is longer than the longest ({limits[1]}); set both"
    )


def test_flags_that_constrain_the_output(target: str, tmp_path: Path) -> None:
    words = (target, "the", "--max-tokens", "12", "--seed", "3")
    (tmp_path / "the.lark").write_text('start: "the cat" | "the other"')
    for flags, texts in (
        (("--choice", "and", "--choice", "all of it"), ("and", "all of it")),
        (("--regex", "th(at|en)"), ("that", "then")),
        (("--grammar", str(tmp_path / "the.lark")), ("the cat", "the other")),
        (("--grammar", 'start: "the cat"'), ("the cat",)),
        (("--regex", "(a|b)", "--bad-words", "a"), ("b",)),
        (("--regex", "(the/a.txt|the)"), ("the",)),
        (("--grammar", "start:/the/"), ("the",)),
    ):
        (record,) = records(*words, *flags)
        assert (record["text"] in texts, record["finish_reason"]) == (True, "stop")
    (record,) = records(*words, "--allowed-token-ids", "5,7")
    assert set(record["token_ids"]) <= {5, 7}
    (tmp_path / "guess.txt").write_text("the other story")
    for guess in (str(tmp_path / "guess.txt"), "it is in a.txt", "and/or"):
        assert records(*words, "--prediction", guess)[0]["text"] == records(*words)[0]["text"]


def test_a_missing_model_or_prompt_is_named(target: str, tmp_path: Path) -> None:
    assert "/nowhere/at/all" in refusal("generate", "/nowhere/at/all", "the")
    assert "prompt: standard input holds none" in refusal("generate")
    assert "model" in refusal("complete", target, "--model", target)
    assert "standard input" in refusal("generate", target, stdin="\n")
    assert "chit" in refusal("chit")
    for name, text in (("a.jsonl", '"the"\n{"text": 1}'), ("a.json", "[[1]]"), ("b.jsonl", "{"), ("c.txt", None)):
        if text is not None:
            (tmp_path / name).write_text(text)
        assert name in refusal("generate", target, "--file", str(tmp_path / name))
    (tmp_path / "d.txt").write_bytes(b"\xff\xfe")
    assert "UTF-8" in refusal("generate", target, "--file", str(tmp_path / "d.txt"))


def test_speculative_config_is_equivalent_to_the_flags(target: str, drafter: str) -> None:
    words = (target, "the", *GREEDY)
    chain = {"method": "draft_model", "model": drafter, "num_speculative_tokens": 3}
    as_config = records(*words, "--speculative-config", json.dumps(chain))
    as_flags = records(*words, "--drafter", drafter, "--tree", "1,1,1")
    assert as_config[0]["metrics"]["speculative_decoding"] == as_flags[0]["metrics"]["speculative_decoding"]
    both = {"model": [drafter], "tree": "2", "verification": "coupled"}
    assert (
        records(*words, "--speculative-config", json.dumps(both))[0]["metrics"]["speculative_decoding"]
        == (records(*words, "--drafter", drafter, "--tree", "2")[0]["metrics"]["speculative_decoding"])
    )
    hedged = ("--speculative-config", json.dumps({"model": drafter, "select": "hedge"}))
    assert "fewer than two" in refusal("generate", *words, *hedged)
    assert "--select" in refusal("generate", *words, *hedged, "--select", "hedge")
    (looked_up,) = records(*words, "--speculative_config", '{"method": "ngram", "num_speculative_tokens": 2}')
    assert looked_up["metrics"]["speculative_decoding"]["num_spec_tokens"] <= 2


@pytest.mark.parametrize(
    ("given", "meaning"), [(["auto"], "auto"), (["none"], ()), (["ngram", "suffix"], ("ngram", "suffix"))]
)
def test_auto_and_none_are_no_names_of_models_in_a_measurement(
    given: list[str], meaning: str | tuple[str, ...]
) -> None:
    assert ConfigFlags({"drafter": given}).settings(CompareConfig)["drafters"] == meaning


def test_the_sizes_of_n_grams_are_those_that_the_message_names() -> None:
    sizes = inspect.signature(NGramDrafter).parameters
    assert (sizes["min_size"].default, sizes["max_size"].default) == (2, 4)


def test_flags_take_underscores_and_sizes(target: str) -> None:
    words = (target, "the", "--max_tokens", "3", "--kv_cache_memory_bytes", "1M", "--max-model-len", "64")
    assert len(records(*words)[0]["token_ids"]) == 3
    assert len(records(*words, "--ignore-eos", "--logit-bias", '{"5": 100}')[0]["token_ids"]) == 3


# ----------------------------------------------------------------------------------- on a terminal


def test_one_prompt_is_streamed_and_coloured_by_origin(target: str, drafter: str) -> None:
    words = ("generate", target, "the story", "--drafter", drafter, "--tree", "2,1", *GREEDY)
    text = run(*words).stdout
    assert "\x1b" not in run(*words, "--stats").stdout
    assert run(*words, "--stats").stdout == text
    streamed = run(*words, env=TERMINAL).stdout
    assert ANSI.sub("", streamed) == text
    assert "\x1b[3" not in streamed
    painted = run(*words, "--stats", env=TERMINAL).stdout
    assert ANSI.sub("", painted).startswith(text)
    assert "generated by the target" in painted
    assert f"drafted by {Path(drafter).name}, accepted" in painted
    assert "\x1b[32m" in painted
    assert "\x1b[33m" in painted
    unpainted = run(*words, "--stats", env=TERMINAL | {"NO_COLOR": "1"}).stdout
    assert ANSI.sub("", unpainted) == text
    assert "\x1b[3" not in unpainted


def test_finished_texts_are_painted_like_streamed_ones(target: str, drafter: str) -> None:
    words = ("--drafter", drafter, "--tree", "2,1", "--stats", *GREEDY)
    streamed = run("generate", target, "the story", *words, env=TERMINAL).stdout
    finished = run("generate", target, "the story", "and", *words, env=TERMINAL).stdout
    assert "── prompt 1: and" in ANSI.sub("", finished)
    text = streamed.partition("\n\n")[0]
    # A stream is written step by step: its colours break oftener.
    assert _spans(text)[:20] == _spans(finished.split("\n", 1)[1])[:20]


def _spans(painted: str) -> list[tuple[str, str]]:
    """Each character and its colour."""
    spans, color = [], ""
    for part in re.split(r"(\x1b\[[0-9;?]*[a-zA-Z])", painted):
        if part.startswith("\x1b"):
            color = part
        else:
            spans += [(character, color) for character in part]
    return spans


def test_statistics_are_a_line_for_each_prompt_on_standard_error(target: str, drafter: str) -> None:
    words = ("the", "and", "--drafter", drafter, "--tree", "2,1", *GREEDY)
    *lines, paths = run("generate", target, *words, "--stats").stderr.splitlines()
    assert re.fullmatch(rf"computed by target: [a-zA-Z ]+ · {re.escape(drafter)}: [a-zA-Z ]+", paths)
    for i, (line, record) in enumerate(zip(lines, records(target, *words), strict=True)):
        stats = record["metrics"]["speculative_decoding"]
        passes, accepted, proposed = (
            stats[name] for name in ("num_target_passes", "num_accepted_draft_tokens", "num_draft_tokens")
        )
        assert line.startswith(
            f"prompt {i}: 24 tokens in {passes} target passes: {stats['tokens_per_pass']:.2f} a pass"
        )
        assert f" · {accepted} of {proposed} draft tokens accepted" in line
        assert line.endswith("tokens/s")
    assert "no draft tokens" in run("generate", target, "the", "--tree", "off", "--stats", *GREEDY).stderr


def test_statistics_say_what_each_rule_yields_under_auto(target: str, drafter: str) -> None:
    words = ("--drafter", drafter, "--tree", "2,1", "--max-tokens", "12", "--verification", "auto", "--stats")
    *_, rules, _ = run("generate", target, "the", "and", *words).stderr.splitlines()
    yields = r"; (coupled|traversal) \d\.\d\d tokens a pass, \d+ a second"
    assert re.fullmatch(rf"verification auto: both rules in turn{yields}{yields}", rules)


def test_statistics_name_the_drafter_of_each_token_where_there_are_several() -> None:
    stats = {
        "num_accepted_draft_tokens": 3, "num_draft_tokens": 4, "num_target_passes": 2, "tokens_per_pass": 2.5,
    }  # fmt: skip
    line = stats_line(5, 1.0, stats, [None, "mtp", "self:int8", "mtp", None])
    assert line.endswith("· 3 of 4 draft tokens accepted (75%), by mtp 2, self:int8 1 · 1.00 s · 5.0 tokens/s")
    assert "accepted (75%) ·" in stats_line(5, 1.0, stats, [None, "mtp", "mtp", "mtp", None])


def test_origins_keep_pace_with_text_that_is_held_back(target: str, drafter: str) -> None:
    """Unfinished characters and stop strings come later than their tokens."""
    with LLM(target, drafters=[drafter], tree="2,1") as llm:
        text = llm.generate("the story", SamplingParams(temperature=0.0, max_tokens=60))[0].outputs[0].text
        stop = text[-12:-8]
        params = SamplingParams(temperature=0.0, max_tokens=60, stop=[stop, text[20:24] + "#"])
        painter, shown, cut = Painter(llm.tokenizer), "", []
        origins: list[str | None] = []
        for chunk in llm.stream("the story", params):
            painter.add(chunk.token_ids, chunk.origins)
            cut += painter.cut(chunk.text)
            shown += chunk.text
            origins += chunk.origins
    assert shown == text.partition(stop)[0]
    assert "".join(piece for piece, _ in cut) == shown
    assert {origin for _, origin in cut} == {None, Path(drafter).name} == set(origins)


def test_control_characters_do_not_reach_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Screen().write([("a\x1b[2Jb", None)])
    assert capsys.readouterr().out == "a\x1b[2Jb"
    for name, value in TERMINAL.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    Screen().write([("a\x1b[2J\tb\n", None)])
    assert capsys.readouterr().out == "a\N{REPLACEMENT CHARACTER}[2J\tb\n"


# -------------------------------------------------------------------------------- complete and chat


def test_complete_answers_each_line(target: str) -> None:
    first, second = [record["text"] for record in records(target, "the", "and", *GREEDY)]
    assert run("complete", target, *GREEDY, stdin="the\n\nand\n").stdout == f"{first}\n{second}\n"
    assert run("complete", target, "-q", "the", *GREEDY).stdout == first + "\n"
    long = "q" * 260
    mixed = run("complete", target, *GREEDY, stdin=f"{long}\nthe\n", code=1)
    assert mixed.stdout.endswith(first + "\n")
    assert "context length" in mixed.stderr
    assert "context length" in refusal("complete", target, "-q", long, *GREEDY)


def test_chat_keeps_its_history(chat_model: str) -> None:
    words = ("chat", chat_model, "--system-prompt", "be brief", *GREEDY)
    fresh = run(*words, stdin="the story\n").stdout
    assert run(*words, "--quick", "the story").stdout == fresh
    again = run(*words, stdin="the story\nthe story\n").stdout
    assert again.startswith(fresh)
    assert again != 2 * fresh
    assert run(*words, stdin="the story\n/clear\nthe story\n/exit\nthe story\n").stdout == 2 * fresh
    noted = run(*words, stdin="/stats\nthe story\n/stats\n/what\n").stderr.splitlines()
    assert "no answer yet" in noted[0]
    assert "24 tokens in" in noted[1]
    assert Chat.HELP in noted[-1]
    noted = run(*words, "--verification", "auto", stdin="the story\n/stats\n").stderr.splitlines()
    assert noted[-1].startswith("verification auto: ")


def test_chat_refuses_a_model_without_a_template(target: str) -> None:
    assert "chat template" in refusal("chat", target, stdin="hello\n")


def _interrupt(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """The engine is interrupted after so many steps, once."""
    step, left = Engine.step, [steps]

    def interrupted(self: Engine) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)


@pytest.mark.parametrize("terminal", [False, True])
def test_an_interrupt_ends_generate_quietly(target: str, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    _interrupt(monkeypatch, 3)
    result = run("generate", target, "the", *GREEDY, code=130, env=TERMINAL if terminal else None)
    assert "error" not in result.stderr


def test_an_interrupt_ends_one_answer_of_a_chat(
    chat_model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    with LLM(chat_model, drafters=[], seed=0) as llm:
        screen = Screen()
        whole = screen.stream(llm, "the", params, stoppable=True)
        assert whole.output is not None
        talk = Chat(LocalPartner(llm, "demo", screen, SamplingOptions(), params), screen, None)
        with monkeypatch.context() as patch:
            _interrupt(patch, 9)
            stopped = screen.stream(llm, "the", params, stoppable=True)
            assert stopped.output is None
            assert 0 < len(stopped.text) < len(whole.text)
            assert whole.text.startswith(stopped.text)
        with monkeypatch.context() as patch:
            _interrupt(patch, 9)
            talk.send("hello", stoppable=True)
        talk.send("and", stoppable=True)  # the answer broken off is part of the history
        again = screen.stream(llm, "the", params, stoppable=True)
    assert again.text == whole.text
    assert capsys.readouterr().out.endswith(whole.text + "\n")


# ------------------------------------------------------------------------------------ how things end


def test_an_unexpected_error_is_one_line_or_with_debug_a_traceback(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: type[Exception]

    def broken(*_: Any, **__: Any) -> None:
        raise kind("the\nsky fell")

    monkeypatch.setattr(LLM, "generate", broken)
    for kind in (RuntimeError, ValueError):
        result = run("generate", target, "the", code=1)
        assert result.stderr == f"specinfer: error: {kind.__name__}: the sky fell (--debug shows where)\n"
    result = CliRunner().invoke(app, ["generate", target, "the", "--debug"])
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "in broken" in result.stderr


def _process(*words: str, **settings: Any) -> "subprocess.CompletedProcess[str]":
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-m", "specinfer", *words]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, env=env, **settings)


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_the_program_quietly(target: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = _process("generate", target, "the", *GREEDY, stdout=writing)
    os.close(writing)
    assert "error" not in process.stderr
    assert process.returncode == 1


@pytest.mark.parametrize("words", [("version",), ("bench", "latency", "--help")], ids=["short", "longer than a buffer"])
def test_a_full_disk_is_one_line(words: Sequence[str]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with full.open("w") as out:
        process = _process(*words, stdout=out)
    assert process.returncode == 1
    assert process.stderr == "specinfer: error: standard output cannot be written: No space left on device\n"


def test_closed_standard_output_is_met_before_the_work() -> None:
    process = _process("generate", "/nowhere/at/all", "the", preexec_fn=lambda: os.close(1))
    assert process.returncode == 2
    assert process.stderr == "specinfer: error: standard output is closed; open it, or send it to a file\n"


def test_characters_that_the_encoding_lacks_are_replaced(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    generate = LLM.generate

    def with_accent(*args: Any, **options: Any) -> Any:
        (output,) = generate(*args, **options)
        output.outputs[0].token_ids.clear()
        output.outputs[0].token_origins.clear()
        return [dataclasses.replace(output, outputs=[dataclasses.replace(output.outputs[0], text="Z\u00fcrich")])]

    monkeypatch.setattr(LLM, "generate", with_accent)
    result = CliRunner(charset="ascii").invoke(app, ["generate", target, "the", *GREEDY])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Z?rich\n", "")


def test_input_that_is_no_text_is_named(target: str) -> None:
    result = CliRunner().invoke(app, ["complete", target, *GREEDY], input=b"the\n\xff\xfe\n")
    assert result.exit_code == 2
    assert result.stderr == "specinfer: error: standard input is not UTF-8 text\n"


def test_input_that_is_no_text_is_named_in_locales_that_read_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), "utf-8", errors="surrogateescape"))
    with pytest.raises(UsageError, match="standard input is not UTF-8 text"):
        read_input()


def test_an_interrupt_while_the_program_is_imported_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "specinfer.cli.app", Interrupted("specinfer.cli.app"))
    with pytest.raises(SystemExit) as end:
        specinfer.cli.main()
    assert end.value.code == 130


# --------------------------------------------------------------------------------------- the others


def test_version(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = f"specinfer {specinfer.__version__}\n"
    assert run("version").stdout == expected
    assert run("--version").stdout == expected
    command = "import sys, specinfer.cli.app; sys.exit('torch' in sys.modules)"  # it takes seconds
    subprocess.run([sys.executable, "-c", command], check=True, timeout=60)


def test_help_shows_the_options_by_section() -> None:
    shown = run("generate", "--help", env={"COLUMNS": "120"}).stdout
    sections = [shown.index(f"\n{name}:\n") for name in ("Model", "Speculation", "Sampling", "Output")]
    assert sections == sorted(sections)
    for flag in ("--max-model-len", "--drafter", "--speculative-config", "--logit-bias", "--json", "--stats"):
        assert flag in shown
    for command in ("complete", "chat", "demo", "collect-env", "version", "bench"):
        assert command in run("--help").stdout
        run(command, "--help")
    assert "latency" in run("bench", code=2).output


def test_collect_env_names_versions_but_nobody() -> None:
    shown = run("collect-env").stdout
    names = ("specinfer", "python", "torch", "transformers", "tokenizers", "safetensors", "cpu", "memory")
    for name in (*names, "native layers"):
        assert re.search(rf"^{name}: +\S", shown, re.MULTILINE)
    assert "not installed" not in shown
    assert str(Path.home()) not in shown
    assert str(Path(specinfer.__file__).parents[2]) not in shown
    assert socket.gethostname() not in shown


def test_collect_env_says_why_no_gpu_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\n")
    monkeypatch.setattr("specinfer.model.device._DRIVER", tmp_path / "version")
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    shown = run("collect-env").stdout
    assert re.search(r"^gpu driver: +535\.104\.05$", shown, re.MULTILINE)
    assert re.search(r"^gpus: +none, PyTorch \S+ is a build without CUDA; to use a GPU", shown, re.MULTILINE)


def test_collect_env_names_what_a_gpu_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = types.SimpleNamespace(name="NVIDIA H100", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    monkeypatch.setattr("specinfer.setup.engine.gpu_abilities", lambda _: {"Triton": "no compiler"})
    shown = run("collect-env").stdout
    assert re.search(r"^gpu 0: +NVIDIA H100, 80 GiB, compute capability 9\.0$", shown, re.MULTILINE)
    assert re.search(r"^gpu 0 Triton: +no, no compiler$", shown, re.MULTILINE)
    assert not re.search("^gpus:", shown, re.MULTILINE)


def test_collect_env_says_why_a_gpu_that_the_driver_counts_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch may count devices by NVML, which an old driver has, too."""

    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nmore of it")

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.init", fail)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    shown = run("collect-env").stdout
    assert re.search(r"^gpus: +none, The NVIDIA driver on your system is too old \(found version", shown, re.MULTILINE)


@pytest.fixture
def _pair_of_tiny_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the embedded pair, whose size would make a slow test."""
    folders = [save_model(tmp_path / name, noise=noise, max_position_embeddings=1024, num_hidden_layers=1)
               for name, noise in (("target", 0.0), ("drafter", 0.1))]  # fmt: skip
    pair = DemoPair(*(save_tokenizer(folder) for folder in folders))
    monkeypatch.setattr("specinfer.setup.model_names.demo_folders", lambda: pair)


@pytest.mark.usefixtures("_pair_of_tiny_models")
def test_demo_streams_measures_and_suggests_what_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FIND_CHAT_MODEL, lambda: None)
    result = run("demo", env=TERMINAL)
    shown = ANSI.sub("", result.stdout)
    assert "generated by the target" in shown
    measured = re.findall(r"^(\S+) +\d\.\d\d tokens per target pass, \d+\.\d\d times the speed", shown, re.MULTILINE)
    assert len(measured) == 3
    assert measured[0] == "auto"
    commands = re.findall(r"^  specinfer (.+)$", shown, re.MULTILINE)
    assert len(commands) > 3
    assert "160 tokens in" in ANSI.sub("", result.stderr)
    assert INSTALL in " ".join(ANSI.sub("", result.stderr).split())


@pytest.fixture
def _tiny_chat_model(chat_model: str, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the chat model of the demo, with a drafter."""
    drafter = model_folder(noise=0.3, tokenizer=True)
    monkeypatch.setattr(FIND_CHAT_MODEL, lambda: Path(chat_model))
    monkeypatch.setattr("specinfer.setup.model_names.chat_drafter_folder", lambda: drafter)


@pytest.mark.usefixtures("_tiny_chat_model")
def test_demo_asks_the_chat_model_and_shows_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specinfer.cli.demo._QUESTIONS", ("the cat and the cat and the cat?",))
    monkeypatch.setattr("specinfer.inputs.chat.samples.chat_prompts", lambda: dict.fromkeys(KINDS, ("the cat",)))
    args = EngineArgs("demo-chat", tree="best-first:8:4")
    monkeypatch.setattr("specinfer.cli.demo.EngineArgs", lambda _: args)
    shown = ANSI.sub("", run("demo", env=TERMINAL | {"COLUMNS": "80"}).stdout)
    assert shown.startswith("> the cat and the cat and the cat?")
    assert "generated by the target" in shown
    assert re.search(r"One pass of the target over a token tree: \d draft tokens, \d accepted", shown)
    assert re.search(r"[├└]── .*  (demo-chat|suffix)\S*  q \d\.\d\d  p \d\.\d\d", shown)
    assert re.search(r"^auto +\d\.\d\d tokens per target pass, \d+\.\d\d times", shown, re.MULTILINE)
    for kind in KINDS:
        assert re.search(rf"^  {kind} +\d\.\d\d tokens per pass, \d+\.\d\d times the speed", shown, re.MULTILINE)
    after = shown.partition("generated by the target")[2]
    assert max(map(len, after.splitlines())) <= 80
    assert "specinfer chat --stats" in shown


@pytest.mark.usefixtures("_tiny_chat_model")
def test_without_a_model_the_chat_model_is_used_at_its_own_temperature(chat_model: str) -> None:
    """A first argument with a space in it is a prompt; one without names a model."""
    words = ("--max-tokens", "6", "--seed", "3")
    named = records("demo-chat", "the cat", "and the", *words)
    assert records("the cat", "and the", *words) == approx_records(named)
    assert records("--model", "demo-chat", "the cat", "and the", *words) == approx_records(named)
    assert records(*words, stdin="the cat\nand the\n") == approx_records(named)
    cool = records(chat_model, "the cat", "and the", *words, "--temperature", "0.7")
    assert [record["token_ids"] for record in cool] == [record["token_ids"] for record in named]
    warm = records(chat_model, "the cat", "and the", *words)
    assert [record["token_ids"] for record in warm] != [record["token_ids"] for record in named]
    assert "is not in the cache" in refusal("generate", "unknown-word", "the cat")
    told = run("chat", "-q", "the cat", *words)
    assert (told.stderr, told.stdout) == ("", run("chat", "demo-chat", "-q", "the cat", *words).stdout)


def approx_records(records: list[dict[str, Any]]) -> Any:
    """The same but for times and counts, which are the machine's."""

    class Same:
        def __eq__(self, other: object) -> bool:
            assert isinstance(other, list)
            names = ("prompt", "token_ids", "text", "finish_reason")
            return [[record[name] for name in names] for record in other] == [
                [record[name] for name in names] for record in records
            ]

    return Same()


@pytest.mark.usefixtures("_pair_of_tiny_models")
def test_without_the_chat_models_package_the_code_pair_is_used_with_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FIND_CHAT_MODEL, lambda: None)
    words = ("the cat", "--max-tokens", "4", "--temperature", "0")
    result = run("generate", *words)
    assert result.stdout == run("generate", "demo", *words).stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("specinfer: demo-chat is not installed, so demo")
    assert line.endswith(INSTALL)
    for command in (
        ["generate", "demo-chat", "the"],
        ["bench", "latency", "--model", "demo-chat"],
        ["plan", "demo-chat"],
    ):
        assert f"model: demo-chat is not installed; {INSTALL}, or name another model" in refusal(*command)
    assert "--drafter: demo-chat is not installed" in refusal("generate", "demo", "the", "--drafter", "demo-chat")
    assert "model: name one" in refusal("bench", "latency", "demo", "--model", "demo-chat")


def test_drafters_of_the_chat_model_are_its_own_and_a_lookup(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(noise=0.3, tokenizer=True)
    monkeypatch.setattr("specinfer.setup.model_names.chat_drafter_folder", lambda: folder)
    names = [usual_drafters(name, folder, torch.device("cpu")).names for name in ("demo-chat", "demo", "some/model")]
    assert names == [("demo-chat", "suffix"), ("demo",), ("ngram",)]
    assert find_drafter("demo-chat") == folder


@pytest.mark.usefixtures("_tiny_chat_model")
def test_a_drafter_of_the_chat_model_stays_as_it_is_next_to_a_grown_target(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(noise=0.3, tokenizer=True)
    assert set(plan_growth(find_models("demo-chat", (str(folder),)), "20m", "float32").growths) >= {str(folder)}
    monkeypatch.setattr("specinfer.setup.model_names.chat_drafter_folder", lambda: folder)
    (folder / "token_map.json").write_text("[1, 2, 3]")
    models = find_models("demo-chat", "auto")
    assert models.drafters == (str(folder), "suffix")
    assert set(plan_growth(models, "20m", "float32").growths) == {str(models.target)}


@pytest.mark.usefixtures("_pair_of_tiny_models")
@pytest.mark.parametrize("name", ["offload", "schedule", "kernels", "perplexity", "host"])
def test_a_bench_that_moved_names_its_new_command(name: str) -> None:
    assert f"run python -m benchmarks {name} in a checkout" in refusal("bench", name, "demo", "--rows", "3")
    assert name not in run("bench", code=2).output.replace("other engines", "")
    assert "python -m benchmarks latency --peer llama.cpp" in refusal("bench", "latency", "--peer", "llama.cpp")
    for command in ("latency", "throughput", "serve"):
        assert f"--grow: run python -m benchmarks {command} --grow 1b" in refusal(
            "bench", command, "demo", "--grow", "1b"
        )
    assert "run bench latency with --tensor-parallel-size" in refusal("bench", "parallel")
    for flag in (("--simulate",), ("--machines", "3")):
        assert "run python -m benchmarks simulate demo" in refusal("plan", "demo", *flag)


@pytest.mark.parametrize("words", ["bench latency", "bench throughput", "bench acceptance", "bench serve", "plan"])
def test_measurements_know_the_type_of_keys_and_values(words: str) -> None:
    wrong = refusal(*words.split(), "demo", "--kv-cache-dtype", "int8")
    assert wrong.startswith("specinfer: error: --kv-cache-dtype must be one of auto, bfloat16")


@pytest.mark.usefixtures("small_demo")
def test_bench_latency_measures_trees_and_writes_numbers(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    shown = run(
        "bench", "latency", "--tree", "2,1", "--tree", "1", "--num-prompts", "1", "--max-tokens", "8",
        "--repeats", "1", "--json", str(file), env=TERMINAL | {"COLUMNS": "80"},
    ).stdout  # fmt: skip
    numbers = json.loads(file.read_text())
    assert set(numbers["arms"]) == {"off", "2,1", "1"}
    tables = ANSI.sub("", shown).partition("medians")[2].partition("tree 2,1:")[0]
    assert max(map(len, tables.splitlines())) <= 80
    assert "…" not in tables
    for heading in ("tokens/s", "ms/token", "tokens/pass", "speedup", "quartiles", "min-max", "draft", "total"):
        assert heading in tables
    spread = numbers["arms"]["2,1"]["speedup_spread"]
    assert f"{spread['min']:.2f}-{spread['max']:.2f}" in tables
    assert "tree" in refusal("bench", "latency", "--tree", "off")
    assert "drafter" in refusal("bench", "latency", "--drafter", "none")
