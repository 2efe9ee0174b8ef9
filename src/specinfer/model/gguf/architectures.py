"""Architectures of GGUF files: transformers' names for llama.cpp's tensors, and what llama.cpp's converter changes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from specinfer.model.gguf.weights import Weight

_QKV = ("attn_q", "attn_k", "attn_v")
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A kind of model as llama.cpp stores it.

    Attributes:
        family: transformers' model_type.
        model_class: transformers' class.
        norms: transformers' names of a layer's norms, by llama.cpp's.
        norm_offset: Number by which stored norms are larger.
        has_pairs: Whether rows of queries and keys that are rotated together are stored side by side.
        has_qk_norms: Whether queries and keys are normalized.
        has_experts: Whether layers have routed experts.
        stacks_experts: Whether transformers' checkpoints have experts as stacks, too, see `StackedSource`.
        has_sinks: Whether attention has sinks.
        is_merged: Whether queries, keys and values are one matrix, and so are gates and values.
        biased: Matrices that have biases; of other architectures those of the attention, if the file has them.
    """

    family: str
    model_class: str
    norms: Mapping[str, str] = field(default_factory=lambda: _NORMS)
    norm_offset: float = 0.0
    has_pairs: bool = False
    has_qk_norms: bool = False
    has_experts: bool = False
    stacks_experts: bool = False
    has_sinks: bool = False
    is_merged: bool = False
    biased: tuple[str, ...] = ()


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", has_pairs=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", biased=_QKV),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", has_qk_norms=True),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", has_qk_norms=True, has_experts=True),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _GEMMA_NORMS, 1.0),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _GEMMA_NORMS, 1.0, has_qk_norms=True),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", is_merged=True),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
        has_experts=True,
        stacks_experts=True,
        has_sinks=True,
        biased=(*_QKV, "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    ),
}


def plan_weights(name: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Weight]]:
    """Yield the tensors that a file of this configuration must have, and the model's weights; experts share tensors.

    Args:
        name: Name of the architecture.
        fields: Fields of config.json.
    """
    arch, hidden, vocab = ARCHITECTURES[name], fields["hidden_size"], fields["vocab_size"]
    yield "token_embd.weight", Weight("model.embed_tokens.weight", (vocab, hidden))
    yield "output_norm.weight", Weight("model.norm.weight", (hidden,), less=arch.norm_offset)
    if not fields["tie_word_embeddings"]:
        yield "output.weight", Weight("lm_head.weight", (vocab, hidden))
    biased = (*_QKV, "attn_output") if fields.get("attention_bias") else arch.biased
    for i in range(fields["num_hidden_layers"]):
        here, there = f"blk.{i}.", f"model.layers.{i}."
        for stored, one in chain(_attention(arch, fields), _feed_forward(arch, fields)):
            yield f"{here}{stored}.weight", replace(one, name=f"{there}{one.name}.weight")
            if stored in biased:
                bias = replace(one, name=f"{there}{one.name}.bias", shape=one.shape[:1])
                yield f"{here}{stored}.bias", bias
        for stored, found in arch.norms.items():
            yield f"{here}{stored}.weight", Weight(f"{there}{found}.weight", (hidden,), less=arch.norm_offset)
        if arch.has_sinks:
            heads = (fields["num_attention_heads"],)
            yield f"{here}attn_sinks.weight", Weight(f"{there}self_attn.sinks", heads)
        for kind in "qk" if arch.has_qk_norms else "":
            found = f"{there}self_attn.{kind}_norm.weight"
            yield f"{here}attn_{kind}_norm.weight", Weight(found, (fields["head_dim"],), less=arch.norm_offset)


def _attention(arch: Architecture, fields: Mapping[str, Any]) -> Iterator[tuple[str, Weight]]:
    hidden, dim = fields["hidden_size"], fields["head_dim"]
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    if arch.is_merged:
        yield "attn_qkv", Weight("self_attn.qkv_proj", ((heads + 2 * kv_heads) * dim, hidden))
    else:
        yield "attn_q", Weight("self_attn.q_proj", (heads * dim, hidden), heads if arch.has_pairs else 0)
        yield "attn_k", Weight("self_attn.k_proj", (kv_heads * dim, hidden), kv_heads if arch.has_pairs else 0)
        yield "attn_v", Weight("self_attn.v_proj", (kv_heads * dim, hidden))
    yield "attn_output", Weight("self_attn.o_proj", (hidden, heads * dim))


def _feed_forward(arch: Architecture, fields: Mapping[str, Any]) -> Iterator[tuple[str, Weight]]:
    hidden, wide = fields["hidden_size"], fields["intermediate_size"]
    if arch.has_experts:
        count, narrow = (fields["num_local_experts"], wide) if arch.stacks_experts else (
            fields["num_experts"], fields["moe_intermediate_size"],
        )  # fmt: skip
        yield "ffn_gate_inp", Weight("mlp.router" if arch.stacks_experts else "mlp.gate", (count, hidden))
        for stored, found, shape in (
            ("ffn_gate_exps", "gate_proj", (narrow, hidden)),
            ("ffn_up_exps", "up_proj", (narrow, hidden)),
            ("ffn_down_exps", "down_proj", (hidden, narrow)),
        ):
            for i in range(count):
                yield stored, Weight(f"mlp.experts.{i}.{found}", shape, expert=i, num_experts=count)
    elif arch.is_merged:
        yield "ffn_up", Weight("mlp.gate_up_proj", (2 * wide, hidden))
        yield "ffn_down", Weight("mlp.down_proj", (hidden, wide))
    else:
        yield "ffn_gate", Weight("mlp.gate_proj", (wide, hidden))
        yield "ffn_up", Weight("mlp.up_proj", (wide, hidden))
        yield "ffn_down", Weight("mlp.down_proj", (hidden, wide))
