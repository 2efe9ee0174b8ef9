"""Help texts at 80 columns, and errors that name a setting as it was typed."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.program import app as laboratory
from specinfer.cli.app import app


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        if not command.hidden:
            yield from commands(command, (*path, name))


ALL = [(program, path, command) for program in (app, laboratory)
       for path, command in commands(typer.main.get_command(program))]  # fmt: skip


@pytest.mark.parametrize(
    ("program", "path", "command"), ALL, ids=["-".join((case[0].info.name, *case[1])) for case in ALL]
)
def test_no_flag_is_cut_or_broken_at_80_columns(program: typer.Typer, path: tuple[str, ...], command: Any) -> None:
    shown = CliRunner().invoke(program, [*path, "--help"], env={"COLUMNS": "80"}).output
    assert max(map(len, shown.splitlines())) < 80
    assert "…" not in shown
    words = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*(?![\w-])", shown))
    flags = {name for each in command.params if not getattr(each, "hidden", False) for name in each.opts}
    assert {name for name in flags if name.startswith("-")} <= words
    variables = {str(each.envvar) for each in command.params if getattr(each, "envvar", None) and not each.hidden}
    assert all(re.search(rf"\b{name}\b", shown) for name in variables)
    assert not re.search(r"[\w-]-$", shown, re.MULTILINE)  # a word broken at a hyphen


def refusal(*words: str, env: dict[str, str] | None = None) -> str:
    result = CliRunner().invoke(app, list(words), env=env)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line.removeprefix("specinfer: error: ")


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (("--tree", "foo"), "--tree: 'foo' is not understood"),
        (("--max_num_seqs", "0"), "--max_num_seqs must be"),
        (("--max-num-seqs=0",), "--max-num-seqs must be"),
        (("-tp", "0"), "-tp must be"),
        (("--max-tokens", "1e3"), "--max-tokens must be an integer, not '1e3'"),
        (("--top_p=high",), "--top_p must be a number, not 'high'"),
        (("--drafter", ""), "--drafter: an empty name"),
        (("--logit-bias", '{"5": 1000}'), "--logit-bias[5] must be from -100 to 100"),
        (("--offload-folder", "x"), "--offload-folder: it is for targets that are streamed; set --offload disk too"),
        (("--json-schema", "/nowhere.json"), "--json-schema: no such file"),
        (("--json-schema", "5"), "--json-schema must be a JSON schema"),
        (("--json-schema", '{"type": "text"}'), "--json-schema: type: 'text' is none of string, "),
        (("--regex", "(a"), "--regex: cannot be read"),
        (
            ("--json-object", "--regex", "a"),
            "give exactly one of --json-schema, --regex, --choice, --grammar and --json-object, not --regex",
        ),
        (("--lora", "x=/no/such/folder"), "--lora: no folder '/no/such/folder'"),
        (("--kv-cache-memory-bytes", "5X"), "--kv-cache-memory-bytes: '5X' is not a size; give bytes, or a size such"),
        (
            ("--speculative-config", "ngram"),
            """--speculative-config must be a JSON object, such as {"method": "ngram"}""",
        ),
        (("--speculative-config", '{"model": "/no/such/folder"}'), "--speculative-config: no folder '/no/such/folder'"),
        (("--speculative-config", "{'method': 'ngram'}"), "--speculative-config: not valid JSON: "),
        (("--logit-bias", "5:1"), """--logit-bias must be a JSON object, such as {"5": -100}, not '5:1'"""),
        (("--nnodes", "2", "--node-rank", "3", "--master-addr", "a"), "--node-rank"),
        (("--temperature", "nan"), "--temperature must be a finite number"),
        (("--n", "0"), "--n must be from 1 to 128"),
        (("--stop-token-ids", "1,x"), "--stop-token-ids: 'x' is not a token id"),
        (("--stop-token-ids", "99999"), "--stop-token-ids: token id 99999 is not in the vocabulary"),
        (("--logit-bias", "{"), "--logit-bias: not valid JSON"),
        (("--allowed-token-ids", ""), "--allowed-token-ids is empty"),
        (("--json-schema", "{"), "--json-schema is not a valid JSON schema"),
        *(((flag, name), f"{flag}: no such file: {name};") for flag, name in (
            ("--json-schema", "nowhere/schema"), ("--json-schema", "schema.JSON"), ("--grammar", "nowhere.lark"),
            ("--prediction", "nowhere/at/all.txt"),
        )),
        (("--choice", ""), "--choice must hold text"),
        (("--grammar", "x" * 3000), "--grammar: cannot be read"),
        (("--max-model-len", "100000"), "--max-model-len: 100000 is more than the model's"),
        (("--kv-cache-memory-bytes", "1K"), "--max-model-len: one request of 1024 tokens needs"),
        (("--drafter", "none", "--drafter", "ngram"), "--drafter: none stands alone"),
        *((("--speculative-config", config), f"--speculative-config: {start}") for config, start in (
            ('{"draft": 1}', "key 'draft' is not known"), ('{"method": "medusa"}', "method 'medusa'"),
            ('{"method": "ngram", "model": "x"}', 'method "ngram" has no model'),
            ('{"method": "draft_model"}', "method 'draft_model' needs a model"),
            ('{"method": "ngram", "prompt_lookup_min": 0}', "prompt_lookup_min must be from 1 to 64"),
            ('{"prompt_lookup_max": 3, "prompt_lookup_min": 4}', "prompt_lookup_min, "),
            ('{"num_speculative_tokens": 0}', "num_speculative_tokens must be from 1"),
            ('{"num_speculative_tokens": 2, "tree": "1"}', "tree and num_speculative_tokens both"),
        )),
        (("--speculative-config", '{"tree": "1"}', "--tree", "2"), "--speculative-config: it and --tree both choose"),
        (("--speculative-config", '{"method": "ngram"}', "--drafter", "ngram"), "--speculative-config: it and --d"),
        (("--file", "prompts.txt"), "--file: prompts are given as arguments too"),
        (("--fast",), "No such option: --fast"),
    ],
)  # fmt: skip
def test_errors_name_the_flag_as_typed(words: tuple[str, ...], start: str) -> None:
    assert refusal("generate", "demo", "the", *words).startswith(start)


def test_fields_that_were_not_given_are_named_by_their_flags() -> None:
    assert "only with --adapt-drafters;" in refusal("serve", "demo", "--adapt-dir", "x")
    assert refusal("bench", "throughput", "demo", "--batch", "0").startswith("--batch must be")
    assert refusal("generate", "/nowhere/at/all", "the").startswith("model: no folder '/nowhere/at/all'")
    chosen = ("--speculative-config", '{"model": "demo"}')
    assert refusal("generate", "/nowhere/at/all", "the", *chosen).startswith("model: no folder '/nowhere/at/all'")
    assert refusal("generate", "--model", "/nowhere/at/all", "the").startswith("--model: no folder")


def test_errors_name_variables_and_keys_of_files_as_they_are_written(tmp_path: Path) -> None:
    assert refusal("serve", "demo", env={"SPECINFER_TREE": "foo"}).startswith("SPECINFER_TREE: 'foo' is not")
    file = tmp_path / "settings.yaml"
    file.write_text("max-num-seqs: 0\n")
    assert refusal("serve", "demo", "--config", str(file)).startswith(f"{file}: max-num-seqs must be")
    file.write_text("port: web\n")
    assert refusal("serve", "demo", "--config", str(file)).startswith(f"{file}: port must be an integer, not 'web'")
    told = refusal("serve", "demo", env={"SPECINFER_ENFORCE_EAGER": "perhaps"})
    assert told.startswith("SPECINFER_ENFORCE_EAGER must be true or false, not 'perhaps'")


@pytest.mark.parametrize(("program", "path"), [(app, ()), (app, ("bench",)), (laboratory, ())])
def test_the_help_is_shown_if_no_command_is_named(program: typer.Typer, path: tuple[str, ...]) -> None:
    bare, asked = (CliRunner().invoke(program, [*path, *more]) for more in ((), ("--help",)))
    assert (bare.exit_code, bare.stdout, bare.stderr) == (2, asked.stdout, "")
