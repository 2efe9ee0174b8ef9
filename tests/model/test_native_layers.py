"""Native layers: transformers' results, hardly more rounding than there, and the same bits in any pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from native_layers import CPU, PROMPT, TREE, Reader, check_rounding, error, last_logits, load, make, saved
from specinfer.core.tree import TokenTree
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load import load_model
from specinfer.model.runner import ModelRunner
from tiny import GEMMA_4, GRANITE, MORE_FUSED, random_prompts

SPARSE = {"qwen3_moe", "mixtral"} | {name for name in MORE_FUSED if "num_experts_per_tok" in MORE_FUSED[name]}
LIKE_LLAMA = sorted(SPARSE | MORE_FUSED.keys() | {"phi3", "olmo_hybrid"})
PLAIN = ["llama", "mistral", "qwen3", "gemma3_text"]
FUSED_HYBRIDS = ["qwen3_5_text", "bamba", "lfm2", "falcon_h1", "mamba2"]
# Tokens are the same at any position to what is turned alike: thetas that the short prompt tells apart.
THETAS = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
}
GEMMA: dict[str, Any] = {"rope_parameters": THETAS}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in (*LIKE_LLAMA, *GEMMA_4, *FUSED_HYBRIDS, "lfm2_moe", "qwen3_next")},
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
    "llama with gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "gemma3": ("gemma3_text", GEMMA),
    "gemma3 by default": ("gemma3_text", {}),
    "gemma3 untied": ("gemma3_text", GEMMA | {"tie_word_embeddings": False}),
    "gemma3 biased": ("gemma3_text", GEMMA | {"attention_bias": True}),
    "gemma3 with soft caps": ("gemma3_text", GEMMA | {"final_logit_softcapping": 5.0}),
    "gemma3 with silu": ("gemma3_text", GEMMA | {"hidden_activation": "silu"}),
    "gemma3 with wide heads": ("gemma3_text", GEMMA | {"head_dim": 256, "query_pre_attn_scalar": 100}),
    "gemma3 with full attention first": (
        "gemma3_text", GEMMA | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "gemma4 with heads of 512": ("gemma4_text-alike", {"head_dim": 256, "global_head_dim": 512}),
    "gemma4 with as many heads of keys": ("gemma4_text-alike", {"num_global_key_value_heads": 4}),
    "gemma4 untied and biased": ("gemma4_text-shared", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma4 with silu": ("gemma4_text-shared", {"hidden_activation": "silu"}),
    "gemma4 with inputs and experts": (
        "gemma4_text-moe",
        {"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2, "final_logit_softcapping": 5.0},
    ),
    "gemma4 with keys that are values, and shared": (
        "gemma4_text-alike", {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32},
    ),
    "qwen3.5 biased": ("qwen3_5_text", {"attention_bias": True}),
    "qwen3.5 with more heads of values": ("qwen3_5_text", {"linear_num_key_heads": 1, "linear_num_value_heads": 6}),
    "qwen3.5 with experts": ("qwen3_5_moe_text", {}),
    "bamba with a group of keys": ("bamba", {"mamba_n_groups": 1}),
    "lfm2 biased": ("lfm2", {"conv_bias": True, "conv_L_cache": 4}),
    "lfm2 with experts": ("lfm2_moe", {"routed_scaling_factor": 1.5}),
    "lfm2 with experts of no bias": ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False}),
    "qwen3-next without normalized weights": ("qwen3_next", {"norm_topk_prob": False}),
    "qwen3-next with a dense layer": ("qwen3_next", {"mlp_only_layers": [1]}),
    "qwen3-next with more heads of values": ("qwen3_next", {"linear_num_key_heads": 1, "linear_num_value_heads": 6}),
    "granite 4": ("granitemoehybrid", GRANITE),
    "granite 4 with rotation": ("granitemoehybrid", GRANITE | {"position_embedding_type": "rope"}),
    "granite 4 without experts": ("granitemoehybrid", GRANITE | {"num_local_experts": 0}),
    "nemotron-h": ("nemotron_h", {"routed_scaling_factor": 2.5}),
    "nemotron-h with groups of experts": (
        "nemotron_h", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    ),
    "nemotron-h biased": ("nemotron_h", {"use_bias": True, "mlp_bias": True}),
    "falcon-h1 with norms before gates": (
        "falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "mamba_n_groups": 1},
    ),
    "falcon-h1 with norms after gates": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "mamba-2 biased": ("mamba2", {"use_bias": True, "n_groups": 1}),
}  # fmt: skip
# Fields that native layers do not know leave the model to transformers.
NOT_FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3 with relu": ("gemma3_text", {"hidden_activation": "relu"}),
    "falcon-h1 biased": ("falcon_h1", {"projectors_bias": True}),
    "nemotron-h with latent experts": ("nemotron_h", {"moe_latent_size": 16}),
    "olmoe with clipped queries": ("olmoe", {"clip_qkv": 0.5}),
}
CLOSER = {"gemma3_text": 2e-6, "llama": 2e-6}
FORMATS = [
    (torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, "int8"), (torch.float32, "int8"),
    (torch.float32, "int4"),
]  # fmt: skip
WIDE = TokenTree((8, *range(20, 70)), (-1, *[0] * 50))


@pytest.mark.parametrize("name", [*CASES, *NOT_FUSED])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, changes = (CASES | NOT_FUSED)[name]
    model = make(family, **changes)
    wanted = reference.last_logits(model, PROMPT)
    runner = load(saved(model, tmp_path))
    assert isinstance(runner.loaded.model, FusedDecoder) == (name in CASES)
    assert error(last_logits(runner), wanted) < CLOSER.get(family, 1e-5)


@pytest.mark.parametrize("name", ["gemma4 with heads of 512", "gemma4 with inputs and experts"])
def test_all_instruction_sets_compute_what_transformers_does(isa: str, name: str, tmp_path: Path) -> None:
    test_logits_are_those_of_transformers(name, tmp_path)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", [*LIKE_LLAMA, *GEMMA_4, *FUSED_HYBRIDS, "gemma3"])
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS, ids=str)
def test_rounding_errors_are_those_of_the_definition(
    name: str, dtype: torch.dtype, quantization: str | None, tmp_path: Path
) -> None:
    family, changes = CASES[name]
    model = make(family, **changes)
    check_rounding(model, saved(model, tmp_path), dtype, quantization)


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", [*LIKE_LLAMA, *GEMMA_4, *FUSED_HYBRIDS[:3], *PLAIN])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_have_the_same_bits_in_any_pass(
    family: str, quantization: str | None, dtype: torch.dtype, model_folder: Callable[..., Path]
) -> None:
    """Nodes of trees have those of tokens that are read one at a time."""
    changes = {"global_head_dim": 288} if family in GEMMA_4 else {}
    loaded = load_model(model_folder(family, **changes), dtype, CPU, quantization)
    assert isinstance(loaded.model, FusedDecoder)
    reader = Reader(ModelRunner(loaded, 600))
    long, short = random_prompts([45, 3])
    reader.read("short", short)
    reader.read("long", long[:40])
    reader.read("long", long[40:])
    logits = reader.runner.forward([reader.piece("short", WIDE), reader.piece("long", TREE)])
    reader.check_bits(short, WIDE, logits[: len(WIDE)], every=17)
    reader.check_bits(long, TREE, logits[len(WIDE) :])


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
