"""Tiny random models of every supported family, built from configs: no downloads."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 96
_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_HEAD = {"head_dim": 8}
_WINDOW = {"sliding_window": 8}
_GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "eos_token_id": None,
        "bos_token_id": None}  # fmt: skip
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "opt": {"vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 256, "word_embed_proj_dim": 32, "eos_token_id": None, "bos_token_id": None,
            "pad_token_id": None},
    "falcon": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
               "max_position_embeddings": 256, "eos_token_id": None, "bos_token_id": None, "alibi": False,
               "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-7b": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                  "max_position_embeddings": 256, "eos_token_id": None, "bos_token_id": None, "multi_query": True,
                  "new_decoder_architecture": False, "alibi": False},
    "falcon-rw": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                  "max_position_embeddings": 256, "eos_token_id": None, "bos_token_id": None, "multi_query": False,
                  "new_decoder_architecture": False, "alibi": True, "parallel_attn": False, "bias": True},
    "mpt": {"vocab_size": VOCAB, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "eos_token_id": None},
    "gpt_bigcode": _GPT,
    "mistral": _LLAMA | _WINDOW | _HEAD,
    "mixtral": _LLAMA | _WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | _HEAD,
    "qwen3_moe": _LLAMA | _HEAD | _MOE,
    "gemma2": _LLAMA | _WINDOW | _HEAD | {"query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0,
                                         "attn_logit_softcapping": 2.0},
    "gemma3_text": _LLAMA | _WINDOW | _HEAD | {"query_pre_attn_scalar": 8, "num_hidden_layers": 3,
                                              "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "phi3": _LLAMA | _WINDOW,
    "gpt2": _GPT,
    "gpt_neox": _LLAMA | {"num_key_value_heads": None},
    "starcoder2": _LLAMA | _WINDOW,
    "gpt_oss": _LLAMA | _WINDOW | _HEAD | {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2},
}  # fmt: skip


def make_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random model in fp32, with weights large enough that its greedy text is not one repeated token."""
    config = AutoConfig.for_model(family.split("-")[0], **(FAMILIES[family] | changes))
    torch.manual_seed(seed)
    # Eager knows soft caps and sinks; but Falcon's adds its ALiBi twice.
    config._attn_implementation = "sdpa" if family.startswith("falcon") else "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 0.15 if "embed" not in name else 0.5)
            elif "sinks" in name:
                weight.normal_(0.0, 1.0)
    return model.eval()


def save_model(folder: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """The same, as a folder of safetensors."""
    make_model(family, seed, **changes).save_pretrained(folder)
    return folder
