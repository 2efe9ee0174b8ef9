"""Native layers of which one part is wrong have other logits: else comparisons with transformers would not see it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import reference
from native_layers import PROMPT, error, last_logits, load_fused, make, paired_call
from specinfer.model.layers.fused import FusedDecoder
from specinfer.ops import Attends, Ending, ExpertsCall, Opens
from tests.model.test_native_layers import GEMMA
from tiny import GRANITE

Change = Callable[[FusedDecoder], None]


def _plan(layers: range = range(9), **changes: Any) -> Change:
    """Set fields of the plans of attention, in those of these layers that have attention."""

    def change(decoder: FusedDecoder) -> None:
        for i, layer in enumerate(decoder.layers):
            if i in layers and layer.attention is not None:
                layer.attention = layer.attention._replace(**changes)

    return change


def _rotation_of(layer: int, other: int) -> Change:
    """Let a layer rotate as another one does."""

    def change(decoder: FusedDecoder) -> None:
        assert decoder.layers[layer].rotation != decoder.layers[other].rotation
        _plan(range(layer, layer + 1), rotation=decoder.layers[other].rotation)(decoder)

    return change


def _rotated(decoder: FusedDecoder) -> None:
    layer = next(layer for layer in decoder.layers if layer.rotation is None)
    assert layer.attention is not None
    layer.attention = layer.attention._replace(rotation=())


def _head_norms(decoder: FusedDecoder) -> None:
    """Norm the queries and the keys of each head alone."""
    for layer in decoder.layers:
        assert layer.attention is not None
        dim = layer.attention.head_dim
        layer.head_norms = [norm[:dim].clone() for norm in layer.head_norms if norm is not None]
        assert len(layer.head_norms) == 2


def _set(structures: list[Any], **changes: Any) -> None:
    """Set fields of structures, of which at least one has another value."""
    assert any(getattr(structure, name) != value for structure in structures for name, value in changes.items())
    for structure in structures:
        for name, value in changes.items():
            setattr(structure, name, value)


def _parts(between: type | None = None, number: int | None = None, **changes: Any) -> Change:
    """Set fields of the parts that have such a thing between their products, or this place in their layer."""

    def change(decoder: FusedDecoder) -> None:
        parts = [
            part
            for layer in decoder.layers
            for i, part in enumerate(layer.call.parts)
            if (between is None or isinstance(part.between, between)) and number in (None, i)
        ]
        _set([part._structure for part in parts], **changes)

    return change


def _experts(**changes: Any) -> Change:
    """Set fields of the experts of all layers."""

    def change(decoder: FusedDecoder) -> None:
        parts = [part.between for layer in decoder.layers for part in layer.call.parts]
        _set([experts._structure for experts in parts if isinstance(experts, ExpertsCall)], **changes)

    return change


def _ungate_shared_expert(decoder: FusedDecoder) -> None:
    _set([next(part for part in decoder.layers[0].call.parts if part.gate)._structure], gate=None)


def _rebuild(**changes: Any) -> Change:
    """Give the first layer another call: with arguments of `paired_call`."""

    def change(decoder: FusedDecoder) -> None:
        layer = decoder.layers[0]
        mixing, opening = layer.call.parts
        options: dict[str, Any] = {
            "norms": (mixing.norm, opening.norm),
            "post_norms": (mixing.adds.post_norm, opening.adds.post_norm),
            "gate": opening.ending,
            "eps": layer.eps,
        }
        linears: Any = (*mixing.linears, *opening.linears)
        layer.call = paired_call(linears, **options | changes, recurrent=layer.recurrence)

    return change


def _swap_norms(decoder: FusedDecoder) -> None:
    norms, post_norms = zip(*((part.norm, part.adds.post_norm) for part in decoder.layers[0].call.parts), strict=True)
    _rebuild(norms=(norms[0], post_norms[0]), post_norms=(norms[1], post_norms[1]))(decoder)


def _store_norm(decoder: FusedDecoder) -> None:
    first, second = (part.norm for part in decoder.layers[0].call.parts)
    assert first is not None
    _rebuild(norms=(first - 1, second))(decoder)


def _recurrence(**changes: Any) -> Change:
    """Let the recurrence of the first layer have other parts."""

    def change(decoder: FusedDecoder) -> None:
        layer = decoder.layers[0]
        assert layer.recurrence is not None
        layer.recurrence = replace(layer.recurrence, **changes)
        if len(layer.call.parts) == 2 and isinstance(layer.call.parts[1].between, Opens):
            _rebuild()(decoder)

    return change


def _join_groups(decoder: FusedDecoder) -> None:
    recurrence = decoder.layers[0].recurrence
    assert recurrence is not None
    assert recurrence.norm is not None
    _recurrence(group=len(recurrence.norm))(decoder)


FAMILY_CHANGES: dict[str, dict[str, Any]] = {
    "gemma3_text": GEMMA,
    "granitemoehybrid": GRANITE,
    # Choices that a bias changes.
    "nemotron_h": {"n_routed_experts": 8},
    "lfm2_moe": {"num_experts": 8},
}
MUTATIONS: dict[str, tuple[str, Change]] = {
    "halves of heads rotated together": ("ernie4_5", _plan(rotates_pairs=False)),
    "neighbours rotated together": ("olmo2", _plan(rotates_pairs=True)),
    "a norm for each head": ("olmo2", _head_norms),
    "a layer that rotates": ("smollm3-mixed", _rotated),
    "what the part before has read": ("olmo2", _parts(skips_norm=0)),
    "the other rotation": ("gemma3_text", _rotation_of(0, 1)),
    "one rotation for all": ("gemma4_text", _rotation_of(0, 1)),
    "no window": ("gemma3_text", _plan(range(1), window=None)),
    "a window where there is none": ("gemma3_text", _plan(range(1, 2), window=8)),
    "no norm of keys": ("gemma3_text", lambda it: it.layers[0].head_norms.__setitem__(1, None)),
    "values as they are": ("gemma4_text", _plan(has_value_norm=False)),
    "attention without gates": ("qwen3_5_text", _plan(is_gated=False)),
    "no norms of what is added": ("gemma3_text", _rebuild(post_norms=(None, None))),
    "silu for gelu": ("gemma3_text", _rebuild(gate=Ending.GATED)),
    "two norms swapped": ("gemma3_text", _swap_norms),
    "a norm's weight as it is stored": ("gemma3_text", _store_norm),
    "embeddings as they are stored": ("gemma3_text", lambda it: setattr(it, "embedding_scale", 1.0)),
    "hidden states as layers leave them": ("gemma4_text", _parts(hidden_factor=1.0)),
    "no cap": ("gemma4_text-shared", lambda it: setattr(it.head, "cap", None)),
    "inputs of the first layer for all": ("gemma4_text-shared", _parts(column=0)),
    "an MLP that is added alone": ("gemma4_text-moe", _parts(number=1, sum=0)),
    "a router that reads what experts read": ("gemma4_text-moe", _parts(router_norm=None)),
    "weights of experts without their scales": ("gemma4_text-moe", _experts(scales=None)),
    "experts by another score": ("glm4_moe-grouped", _experts(scores=0)),
    "experts without a bias of their choice": ("ernie4_5_moe", _experts(bias=None)),
    "experts of nemotron-h without a bias of their choice": ("nemotron_h", _experts(bias=None)),
    "experts of lfm2 without a bias of their choice": ("lfm2_moe", _experts(bias=None)),
    "experts of any group": ("solar_open", _experts(chosen_groups=4)),
    "weights of experts as they are scored": ("qwen3_next", _experts(normalizes=0)),
    "fewer experts": ("qwen3_next", _experts(chosen=1)),
    "weights by sigmoids": ("qwen3_5_moe_text", _experts(scores=1)),
    "weights by a softmax over all": ("granitemoehybrid", _experts(scores=0)),
    "weights without a factor": ("granitemoehybrid", _experts(factor=1.0)),
    "a shared expert without a gate": ("qwen3_next", _ungate_shared_expert),
    "values with gates": ("nemotron_h", _parts(Opens, opening=1)),
    "results without a factor": ("falcon_h1", _parts(Attends, factor=1.0)),
    "outputs without factors": ("falcon_h1", _parts(Opens, scales=None)),
    "columns as they are computed": ("qwen3_next", _recurrence(order=None)),
    "gates before the norm": ("qwen3_5_text", _recurrence(opens_first=True)),
    "no norm of results": ("qwen3_5_text", _recurrence(norm=None)),
    "one norm over all heads": ("qwen3_5_text", _join_groups),
    "inputs for gates": ("qwen3_5_text", _recurrence(gates=0)),
    "other steps": ("qwen3_5_text", _recurrence(steps=0)),
    "the norm before gates": ("bamba", _recurrence(opens_first=False)),
    "no factors of inputs": ("lfm2", _recurrence(factors=None)),
    "gates with SiLU": ("lfm2", _recurrence(activates=True)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_part_that_is_wrong_shows(name: str, tmp_path: Path) -> None:
    family, mutate = MUTATIONS[name]
    model = make(family, **FAMILY_CHANGES.get(family, {}))
    wanted = reference.last_logits(model, PROMPT)
    runner, decoder = load_fused(model, tmp_path)
    assert error(last_logits(runner), wanted) < 1e-5
    mutate(decoder)
    decoder.stack.calls.clear()
    for layer in decoder.layers:
        layer._mixers.clear()
    assert not error(last_logits(runner), wanted) < 1e-3
