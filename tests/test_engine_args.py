"""EngineArgs: one dataclass for the library, the flags and the documents; former names; refusals without torch."""

import dataclasses
import inspect
import json
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from specinfer import LLM, AsyncLLM, EngineArgs
from specinfer.cli.app import app
from specinfer.cli.options import EngineOptions, ServedOptions
from specinfer.core.config import DTYPES
from specinfer.core.options import settings_of
from specinfer.model.device import DTYPES as TORCH_DTYPES


@pytest.fixture
def folder(model_folder: Callable[..., Path]) -> str:
    return str(model_folder(tokenizer=True))


def test_every_field_is_described_and_has_a_flag() -> None:
    fields = {each.name for each in dataclasses.fields(EngineArgs)}
    assert {each.name for each, _ in settings_of(EngineArgs)} == fields
    flags = {parameter.name for parameter in EngineOptions.flags(ServedOptions.__metadata__[0])}
    assert flags - {"speculative_config"} == fields - {"drafters"} | {"drafter"}
    for each, about in settings_of(EngineArgs):
        assert about.text.endswith((".", ")", "...")), each.name
        assert all(choice in about.text for choice in about.choices), each.name


def test_llm_takes_the_fields_as_its_arguments() -> None:
    taken = inspect.signature(LLM).parameters
    assert set(taken) == {each.name for each in dataclasses.fields(EngineArgs)} | {"progress"}
    assert [name for name, given in taken.items() if given.kind is not inspect.Parameter.KEYWORD_ONLY] == ["model"]
    for each in dataclasses.fields(EngineArgs):
        if each.name != "model":
            assert taken[each.name].default == each.default
    with pytest.raises(TypeError, match="no_such"):
        LLM("demo", no_such=1)  # type: ignore[call-arg]


def test_types_by_name_are_those_of_torch() -> None:
    assert tuple(TORCH_DTYPES) == DTYPES


def test_arguments_are_values_that_can_be_sent() -> None:
    args = EngineArgs("demo", tree="2,1", drafters=["demo"], memory_budget="4GiB", offload="disk")
    assert pickle.loads(pickle.dumps(args)) == args
    assert EngineArgs(**json.loads(json.dumps(args.as_dict()))) == args
    assert dataclasses.replace(args, seed=3).engine_config.seed == 3


def test_numbers_of_numpy_are_pythons() -> None:
    args = EngineArgs(
        "m", max_num_seqs=np.int64(4), gpu_memory_utilization=np.float32(0.5), enforce_eager=np.bool_(True)
    )
    assert json.loads(json.dumps(args.as_dict()))["max_num_seqs"] == 4


@pytest.mark.parametrize("value", ["", "  ", 5, True, [], b"m", "a\0b"])
@pytest.mark.parametrize(
    "field", ["model", "tokenizer", "speculation_policy", "step_log", "adapt_dir", "prefix_cache_dir"]
)
def test_what_is_no_path_is_refused_by_name(field: str, value: Any) -> None:
    given = {"model": "m", "adapt_drafters": True} | {field: value}
    with pytest.raises(ValueError, match=f"^{field}"):
        EngineArgs(**given)


def test_sizes_are_numbers_or_text() -> None:
    for size, num_bytes in (
        (5, 5),
        ("1K", 1024),
        ("2k", 2000),
        ("3GiB", 3 << 30),
        ("1.5kb", 1500),
        ("2 TB", 2 * 10**12),
    ):
        args = EngineArgs("m", kv_cache_memory_bytes=size, offload="disk", memory_budget=size)
        assert args.engine_config.kv_cache_memory_bytes == args.offload_config.budget_bytes == num_bytes
    with pytest.raises(ValueError, match=r"^kv_cache_memory_bytes: '5X' is not a size"):
        EngineArgs("m", kv_cache_memory_bytes="5X")


@pytest.mark.parametrize("field", [each.name for each, _ in settings_of(EngineArgs) if isinstance(each.default, bool)])
def test_text_is_not_taken_for_true(field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field} must be true or false, not 'false'"):
        EngineArgs("m", **{field: "false"})


def test_engines_are_made_from_arguments(folder: str) -> None:
    args = EngineArgs(folder, drafters=["ngram"], tree="1,1", max_num_seqs=3, seed=4)
    named = LLM(folder, drafters=["ngram"], tree="1,1", max_num_seqs=3, seed=4)
    made, shared = LLM.from_engine_args(args), AsyncLLM.from_engine_args(args)
    texts = [llm.generate("the cat")[0].outputs[0].text for llm in (named, made, shared.llm)]
    assert len(set(texts)) == 1
    assert made.max_num_seqs == shared.llm.max_num_seqs == 3
    with pytest.raises(ValueError, match=r"^node_rank: "):
        LLM(
            folder, tensor_parallel_size=2, nnodes=2, node_rank=1, master_addr="localhost", insecure_cluster=True
        )  # fmt: skip


# ------------------------------------------------------------------------------------ former names


def test_former_arguments_are_taken_with_a_warning(folder: str) -> None:
    with pytest.warns(DeprecationWarning, match="drawing is now draft_sampling") as caught:
        llm = LLM(folder, drafters=["ngram"], tree="1", drawing="top-k")  # type: ignore[call-arg]
    assert caught[0].filename == __file__
    assert llm.generate("the cat")
    with (
        pytest.warns(DeprecationWarning, match="scheduler is now speculation_policy"),
        pytest.raises(ValueError, match="speculation_policy: no file /nowhere"),
    ):
        LLM(folder, scheduler="/nowhere")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="drawing: it is now draft_sampling; give only that"):
        LLM(folder, drawing="iid", draft_sampling="iid")  # type: ignore[call-arg]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM(folder, drafters=["ngram"], tree="1", draft_sampling="top-k")


def _loaded(monkeypatch: pytest.MonkeyPatch, *words: str, env: dict[str, str] | None = None) -> tuple[EngineArgs, str]:
    """Return the arguments that a command would load, and what it prints on standard error."""
    seen: list[EngineArgs] = []

    def load(args: EngineArgs, *_: Any) -> None:
        seen.append(args)
        raise ValueError("seen")

    monkeypatch.setattr("specinfer.cli.serve.follow", load)
    monkeypatch.setattr("specinfer.cli.serve.is_supported", lambda: False)  # the test's process must not fork
    result = CliRunner().invoke(app, ["serve", "demo", *words], env=env)
    assert seen, result.output
    return seen[0], result.stderr


OLD, NEW = "--drawing", "--draft-sampling"


@pytest.mark.parametrize("place", ["flag", "joined", "environment", "file", "json"])
def test_former_flags_are_taken_with_one_warning(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("drawing: iid\nverification: traversal")
    rule = ["--verification", "traversal"]
    words, env = {
        "flag": ([OLD, "iid", *rule], {}),
        "joined": ([f"{OLD}=iid", *rule], {}),
        "environment": (rule, {"SPECINFER_DRAWING": "iid"}),
        "file": (["--config", str(file)], {}),
        "json": (["--speculative-config", '{"drawing": "iid", "verification": "traversal"}'], {}),
    }[place]
    args, shown = _loaded(monkeypatch, *words, env=env)
    assert args.draft_sampling == "iid"
    assert shown.count("is now") == 1
    assert "draft" in shown.split("is now")[1].split(";")[0]
    args, shown = _loaded(monkeypatch, NEW, "iid", *rule)
    assert (args.draft_sampling, "is now" in shown) == ("iid", False)


def test_a_flag_under_both_names_is_refused() -> None:
    result = CliRunner().invoke(app, ["generate", "demo", "the", OLD, "iid", NEW, "iid"])
    assert result.exit_code == 2
    assert "--drawing: it is now --draft-sampling; give only that" in result.stderr


def test_former_flags_are_not_in_the_help() -> None:
    shown = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "160"}).stdout
    assert NEW in shown
    assert "--speculation-policy" in shown
    assert OLD not in shown
    assert "--scheduler" not in shown
    result = CliRunner().invoke(app, ["bench", "latency", "--scheduler", "/nowhere", "--num-prompts", "0"])
    assert "--scheduler is now --speculation-policy" in result.stderr


# ------------------------------------------------------------------------------------ without torch

MISTAKES = [
    (["generate", "demo", "the", "--dtype", "int3"], "dtype must be one of"),
    (["generate", "demo", "the", "--tree", "2,0"], "tree"),
    (["generate", "demo", "the", "--device", "toaster"], "device"),
    (["generate", "demo", "the", "--quantization", "int3"], "quantization must be one of"),
    (["generate", "demo", "the", "--kv-cache-memory-bytes", "5X"], "--kv-cache-memory-bytes"),
    (["generate", "demo", "the", "--temperature", "nan"], "temperature"),
    (["chat", "demo", "-tp", "2", "--nnodes", "3", "--master-addr", "a"], "nnodes"),
    (["serve", "demo", "--verification", "hope"], "verification must be one of"),
    (["serve", "demo", "--port", "70000"], "port must be"),
    (["serve", "demo", "--max-num-queued-reqs", "-1"], "--max-num-queued-reqs"),
    (["serve", "demo", "--adapt-dir", "x"], "--adapt-dir"),
    (["serve", "demo", "--replica-cpus", "2"], "works with --replicas"),
    (["serve", "/no/such/folder"], "no folder"),
    (["serve", "demo", "--trace", "/no/such/file"], "--trace: "),
    (["generate", "/no/such/folder", "the"], "no folder"),
    (["generate", "demo", "the", "--drafter", "/no/such/folder"], "--drafter: no folder"),
    (
        ["generate", "demo", "the", "--drafter", "self:int3"],
        "--drafter: 'self:int3' must be one of self:int8, self:int4",
    ),
    (["generate", "demo", "the", "--tokenizer", "/no/such/folder"], "--tokenizer: no folder"),
    (["generate", "demo", "the", "--speculation-policy", "/no/such/file"], "--speculation-policy: no file"),
    (["run", "demo", "the", "--top-p", "3"], "--top-p"),
    (["complete", "/no/such/folder"], "no folder"),
    (["run-batch", "demo", "-i", "/no/such/file", "-o", "x"], "-i: /no/such/file cannot be read"),
    (["plan", "demo", "--num-prompts", "0"], "--num-prompts"),
    (["plan", "/no/such/folder"], "no folder"),
    (["tune", "demo", "--drafter", "new:1", "--data", "/no/such/file", "--out", "x"], "--data: no file"),
    (["tune", "/no/such/folder", "--drafter", "new:1", "--data", "demo", "--out", "x"], "no folder"),
    (["tune", "demo", "--policy", "/no/such/file", "--data", "demo"], "--policy: /no/such/file cannot be written"),
    (["trace", "/no/such/file"], "/no/such/file cannot be read"),
    (["bench", "latency", "demo", "--tree", "foo"], "--tree: 'foo'"),
    (["bench", "latency", "demo", "--json", "/no/such/file"], "--json: "),
    (["bench", "latency", "/no/such/folder"], "no folder"),
    (["bench", "latency", "demo", "--drafter", "self:int3"], "--drafter: 'self:int3' must be one of self:int8"),
    (["bench", "throughput", "demo", "--batch", "0"], "--batch must be"),
    (["bench", "acceptance", "demo", "--part", "foo"], "--part must be"),
    (["bench", "acceptance", "demo", "--device", "toaster"], "--device: 'toaster'"),
    (["bench", "serve", "demo", "--tree", "foo"], "--tree: 'foo'"),
    (["pull", "/no/such/folder"], "not the name of a model on the hub"),
    (["rm", "demo"], "part of the package"),
    (["list", "--drafters", "nobody"], "none are known for nobody"),
]


def test_mistakes_are_refused_before_torch_is_imported() -> None:
    program = """
import json, sys
from typer.testing import CliRunner
from specinfer.cli.app import app
for words, part in json.load(sys.stdin):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and part in result.stderr, (words, result.output)
    assert "torch" not in sys.modules and "transformers" not in sys.modules, words
"""
    ran = subprocess.run([sys.executable, "-c", program], input=json.dumps(MISTAKES), text=True, capture_output=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prefix_cache_size": "1GiB"},
            "prefix_cache_size: it limits prefix_cache_dir, which is not set; set that too",
        ),
        ({"prefix_cache_dir": "d", "prefix_cache_size": "much"}, "prefix_cache_size: 'much' is not a size"),
        ({"prefix_cache_dir": "d", "enable_prefix_caching": False}, "prefix_cache_dir: enable_prefix_caching is off"),
        ({"prefix_cache_dir": "d", "tensor_parallel_size": 2}, "prefix_cache_dir: each rank has a part"),
        ({"prefix_cache_dir": "d", "pipeline_parallel_size": 2}, "prefix_cache_dir: each rank has a part"),
        ({"prefix_cache_dir": "d", "offload": "disk"}, "prefix_cache_dir: with offload, memory_budget has no room"),
    ],
)
def test_prefixes_that_cannot_be_kept_on_disk_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        EngineArgs("m", **options)


def test_vllms_variable_asks_for_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        assert EngineArgs("demo").batch_invariant is expected
    assert EngineArgs("demo", batch_invariant=True).batch_invariant
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "yes")
    with pytest.raises(ValueError, match="VLLM_BATCH_INVARIANT in the environment is 'yes'; set it to 1 or 0"):
        EngineArgs("demo")
