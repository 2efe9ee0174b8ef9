"""Requests of agent work: what they contain, that they are read as the server reads them, and how they are measured."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from benchmarks.agents.requests import AGENT_KINDS, AGENTS, agent_prompts, agent_requests, request_body
from benchmarks.comparisons import GrownLatencyConfig, PeerLatency, run_grown_latency, tuning_turn
from benchmarks.peers.names import LIBRARIES, Library
from reports import shown
from specinfer.reporting.report import Report
from specinfer.server.protocol import ChatFields
from talking import HERMES, save_talker

MAX_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model that writes bytes, whose format of calls is Hermes'."""
    return save_talker(tmp_path_factory.mktemp("talker"), HERMES, max_len=8192)


def measure(folder: Path, **changes: Any) -> Report[PeerLatency]:
    options = {"model": str(folder), "drafters": "suffix", "trees": ("1,1",), "device": "cpu", "kinds": (AGENTS,),
               "num_prompts": 5, "max_tokens": MAX_TOKENS, "repeats": 1}  # fmt: skip
    return run_grown_latency(GrownLatencyConfig(**(options | changes)))


# ---------------------------------------------------------------------------------------- the data


def test_there_are_as_many_requests_as_are_described_and_none_twice() -> None:
    counts = {kind: len(requests) for kind, requests in agent_requests().items()}
    assert counts == {"extraction": 20, "calls": 20, "edits": 20, "quotes": 20, "samples": 10}
    written = [json.dumps(request) for requests in agent_requests().values() for request in requests]
    assert len(set(written)) == 90
    fields = {name for requests in agent_requests().values() for request in requests for name in request}
    assert fields == {"messages", "response_format", "tools", "tool_choice", "n", "temperature"}


def test_schemas_are_valid_and_flat_nested_with_arrays_and_with_enums() -> None:
    schemas = [request["response_format"]["json_schema"]["schema"] for request in agent_requests()["extraction"]]
    for schema in schemas:
        jsonschema_rs.meta.validate(schema)
    below = [json.dumps(schema["properties"]) for schema in schemas]
    has_enums = sum('"enum"' in text for text in below)
    has_arrays = sum('"array"' in text for text in below)
    are_nested = sum('"object"' in text and '"array"' not in text for text in below)
    are_flat = sum('"object"' not in text and '"array"' not in text for text in below)
    assert min(has_enums, has_arrays, are_nested, are_flat) >= 4


def test_tools_are_valid_and_two_to_eight() -> None:
    counts = set()
    for request in agent_requests()["calls"]:
        functions = [tool["function"] for tool in request["tools"]]
        counts.add(len(functions))
        assert len({function["name"] for function in functions}) == len(functions)
        for function in functions:
            jsonschema_rs.meta.validate(function["parameters"])
            assert set(function["parameters"]["required"]) <= function["parameters"]["properties"].keys()
    assert min(counts) == 2
    assert max(counts) == 8


def test_files_to_edit_have_60_to_200_lines() -> None:
    lengths = []
    for request in agent_requests()["edits"]:
        text = request["messages"][-1]["content"]
        lengths.append(len(text.split("```")[1].splitlines()) - 1)
    assert 60 <= min(lengths) <= max(lengths) <= 200


def test_what_is_to_be_quoted_is_the_result_of_a_tool() -> None:
    for request in agent_requests()["quotes"]:
        *_, call, result, question = request["messages"]
        assert (call["tool_calls"][0]["id"], result["role"]) == (result["tool_call_id"], "tool")
        assert question["role"] == "user"
        assert len(result["content"]) > 250


def test_samples_are_eight_and_drawn() -> None:
    assert {(request["n"], request["temperature"]) for request in agent_requests()["samples"]} == {(8, 0.7)}


# ---------------------------------------------------------------------------------------- reading


def test_requests_are_read_as_the_server_reads_them(folder: Path) -> None:
    config = GrownLatencyConfig(model=str(folder), kinds=(AGENTS,), num_prompts=90, temperature=0.5, seed=3)
    read = agent_prompts(folder, config)
    assert read.kinds[:6] == (*AGENT_KINDS, "extraction")
    assert [read.kinds.count(kind) for kind in AGENT_KINDS] == [20, 20, 20, 20, 10]
    by_kind = {kind: read.requests[number].params for number, kind in enumerate(AGENT_KINDS)}
    assert by_kind["extraction"].structured_outputs is not None
    assert by_kind["calls"].structured_outputs is not None
    assert by_kind["edits"].structured_outputs is None
    assert (by_kind["edits"].temperature, by_kind["edits"].seed, by_kind["edits"].ignore_eos) == (0.5, 5, False)
    assert (by_kind["samples"].temperature, by_kind["samples"].n, read.most_outputs) == (0.7, 8, 8)
    body = request_body(agent_requests()["calls"][0], config, 1)
    assert ChatFields.model_validate(body).check() == {}  # no field is ignored
    assert tuning_turn(read).prompts == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_prompts": 91}, r"num_prompts: 91 are needed, and there are 90 chat prompts of extraction, calls, "),
        ({"max_tokens": 8000}, r"max_tokens: 8000 after a prompt of .* do not fit"),
    ],
)
def test_requests_that_cannot_be_measured_are_refused(folder: Path, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        agent_prompts(folder, GrownLatencyConfig(model=str(folder), kinds=(AGENTS,), **changes))


def test_models_without_a_chat_template_and_other_kinds_beside_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kinds: .* cannot be given chat requests: .*no chat template"):
        agent_prompts(save_talker(tmp_path, None), GrownLatencyConfig(kinds=("calls",), num_prompts=1))
    with pytest.raises(ValueError, match=r"kinds: extraction, .* are measured apart from others"):
        GrownLatencyConfig(kinds=("calls", "code"))


# -------------------------------------------------------------------------------------- measuring


def test_each_kind_is_measured_and_texts_are_those_of_plain_decoding(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "table.md"
    report = measure(folder, markdown=file)
    result = report.measured.ours.result
    assert [len(run.outputs) for run in result.plain.runs] == [1, 1, 1, 1, 8]
    assert result.partings(result.trees[0]) == []
    numbers = report.as_dict()
    assert list(numbers["by_kind"]) == list(AGENT_KINDS)
    samples = numbers["by_kind"]["samples"]["arms"]["1,1"]
    assert samples["tokens_before_parting"] == []
    arm = numbers["arms"]["1,1"]
    assert arm["accepted_per_pass"].keys() == {"grammar", "suffix"}
    assert sum(arm["accepted_per_pass"].values()) == pytest.approx(arm["tokens_per_pass"] - 1, abs=0.2)
    text = file.read_text()
    assert "| samples | 1,1 |" in text
    assert "8 of 8" in text
    assert "Draft tokens accepted in a pass, by drafter" in text


def test_peers_answer_the_same_requests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    floats = {"float32": "f32"}
    for name, takes_requests in (("fake", True), ("plain", False)):
        library = Library("tests.benchmarks.fake_peer", ("f32",), floats, "draft", needs_gguf=False,
                          takes_requests=takes_requests)  # fmt: skip
        monkeypatch.setitem(LIBRARIES, name, library)
    report = measure(folder, kinds=("quotes", "samples"), num_prompts=2, peers=("fake", "plain"))
    peers = report.measured.peers
    assert peers is not None
    assert [len(run.outputs) for run in peers.arms[0].runs] == [1, 8]
    assert dict(peers.skipped) == {"plain:f32": "it answers no chat requests with formats and tools"}
    assert "of 9 outputs part from our plain decoding" in shown(report, 200)
