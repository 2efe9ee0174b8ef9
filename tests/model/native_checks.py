"""Checks of native layers against transformers and their own bits, and changes that such checks must find."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import reference
from native_layers import CPU, PROMPT, TREE, Reader, error, last_logits, load_fused, saved
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.layers.native import NativeLayer
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.runner import ModelRunner
from specinfer.ops import AttentionCall, ExpertsCall
from tiny import paths_of, random_prompts


def check_logits(model: Any, folder: Path) -> None:
    """Check that native layers compute what transformers does."""
    wanted = reference.last_logits(model, PROMPT)
    runner, _ = load_fused(model, folder)
    assert error(last_logits(runner), wanted) < 1e-5


def check_rounding(model: Any, folder: Path, dtype: torch.dtype, quantization: str | None) -> None:
    """Check that native layers round hardly more than the definition of transformers does."""
    wanted = reference.last_logits(model, PROMPT)
    saved(model, folder)
    runner, definition = (
        ModelRunner(load_model(folder, dtype, CPU, quantization, native=native), 64) for native in (True, False)
    )
    assert isinstance(runner.loaded.model, FusedDecoder)
    found, own = (error(last_logits(one), wanted) for one in (runner, definition))
    assert found < 1.5 * own + 0.01


def check_trees(loaded: LoadedModel) -> None:
    """Check that a tree's nodes have the bits of tokens that are read one at a time."""
    assert isinstance(loaded.model, FusedDecoder)
    reader = Reader(ModelRunner(loaded, 300))
    long, short = random_prompts([21, 3])
    reader.read("other", short)
    reader.read("long", long[:15])
    reader.read("long", long[15:])
    tree = reader.runner.forward([reader.piece("other", TREE), reader.piece("long", TREE)])[len(TREE) :]
    for node, path in enumerate(paths_of(TREE)):
        assert torch.equal(tree[node], reader.alone("alone", [*long, 8, *path]))


def check_change_shows(model: Any, folder: Path, change: Callable[[FusedDecoder], None]) -> None:
    """Check that logits are wrong after a change of the native layers: else `check_logits` would not find it."""
    wanted = reference.last_logits(model, PROMPT)
    runner, decoder = load_fused(model, folder)
    assert error(last_logits(runner), wanted) < 1e-5
    change(decoder)
    assert not error(last_logits(runner), wanted) < 1e-3


def change_plan(layer: NativeLayer, **changes: Any) -> None:
    """Set fields of the plan of a layer's attention."""
    assert layer.attention is not None
    layer.attention = layer.attention._replace(**changes)


def change_attentions(decoder: FusedDecoder, **changes: Any) -> None:
    """Set fields of the attention of all layers, one of which at least has another value."""
    found = 0
    for layer in decoder.layers:
        for mixers in layer._mixers.values():
            for call in mixers:
                if isinstance(call, AttentionCall):
                    for name, value in changes.items():
                        found += getattr(call._structure, name) != value
                        setattr(call._structure, name, value)
    assert found


def change_experts(decoder: FusedDecoder, **changes: Any) -> None:
    """Set fields of the experts of all layers, which have other values."""
    parts = [part for layer in decoder.layers for part in layer.call.parts if isinstance(part.between, ExpertsCall)]
    for part in parts:
        for name, value in changes.items():
            assert getattr(part.between._structure, name) != value
            setattr(part.between._structure, name, value)
