"""Heads on the target's hidden states: what is tapped, growth by the formulas, and exact output."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import reference
from benchmarks.program import app as laboratory
from heads import (
    check_growth,
    cycle_text,
    drafter_of,
    ids_of,
    llm_of,
    save_cycle,
    save_eagle3,
    save_tiny_block,
    texts_of,
)
from pair_heads import save_eagle
from reference.heads import SlowEagle3, slow_tree, tensors_of
from reference.texts import hidden_states
from specinfer import LLM, SamplingParams
from specinfer.cli.app import app
from specinfer.core.errors import ModelError
from specinfer.core.request import Request
from specinfer.model.batch import Piece
from specinfer.model.graphs.capture import Graphs
from specinfer.model.kv_tensors import TapShape
from specinfer.model.layers.device import DeviceDecoder
from specinfer.model.load import load_model
from specinfer.model.runner import ModelRunner
from specinfer.ops.quantized_linear import QuantizedLinear
from tiny import make_model, random_prompts, save_model, save_tokenizer

LAYERS = 8  # of the target
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.mark.parametrize(
    ("options", "flags", "reads"),
    [
        ({}, {}, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, {}, (2, 4, 7)),
        (
            {"layout": "speculators", "eagle_aux_hidden_state_layer_ids": [1, 3, 8], "norm_before_residual": True},
            {"norm_before_residual": True},
            (1, 3, 8),
        ),
        (
            {"layout": "speculators", "norm_before_residual": False, "norm_output": True, "family": "qwen3"},
            {"norm_output": True},
            (2, 4, 5),
        ),
        ({"draft_ids": range(3, 90, 2), "own_embedding": True, "fc_norm": True, "pickled": True}, {}, (2, 4, 5)),
        ({"norm_before_fc": True}, {}, (2, 4, 5)),
    ],
    ids=["original", "layer ids", "speculators", "normed output", "reduced vocabulary", "norm before fc"],
)
def test_growth_follows_the_formulas(
    options: dict[str, Any],
    flags: dict[str, bool],
    reads: tuple[int, ...],
    target: Path,
    model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specinfer.setup.assembly.choose_dialect", lambda *_: None)
    folder = save_eagle3(tmp_path / "head", **options)
    slow = SlowEagle3(folder, model.model.embed_tokens.weight.detach(), **flags)

    def features_of(tokens: list[int]) -> Tensor:
        return slow.project(hidden_states(model, tokens[:-1], reads))

    with llm_of(target, folder, tree="1") as llm:
        check_growth(llm, lambda tokens, shape: slow_tree(slow, features_of(tokens), tokens, shape))


# ------------------------------------------------------------------------------------------------ taps


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("gemma3_text", {}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("llama", {"offload": "disk"}),
        ("gpt2", {}),
        ("opt", {"offload": "disk"}),
        ("opt", {}),
    ],
    ids=str,
)
def test_tapped_states_are_those_of_transformers(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "target", family)
    config = make_model(family).config.get_text_config()
    num_layers = config.num_hidden_layers
    monkeypatch.setattr("specinfer.setup.assembly.taps_of", lambda *_: TapShape(tuple(range(num_layers + 1)), 32))
    dtype = options.get("dtype", "float32")
    with LLM(folder, drafters=["ngram"], tree="1,1,1", **({"dtype": "float32"} | options)) as llm:
        request = Request("one", random_prompts([30])[0], GREEDY, seed=0, cache_salt=None)
        llm.engine.add(request)
        while request.num_output < 12:
            llm.engine.step()
        count = len(request.token_ids) - 1
        taps = llm.target.read_taps(range(num_layers + 1), "one", 0, count)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        with torch.no_grad():
            wanted = plain(torch.tensor([request.token_ids[:-1]]), output_hidden_states=True).hidden_states
    tolerance = 2e-4 if dtype == "float32" else 0.1
    for number, (found, state) in enumerate(zip(taps, wanted, strict=True)):
        if number < num_layers:  # transformers has the last one only after the last norm
            torch.testing.assert_close(found.float(), state[0].float(), rtol=tolerance, atol=tolerance)


class _Indexing(TorchDispatchMode):
    """The operations that index rows, for which PyTorch uses all of its threads even if they are few."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.removeprefix("_").startswith("index_put") or (name == "index" and args[0].ndim > 1):
            self.names.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["EAGLE-3", "dspark"])
def test_hidden_states_are_stored_and_read_on_one_thread(kind: str, target: Path, head: Path, tmp_path: Path) -> None:
    folder = head if kind == "EAGLE-3" else tmp_path
    if kind == "dspark":
        save_tiny_block(folder, kind)
    with llm_of(target, folder, tree="2,2,1") as llm, _Indexing() as indexing:
        llm.generate(ids_of(random_prompts([9])), GREEDY, use_tqdm=False)
    assert not indexing.names


def test_nothing_is_stored_where_no_drafter_reads_hidden_states(target: Path) -> None:
    with llm_of(target, "ngram") as llm:
        assert llm.target.loaded.taps is None
        assert llm.target.tensors.taps == {}


# -------------------------------------------------------------------------------------- exactness


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_eagle3(tmp_path_factory.mktemp("head"), draft_ids=range(2, 90))


def _acceptance(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> float:
    """Return the mean number of accepted tokens of the passes with a tree."""
    outputs = llm.generate(ids_of(prompts), params, use_tqdm=False)
    counts = [dict(one.metrics.speculative_decoding) for one in outputs]
    return sum(one["num_accepted_draft_tokens"] for one in counts) / sum(one["num_spec_steps"] for one in counts)


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a target whose next token depends on its last one only, and a head that predicts it without error.

    The head knows a token only by the feature of the token before: an error of pairing, position or level is a wrong
    token.
    """
    return save_cycle(tmp_path_factory.mktemp("cycle"))


def test_the_dialect_that_agrees_with_the_target_is_chosen_and_logged(
    cycle: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = cycle
    generated = cycle_text(48)
    monkeypatch.setattr("specinfer.drafters.dialect_choice.common_tokens", lambda *_: generated)
    copied = tmp_path / "head"
    shutil.copytree(head, copied)
    fields = json.loads((copied / "config.json").read_text())
    for extra, chosen in (
        ({"norm_output": True}, "layers 2, 4, 5"),  # as SpecForge writes it, whose heads recycle h itself
        ({"norm_output": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, "layers 2, 4, 7"),
    ):
        (copied / "config.json").write_text(json.dumps(fields | extra))
        caplog.clear()
        with caplog.at_level("INFO"), llm_of(target, copied, tree="1,1,1,1") as llm:
            assert _acceptance(llm, random_prompts([5], vocab=64)) > 3.5
            assert sorted(llm.target.tensors.taps) == [int(one) for one in chosen.removeprefix("layers ").split(", ")]
        (line,) = [one.getMessage() for one in caplog.records if "can be read in" in one.getMessage()]
        assert f"hidden states after {chosen}, which agrees with the target on 100 %" in line


def test_passes_are_captured_when_it_is_known_what_they_store(
    cycle: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured pass would go on writing to memory that other readings of the configuration had needed."""
    copied, stored = Path(shutil.copytree(cycle[1], tmp_path / "head")), list[set[int]]()
    fields = json.loads((copied / "config.json").read_text())
    fields["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    (copied / "config.json").write_text(json.dumps(fields))
    monkeypatch.setattr(ModelRunner, "prepare", lambda runner, _: stored.append(set(runner.tensors.taps)))
    with llm_of(cycle[0], copied, tree="1,1") as llm:
        assert stored[0] == set(llm.target.tensors.taps)
        assert len(stored[0]) == 3


def test_a_cached_prefix_does_not_change_what_is_accepted(cycle: tuple[Path, Path]) -> None:
    """Other engines draft blindly after a hit, since cached tokens have no hidden states there."""
    target, head = cycle
    prompt = cycle_text(200)
    params = SamplingParams(temperature=0, max_tokens=29)
    with llm_of(target, head, tree="1,1,1,1,1,1") as llm:
        assert _acceptance(llm, [prompt[:192]], params) == 6
        before = llm.target.cache.num_cached
        assert before >= 192
        for end in (192, 193, 200):  # the same prompt, and longer ones
            (output,) = llm.generate(ids_of([prompt[:end]]), params, use_tqdm=False)
            assert output.num_cached_tokens >= 180
            assert dict(output.metrics.speculative_decoding)["mean_acceptance_length"] == 7
        drafter = drafter_of(llm)
        drafter.runner.cache._prefixes.evict(10_000)  # the head's own cache is lost, the target's is not
        assert _acceptance(llm, [prompt[:192]], params) == 6


def test_requests_with_another_first_token_share_nothing_of_the_head(cycle: tuple[Path, Path]) -> None:
    target, head = cycle
    prompt = list(range(40))
    with llm_of(target, head, tree="1,1") as llm:
        drafter = drafter_of(llm)
        for first in (5, 6):
            llm.generate(ids_of([[first, *prompt]]), SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
        match = drafter.runner.cache._prefixes.match
        salts = [salt for salt in ("5:", "6:") if len(match(salt, prompt)[1])]
        assert salts == ["5:", "6:"]


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (1, 3), (2, 2)], ids=str)
def test_a_target_on_several_ranks_has_a_head_too(sizes: tuple[int, int], target: Path, model: Any, head: Path) -> None:
    prompts = random_prompts([8, 20])
    ranks = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}
    with llm_of(target, head, tree="2,2,1", **ranks) as llm:
        found = texts_of(llm, prompts, GREEDY)
        request = Request("one", random_prompts([30])[0], GREEDY, seed=0, cache_salt=None)
        llm.engine.add(request)
        while request.num_output < 12:
            llm.engine.step()
        count = len(llm.target.cache.slots("one"))
        taps = llm.target.read_taps((2, 4, 5), "one", 0, count)
    for tap, wanted in zip(taps, hidden_states(model, request.token_ids[:count], (2, 4, 5)), strict=True):
        torch.testing.assert_close(tap, wanted, rtol=2e-4, atol=2e-4)
    assert found == [reference.greedy(model, prompt, 24) for prompt in prompts]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantized_head_drafts_for_the_same_text(quantization: str, target: Path, model: Any, head: Path) -> None:
    prompts = random_prompts([8])
    with llm_of(target, head, tree="2,2,1", drafter_quantization=quantization) as llm:
        loaded = drafter_of(llm).runner.loaded
        assert loaded.quantization == quantization
        output_head: Any = loaded.model.lm_head
        assert output_head.bits == int(quantization.removeprefix("int")), "as few as the layers"
        found = texts_of(llm, prompts, GREEDY)
    assert found == [reference.greedy(model, prompt, 24) for prompt in prompts]


def test_drafting_with_a_quantized_head_unpacks_no_weights(
    target: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked: list[QuantizedLinear] = []
    with llm_of(target, head, tree="2,1", drafter_quantization="int4") as llm:
        monkeypatch.setattr(QuantizedLinear, "weight", property(lambda layer: unpacked.append(layer) or torch.empty(0)))
        llm.generate(ids_of(random_prompts([8])), GREEDY, use_tqdm=False)
    assert not unpacked


def test_a_heads_own_configuration_may_name_its_quantization(target: Path, tmp_path: Path) -> None:
    head = save_eagle3(tmp_path / "head", drafter_quantization="int8")
    with llm_of(target, head) as llm:
        assert drafter_of(llm).runner.loaded.quantization == "int8"
    with llm_of(target, head, drafter_quantization="int4") as llm:
        assert drafter_of(llm).runner.loaded.quantization == "int4"
    wrong = save_eagle3(tmp_path / "wrong", drafter_quantization="int3")
    with pytest.raises(ModelError, match=r"drafters: drafter_quantization in .*wrong.*int3"):
        llm_of(target, wrong)


# -------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("kind", ["nan", "extra", "code", "cut", "missing"])
def test_damaged_heads_are_refused_by_name(kind: str, target: Path, tmp_path: Path) -> None:
    folder = save_eagle3(tmp_path / "head", pickled=kind == "code")
    file = folder / "model.safetensors"
    part = "model.safetensors is damaged"
    if kind == "nan":
        save_file(tensors_of(folder) | {"fc.weight": torch.full((32, 96), float("nan"))}, file)
        part = "tensor fc.weight of .* has NaN or infinity"
    elif kind == "extra":
        save_file(tensors_of(folder) | {"gate.weight": torch.ones(3)}, file)
        part = "1 tensors of .* are not known, gate.weight among them"
    elif kind == "code":
        torch.save({"fc.weight": Path("/")}, folder / "pytorch_model.bin")
        part = "code of a checkpoint is never run"
    elif kind == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        file.unlink()
        part = "neither model.safetensors nor pytorch_model.bin"
    with pytest.raises(ModelError, match=f"^drafters: .*{part}"):
        llm_of(target, folder)


def test_a_head_is_no_target_and_some_targets_have_none(target: Path, head: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is a drafter \(EAGLE-3\); name its target as the model, and it in drafters"):
        LLM(head)
    falcon = save_model(tmp_path / "falcon", "falcon")
    with pytest.raises(ModelError, match="hidden states, which targets of family 'falcon' do not show"):
        llm_of(falcon, head)


@pytest.mark.parametrize("decoder", ["definition", "device"])
def test_captured_passes_store_hidden_states_of_real_tokens_only(decoder: str, target: Path, model: Any) -> None:
    loaded = load_model(target, torch.float32, torch.device("cpu"), native=False)
    if decoder == "device":
        loaded = replace(loaded, model=DeviceDecoder(loaded.model, loaded.max_position).eval())
    loaded = replace(loaded, taps=TapShape((0, 3, LAYERS), 32))
    runner = ModelRunner(loaded, 120, graphs=Graphs(torch.device("cpu")))
    assert runner.padded is not None
    text = random_prompts([21])[0]
    last = runner.tensors.taps[3][119].clone()
    for start, end in ((0, 13), (13, 14), (14, 21)):  # passes that are padded to larger sizes
        slots = runner.cache.reserve("one", end - start)
        piece = Piece.from_span(text[start:end], None, runner.cache.slots("one"), slots)
        runner.forward([replace(piece, num_logits=1)])
        runner.cache.commit("one", range(end - start))
    for found, wanted in zip(
        runner.read_taps((0, 3, LAYERS), "one", 0, 21), hidden_states(model, text, (0, 3, LAYERS)), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)
    assert torch.equal(runner.tensors.taps[3][119], last), "padding has written to a slot"


def test_bench_measures_a_head_and_grows_it_with_its_target(head: Path, tmp_path: Path) -> None:
    target = save_tokenizer(save_model(tmp_path / "target", "llama", num_hidden_layers=LAYERS))
    words = ["latency", "--model", str(target), "--dtype", "float32"]
    words += ["--num-prompts", "1", "--max-tokens", "8", "--tree", "2,1", "--repeats", "1", "--prompt-chars", "100"]
    for program, more in ((app, []), (laboratory, ["--grow", "2m"])):
        line = [*(["bench"] if program is app else []), *words, "--drafter", str(head), *more]
        result = CliRunner().invoke(program, line)
        assert result.exit_code == 0, result.output
        assert "2,1" in result.output
    result = CliRunner().invoke(laboratory, [*words, "--drafter", str(save_eagle(tmp_path / "eagle")), "--grow", "2m"])
    assert result.exit_code == 2
    assert "(EAGLE) fits the model as it is; leave grow out, or name a small model" in " ".join(result.output.split())
