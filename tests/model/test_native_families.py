"""Native layers of families that differ from Llama in little: transformers' results, and the same bits in any pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from native_layers import CPU, PROMPT, error, last_logits, load, make, saved
from specinfer.model.layers.device import can_fuse_on_device
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load import load_model
from tests.model.native_checks import (
    change_attentions,
    change_experts,
    check_change_shows,
    check_logits,
    check_rounding,
    check_trees,
)
from tiny import MORE_FUSED, make_model

SPARSE = {"qwen3_moe", "mixtral"} | {name for name in MORE_FUSED if "num_experts_per_tok" in MORE_FUSED[name]}
FAMILIES = sorted(SPARSE | MORE_FUSED.keys() | {"phi3", "olmo_hybrid"})


def biased(family: str, **changes: Any) -> Any:
    """A model with all biases, also those of the choice of experts, and norms that are not those it begins with."""
    model = make(family, **changes)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += torch.randn_like(buffer)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = biased(family)
    check_logits(model, tmp_path)


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "quantization"), [(torch.bfloat16, None), (torch.bfloat16, "int8"), (torch.float32, "int4")]
)
def test_rounding_errors_are_those_of_the_definition(
    family: str, dtype: torch.dtype, quantization: str | None, tmp_path: Path
) -> None:
    model = biased(family)
    check_rounding(model, tmp_path, dtype, quantization)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "quantization"), [(torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, "int4")]
)
@pytest.mark.covering(1)
def test_trees_have_the_bits_of_chains(
    family: str, dtype: torch.dtype, quantization: str | None, model_folder: Callable[..., Path]
) -> None:
    loaded = load_model(model_folder(family), dtype, CPU, quantization)
    check_trees(loaded)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts in every other layer": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "weights of experts as they are scored": ("qwen2_moe-mixed", {"norm_topk_prob": False}),
    "a window in some layers": ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "no norms of queries and keys": ("glm4_moe-grouped", {"use_qk_norm": False}),
    "one head of keys": ("olmo2", {"num_key_value_heads": 1}),
    "as many heads of keys": ("olmo2", {"num_key_value_heads": 4}),
    "all of a head rotated in pairs": ("glm", {"partial_rotary_factor": 1.0}),
    "no rotation": ("olmo_hybrid", {"rope_parameters": None}),
    "no window": ("exaone4-mixed", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "a part of a head rotated": ("phi3", {"partial_rotary_factor": 0.5}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_compute_what_transformers_does(name: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[name]
    model = biased(family, **changes)
    check_logits(model, tmp_path)


def _rotated(decoder: FusedDecoder) -> None:
    layer = next(one for one in decoder.layers if one.rotation is None)
    assert layer.attention is not None
    layer.attention = layer.attention._replace(rotation=())
    layer._mixers.clear()
    decoder.stack.calls.clear()


def _parts(decoder: FusedDecoder, **changes: Any) -> None:
    for part in decoder.layers[0].call.parts:
        for name, value in changes.items():
            setattr(part._structure, name, value)


MUTATIONS: dict[str, tuple[str, Callable[[FusedDecoder], None]]] = {
    "halves of heads rotated together": ("ernie4_5", lambda it: change_attentions(it, rotates_pairs=0)),
    "neighbours rotated together": ("olmo2", lambda it: change_attentions(it, rotates_pairs=1)),
    "a norm for each head": ("olmo2", lambda it: change_attentions(it, joins_heads=0)),
    "a layer that rotates": ("smollm3-mixed", lambda it: _rotated(it)),
    "what the part before has read": ("olmo2", lambda it: _parts(it, skips_norm=0)),
    "experts by another score": ("glm4_moe-grouped", lambda it: change_experts(it, scores=0)),
    "experts without a bias of their choice": ("ernie4_5_moe", lambda it: change_experts(it, bias=None)),
    "experts of any group": ("solar_open", lambda it: change_experts(it, chosen_groups=4)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_part_that_is_wrong_shows(name: str, tmp_path: Path) -> None:
    """Else the tests above would not show it."""
    family, mutate = MUTATIONS[name]
    model = biased(family)
    check_change_shows(model, tmp_path, mutate)


def test_fields_that_native_layers_do_not_know_leave_the_model_to_transformers(tmp_path: Path) -> None:
    model = make("olmoe", clip_qkv=0.5)
    wanted = reference.last_logits(model, PROMPT)
    runner = load(saved(model, tmp_path))
    assert not isinstance(runner.loaded.model, FusedDecoder)
    assert error(last_logits(runner), wanted) < 1e-5


def test_on_gpus_layers_that_differ_from_llamas_are_not_fused() -> None:
    gpu = torch.device("cuda")
    assert can_fuse_on_device(make_model("seed_oss"), gpu)
    for family in ("smollm3-mixed", "granite", "olmo2", "ernie4_5", "glm4", "qwen3_moe"):
        assert not can_fuse_on_device(make_model(family), gpu)
