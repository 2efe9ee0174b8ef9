"""Every supported family: one pass over a tree gives transformers' logits on each path; others are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import sweep
import tiny
from native_layers import check_tree_logits
from specinfer import LLM
from specinfer.core.errors import ModelError
from specinfer.model.adapters.sites import connect
from specinfer.model.heads.load import shows_hidden_states
from specinfer.model.layers import families as layer_families
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load import load_model
from specinfer.model.recurrent import scan
from specinfer.model.recurrent.layers import LOOP_REPLACED
from specinfer.model.runner import ModelRunner
from tiny import (
    FAMILIES,
    GEMMA_4,
    HYBRIDS,
    KINDS_OF_HYBRIDS,
    MORE_FUSED,
    VOCAB,
    load_runner,
    make_model,
    quick,
)

CPU = torch.device("cpu")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama yarn": (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    ),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "falcon sequential": ("falcon-7b", {"parallel_attn": False}),
    "falcon one norm": ("falcon", {"num_ln_in_parallel_attn": 1}),
    "falcon 5 heads": ("falcon-rw", {"num_attention_heads": 5, "hidden_size": 40}),
    "bloom post norm": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "bloom 6 heads": ("bloom", {"n_head": 6, "hidden_size": 48}),
    "mpt clipped": ("mpt", {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.2}}),
    "mpt 6 heads": ("mpt", {"n_heads": 6, "d_model": 48}),
    "opt post norm": ("opt", {"do_layer_norm_before": False}),
    "opt projected": ("opt", {"word_embed_proj_dim": 16}),
    "gpt2 scaled": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    "neox parallel": ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 0.5}),
    "bigcode heads": ("gpt_bigcode", {"multi_query": False}),
    "phi3 partial": ("phi3", {"partial_rotary_factor": 0.5}),
    "llama linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama 3": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
}
# Native layers of the slow ones are compared with chains and with transformers in test_native_layers.
CASES = [*FAMILIES, *quick(MORE_FUSED), *GEMMA_4, *HYBRIDS]


@pytest.mark.parametrize("name", [*CASES, *VARIANTS])
def test_tree_logits_are_those_of_each_path(name: str, model_folder: Callable[..., Path]) -> None:
    family, changes = VARIANTS.get(name, (name, {}))
    check_tree_logits(make_model(family, **changes), load_runner(model_folder(family, **changes), 256))


@pytest.mark.parametrize(
    "family",
    ["lfm2-biased", "qwen3_next", "bamba", "mamba", "kimi_linear", "bailing_hybrid", "recurrent_gemma", "minimax"],
)
def test_convolutions_and_recurrences_are_the_same_without_native_kernels(
    family: str, model_folder: Callable[..., Path]
) -> None:
    loaded = load_model(model_folder(family), torch.float32, CPU, native=False)
    check_tree_logits(make_model(family), ModelRunner(loaded, 256))


@pytest.mark.parametrize("family", quick(HYBRIDS, *KINDS_OF_HYBRIDS))
def test_a_node_that_continues_another_branch_is_noticed(
    family: str, runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The known-wrong arm: convolutions and recurrences follow the order of the batch instead of each path."""

    monkeypatch.setattr(
        scan, "parents_of", lambda piece: np.arange(-1, len(piece.prefix_slots) + piece.visible.shape[1] - 1)
    )
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_tree_logits(make_model(family), runner_of(family))


@pytest.mark.parametrize("family", [*FAMILIES, *quick(MORE_FUSED), *HYBRIDS])
def test_which_are_fused(family: str, runner_of: Callable[..., ModelRunner]) -> None:
    assert isinstance(runner_of(family).loaded.model, FusedDecoder) == (family.split("-")[0] in layer_families.FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_layer_stores(family: str, runner_of: Callable[..., ModelRunner]) -> None:
    loaded = runner_of(family).loaded
    config = FAMILIES[family]
    layers = next(config[name] for name in ("num_hidden_layers", "n_layer", "n_layers") if name in config)
    assert len(loaded.layer_shapes) == layers
    assert (loaded.vocab_size, loaded.max_position) == (VOCAB, 256)
    heads = {"falcon": 2, "falcon-7b": 1, "gpt_bigcode": 1}.get(family, config.get("num_key_value_heads") or 4)
    assert {(s.num_kv_heads, s.key_dim, s.value_dim) for s in loaded.layer_shapes} == {(heads, 8, 8)}


# Rotations that depend on the longest text in the pass: a request would change with its neighbours.
DYNAMIC: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3 longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
        },
    ),
    "llama dynamic": (
        "llama",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 16}},
    ),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_variants_that_know_their_neighbours_are_right_or_refused(name: str, tmp_path: Path) -> None:
    family, changes = DYNAMIC[name]
    model = make_model(family, **changes)
    model.save_pretrained(tmp_path)
    _check_right_or_refused(model, tmp_path, max_model_len=16)


# Not promised, but transformers can build them, so somebody will try: silently wrong is the one thing not allowed.
OTHERS: dict[str, dict[str, Any]] = {
    "phimoe": {"num_local_experts": 4, "sliding_window": 8},  # its window is in the mask only
    "qwen2_moe": tiny._MOE | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4},
    "cohere2": {"sliding_window": 8},
    "olmo3": {"sliding_window": 8},
    "exaone4": {"sliding_window": 8},
    "ministral": {"sliding_window": 8, "head_dim": 8},
    "granite": {"embedding_multiplier": 2.0, "attention_multiplier": 0.3},
    "stablelm": {},
    "phi": {},
    "glm4": {"head_dim": 8},
    "smollm3": {"no_rope_layers": [1, 0]},
    "deepseek_v3": {
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    },
}  # fmt: skip


def _config(family: str, **changes: Any) -> Any:
    return AutoConfig.for_model(family, **(FAMILIES["llama"] | {"pad_token_id": 0} | changes))


def _random(config: Any) -> Any:
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 0.15 if "embed" not in name else 0.5)
    return model.eval()


def _check_right_or_refused(model: Any, folder: Path, max_model_len: int | None = None) -> None:
    refusal, runner = "", None
    try:
        runner = ModelRunner(load_model(folder, torch.float32, CPU, max_model_len=max_model_len), 256)
    except ModelError as error:
        refusal = str(error)
    if runner is None:
        assert f"'{model.config.model_type}'" in refusal
    else:
        check_tree_logits(model, runner)


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_right_or_refused(family: str, tmp_path: Path) -> None:
    model = _random(_config(family, **OTHERS[family]))
    model.save_pretrained(tmp_path)
    _check_right_or_refused(model, tmp_path)


@pytest.mark.parametrize("family", ["bert", "electra", "rwkv", "xlstm"])
def test_what_cannot_run_is_refused_by_name(family: str, tmp_path: Path) -> None:
    sweep.tiny_model(family).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"'{family}'"):
        load_model(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize("family", sorted(LOOP_REPLACED))
def test_stages_of_a_definition_that_is_replaced_are_refused_with_the_remedy(family: str, tmp_path: Path) -> None:
    tiny.save_model(tmp_path, family)
    with pytest.raises(ModelError, match=r"^pipeline_parallel_size: .*; use 1, or tensor"):  # before ranks are started
        LLM(tmp_path, drafters=[], pipeline_parallel_size=2)


@pytest.mark.parametrize("family", HYBRIDS)
def test_heads_are_refused_where_a_definition_is_replaced(family: str, runner_of: Callable[..., ModelRunner]) -> None:
    model: Any = load_model(runner_of(family).loaded.folder, torch.float32, CPU, native=False).model
    assert shows_hidden_states(model.config) == hasattr(model, "get_decoder")


def test_adapters_change_only_what_is_computed_for_the_rows_of_a_pass(tmp_path: Path) -> None:
    sites = connect(load_runner(tiny.save_model(tmp_path, "jamba"), 64).loaded)
    names = {part.rpartition(".")[2] for site in sites for part in site.parts}
    assert {"in_proj", "x_proj", "out_proj", "q_proj"} <= names
    assert "dt_proj" not in names  # of the scan, which may be more


@pytest.mark.parametrize("family", ["t5", "bart", "whisper", "vit", "clip"])
def test_what_is_no_decoder_is_refused_by_name(family: str, tmp_path: Path, model_folder: Callable[..., Path]) -> None:
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(model_folder("llama") / "model.safetensors")
    with pytest.raises(ModelError, match=f"'{family}'"):
        load_model(tmp_path, torch.float32, CPU)
