"""Parts that the plans of several architectures share. A plan yields tensors of the file, and the model's weights."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from specinfer.model.gguf.metadata import TAKE_ANOTHER, Metadata
from specinfer.model.gguf.rope import read_rope
from specinfer.model.gguf.weights import Weight

Fields = Mapping[str, Any]
Plan = Iterator[tuple[str, Weight]]
GATED = ("gate_proj", "up_proj", "down_proj")
GRANITE_GATED = ("input_linear", "input_linear", "output_linear")  # gates and values are one matrix
QKV = ("attn_q", "attn_k", "attn_v", "attn_output")
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
SIGMOID = 2  # llama.cpp's number of the function that routers choose by
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


class Family(NamedTuple):
    """A kind of model as llama.cpp stores it.

    Attributes:
        read_fields: Function of the metadata, and of the fields of config.json that all architectures share, that
            returns the others.
        plan: Function of all fields, and of the names of the file's tensors.
        stacks_experts: Whether experts become stacks as in the definition, see `StackedSource`; or each is a weight
            of its own, as in checkpoints.
        transposes_experts: Whether these stacks are transposed, and have gates next to values; or gates before values.
        written: transformers' model types that are written as this architecture; " with experts" follows where some
            layers are experts alone.
        keys: Function of the fields of config.json that returns the metadata of this architecture alone, see
            `writing.py`. None is not written.
        renamed: Function of the definition's weights that returns them by the plan's names, where these are others.
        mtp: Function of all fields that yields the tensors of the first MTP layer, after the last one of the model
            itself; or None for architectures whose MTP layers have no names.
    """

    read_fields: Callable[[Metadata, Fields], dict[str, Any]]
    plan: Callable[[Fields, Collection[str]], Plan]
    stacks_experts: bool = True
    transposes_experts: bool = False
    written: tuple[str, ...] = ()
    keys: Callable[[Fields], dict[str, Any]] = lambda _: {}
    renamed: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda weights: weights
    mtp: Callable[[Fields], Plan] | None = None


def in_layer(number: int, pairs: Iterable[tuple[str, Weight]], layers: str = "model.layers") -> Plan:
    """Yield tensors of a layer by their names in the file and the model; those of `pairs` are relative to it."""
    for stored, one in pairs:
        yield f"blk.{number}.{stored}", replace(one, name=f"{layers}.{number}.{one.name}")


def outside(
    fields: Fields, embeddings: str = "model.embed_tokens", norm: str = "model.norm", less: float = 0.0
) -> Plan:
    """Yield the tensors outside of layers."""
    vocab, hidden = fields["vocab_size"], fields["hidden_size"]
    yield "token_embd.weight", Weight(f"{embeddings}.weight", (vocab, hidden))
    yield "output_norm.weight", Weight(f"{norm}.weight", (hidden,), less=less)
    if not fields["tie_word_embeddings"]:
        yield "output.weight", Weight("lm_head.weight", (vocab, hidden))


def around_mtp(fields: Fields, names: tuple[str, str, str, str], less: float = 0.0) -> Plan:
    """Yield the tensors around the decoder layer of an MTP layer.

    Args:
        names: Those in the model of the norms of embeddings, hidden states and outputs, and of the matrix for both.
    """
    hidden, at = fields["hidden_size"], f"blk.{fields['num_hidden_layers']}.nextn"
    *of_norms, join = names
    stored = [f"{at}.{name}" for name in ("enorm", "hnorm", "shared_head_norm")]
    yield from norms(dict(zip(stored, of_norms, strict=True)), hidden, less)
    yield f"{at}.eh_proj.weight", Weight(f"{join}.weight", (hidden, 2 * hidden))


def norms(names: Mapping[str, str], size: int, less: float = 0.0) -> Plan:
    """Yield norms, whose names in the model are given by those in the file."""
    for stored, name in names.items():
        yield f"{stored}.weight", Weight(f"{name}.weight", (size,), less=less)


def attention_fields(
    meta: Metadata, common: Fields, *, rotates: bool = True, may_rotate_part: bool = True
) -> dict[str, Any]:
    """Return the fields of config.json for attention in some layers.

    Args:
        rotates: Whether a part of each head is rotated, or all of it. Otherwise attention does not know positions,
            even if the file describes rotations.
        may_rotate_part: Whether less than a whole head may be rotated.
    """
    heads, num_layers = meta.size("attention.head_count"), common["num_hidden_layers"]
    usual = common["hidden_size"] // heads
    head_dim = meta.size("attention.key_length", usual if may_rotate_part else meta.size("rope.dimension_count", usual))
    for name in ("attention.value_length", *(() if may_rotate_part else ("rope.dimension_count",))):
        if meta.size(name, head_dim) != head_dim:
            raise meta.error(f"{meta.arch}.{name} is not the size of a head, {head_dim}", TAKE_ANOTHER)
    kv_heads = meta.only("attention.head_count_kv", num_layers, heads)
    meta.check_heads(heads, kv_heads)
    fields = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    if not rotates:
        return fields
    rotated = meta.size("rope.dimension_count", head_dim)
    if rotated % 2 or rotated > head_dim:
        raise meta.error(f"{meta.arch}.rope.dimension_count is {rotated}, and the size of a head {head_dim}")
    rope, part = read_rope(meta, rotated), rotated / head_dim
    return {**fields, "rope_parameters": rope if part == 1 else {**rope, "partial_rotary_factor": part}}


def whole_fields(
    meta: Metadata, common: Fields, family: str, model_class: str, *, may_rotate_part: bool = False
) -> dict[str, Any]:
    """Return the fields of config.json of a model with attention and an MLP in all layers.

    Args:
        family: transformers' model_type.
        model_class: transformers' class.
        may_rotate_part: As for `attention_fields`.
    """
    return {
        "model_type": family,
        "architectures": [model_class],
        **attention_fields(meta, common, may_rotate_part=may_rotate_part),
        "intermediate_size": meta.size("feed_forward_length"),
    }


_MULTIPLIERS = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip


def multipliers(meta: Metadata) -> dict[str, float]:
    """Return the factors of Granite's definition."""
    return {name: meta.positive(stored, 1.0) for name, stored in _MULTIPLIERS.items()}


def granite_fields(meta: Metadata, common: Fields, family: str, model_class: str) -> dict[str, Any]:
    """Return the fields of config.json that Granite has with and without experts."""
    return {**whole_fields(meta, common, family, model_class), **multipliers(meta)}


def multiplier_keys(fields: Fields) -> dict[str, Any]:
    """Return the metadata of the factors of Granite's definition."""
    return {stored: float(fields[name]) for name, stored in _MULTIPLIERS.items()}


def kv_heads_by_layer(fields: Fields) -> list[int]:
    """Return the heads of keys of each layer, of those without attention 0."""
    return [fields["num_key_value_heads"] * (kind == "full_attention") for kind in fields["layer_types"]]


def expansion(meta: Metadata, common: Fields) -> int:
    """Return the number of times that the inner size of a layer is the outer one."""
    inner, hidden = meta.size("ssm.inner_size"), common["hidden_size"]
    if inner % hidden:
        raise meta.error(f"{meta.arch}.ssm.inner_size is {inner}, no multiple of {hidden}", TAKE_ANOTHER)
    return int(inner // hidden)


def expert_groups(meta: Metadata) -> dict[str, int]:
    """Return the fields of the groups of experts, which are chosen by their two best experts."""
    count, groups = meta.count("expert_count"), meta.size("expert_group_count", 1)
    used = meta.size("expert_group_used_count", 1)
    if used > groups or count % groups or (groups > 1 and count < 2 * groups):
        raise meta.error(f"{meta.arch}.expert_group_count is {groups}, of which {used} are used, for {count} experts")
    return {"n_group": groups, "topk_group": used}


def shared_expert_keys(fields: Fields) -> dict[str, Any]:
    """Return the metadata of experts that are chosen by sigmoids, next to shared ones."""
    return {
        "expert_shared_count": fields["n_shared_experts"],
        "expert_weights_scale": float(fields["routed_scaling_factor"]),
        "expert_weights_norm": fields["norm_topk_prob"],
        "expert_gating_func": SIGMOID,
    }


def attention(
    fields: Fields, module: str = "self_attn", *, out: str = "o_proj", per_head: int = 1, has_pairs: bool = False
) -> Plan:
    """Yield the matrices of attention.

    Args:
        per_head: Queries, and gates, of each head.
        has_pairs: Whether rows that are rotated together are stored side by side.
    """
    hidden, dim = fields["hidden_size"], fields["head_dim"]
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    query, key = (heads, kv_heads) if has_pairs else (0, 0)
    yield "attn_q.weight", Weight(f"{module}.q_proj.weight", (per_head * heads * dim, hidden), query)
    yield "attn_k.weight", Weight(f"{module}.k_proj.weight", (kv_heads * dim, hidden), key)
    yield "attn_v.weight", Weight(f"{module}.v_proj.weight", (kv_heads * dim, hidden))
    yield "attn_output.weight", Weight(f"{module}.{out}.weight", (hidden, heads * dim))


def with_biases(pairs: Iterable[tuple[str, Weight]], names: Collection[str] | None = None) -> Plan:
    """Yield matrices, and the bias of each whose name in the file is among `names`, or of all."""
    for stored, one in pairs:
        yield stored, one
        if names is None or stored.removesuffix(".weight") in names:
            name = one.name.removesuffix("weight") + "bias"
            yield stored.removesuffix("weight") + "bias", replace(one, name=name, shape=one.shape[:1])


def gated(module: str, hidden: int, width: int, names: tuple[str, str, str] = GATED, end: str = "") -> Plan:
    """Yield the matrices of an MLP with gates.

    Args:
        names: Those of gates, values and outputs in the model.
        end: End of the names in the file.
    """
    gate, up, down = (f"{module}.{name}.weight" for name in names)
    yield f"ffn_gate{end}.weight", Weight(gate, (width, hidden))
    yield f"ffn_up{end}.weight", Weight(up, (width, hidden))
    yield f"ffn_down{end}.weight", Weight(down, (hidden, width))


def experts(module: str, hidden: int, width: int, count: int, names: tuple[str, str, str] = GATED) -> Plan:
    """Yield the matrices of routed experts, which files have as stacks; `names` as for `gated`."""
    for i in range(count):
        for stored, one in gated(f"{module}.{i}", hidden, width, names, "_exps"):
            yield stored, replace(one, expert=i, num_experts=count)


def granite_experts(fields: Fields) -> Plan:
    """Yield the router and the routed experts of Granite."""
    hidden, count = fields["hidden_size"], fields["num_local_experts"]
    yield "ffn_gate_inp.weight", Weight("block_sparse_moe.router.weight", (count, hidden))
    yield from experts("block_sparse_moe.experts", hidden, fields["intermediate_size"], count)
