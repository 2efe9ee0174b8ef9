"""Kinds of decoder layers that native code computes: what differs from Llama's is what transformers computes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from native_layers import PROMPT, error, last_logits, load, load_fused, make, paired_call, saved
from specinfer.model.layers.device import can_fuse_on_device
from specinfer.model.layers.fused import FusedDecoder
from specinfer.ops import Attends, Ending, ExpertsCall, LayerCall, Opens
from tests.model.native_checks import change_plan
from tiny import HYBRIDS, make_model

# Tokens are the same at any position to what is turned alike: thetas that the short prompt tells apart.
_THETAS = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
}
GEMMA: dict[str, Any] = {"rope_parameters": _THETAS}
_GRANITE = {
    "residual_multiplier": 0.4, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "attention_multiplier": 0.2,
}  # fmt: skip
FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", GEMMA),
    "gemma3 by default": ("gemma3_text", {}),
    "gemma3 untied": ("gemma3_text", GEMMA | {"tie_word_embeddings": False}),
    "gemma3 biased": ("gemma3_text", GEMMA | {"attention_bias": True}),
    "gemma3 with soft caps": ("gemma3_text", GEMMA | {"final_logit_softcapping": 5.0}),
    "gemma3 with silu": ("gemma3_text", GEMMA | {"hidden_activation": "silu"}),
    "gemma3 with wide heads": ("gemma3_text", GEMMA | {"head_dim": 256, "query_pre_attn_scalar": 100}),
    "gemma3 with full attention first": (
        "gemma3_text",
        GEMMA | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "llama with gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "qwen3.5": ("qwen3_5_text", {}),
    "qwen3.5 biased": ("qwen3_5_text", {"attention_bias": True}),
    "qwen3.5 with more heads of values": ("qwen3_5_text", {"linear_num_key_heads": 1, "linear_num_value_heads": 6}),
    "bamba": ("bamba", {}),
    "bamba with a group of keys": ("bamba", {"mamba_n_groups": 1}),
    "lfm2": ("lfm2", {}),
    "lfm2 biased": ("lfm2", {"conv_bias": True, "conv_L_cache": 4}),
    "lfm2 with experts": ("lfm2_moe", {"routed_scaling_factor": 1.5}),
    "lfm2 with experts of no bias": ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False}),
    "qwen3-next": ("qwen3_next", {}),
    "qwen3-next without normalized weights": ("qwen3_next", {"norm_topk_prob": False}),
    "qwen3-next with a dense layer": ("qwen3_next", {"mlp_only_layers": [1]}),
    "qwen3-next with more heads of values": ("qwen3_next", {"linear_num_key_heads": 1, "linear_num_value_heads": 6}),
    "qwen3.5 with experts": ("qwen3_5_moe_text", {}),
    "granite 4": ("granitemoehybrid", _GRANITE),
    "granite 4 with rotation": ("granitemoehybrid", _GRANITE | {"position_embedding_type": "rope"}),
    "granite 4 without experts": ("granitemoehybrid", _GRANITE | {"num_local_experts": 0}),
    "nemotron-h": ("nemotron_h", {"routed_scaling_factor": 2.5}),
    "nemotron-h with groups of experts": (
        "nemotron_h", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    ),
    "nemotron-h biased": ("nemotron_h", {"use_bias": True, "mlp_bias": True}),
    "falcon-h1": ("falcon_h1", {}),
    "falcon-h1 with norms before gates": (
        "falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "mamba_n_groups": 1},
    ),
    "falcon-h1 with norms after gates": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "mamba-2": ("mamba2", {}),
    "mamba-2 biased": ("mamba2", {"use_bias": True, "n_groups": 1}),
}  # fmt: skip
NOT_FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3 with relu": ("gemma3_text", {"hidden_activation": "relu"}),
    "falcon-h1 biased": ("falcon_h1", {"projectors_bias": True}),
    "nemotron-h with latent experts": ("nemotron_h", {"moe_latent_size": 16}),
}


@pytest.mark.parametrize("name", [*FUSED, *NOT_FUSED])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, changes = (FUSED | NOT_FUSED)[name]
    model = make(family, **changes)
    wanted = reference.last_logits(model, PROMPT)
    runner = load(saved(model, tmp_path))
    assert isinstance(runner.loaded.model, FusedDecoder) == (name in FUSED)
    assert error(last_logits(runner), wanted) < (1e-5 if family in HYBRIDS else 2e-6)


@pytest.mark.parametrize(
    ("dtype", "quantization", "tolerance"),
    [
        (torch.bfloat16, None, 0.015),
        (torch.float16, None, 0.001),
        (torch.bfloat16, "int8", 0.04),
        (torch.float32, "int8", 0.04),
        (torch.float32, "int4", 0.25),
    ],
)
def test_gemma_in_less_precision(
    dtype: torch.dtype, quantization: str | None, tolerance: float, tmp_path: Path
) -> None:
    model = make("gemma3_text", **GEMMA)
    wanted = reference.last_logits(model, PROMPT)
    runner = load(saved(model, tmp_path), dtype, quantization)
    assert isinstance(runner.loaded.model, FusedDecoder)
    assert error(last_logits(runner), wanted) < tolerance


def _rebuilt(decoder: FusedDecoder, **changes: Any) -> None:
    """Gives the first layer another call."""
    layer, call = decoder.layers[0], decoder.layers[0].call
    mixing, opening = call.parts
    options = {
        "norms": _norms(call),
        "post_norms": _post_norms(call),
        "gate": opening.ending,
        "eps": layer.eps,
    } | changes
    linears: Any = (*mixing.linears, *opening.linears)
    layer.call = paired_call(linears, **options, recurrent=layer.recurrence)


def _norms(call: LayerCall) -> Any:
    return tuple(part.norm for part in call.parts)


def _post_norms(call: LayerCall) -> Any:
    return tuple(part.adds.post_norm for part in call.parts)


def _swap_norms(decoder: FusedDecoder) -> None:
    norms, post_norms = _norms(decoder.layers[0].call), _post_norms(decoder.layers[0].call)
    _rebuilt(decoder, norms=(norms[0], post_norms[0]), post_norms=(norms[1], post_norms[1]))


def _without_one(decoder: FusedDecoder) -> None:
    first, second = _norms(decoder.layers[0].call)
    _rebuilt(decoder, norms=(first - 1, second))


MUTATIONS: dict[str, Callable[[FusedDecoder], None]] = {
    "the other rotation": lambda it: change_plan(it.layers[0], rotation=it.layers[1].rotation),
    "no norms of what is added": lambda it: _rebuilt(it, post_norms=(None, None)),
    "silu for gelu": lambda it: _rebuilt(it, gate=Ending.GATED),
    "two norms swapped": _swap_norms,
    "a norm's weight as it is stored": _without_one,
    "no window": lambda it: change_plan(it.layers[0], window=None),
    "a window where there is none": lambda it: change_plan(it.layers[1], window=8),
    "no norm of keys": lambda it: it.layers[0].head_norms.__setitem__(1, None),
    "embeddings as they are stored": lambda it: setattr(it, "embedding_scale", 1.0),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_part_of_gemma_that_is_wrong_shows(name: str, tmp_path: Path) -> None:
    """Else the tests above would not show it."""
    model = make("gemma3_text", **GEMMA)
    wanted = reference.last_logits(model, PROMPT)
    runner, decoder = load_fused(model, tmp_path)
    MUTATIONS[name](decoder)
    assert error(last_logits(runner), wanted) > 1e-3


def _changed(decoder: FusedDecoder, **changes: Any) -> None:
    """Gives the first layer, a recurrence, other parts."""
    layer = decoder.layers[0]
    assert layer.recurrence is not None
    layer.recurrence = replace(layer.recurrence, **changes)
    _rebuilt(decoder)


def _width_of(decoder: FusedDecoder) -> int:
    recurrence = decoder.layers[0].recurrence
    assert recurrence is not None
    assert recurrence.norm is not None
    return len(recurrence.norm)


def _ungated(decoder: FusedDecoder) -> None:
    layer = next(layer for layer in decoder.layers if layer.recurrent is None)
    change_plan(layer, is_gated=False)


HYBRID_MUTATIONS: dict[str, tuple[str, Callable[[FusedDecoder], None]]] = {
    "gates before the norm": ("qwen3_5_text", lambda it: _changed(it, opens_first=True)),
    "no norm of results": ("qwen3_5_text", lambda it: _changed(it, norm=None)),
    "one norm over all heads": ("qwen3_5_text", lambda it: _changed(it, group=_width_of(it))),
    "inputs for gates": ("qwen3_5_text", lambda it: _changed(it, gates=0)),
    "other steps": ("qwen3_5_text", lambda it: _changed(it, steps=0)),
    "attention without gates": ("qwen3_5_text", _ungated),
    "the norm before gates": ("bamba", lambda it: _changed(it, opens_first=False)),
    "no factors of inputs": ("lfm2", lambda it: _changed(it, factors=None)),
    "gates with SiLU": ("lfm2", lambda it: _changed(it, activates=True)),
}


@pytest.mark.parametrize("name", HYBRID_MUTATIONS)
def test_a_part_of_a_hybrid_that_is_wrong_shows(name: str, tmp_path: Path) -> None:
    family, mutate = HYBRID_MUTATIONS[name]
    model = make(family)
    wanted = reference.last_logits(model, PROMPT)
    runner, decoder = load_fused(model, tmp_path)
    mutate(decoder)
    assert not error(last_logits(runner), wanted) < 1e-3


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "lfm2", "falcon_h1", "mamba2"])
@pytest.mark.parametrize(
    ("dtype", "quantization", "tolerance"),
    [(torch.bfloat16, None, 0.03), (torch.bfloat16, "int8", 0.06), (torch.float32, "int4", 0.4)],
)
def test_hybrids_in_less_precision(
    family: str, dtype: torch.dtype, quantization: str | None, tolerance: float, tmp_path: Path
) -> None:
    model = make(family)
    wanted = reference.last_logits(model, PROMPT)
    runner = load(saved(model, tmp_path), dtype, quantization)
    assert isinstance(runner.loaded.model, FusedDecoder)
    assert error(last_logits(runner), wanted) < tolerance


def _part_of(decoder: FusedDecoder, between: type[Any]) -> Any:
    parts = [part for layer in decoder.layers for part in layer.call.parts]
    return next(part for part in parts if isinstance(part.between, between))


def _with(structure: Any, **changes: Any) -> None:
    for name, value in changes.items():
        assert getattr(structure, name) != value
        setattr(structure, name, value)


def _routed(decoder: FusedDecoder, **changes: Any) -> None:
    _with(_part_of(decoder, ExpertsCall).experts._structure, **changes)


PART_MUTATIONS: dict[str, tuple[str, Callable[[FusedDecoder], None]]] = {
    "weights of experts as they are scored": ("qwen3_next", lambda it: _routed(it, normalizes=0)),
    "fewer experts": ("qwen3_next", lambda it: _routed(it, chosen=1)),
    "weights by sigmoids": ("qwen3_5_moe_text", lambda it: _routed(it, scores=1)),
    "weights by a softmax over all": ("granitemoehybrid", lambda it: _routed(it, scores=0)),
    "weights without a factor": ("granitemoehybrid", lambda it: _routed(it, factor=1.0)),
    "experts without a bias of their choice": ("nemotron_h", lambda it: _routed(it, bias=None)),
    "experts of lfm2 without a bias of their choice": ("lfm2_moe", lambda it: _routed(it, bias=None)),
    "a shared expert without a gate": (
        "qwen3_next", lambda it: _with(next(one for one in it.layers[0].call.parts if one.gate)._structure, gate=None),
    ),
    "values with gates": ("nemotron_h", lambda it: _with(_part_of(it, Opens)._structure, opening=1)),
    "results without a factor": ("falcon_h1", lambda it: _with(_part_of(it, Attends)._structure, factor=1.0)),
    "outputs without factors": ("falcon_h1", lambda it: _with(_part_of(it, Opens)._structure, scales=None)),
    "columns as they are computed": ("qwen3_next", lambda it: _changed_order(it)),
}  # fmt: skip


def _changed_order(decoder: FusedDecoder) -> None:
    layer = decoder.layers[0]
    assert layer.recurrence is not None
    layer.recurrence = replace(layer.recurrence, order=None)


@pytest.mark.parametrize("name", PART_MUTATIONS)
def test_a_part_of_a_layer_that_is_wrong_shows(name: str, tmp_path: Path) -> None:
    family, mutate = PART_MUTATIONS[name]
    many = {"nemotron_h": {"n_routed_experts": 8}, "lfm2_moe": {"num_experts": 8}}  # a choice that a bias changes
    changes = ({"granitemoehybrid": _GRANITE} | many).get(family, {})
    model = make(family, **changes)
    with torch.no_grad():
        for name_, buffer in model.named_buffers():
            if name_.endswith(("e_score_correction_bias", "expert_bias")):
                buffer += torch.randn_like(buffer)
    wanted = reference.last_logits(model, PROMPT)
    runner, decoder = load_fused(model, tmp_path)
    assert error(last_logits(runner), wanted) < 1e-5
    mutate(decoder)
    decoder.stack.calls.clear()
    for layer in decoder.layers:
        layer._mixers.clear()
    assert not error(last_logits(runner), wanted) < 1e-3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_embeddings_are_scaled_as_transformers_rounds_the_scale(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    model = make("gemma3_text", tie_word_embeddings=tied).to(dtype)
    runner, tokens = load(saved(model, tmp_path), dtype), torch.tensor(PROMPT)
    decoder = runner.loaded.model
    assert isinstance(decoder, FusedDecoder)
    assert decoder.embedding_scale != 32**0.5
    with torch.no_grad():
        assert torch.equal(decoder._first_hidden(tokens).to(dtype), model.model.embed_tokens(tokens))


def test_on_gpus_only_layers_of_llamas_kind_are_fused() -> None:
    gpu = torch.device("cuda")
    assert can_fuse_on_device(make_model("llama"), gpu)
    assert can_fuse_on_device(make_model("qwen3"), gpu)
    assert not can_fuse_on_device(make_model("gemma3_text"), gpu)
    assert not can_fuse_on_device(make_model("llama", hidden_act="gelu_pytorch_tanh"), gpu)
