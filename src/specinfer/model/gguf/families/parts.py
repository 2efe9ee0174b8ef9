"""Parts that the plans of several architectures share. A plan yields tensors of the file, and the model's weights."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from specinfer.model.gguf.metadata import TAKE_ANOTHER, Metadata, read_rope
from specinfer.model.gguf.weights import Weight

Fields = Mapping[str, Any]
Plan = Iterator[tuple[str, Weight]]
Has = Callable[[str], bool]  # of a name within a layer, without ".weight": whether the file has the tensor
GATED = ("gate_proj", "up_proj", "down_proj")
GRANITE_GATED = ("input_linear", "input_linear", "output_linear")  # gates and values are one matrix
QKV = ("attn_q", "attn_k", "attn_v", "attn_output")
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
SIGMOID = 2  # llama.cpp's number of the function that routers choose by
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
WINDOW = "attention.sliding_window"


class Key(NamedTuple):
    """A value of the metadata that config.json has as a field.

    Attributes:
        stored: Name in the file, after that of the architecture.
        field: Name in config.json.
        default: Value of files without it, or None if they must have it. Its type is that of the value: a number of at
            least 1, one above 0, or a truth value.
    """

    stored: str
    field: str
    default: float | None = None

    def read(self, meta: Metadata) -> Any:
        if isinstance(self.default, bool):
            return meta.get(self.stored, bool, self.default)
        if isinstance(self.default, float):
            return meta.positive(self.stored, self.default)
        return meta.size(self.stored, self.default)

    def written(self, fields: Fields) -> Any:
        value = fields.get(self.field)
        return float(value) if isinstance(self.default, float) and value is not None else value


class Family(NamedTuple):
    """A kind of model as llama.cpp stores it.

    Attributes:
        read_fields: Function of the metadata, and of the fields of config.json that all architectures share, that
            returns the others but for `numbers`.
        layer: Function of all fields, of a layer's number, and of which tensors the file has of it, that yields its
            tensors by their names within the layer.
        numbers: Values that the metadata and config.json have alike.
        outside: Function of all fields, and of the names of the file's tensors, that yields those outside of layers.
        layers: Name of the list of layers in the model.
        stacks_experts: Whether experts become stacks as in the definition, see `StackedSource`; or each is a weight
            of its own, as in checkpoints.
        transposes_experts: Whether these stacks are transposed, and have gates next to values; or gates before values.
        written: transformers' model types that are written as this architecture; " with experts" follows where some
            layers are experts alone.
        keys: Function of the fields of config.json that returns the other metadata of this architecture alone, see
            `writing.py`. None is not written.
        renamed: Function of the definition's weights that returns them by the plan's names, where these are others.
        mtp: Function of all fields that yields the tensors of the first MTP layer, after the last one of the model
            itself; or None for architectures whose MTP layers have no names.
    """

    read_fields: Callable[[Metadata, Fields], dict[str, Any]]
    layer: Callable[[Fields, int, Has], Plan]
    numbers: tuple[Key, ...] = ()
    outside: Callable[[Fields, Collection[str]], Plan] = lambda fields, _: outside(fields)
    layers: str = "model.layers"
    stacks_experts: bool = True
    transposes_experts: bool = False
    written: tuple[str, ...] = ()
    keys: Callable[[Fields], dict[str, Any]] = lambda _: {}
    renamed: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda weights: weights
    mtp: Callable[[Fields], Plan] | None = None

    def fields(self, meta: Metadata, common: Fields) -> dict[str, Any]:
        """Return the fields of config.json that this architecture has in addition to the common ones."""
        return {key.field: key.read(meta) for key in self.numbers} | self.read_fields(meta, common)

    def plan(self, fields: Fields, names: Collection[str]) -> Plan:
        """Yield the tensors of a model; `names` are those of the file's tensors."""
        yield from self.outside(fields, names)
        for i in range(fields["num_hidden_layers"]):
            layer = self.layer(fields, i, lambda stored, i=i: f"blk.{i}.{stored}.weight" in names)  # type: ignore[misc]
            yield from in_layer(i, layer, self.layers)

    def metadata(self, fields: Fields) -> dict[str, Any]:
        """Return the metadata that this architecture has in addition to the common ones."""
        return {key.stored: key.written(fields) for key in self.numbers} | self.keys(fields)


def in_layer(number: int, pairs: Iterable[tuple[str, Weight]], layers: str = "model.layers") -> Plan:
    """Yield tensors of a layer by their names in the file and the model; those of `pairs` are relative to it."""
    for stored, one in pairs:
        yield f"blk.{number}.{stored}", replace(one, name=f"{layers}.{number}.{one.name}")


def outside(
    fields: Fields,
    embeddings: str = "model.embed_tokens",
    norm: str = "model.norm",
    less: float = 0.0,
    stored_norm: str = "output_norm",
) -> Plan:
    """Yield the tensors outside of layers."""
    vocab, hidden = fields["vocab_size"], fields["hidden_size"]
    yield "token_embd.weight", Weight(f"{embeddings}.weight", (vocab, hidden))
    yield f"{stored_norm}.weight", Weight(f"{norm}.weight", (hidden,), less=less)
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


# The factors of Granite's definition.
MULTIPLIERS = (
    Key("attention.scale", "attention_multiplier", 1.0),
    Key("embedding_scale", "embedding_multiplier", 1.0),
    Key("residual_scale", "residual_multiplier", 1.0),
    Key("logit_scale", "logits_scaling", 1.0),
)
EXPERT_WIDTH = Key("expert_feed_forward_length", "moe_intermediate_size")
EXPERT_SCALE = Key("expert_weights_scale", "routed_scaling_factor", 1.0)


def kv_heads_by_layer(fields: Fields) -> list[int]:
    """Return the heads of keys of each layer, of those without attention 0."""
    return [fields["num_key_value_heads"] * (kind == "full_attention") for kind in fields["layer_types"]]


def num_dense_layers(meta: Metadata, common: Fields) -> int:
    """Return the number of first layers without experts."""
    count, num_layers = meta.get("leading_dense_block_count", int, 0), common["num_hidden_layers"]
    if not 0 <= count <= num_layers:
        raise meta.error(f"{meta.arch}.leading_dense_block_count is {count}")
    return int(count)


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


def mlp(fields: Fields) -> Plan:
    """Yield the matrices of an MLP with gates, by their usual names."""
    return gated("mlp", fields["hidden_size"], fields["intermediate_size"])


def experts(
    fields: Fields, count: int, width: int, module: str = "mlp", *, router: str = "gate", hidden: int | None = None
) -> Plan:
    """Yield the router and the matrices of routed experts, which files have as stacks.

    Args:
        width: Inner size of an expert.
        router: Name of the router in the module.
        hidden: Outer size of an expert, or None for that of the model.
    """
    outer = hidden or fields["hidden_size"]
    yield "ffn_gate_inp.weight", Weight(f"{module}.{router}.weight", (count, fields["hidden_size"]))
    for i in range(count):
        for stored, one in gated(f"{module}.experts.{i}", outer, width, end="_exps"):
            yield stored, replace(one, expert=i, num_experts=count)


def granite_experts(fields: Fields) -> Plan:
    """Yield the router and the routed experts of Granite."""
    return experts(
        fields, fields["num_local_experts"], fields["intermediate_size"], "block_sparse_moe", router="router"
    )


def biased_experts(fields: Fields, count: int) -> Plan:
    """Yield a router with biases, and this many experts next to shared ones."""
    width = fields["moe_intermediate_size"]
    yield "exp_probs_b.bias", Weight("mlp.gate.e_score_correction_bias", (count,))
    yield from experts(fields, count, width)
    yield from gated("mlp.shared_experts", fields["hidden_size"], width * fields["n_shared_experts"], end="_shexp")
