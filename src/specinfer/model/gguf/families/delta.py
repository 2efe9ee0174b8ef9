"""Qwen3-Next and Qwen3.5: gated delta rule layers, and attention with gates.

Files of Qwen3-Next have its matrices as checkpoints of Qwen3.5 do, and are read as such: the families compute the same.
Its own checkpoints, from which files are written, have one matrix for queries, keys, values and gates.
In those of Qwen3.5, the heads of values are in another order than in checkpoints: first one of each head of keys, then
another one of each, and so on.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from specinfer.model.gguf.families import parts
from specinfer.model.gguf.families.parts import HEAD_NORMS, Family, Fields, Has, Key, Plan
from specinfer.model.gguf.metadata import Metadata
from specinfer.model.gguf.weights import Weight

_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
_SECTIONS = "rope.dimension_sections"
_DEFAULT_INTERVAL = 4  # one in this many layers has attention


def _dense_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "intermediate_size": meta.size("feed_forward_length"),
        **_fields(meta, common),
    }


def _moe_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        **meta.experts("num_experts"),
        **_fields(meta, common),
    }


def _next_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of Qwen3-Next; some that Qwen3.5 does not know are those of all its models."""
    return {
        **_moe_fields(meta, common),
        "intermediate_size": meta.get("feed_forward_length", int) and meta.size("feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    inner, heads, keys = meta.size("ssm.inner_size"), meta.count("ssm.time_step_rank"), meta.size("ssm.group_count")
    if inner % heads or heads % keys:
        raise meta.error(f"{meta.arch}.ssm.time_step_rank is {heads}, for {keys} groups and {inner} values")
    num_layers = common["num_hidden_layers"]
    if meta.get("attention.recurrent_layers", list) is None:
        interval = meta.size("full_attention_interval", _DEFAULT_INTERVAL)
        is_recurrent = [(i + 1) % interval for i in range(num_layers)]
    else:
        is_recurrent = meta.sizes("attention.recurrent_layers", num_layers)
    return {
        **parts.attention_fields(meta, common),
        "layer_types": ["linear_attention" if one else "full_attention" for one in is_recurrent],
        "linear_value_head_dim": inner // heads,
        "linear_num_value_heads": heads,
    }


_NUMBERS = (
    Key("ssm.conv_kernel", "linear_conv_kernel_dim"),
    Key("ssm.state_size", "linear_key_head_dim"),
    Key("ssm.group_count", "linear_num_key_heads"),
)
_OF_EXPERTS = (
    *_NUMBERS, parts.EXPERT_WIDTH, Key("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
)  # fmt: skip


def _keys(fields: Fields) -> dict[str, Any]:
    values = fields["linear_num_value_heads"]
    return {
        "full_attention_interval": [*fields["layer_types"], "full_attention"].index("full_attention") + 1,
        "ssm.time_step_rank": values,
        "ssm.inner_size": values * fields["linear_value_head_dim"],
    }


def _qwen35_keys(fields: Fields) -> dict[str, Any]:
    """Return the metadata with the pairs rotated by time, height and width, which are all the same for text."""
    rope = fields["rope_parameters"]
    pairs = int(fields["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
    usual = [-(-(pairs - i) // 3) for i in range(3)]
    return {**_keys(fields), _SECTIONS: [*rope.get("mrope_section", usual), 0]}


def _layer(fields: Fields, number: int, has: Has, *, mixer: Callable[[Fields, bool], Plan]) -> Plan:
    """Yield the tensors of a layer.

    Args:
        mixer: Function that yields those of a layer without attention; its second argument is whether the file has
            `ssm_in`.
    """
    yield from parts.norms(_NORMS, fields["hidden_size"], 1.0)
    if fields["layer_types"][number] == "full_attention":
        yield from _attention(fields)
    else:
        yield from mixer(fields, has("ssm_in"))
    yield from _mlp(fields, has("ffn_gate_up_exps"))


def _mtp(fields: Fields) -> Plan:
    names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc")
    yield from parts.around_mtp(fields, names, 1.0)
    layer = (parts.norms(_NORMS, fields["hidden_size"], 1.0), _attention(fields), _mlp(fields, are_joined=False))
    for stored, one in chain(*layer):
        yield f"blk.{fields['num_hidden_layers']}.{stored}", replace(one, name=f"mtp.layers.0.{one.name}")


def _attention(fields: Fields) -> Plan:
    yield from parts.attention(fields, per_head=2)
    yield from parts.norms(HEAD_NORMS, fields["head_dim"], 1.0)


def _mlp(fields: Fields, are_joined: bool) -> Plan:
    if "num_experts" not in fields:
        yield from parts.mlp(fields)
        return
    hidden, width = fields["hidden_size"], fields["moe_intermediate_size"]
    yield "ffn_gate_inp_shexp.weight", Weight("mlp.shared_expert_gate.weight", (1, hidden))
    yield from parts.gated("mlp.shared_expert", hidden, fields["shared_expert_intermediate_size"], end="_shexp")
    halves = {"ffn_gate_exps.weight": slice(None, width), "ffn_up_exps.weight": slice(width, None)}
    for stored, one in parts.experts(fields, fields["num_experts"], width):
        if are_joined and stored in halves:
            half = partial(_part, rows=halves[stored])
            yield "ffn_gate_up_exps.weight", replace(one, stored=(2 * width, hidden), order=half)
        else:
            yield stored, one


def _qwen3_5_mixer(fields: Fields, _has_all_in_one: bool) -> Plan:
    """Yield the tensors of a layer without attention of Qwen3.5."""
    keys, values, hidden = fields["linear_num_key_heads"], fields["linear_num_value_heads"], fields["hidden_size"]
    repeats, dim = values // keys, fields["linear_value_head_dim"]
    before, width = 2 * keys * fields["linear_key_head_dim"], values * dim
    order = partial(_grouped, repeats=repeats, keys=keys)
    of_channels = partial(order, start=before)
    starts = [(repeat * keys + key) * dim for key in range(keys) for repeat in range(repeats)]
    inputs = tuple(range(start, start + dim) for start in starts) if repeats > 1 else ()
    rows = {
        "attn_qkv": ("in_proj_qkv", before + width, of_channels),
        "attn_gate": ("in_proj_z", width, order),
        "ssm_beta": ("in_proj_b", values, order),
        "ssm_alpha": ("in_proj_a", values, order),
    }
    for stored, (name, size, of_rows) in rows.items():
        yield f"{stored}.weight", Weight(f"linear_attn.{name}.weight", (size, hidden), order=of_rows)
    yield "ssm_out.weight", Weight("linear_attn.out_proj.weight", (hidden, width), inputs=inputs)
    for stored, one in _small(fields):
        if "norm" not in stored:
            one = replace(one, order=of_channels if "conv" in stored else order)
        yield stored, one


def _qwen3_next_mixer(fields: Fields, has_all_in_one: bool) -> Plan:
    """Yield the tensors of a layer without attention of Qwen3-Next.

    Args:
        has_all_in_one: Whether the file has the matrix of queries, keys, values and gates of checkpoints.
    """
    keys, values, hidden = fields["linear_num_key_heads"], fields["linear_num_value_heads"], fields["hidden_size"]
    dim, repeats = fields["linear_key_head_dim"], values // keys
    width = values * fields["linear_value_head_dim"]
    conv, each = 2 * keys * dim + width, width // keys
    yield "ssm_out.weight", Weight("linear_attn.out_proj.weight", (hidden, width))
    yield from _small(fields)
    if fields["model_type"] == "qwen3_next":
        yield from _matrices_of_checkpoints(keys, (dim, dim, each, each), 2 * repeats, hidden)
        return
    sizes = (dim, dim, each, each)  # of each head of keys: queries, keys, values, gates
    for stored, name, count, kept in (("attn_qkv", "qkv", conv, (0, 1, 2)), ("attn_gate", "z", width, (3,))):
        one = Weight(f"linear_attn.in_proj_{name}.weight", (count, hidden))
        if has_all_in_one:
            of_rows = partial(_parts_of_heads, heads=keys, sizes=sizes, kept=kept)
            one, stored = replace(one, stored=(conv + width, hidden), order=of_rows), "ssm_in"
        yield f"{stored}.weight", one
    for i, name in enumerate("ba"):
        of_rows = partial(_parts_of_heads, heads=keys, sizes=(repeats, repeats), kept=(i,))
        one = Weight(f"linear_attn.in_proj_{name}.weight", (values, hidden), stored=(2 * values, hidden), order=of_rows)
        yield "ssm_ba.weight", one


def _matrices_of_checkpoints(keys: int, sizes: Sequence[int], repeats: int, hidden: int) -> Plan:
    """Yield what Qwen3-Next's checkpoints join; `sizes` are the rows of queries, keys, values and gates of a head."""
    *first, gates = sizes
    both, rows = "linear_attn.in_proj_qkvz.weight", sum(first)
    of_heads = partial(_heads_of_parts, heads=keys, sizes=first)
    yield "attn_qkv.weight", Weight(both, (keys, rows, hidden), stored=(keys * rows, hidden), order=of_heads)
    yield "attn_gate.weight", Weight(both, (keys, gates, hidden), stored=(keys * gates, hidden))
    yield "ssm_ba.weight", Weight("linear_attn.in_proj_ba.weight", (keys * repeats, hidden))


def _small(fields: Fields) -> Plan:
    """Yield what is not quantized."""
    values, taps = fields["linear_num_value_heads"], fields["linear_conv_kernel_dim"]
    channels = 2 * fields["linear_num_key_heads"] * fields["linear_key_head_dim"]
    channels += values * fields["linear_value_head_dim"]
    conv = Weight("linear_attn.conv1d.weight", (channels, 1, taps), stored=(channels, taps))
    yield "ssm_conv1d.weight", conv
    yield "ssm_a", Weight("linear_attn.A_log", (values,), is_log=True)
    yield "ssm_dt.bias", Weight("linear_attn.dt_bias", (values,))
    yield "ssm_norm.weight", Weight("linear_attn.norm.weight", (fields["linear_value_head_dim"],))


def _part(stored: Tensor, rows: slice) -> Tensor:
    return stored[rows]


def _grouped(stored: Tensor, repeats: int, keys: int, start: int = 0) -> Tensor:
    """Return rows of which those from `start` on, of heads of values, are in the order of their heads of keys."""
    heads = stored[start:].unflatten(0, (repeats, keys, -1)).transpose(0, 1).flatten(0, 2)
    return torch.cat([stored[:start], heads]) if start else heads


def _parts_of_heads(stored: Tensor, heads: int, sizes: Sequence[int], kept: Sequence[int]) -> Tensor:
    """Return some parts of the rows of each head, one part after the other; `sizes` are those of all parts."""
    parts = stored.unflatten(0, (heads, -1)).split(list(sizes), dim=1)
    return torch.cat([parts[i].flatten(0, 1) for i in kept])


def _heads_of_parts(stored: Tensor, heads: int, sizes: Sequence[int]) -> Tensor:
    """Return the rows of each head, of one part after the other; undoes `_parts_of_heads`."""
    parts = stored.split([heads * size for size in sizes])
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1)


_OF_NEXT = partial(_layer, mixer=_qwen3_next_mixer)
_OF_3_5 = partial(_layer, mixer=_qwen3_5_mixer)
_NEXT = Family(
    _next_fields, _OF_NEXT, _OF_EXPERTS, lambda fields, _: parts.outside(fields, less=1.0), stacks_experts=False,
    written=("qwen3_next",), keys=_keys, mtp=_mtp,
)  # fmt: skip
_MOE = _NEXT._replace(read_fields=_moe_fields, layer=_OF_3_5, written=("qwen3_5_moe_text",), keys=_qwen35_keys)
FAMILIES = {
    "qwen3next": _NEXT,
    "qwen35": _MOE._replace(
        read_fields=_dense_fields, numbers=_NUMBERS, written=("qwen3_5_text",), stacks_experts=True
    ),
    "qwen35moe": _MOE,
}
