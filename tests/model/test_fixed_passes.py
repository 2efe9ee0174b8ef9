"""Whole passes in a fixed order, with the kernels of GPUs: a token's logits have the same bits in any pass."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from adapters import save_adapter
from interpreter import interpreted
from one_order import in_order, launches
from one_order import one_order as one_order
from specinfer.core.errors import ModelError
from specinfer.core.lora import LoRAConfig, LoRARequest
from specinfer.core.tree import TokenTree
from specinfer.model.adapters.registry import Adapters
from specinfer.model.batch import Piece
from specinfer.model.fixed_passes import FixedOrder
from specinfer.model.graphs.capture import Graphs
from specinfer.model.graphs.sizes import Size
from specinfer.model.kv_cache import NO_SLOTS, Slots
from specinfer.model.load import load_model
from specinfer.model.runner import ModelRunner
from specinfer.ops.cpu import low_rank
from tiny import quick, random_prompts

CPU, TWICE = torch.device("cpu"), torch.tensor([0, 0, 1])
pytestmark = [interpreted, pytest.mark.usefixtures("one_order")]
# A family, and what changes in how it is loaded. Gemma 2 and mixtures of experts run as transformers defines them.
CASES: dict[str, tuple[str, torch.dtype, str | None, torch.dtype | None]] = {
    "llama bfloat16": ("llama", torch.bfloat16, None, None),
    "llama float16": ("llama", torch.float16, None, None),
    "llama float32": ("llama", torch.float32, None, None),
    "llama in fp8 caches": ("llama", torch.bfloat16, None, torch.float8_e4m3fn),
    "llama in int8": ("llama", torch.bfloat16, "int8", None),
    "llama in int4": ("llama", torch.bfloat16, "int4", None),
    "qwen3": ("qwen3", torch.bfloat16, None, None),
    "qwen3_moe": ("qwen3_moe", torch.bfloat16, None, None),
    "qwen3_moe in int4": ("qwen3_moe", torch.bfloat16, "int4", None),
    "gemma2": ("gemma2", torch.bfloat16, None, None),
}


def _runner(folder: Path, dtype: torch.dtype, quantization: str | None, kv_dtype: torch.dtype | None) -> ModelRunner:
    loaded = load_model(folder, dtype, CPU, quantization, native=False, kv_dtype=kv_dtype)
    return ModelRunner(in_order(loaded), 200, graphs=Graphs(CPU))


def _chain(tokens: list[int], prefix: Slots, slots: Slots, num_logits: int) -> Piece:
    positions = range(len(prefix), len(prefix) + len(tokens))
    return Piece(tokens, positions, prefix, slots, np.tri(len(tokens), dtype=np.bool_), num_logits)


@pytest.mark.parametrize("name", quick(CASES, "llama bfloat16"))
def test_logits_have_the_same_bits_in_any_pass(name: str, model_folder: Callable[..., Path]) -> None:
    """In a whole prompt, in chunks after a cached prefix, alone, in a tree, and beside others."""
    family, *settings = CASES[name]
    runner, places = _runner(model_folder(family), *settings), np.arange(1, 200)
    tokens = random_prompts([12], seed=1)[0]

    def logits(*pieces: Piece) -> Tensor:
        return runner.forward(list(pieces)).clone()

    whole = logits(_chain(tokens, NO_SLOTS, places[:12], 12))
    logits(_chain(tokens[:5], NO_SLOTS, places[20:25], 0))
    assert torch.equal(logits(_chain(tokens[5:], places[20:25], places[25:32], 7)), whole[5:]), "chunks of a prompt"
    assert torch.equal(logits(_chain(tokens[11:], places[20:31], places[40:41], 1)), whole[11:]), "plain decoding"
    #  8 ─ 9 ─ 10 ─ 11, with others before and between them
    tree = TokenTree((tokens[8], 3, tokens[9], 4, tokens[10], 5, tokens[11]), (-1, 0, 0, 2, 2, 4, 4))
    pieces = (
        Piece.from_span([tokens[8]], tree, places[:8], places[50:57]),
        _chain(tokens[:3], NO_SLOTS, places[60:63], 1),
    )
    found = logits(*pieces)
    assert torch.equal(found[[0, 2, 4, 6]], whole[8:]), "a tree"
    assert torch.equal(found[7], whole[2]), "another request beside it"


@pytest.mark.slow
def test_adapters_add_the_same_bits_in_any_pass(
    model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a prompt, alone after it, and in passes without padding, such as those of more than 512 tokens."""
    monkeypatch.setattr(low_rank, "packs", lambda _: False)  # as on a GPU
    base, tokens, places = model_folder("llama"), random_prompts([6], seed=1)[0], np.arange(1, 200)
    runner = _runner(base, torch.bfloat16, None, None)
    adapters = Adapters(runner.loaded, LoRAConfig(1, 8, 1), "base")
    table = adapters.find(LoRARequest("a", 1, str(save_adapter(tmp_path, base, 1)))).table
    assert runner.padded is not None
    runner.padded.adapter_slots = adapters._sites.adapter_slots(adapters.config)
    piece = _chain(tokens, NO_SLOTS, places[:6], 6)
    plain = runner.forward([piece]).clone()
    whole = runner.forward([replace(piece, adapter=table)]).clone()
    assert (whole - plain).abs().max() > 0.1
    alone = replace(_chain(tokens[5:], places[:5], places[30:31], 1), adapter=table)
    assert torch.equal(runner.forward([alone]), whole[5:])
    monkeypatch.setattr(Size, "padded", lambda _: None)
    both = [replace(piece, adapter=table, slots=places[40:46]), replace(piece, slots=places[50:56])]
    assert torch.equal(runner.forward(both), torch.cat([whole, plain]))


@pytest.mark.slow
def test_passes_have_no_launches_that_rows_decide_about(model_folder: Callable[..., Path]) -> None:
    runner, places = _runner(model_folder("llama"), torch.bfloat16, None, None), np.arange(1, 200)
    tokens, decided = random_prompts([60], seed=1)[0], list[set[object]]()
    for count in (1, 3, 60):
        launches.clear()
        runner.forward([_chain(tokens[:count], NO_SLOTS, places[:count], 1)])
        products = [launch for launch in launches if launch.kernel != "finish_program"]  # for few rows alone
        decided.append({launch.deciding() for launch in products})
    assert decided[0] == decided[1] == decided[2]


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda x: x @ x.T, "multiplies rows by each other"),
        (lambda x: x.cumsum(1), "PyTorch's cumsum"),
        (lambda x: x.sum(), "PyTorch's sum"),
        (lambda x: x.clone().index_put_((TWICE,), x, accumulate=True), "PyTorch's index_put_"),
        (lambda x: x.clone().scatter_(0, TWICE[:, None], x, reduce="add"), "PyTorch's scatter_"),
        (lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]), "PyTorch's"),
        (lambda x: x.new_zeros(2, 8).index_add_(0, TWICE, x), "PyTorch's index_add_"),
        (lambda x: torch.bincount(TWICE, x[:, 0]), "PyTorch's bincount"),
        (lambda x: torch.bincount(TWICE, weights=x[:, 0]), "PyTorch's bincount"),
        (lambda x: x[0, 0].sum(0), "PyTorch's sum"),
    ],
)
def test_operations_without_one_order_are_refused_by_name(compute: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(ModelError, match=message), torch.inference_mode(), FixedOrder(nn.Linear(8, 8)):
        compute(torch.ones(3, 8))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.softmax(-1), lambda x: x.mean(-1), lambda x: x.view(3, 2, 4).sum(1), lambda x: x.topk(3)[0],
        lambda x: nn.functional.layer_norm(x, (8,)), lambda x: nn.functional.rms_norm(x, (8,)),
        lambda x: x.pow(2).mean(-1, keepdim=True),
    ],
)  # fmt: skip
def test_replaced_operations_compute_what_pytorchs_do(compute: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), FixedOrder(nn.Linear(8, 8)):
        found = compute(x)
    torch.testing.assert_close(found, compute(x))


def test_a_runner_without_padded_passes_is_refused(model_folder: Callable[..., Path]) -> None:
    loaded = in_order(load_model(model_folder("llama"), torch.bfloat16, CPU, native=False))
    with pytest.raises(ModelError, match="no passes of one order of sums: capturing is off; leave enforce_eager or"):
        ModelRunner(loaded, 200, graphs=None)


def test_adapters_on_several_gpus_are_refused(model_folder: Callable[..., Path]) -> None:
    loaded = in_order(load_model(model_folder("llama"), torch.bfloat16, CPU, native=False))
    ranks: Any = object()
    with pytest.raises(ModelError, match="leave enable_lora or batch_invariant out, or use one GPU"):
        Adapters(loaded, LoRAConfig(1, 8, 1), "base", ranks)
