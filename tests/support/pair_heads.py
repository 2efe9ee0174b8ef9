"""Tiny EAGLE-1 heads and targets with MTP layers, by public names."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from heads import TINY, layer_shapes, random_tensors, save_head
from reference.heads import SlowPair, norm

LAYERS = 2
_MLA = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DEEPSEEK_MOE = _MOE | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_HYBRID = {  # the last layer becomes the MTP layer
    "layer_types": ["linear_attention", *["full_attention"] * LAYERS], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
}  # fmt: skip


class MtpNames(NamedTuple):
    """The names of the tensors of an MTP layer; see `specinfer.model.heads.mtp.Layout`."""

    embedding_norm: str
    feature_norm: str
    join: str
    output_norm: str | None
    block: str


_DEEPSEEK = MtpNames(
    *(f"model.layers.{LAYERS}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    f"model.layers.{LAYERS}.",
)
# By family: changes of its configuration with one layer more than the target, and the names in the checkpoint.
MTP_FAMILIES: dict[str, tuple[dict[str, Any], MtpNames]] = {
    "deepseek_v3": (_MLA | _DEEPSEEK_MOE, _DEEPSEEK),
    "glm4_moe": (TINY | _DEEPSEEK_MOE | {"use_qk_norm": True}, _DEEPSEEK),
    "glm4_moe_lite": (_MLA | _DEEPSEEK_MOE, _DEEPSEEK),
    "mimo": (
        TINY,
        MtpNames(
            *(f"model.mtp_layers.0.{name}"
              for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),
            "model.mtp_layers.0.",
        ),
    ),
    "mimo_v2_flash": (
        TINY | _MOE | {
            "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "dense"],
        },
        MtpNames(
            *(f"model.mtp.layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")),
            "model.mtp.layers.0.",
        ),
    ),
    "ernie4_5_moe": (
        TINY | {
            "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1, "moe_layer_end_index": LAYERS - 1,
        },
        MtpNames("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", None,
                 "model.mtp_block.0."),
    ),
    "qwen3_next": (
        TINY | _MOE | _HYBRID | {"num_experts": 4, "shared_expert_intermediate_size": 24},
        MtpNames("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0."),
    ),
    "qwen3_5_moe_text": (
        TINY | _MOE | _HYBRID | {"num_experts": 4, "shared_expert_intermediate_size": 24},
        MtpNames("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0."),
    ),
    "qwen3_5_text": (
        TINY | _HYBRID,
        MtpNames("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0."),
    ),
}  # fmt: skip
_SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def save_eagle(
    folder: Path,
    *,
    family: str = "llama",
    bias: bool = False,
    own_embedding: bool = True,
    pickled: bool = False,
    drop: Sequence[str] = (),
    target_width: int = 32,
    **fields: Any,
) -> Path:
    """Write an EAGLE-1 head as its authors publish it: with the configuration of a Llama of one layer."""
    shapes: dict[str, Sequence[int]] = {"fc.weight": (32, 32 + target_width), **layer_shapes("layers.0.")}
    if own_embedding:
        shapes["embed_tokens.weight"] = (96, 32)
    tensors = random_tensors(shapes)
    if bias:
        tensors["fc.bias"] = torch.randn(32, generator=torch.Generator().manual_seed(1))
    config = TINY | {
        "architectures": ["LlamaForCausalLM"], "model_type": family, "vocab_size": 96, "num_hidden_layers": 1,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "bias": bias,
    }  # fmt: skip
    return save_head(folder, tensors, config | fields, drop=drop, pickled=pickled)


# --------------------------------------------------------------------------------------------- MTP


def save_mtp(folder: Path, family: str, *, is_normed: bool = True) -> tuple[Any, SlowPair]:
    """Write a target with an MTP layer, and return the target as transformers has it, and the slow layer.

    A model with one layer more is made, whose last layer becomes the MTP layer.
    """
    changes, names = MTP_FAMILIES[family]
    known = "qwen2" if family == "mimo" else family
    config = AutoConfig.for_model(known, **(_SIZES | changes | {"num_hidden_layers": LAYERS + 1}))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            weight.normal_(0.0, 0.15 if "embed" not in name else 0.5)
        elif "norm" in name:
            weight.add_(torch.randn_like(weight) * 0.2)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    block = model.model.layers[LAYERS]
    tensors = _with_layout(load_file(folder / "model.safetensors"), names)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    for name in ("layer_types", "mlp_layer_types"):
        if fields.get(name):
            fields[name] = fields[name][:LAYERS]
    fields |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1, "model_type": family}
    (folder / "config.json").write_text(json.dumps(fields))
    del model.model.layers[LAYERS]
    model.config.num_hidden_layers = LAYERS
    return model, _slow_mtp(model, block, tensors, names, family, is_normed=is_normed)


def _with_layout(tensors: Mapping[str, Tensor], names: MtpNames) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint whose last layer is an MTP layer, with those around it."""
    last, found = f"model.layers.{LAYERS}.", {}
    for name, tensor in tensors.items():
        if name.startswith(last):
            name = names.block + name.removeprefix(last)
            if names.block.startswith("model.mtp.layers"):
                name = name.replace("post_attention_layernorm", "pre_mlp_layernorm")
        found[name] = tensor
    norms = [name for name in (names.embedding_norm, names.feature_norm, names.output_norm) if name]
    shapes = {f"{name}.weight": (32,) for name in norms} | {f"{names.join}.weight": (32, 64)}
    found |= random_tensors(shapes, seed=3)
    if names.block.startswith("model.layers"):  # copies, as these checkpoints have
        found[f"{names.block}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        found[f"{names.block}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return found


def _slow_mtp(
    model: Any, block: Any, w: Mapping[str, Tensor], names: MtpNames, family: str, *, is_normed: bool
) -> SlowPair:
    """Return the formulas, with the decoder layer of transformers in their middle."""
    is_qwen_next, config = names.block.startswith("mtp."), model.config
    eps, offset = config.rms_norm_eps, 1.0 if is_qwen_next else 0.0
    kinds = ["sliding_attention"] if family == "mimo_v2_flash" else []

    def layer(u: Tensor) -> Tensor:
        places = torch.arange(len(u))
        distance = places[:, None] - places
        seen = (distance >= 0) & (distance < (config.sliding_window if kinds else len(u)))
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        rotation = model.model.rotary_emb(u[None], places[None], *kinds)
        out = block(u[None], attention_mask=mask, position_ids=places[None], position_embeddings=rotation)
        return (out[0] if isinstance(out, tuple) else out)[0]

    def normed(name: str) -> Callable[[Tensor], Tensor]:
        return lambda x: norm(x, w[f"{name}.weight"] + offset, eps)

    return SlowPair(
        model.model.embed_tokens.weight.detach(),
        model.lm_head.weight.detach(),
        lambda x: x @ w[f"{names.join}.weight"].T,
        layer,
        embedding_norm=normed(names.embedding_norm),
        feature_norm=normed(names.feature_norm),
        output_norm=normed(names.output_norm or "model.norm"),
        feature_is_first=family == "mimo",
        blanks_first=not is_qwen_next,
        is_normed=is_normed,
    )
