"""Layers without attention on a GPU: each convolution or recurrence is one launch, here in Triton's interpreter."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from reference import device
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TokenTree
from specinfer.drafters import SmallModelDrafter
from specinfer.model.batch import Piece
from specinfer.model.load import load_model
from specinfer.model.recurrent import mixer
from specinfer.model.recurrent.layers import is_recurrent
from specinfer.model.recurrent.linear import ShortConv
from specinfer.model.runner import ModelRunner
from specinfer.ops import kernels, layer_ops
from specinfer.ops.cpu.recurrence import ConvolutionCall, RecurrenceCall
from specinfer.ops.scan_order import ScanOrder
from tiny import HYBRIDS, VOCAB, make_engine, make_model, make_request, quick, random_prompts, run

pytest.importorskip("triton")
from interpreter import interpreted
from specinfer.ops.triton import recurrence

pytestmark = interpreted
Runners = Callable[..., ModelRunner]
NUM_TOKENS = 4  # the interpreter takes long
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
PROMPTS = random_prompts([3, 8])


class Launches(Counter[str]):
    """The launches of each kernel; tensors seem to be on a GPU while `are_on`."""

    are_on = False


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = Launches()

    def counted(name: str) -> Callable[..., torch.Tensor]:
        kernel = getattr(recurrence, name)

        def launch(*args: Any) -> torch.Tensor:
            launches[name] += 1
            found: torch.Tensor = kernel(*args)
            return found

        return launch

    launching = {name: counted(name) for name in ("convolve", "recur")}
    monkeypatch.setattr(kernels, "back_end", lambda name: (launching if launches.are_on else device.OPERATIONS)[name])
    monkeypatch.setattr(mixer, "_is_native", lambda _: False)
    return launches


@pytest.mark.parametrize("family", HYBRIDS)
def test_what_kernels_read_is_on_the_device(
    family: str, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an ordinary pass of a tree, on a device without numbers."""
    meta = torch.device("meta")
    loaded = load_model(model_folder(family), torch.bfloat16, torch.device("cpu"), native=False)
    model = loaded.model.to(meta)
    for module in model.modules():  # made when the model was loaded
        module.__dict__.pop("calls", None)
        module.__dict__.pop("_call", None)
    runner, calls = ModelRunner(replace(loaded, device=meta), 64), Counter[str]()

    def convolve(inputs: Tensor, paths: Tensor, call: ConvolutionCall) -> Tensor:
        calls["convolve"] += 1
        _on_device(inputs, paths, call.weight, call.bias)
        return torch.empty(len(paths), inputs.shape[2], device=meta)

    def recur(mixed: Tensor, call: RecurrenceCall, order: ScanOrder, stored: Tensor, pool: Tensor | None) -> Tensor:
        calls["recur"] += 1
        tensors = [value for name in ScanOrder.__slots__ if isinstance(value := getattr(order, name), Tensor)]
        _on_device(mixed, call.bias, call.decay, call.skip, *tensors, stored, pool)
        assert {one.dtype for one in (mixed, call.decay)} == {torch.float32}
        assert {one.dtype for one in tensors} == {torch.int64}
        return torch.empty(order.num_results, call.sizes.num_heads, call.sizes.value_dim, device=meta)

    monkeypatch.setattr(layer_ops, "convolve", convolve)
    monkeypatch.setattr(layer_ops, "recur", recur)
    tree = TokenTree((1, 2, 3, 4), (-1, 0, 0, 1))
    logits = runner.forward([Piece.from_span([5, 6, 1], tree, np.arange(4), np.arange(4, 10))])
    assert logits.shape == (4, loaded.num_logits)
    layers = [module for module in model.modules() if is_recurrent(module)]
    assert calls["convolve"] == len(layers)
    assert calls["recur"] == sum(not isinstance(one, ShortConv) for one in layers)


def _on_device(*tensors: Tensor | None) -> None:
    assert all(one is None or (one.is_meta and one.is_contiguous()) for one in tensors)


_TREES_OF = ("lfm2", "qwen3_5_text", "bamba", "mamba", "bailing_hybrid", "recurrent_gemma")


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_kept", [3, 16])
@pytest.mark.parametrize(
    "family", quick(_TREES_OF, "lfm2", "qwen3_5_text", "bamba", "mamba", "recurrent_gemma")
)  # the others' recurrences are in tests/ops/test_recurrence.py, and take seconds here
def test_trees_over_kernels_give_the_tokens_of_plain_decoding(
    family: str, num_kept: int, runner_of: Runners, launched: Launches
) -> None:
    """The drafter's layers are PyTorch's: the interpreter takes long, and they would be the same kernels once more."""
    folders = (runner_of(family, *args).loaded.folder for args in ((), (0, 0.15)))
    loaded, other = (load_model(one, torch.float32, torch.device("cpu"), native=False) for one in folders)
    target, drafter = (ModelRunner(one, 512, num_states=num_kept) for one in (loaded, other))
    forward, num_passes = target.forward, 0

    def passes(pieces: Any) -> torch.Tensor:
        nonlocal num_passes
        num_passes += 1
        before, launched.are_on = dict(launched), True
        found = forward(pieces)
        launched.are_on = False
        layers = [module for module in loaded.model.modules() if is_recurrent(module)]
        assert launched["convolve"] - before.get("convolve", 0) == len(layers)
        assert launched["recur"] - before.get("recur", 0) == sum(not isinstance(one, ShortConv) for one in layers)
        return found

    target.forward = passes  # type: ignore[method-assign]
    engine = make_engine(target, SmallModelDrafter(drafter, VOCAB, "small"), (2, 2), max_num_batched_tokens=16)
    found = run(engine, [make_request(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)])
    assert found == [reference.greedy(make_model(family), prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert num_passes
