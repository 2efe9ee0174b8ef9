"""Peers: each in a process of its own, out with a reason when it fails, on weights that are the target's."""

import dataclasses
import importlib.util
import io
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from benchmarks.latency import PeerLatencyConfig, PeerLatencyReport, run_peer_latency
from benchmarks.peers import race
from benchmarks.peers.messages import Adapter, Ask, Load
from benchmarks.peers.names import LIBRARIES, Library, Peer, parse_peer
from benchmarks.peers.plain_folder import plain_folder
from benchmarks.peers.race import Peers
from benchmarks.peers.report import ratio_over
from benchmarks.peers.table import print_peers
from benchmarks.process import Worker, WorkerError
from fake_peer import TOKEN
from gguf_files import write_model
from specinfer.bench.latency_report import plot_latency
from specinfer.bench.models import Models
from specinfer.core.sampling import SamplingParams
from specinfer.demo.pair import demo_folders
from specinfer.model.folder import find_folder
from tiny import VOCAB, save_model

PROMPTS = ((1, 2, 3, 4), (5, 6, 7, 8, 9))
MAX_TOKENS = 8
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a drafter that often agrees."""
    root = tmp_path_factory.mktemp("pair")
    return str(save_model(root / "target")), str(save_model(root / "drafter", noise=0.2))


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    floats = dict.fromkeys(("float32", "bfloat16", "float16"), "f32")
    fake = Library("fake_peer", {}, ("f32", "q8_0"), floats, lookup="lookup", needs_gguf=False)
    absent = Library("fake_peer", {"no_such_module": "no-such-package", "json": "json"}, ("f32",), floats)
    monkeypatch.setitem(LIBRARIES, "fake", fake)
    monkeypatch.setitem(LIBRARIES, "absent", absent)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"), prepend=os.pathsep)


def measure(folders: tuple[str, str], *peers: str, **changes: Any) -> PeerLatencyReport:
    target, drafter = folders
    options = {"model": target, "drafters": (drafter,), "trees": ("1,1", "1"), "device": "cpu", "prompts": PROMPTS,
               "max_tokens": MAX_TOKENS, "repeats": 2, "peers": peers}  # fmt: skip
    return run_peer_latency(PeerLatencyConfig(**(options | changes)))


def shown(report: PeerLatencyReport) -> str:
    assert report.peers is not None
    text = io.StringIO()
    print_peers(report.ours, report.peers, Console(file=text, width=200))
    return text.getvalue()


# ------------------------------------------------------------------------------------------ names


def test_names() -> None:
    assert parse_peer("llama.cpp", "bfloat16") == Peer("llama.cpp", False, "bf16")
    assert parse_peer("llama.cpp-draft:q8_0", "float32").name == "llama.cpp-draft:q8_0"
    assert parse_peer("transformers-assisted", "float32").name == "transformers-assisted:float32"
    assert parse_peer("llama.cpp-lookup:file", "float32") == Peer("llama.cpp", True, "file", looks_up=True)
    assert parse_peer("transformers-lookup", "bfloat16").name == "transformers-lookup:bfloat16"
    assert parse_peer("openvino-draft", "bfloat16") == Peer("openvino", True, "f16")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vllm", "peers: 'vllm' is not known; there are transformers, transformers-assisted, transformers-lookup, "),
        ("openvino-lookup", "peers: 'openvino-lookup' is not known"),
        ("transformers-draft", "peers: 'transformers-draft' is not known"),
        ("openvino:bf16", "peers: openvino has weights in f16, q8_0, q4_0, not in 'bf16'"),
        ("llama.cpp-draft:", "peers: llama.cpp-draft has weights in f32, .*, not in ''"),
    ],
)
def test_bad_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PeerLatencyConfig(peers=("transformers", name))


# ---------------------------------------------------------------------------------------- process


@pytest.fixture
def process() -> Iterator[Worker]:
    process = Worker("fake_peer", 2)
    yield process
    process.close()


def load_message(drafter: str | None = None) -> dict[str, Any]:
    return {"do": "load", "job": dataclasses.asdict(Load("target", drafter, 64, "float32", "cpu"))}


def ask_message(drafts: bool = False, **settings: Any) -> dict[str, Any]:
    return {"do": "generate", "ask": dataclasses.asdict(Ask([1, 2], 4, 0.0, 0, drafts, settings))}


def test_messages_and_their_answers(process: Worker) -> None:
    assert process.ask(load_message(), 20) == {"settings": [{}], "version": "fake on 2"}
    assert process.ask(load_message("drafter"), 20)["settings"][0] == {"num_draft": 1}
    said = process.ask(ask_message(drafts=True, num_draft=4), 20)
    assert said == {"token_ids": [TOKEN] * 4, "num_first": 2, "prompt_time": 0.5, "time": 8.0}
    with pytest.raises(WorkerError, match="KeyError: 'num_draft'"):
        process.ask(ask_message(drafts=True), 20)
    assert process.ask(ask_message(), 20)["time"] == 4.0  # an error ends nothing


def test_a_module_that_is_not_there_is_an_answer() -> None:
    process = Worker("no_such_module", 1)
    with pytest.raises(WorkerError, match="ModuleNotFoundError: No module named 'no_such_module'"):
        process.ask(load_message(), 20)
    process.close()


def test_a_worker_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PEER", "1 die")
    process = Worker("fake_peer", 1)
    for _ in range(2):  # when it ends, and when it is asked after that
        with pytest.raises(WorkerError, match="its process ended with status 3: last words"):
            process.ask(ask_message(), 20)
    process.close()


def test_a_worker_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PEER", "1 hang")
    process = Worker("fake_peer", 1)
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
    assert report.peers is not None
    assert [arm.name for arm in report.peers.arms] == ["fake:f32", "fake-draft:f32", "fake:q8_0"]
    places = [(run.repeat, run.prompts) for run in report.ours.result.plain.runs]
    plain, draft = report.peers.arms[:2]
    for arm in report.peers.arms:
        assert [(run.repeat, run.prompts) for run in arm.runs] == places
        assert {run.token_ids for run in arm.runs} == {(TOKEN,) * MAX_TOKENS}
        assert arm.details["version"] == f"fake on {torch.get_num_threads()}"
    # 7 of 8 tokens are said within 8 seconds; of the other arm 6, since 2 came first.
    assert plain.tokens_per_second.median == pytest.approx(7 / 8)
    assert draft.tokens_per_second.median == pytest.approx(6 / 8)
    assert (plain.details["settings"], draft.details["settings"]) == ({}, {"num_draft": 3})
    ratios = [run.num_decoded / run.time / (7 / 8) for run in report.ours.result.plain.runs]
    assert ratio_over(report.ours.result.plain, plain).max == pytest.approx(max(ratios))
    best = report.ours.result.best
    whole = [8.5 / (run.prompt_time + run.time) for run in best.runs]

    numbers = json.loads(file.read_text())
    assert set(numbers["arms"]) == {"off", "1,1", "1"}
    entry = numbers["peers"]["fake-draft:f32"]
    assert entry["settings"] == {"num_draft": 3}
    assert entry["tree_request_over_peer"] == pytest.approx(statistics.median(whole))
    assert entry["tree"] == best.name
    assert entry["tree_over_peer"] == pytest.approx(ratio_over(best, draft).median)
    assert entry["plain_over_peer"] == pytest.approx(ratio_over(report.ours.result.plain, draft).median)
    assert len(entry["tokens_before_parting"]) == 4
    assert len(entry["runs"]) == 4
    assert numbers["peers_skipped"] == {"absent:f32": "pip install no-such-package json"}
    assert numbers["options"]["peers"] == ["fake", "fake-draft", "fake:q8_0", "fake:f32", "absent"]
    text = shown(report)
    assert "peer absent:f32 skipped: pip install no-such-package json" in text
    assert "peer fake-draft:f32 with num_draft 3, fake on 1: 4 of 4 outputs part from our plain decoding" in text
    plot_latency(report.ours, tmp_path / "plot.svg", report.peers.arms)
    assert "fake" in (tmp_path / "plot.svg").read_text()


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
    assert len(report.ours.result.plain.runs) == 4
    assert report.peers is not None
    assert report.peers.arms == ()
    assert dict(report.peers.skipped) == {"fake:f32": reason}
    assert f"peer fake:f32 skipped: {reason}" in shown(report)


def test_a_peer_that_looks_up_needs_no_drafter_and_speculates(folders: tuple[str, str]) -> None:
    report = measure(folders, "fake-lookup", "fake-draft", drafters=("ngram",), trees=("1",), repeats=1)
    assert report.peers is not None
    assert dict(report.peers.skipped) == {"fake-draft:f32": "no drafter is a model"}
    (arm,) = report.peers.arms
    assert (arm.name, arm.details["drafts"]) == ("fake-lookup:f32", True)
    assert arm.details["settings"] == {"num_draft": 3, "looked_up": True}


def test_peers_that_cannot_run(folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = measure(folders, "fake-draft", "fake", drafters=("ngram",), repeats=1)
    assert report.peers is not None
    assert dict(report.peers.skipped) == {"fake-draft:f32": "no drafter is a model"}
    assert [arm.name for arm in report.peers.arms] == ["fake:f32"]
    other = save_model(tmp_path / "other", vocab_size=VOCAB - 1)
    models = race.Models(Path(folders[0]), (str(other),))
    with race.Peers(["fake-draft"], models, dtype=torch.float32, device=torch.device("cpu"), max_len=64) as peers:
        peers.start(SamplingParams(temperature=0.0), lambda _: None)
        assert "vocabulary of 95 tokens is not the target's of 96" in peers.report().skipped["fake-draft:f32"]
    greedy_only = dataclasses.replace(LIBRARIES["fake"], samples_with_drafter=False)
    monkeypatch.setitem(LIBRARIES, "fake", greedy_only)
    with race.Peers(["fake-draft"], models, dtype=torch.float32, device=torch.device("cpu"), max_len=64) as peers:
        peers.start(SamplingParams(temperature=0.5), lambda _: None)
        assert "use temperature 0" in peers.report().skipped["fake-draft:f32"]
    with race.Peers(["fake"], models, dtype=torch.float32, device=torch.device("cuda"), max_len=64) as peers:
        peers.start(SamplingParams(temperature=0.0), lambda _: None)
        assert "on the CPU only" in peers.report().skipped["fake:f32"]


def test_without_peers_the_report_does_not_mention_them(folders: tuple[str, str]) -> None:
    report = measure(folders, trees=("1",), repeats=1)
    assert report.peers is None
    assert "peers" not in report.as_dict()


# ---------------------------------------------------------------------------------- the same text


def expected(folder: Path, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """What transformers says in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made: list[int] = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0].tolist()
    return made[len(prompt) :]


def check_adapter(
    adapter: Adapter, target: str, drafter: str, prompt: tuple[int, ...], text: list[int], *, samples: bool = True
) -> None:
    """Greedy text with and without guesses is the text given; sampled text has its length."""
    max_len = len(prompt) + len(text)
    arms = [(None, False), (drafter, False), *([(None, True)] if samples else [])]  # the last one looks up
    for path, looks_up in arms:
        offered = adapter.load(Load(target, path, max_len, "float32", "cpu", looks_up=looks_up))
        drafts = looks_up or path is not None
        for settings in offered[:: max(1, len(offered) // 4)]:
            ask = Ask(list(prompt), len(text), 0.0, 0, drafts, settings)
            said = adapter.generate(ask)
            assert said.token_ids == text, settings
            assert 1 <= said.num_first <= len(text)
            assert min(said.time, said.prompt_time) > 0
        if drafts and not samples:
            continue
        sampled = Ask(list(prompt), len(text), 0.8, 3, drafts, offered[-1])
        assert len(adapter.generate(sampled).token_ids) == len(text)


@pytest.fixture
def _usual_verbosity() -> Iterator[None]:
    verbosity = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(verbosity)


@pytest.mark.usefixtures("_usual_verbosity")
def test_transformers_generates_the_text(folders: tuple[str, str]) -> None:
    from benchmarks.peers.transformers_engine import create

    text = expected(Path(folders[0]), PROMPTS[1], 24)
    check_adapter(create(1), *folders, PROMPTS[1], text)


@pytest.mark.slow
def test_transformers_compiled_generates_the_text(folders: tuple[str, str]) -> None:
    """In a process of its own: what is compiled, and how, is settled for a whole process."""
    process = Worker("benchmarks.peers.transformers_compiled_engine", 1)
    try:
        job = dataclasses.asdict(Load(folders[0], None, 64, "float32", "cpu"))
        assert process.ask({"do": "load", "job": job}, 120)["settings"] == [{}]
        for prompt in PROMPTS[::-1]:  # the cache of the first prompt serves the second, too
            ask = dataclasses.asdict(Ask(list(prompt), 24, 0.0, 0, False, {}))
            said = process.ask({"do": "generate", "ask": ask}, 280)
            assert said["token_ids"] == expected(Path(folders[0]), prompt, 24)
    finally:
        process.close()


@pytest.mark.usefixtures("_usual_verbosity")
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_accelerate_generates_the_text_with_every_layer_on_the_disk(tmp_path: Path, family: str) -> None:
    pytest.importorskip("accelerate")
    from benchmarks.peers.accelerate_engine import create

    folder = save_model(tmp_path / "model", family)
    engine = create(1)
    prompt = PROMPTS[1]
    assert engine.load(Load(str(folder), None, 64, "float32", "cpu", "disk")) == [{}]
    (model,) = engine._engine._models.values()
    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    assert {weight.device.type for weight in layers.parameters()} == {"meta"}
    said = engine.generate(Ask(list(prompt), 16, 0.0, 0, False, {}))
    assert said.token_ids == expected(folder, prompt, 16)


@pytest.mark.peer
@pytest.mark.parametrize("weights", ["f32", "f16"])
def test_llama_cpp_generates_the_text_of_the_embedded_pair(tmp_path: Path, weights: str) -> None:
    pytest.importorskip("llama_cpp")
    from benchmarks.peers.llama_cpp_engine import create

    pair, prompt = demo_folders(), tuple(range(10, 60))
    files = [str(gguf_of(folder, tmp_path, weights)) for folder in (pair.target, pair.drafter)]
    check_adapter(create(1), *files, prompt, expected(pair.target, prompt, 48))
    mapped = create(1)  # held to less memory: few settings, each with long chains
    offered = mapped.load(Load(*files, 98, "float32", "cpu", is_slow=True))
    assert [settings["num_draft"] for settings in offered] == [16, 16, 8]
    said = mapped.generate(Ask(list(prompt), 48, 0.0, 0, True, offered[0]))
    assert said.token_ids == expected(pair.target, prompt, 48)


@pytest.mark.peer
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
        ("llama", {"rope_parameters": LLAMA_3}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_llama_cpp_generates_the_text_of_each_family(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    pytest.importorskip("llama_cpp")
    from benchmarks.peers.llama_cpp_engine import create

    folder = save_model(tmp_path / "model", family, **changes)
    file = str(gguf_of(folder, tmp_path, "f32"))
    prompt = tuple(range(2, 90))
    check_adapter(create(1), file, file, prompt, expected(folder, prompt, 24))


@pytest.mark.peer
def test_openvino_generates_the_text_of_the_embedded_pair(tmp_path: Path) -> None:
    pytest.importorskip("openvino_genai")
    from benchmarks.peers.openvino_engine import converted, create

    pair, prompt = demo_folders(), tuple(range(10, 60))
    files = [str(gguf_of(folder, tmp_path, "f16")) for folder in (pair.target, pair.drafter)]
    check_adapter(create(1), *files, prompt, expected(pair.target, prompt, 48), samples=False)
    assert not (converted(Path(files[0])) / "model.gguf").exists()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", "", ".gguf", ".gguf"]


# ------------------------------------------------------------------------------------- GGUF files


def gguf_of(folder: Path, root: Path, weights: str) -> Path:
    pytest.importorskip("gguf")
    from benchmarks.peers.gguf_file import write_gguf

    file = root / f"{folder.name}-{weights}.gguf"
    write_gguf(folder, file, weights)
    return file


def test_a_gguf_file_holds_the_weights(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    folder = save_model(tmp_path / "model", rope_parameters=LLAMA_3)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reader = gguf.GGUFReader(gguf_of(folder, tmp_path, "f32"))
    held = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}
    assert len(held) == len(dict(model.named_parameters())) + 1
    layer = model.model.layers[1]
    torch.testing.assert_close(held["blk.1.ffn_down.weight"], layer.mlp.down_proj.weight.data)
    torch.testing.assert_close(held["blk.1.attn_v.weight"], layer.self_attn.v_proj.weight.data)
    torch.testing.assert_close(held["output_norm.weight"], model.model.norm.weight.data)
    # Two KV heads of 8 rows: row i of the first half and row i of the second stand together.
    order = [head * 8 + half * 4 + i for head in range(2) for i in range(4) for half in range(2)]
    torch.testing.assert_close(held["blk.1.attn_k.weight"], layer.self_attn.k_proj.weight.data[order])
    usual = 1 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    torch.testing.assert_close(usual / held["rope_freqs.weight"], frequencies)
    assert len(reader.fields["tokenizer.ggml.tokens"].data) == VOCAB


@pytest.mark.parametrize(("weights", "tolerance"), [("f16", 1e-3), ("bf16", 8e-3), ("q8_0", 1e-2), ("q4_0", 0.2)])
def test_a_gguf_file_rounds_matrices_only(tmp_path: Path, weights: str, tolerance: float) -> None:
    gguf = pytest.importorskip("gguf")
    folder = save_model(tmp_path / "model", "qwen2", intermediate_size=64)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_of(folder, tmp_path, weights)).tensors}
    matrix = tensors["blk.0.attn_q.weight"]
    assert matrix.tensor_type.name.lower() == weights
    read = torch.tensor(gguf.quants.dequantize(matrix.data, matrix.tensor_type))
    weight = model.model.layers[0].self_attn.q_proj.weight.data
    assert (read - weight).abs().max() <= tolerance * weight.abs().max()
    bias = tensors["blk.0.attn_q.bias"]
    torch.testing.assert_close(torch.tensor(bias.data), model.model.layers[0].self_attn.q_proj.bias.data)


@pytest.mark.parametrize(
    ("family", "changes", "weights", "message"),
    [
        ("gpt2", {}, "f32", "GGUF files are written of llama, mistral, qwen2, qwen3 models, not of 'gpt2'"),
        ("mistral", {}, "f32", "sliding windows"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "f32", "'linear'"),
        ("llama", {"hidden_act": "gelu"}, "f32", "hidden_act 'gelu'"),
        ("llama", {"intermediate_size": 40}, "q8_0", "cannot be written as Q8_0"),
    ],
)
def test_what_a_gguf_file_cannot_express_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], weights: str, message: str
) -> None:
    folder = save_model(tmp_path / "model", family, **changes)
    with pytest.raises(WorkerError, match=message):
        gguf_of(folder, tmp_path, weights)


def test_files_for_peers_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = save_model(tmp_path / "model")
    first = race._as_gguf(folder, "f32")
    written = first.stat().st_mtime_ns
    assert race._as_gguf(folder, "f32").stat().st_mtime_ns == written
    save_model(folder, seed=1, num_hidden_layers=1)
    assert race._as_gguf(folder, "f32") != first
    assert len(list(first.parent.iterdir())) == 2
    with pytest.raises(WorkerError):
        race._as_gguf(save_model(tmp_path / "other", "gpt2"), "f32")
    assert len(list(first.parent.iterdir())) == 2


def test_every_library_has_an_adapter() -> None:
    for name in ("transformers", "transformers-compiled", "llama.cpp", "openvino", "accelerate", "accelerate-cpu"):
        assert importlib.util.find_spec(LIBRARIES[name].module) is not None


def test_a_gguf_file_is_read_as_it_is_or_as_safetensors(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf")
    folder = find_folder(tmp_path / "model.gguf")
    plain = plain_folder(folder, "float32")
    assert plain == plain_folder(plain, "float32") == plain_folder(folder, "float32") != folder
    read = AutoModelForCausalLM.from_pretrained(plain, dtype="auto").state_dict()
    assert read.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, read[name]) for name, tensor in model.state_dict().items())
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "max_len": 8}
    peer, transformers = (parse_peer(name, "float32") for name in ("llama.cpp:file", "transformers"))
    peers = Peers([], Models(folder, ()), **options)
    assert peers._as_read(peer, folder) == (tmp_path / "model.gguf").resolve()
    assert peers._as_read(transformers, folder) == plain
    with pytest.raises(WorkerError, match="the target is not read from a GGUF file as it is"):
        Peers([], Models(plain, ()), **options)._as_read(peer, plain)
