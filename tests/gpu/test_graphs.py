"""On a CUDA device: captured passes give what passes give that are launched kernel by kernel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from native_layers import TREE, Reader
from specinfer import LLM, SamplingParams
from specinfer.core.tree import TokenTree
from specinfer.model.batch import Piece
from specinfer.model.graphs.capture import CaptureError, Graphs
from specinfer.model.graphs.sizes import loaded_sizes
from specinfer.model.load import load_model
from specinfer.model.quantized_experts import RoutedExperts
from specinfer.model.runner import ModelRunner
from tiny import FAMILIES, random_prompts

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
MIXTURES = {"mixtral", "qwen3_moe", "gpt_oss"}  # some of which have shapes that depend on what they compute
PROMPTS = random_prompts([3, 40, 17, 60])
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(temperature=1.0, top_k=20, seed=1, max_tokens=24),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=2, max_tokens=24, logprobs=2),
    SamplingParams(temperature=1.2, min_p=0.05, logit_bias={3: 2.0}, min_tokens=5, seed=3, max_tokens=24),
]


def _tokens(folder: Path, small: Path, tree: str, **options: Any) -> tuple[list[list[int]], ModelRunner]:
    llm = LLM(folder, drafters=[str(small), "ngram"], tree=tree, device="cuda", max_num_batched_tokens=32, **options)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert isinstance(llm.target, ModelRunner)
    return [output.outputs[0].token_ids for output in outputs], llm.target


@pytest.mark.parametrize("family", [*FAMILIES, "lfm2", "qwen3_5_text", "bamba", "mamba"])
def test_captured_passes_compute_what_others_do(family: str, model_folder: Callable[..., Path]) -> None:
    folder, small = model_folder(family), model_folder(family, noise=0.02)
    wanted, eager = _tokens(folder, small, "off", enforce_eager=True)
    assert eager.padded is None
    for tree in ("off", "2,2,1"):
        found, runner = _tokens(folder, small, tree)
        assert found == wanted
        assert runner.padded is not None
        assert runner.graphs is not None
        if family not in MIXTURES:
            assert runner.why_not_captured is None
            assert runner.graphs.num_captured


def _pass(runner: ModelRunner, prompt: list[int]) -> torch.Tensor:
    reader = Reader(runner)
    reader.read("a", prompt)
    logits = runner.forward([reader.piece("a", TREE)]).clone()
    runner.cache.free("a")
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_replayed_logits_are_those_of_other_attention(dtype: torch.dtype, model_folder: Callable[..., Path]) -> None:
    """Again and again in the same buffers, between passes of other sizes."""
    loaded = load_model(model_folder("llama"), dtype, CUDA)
    captured, eager = (ModelRunner(loaded, 600, graphs=graphs) for graphs in (Graphs(CUDA), None))
    assert captured.padded is not None
    captured.prepare()
    assert set(loaded_sizes(32)) <= set(captured.padded.sizes)
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.1}
    for prompt in random_prompts([1, 30, 7, 90, 200, 2, 30]):
        torch.testing.assert_close(_pass(captured, prompt), _pass(eager, prompt), **tolerance)


def test_chunks_of_prompts_larger_than_all_sizes_give_the_logits_of_other_attention(
    model_folder: Callable[..., Path],
) -> None:
    """One after the other without a wait in between, so that a pass is launched while the one before it runs."""
    loaded = load_model(model_folder("llama", max_position_embeddings=4096), torch.float32, CUDA)
    found = []
    for graphs in (Graphs(CUDA), None):
        runner, logits = ModelRunner(loaded, 9000, graphs=graphs), []
        for i, count in enumerate([1500, 600, 700, 513, 650]):
            pieces = []
            for name in "ab":
                tokens = random_prompts([count], seed=i)[0]
                slots, prefix = runner.cache.reserve(name, count), runner.cache.slots(name)
                pieces.append(Piece.from_span(tokens, TokenTree.root(tokens[-1]), prefix, slots))
            logits.append(runner.forward(pieces).clone())
            for name in "ab":
                runner.cache.commit(name, range(count))
        for name in "ab":
            runner.cache.free(name)
        found.append(torch.cat(logits))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_passes_with_the_codes_of_routed_experts_are_captured(
    family: str, quantization: str, model_folder: Callable[..., Path]
) -> None:
    loaded = load_model(model_folder(family), torch.float32, CUDA, quantization)  # so that no route is a close choice
    assert any(isinstance(module, RoutedExperts) for module in loaded.model.modules())
    captured, eager = (ModelRunner(loaded, 600, graphs=graphs) for graphs in (Graphs(CUDA), None))
    captured.prepare()
    for prompt in random_prompts([1, 30, 90]):
        torch.testing.assert_close(_pass(captured, prompt), _pass(eager, prompt), rtol=1e-3, atol=1e-3)
    assert captured.why_not_captured is None
    assert captured.graphs is not None
    assert captured.graphs.num_captured


def test_a_captured_pass_allocates_nothing(model_folder: Callable[..., Path]) -> None:
    runner = ModelRunner(load_model(model_folder("llama"), torch.float32, CUDA), 600, graphs=Graphs(CUDA))
    runner.prepare()
    cache, counts = runner.cache, []
    for _ in range(8):
        slots = cache.reserve("a", 1)
        runner.forward([Piece.from_span([8], TokenTree.root(8), cache.slots("a"), slots)])
        cache.commit("a", [0])
        counts.append(torch.cuda.memory_stats()["allocation.all.allocated"])
    cache.free("a")
    assert counts[1:] == [counts[1]] * 7


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_captured_pass_waits_for_nothing(model_folder: Callable[..., Path]) -> None:
    runner = ModelRunner(load_model(model_folder("llama"), torch.float32, CUDA), 600, graphs=Graphs(CUDA))
    runner.prepare()
    slots = runner.cache.reserve("a", 1)
    piece = Piece.from_span([8], TokenTree.root(8), runner.cache.slots("a"), slots)
    runner.forward([piece])
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.forward([piece])
    finally:
        torch.cuda.set_sync_debug_mode("default")
        runner.cache.free("a")


def test_what_waits_for_the_device_is_refused_and_the_next_is_captured() -> None:
    graphs = Graphs(CUDA)
    x = torch.ones(4, device=CUDA)

    def waits() -> None:
        x.add_(x.nonzero().shape[0])

    with pytest.raises(CaptureError):
        graphs.captured(waits)
    x.fill_(1)

    def doubles() -> None:
        x.mul_(2)

    run = graphs.captured(doubles)
    before = x.clone()
    run()
    assert torch.equal(x, before * 2)
    assert graphs.num_captured == 1


def test_a_capture_that_breaks_leaves_nothing_behind() -> None:
    """What breaks it is seen by no warm-up. Random numbers, pinned memory and captures are as before."""
    graphs = Graphs(CUDA)
    x = torch.ones(4, device=CUDA)

    def breaks() -> None:
        x.mul_(1)
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()

    def doubles() -> None:
        x.mul_(2)

    before = graphs.captured(doubles)
    for _ in range(2):
        with pytest.raises(CaptureError):
            graphs.captured(breaks)
        assert torch.rand(3, device=CUDA).isfinite().all()
        assert torch.ones(3, pin_memory=True).to(CUDA, non_blocking=True).sum() == 3
    x.fill_(1)
    after = graphs.captured(doubles)
    x.fill_(1)
    before()
    after()
    assert x.tolist() == [4, 4, 4, 4]


def test_captures_go_on_when_all_others_are_gone() -> None:
    graphs = Graphs(CUDA)
    x = torch.zeros(4, device=CUDA)
    for _ in range(3):
        run = graphs.captured(lambda: x.copy_(torch.ones_like(x).cumsum(0)))
        x.zero_()
        run()
        assert x.tolist() == [1, 2, 3, 4]
        del run
        torch.cuda.empty_cache()
