"""The shard of a decoder layer that one rank of a tensor group computes, by model family.

The first projection of a block (queries, keys, values, an MLP's first) is split by its outputs, and the projection
after it by its inputs. Each layer then needs two sums over the ranks (Megatron-LM, arXiv 1909.08053, section 3).
Attention is split by heads. With fewer KV heads than ranks, several ranks have the same KV head.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from specinfer.core.errors import ModelError
from specinfer.model.recurrent.layers import LAYER_TYPES


class Kind(Enum):
    """The way in which a projection is split."""

    OUTPUTS = auto()  # evenly by outputs
    KV = auto()  # by outputs: one KV head after the other
    QKV = auto()  # by outputs: all queries, all keys, all values
    GROUPS = auto()  # by outputs: for each KV head its queries, its key, its value
    HALVES = auto()  # by outputs: gates, then values
    PAIRS = auto()  # by outputs: gates and values alternate
    INPUTS = auto()  # evenly by inputs; results are summed over ranks
    ONCE = auto()  # a bias that only the first rank adds
    SUM = auto()  # a module without own weights, whose results are summed over ranks


# By name within a layer: modules, or bare weights with the dimension to split (they do not define inputs and outputs).
Plan = Mapping[str, Kind | tuple[Kind, int]]

_GPT: Plan = {"attn.c_proj": Kind.INPUTS, "mlp.c_fc": Kind.OUTPUTS, "mlp.c_proj": Kind.INPUTS}
_ATTENTION: Plan = {"self_attn.q_proj": Kind.OUTPUTS, "self_attn.k_proj": Kind.KV, "self_attn.v_proj": Kind.KV}
_OF_EXPERTS: Plan = {
    ".gate_up_proj": (Kind.HALVES, 1), ".up_proj": (Kind.OUTPUTS, 1), ".down_proj": (Kind.INPUTS, 2), "": Kind.SUM
}  # fmt: skip
_GRANITE_MOE: Plan = {f"block_sparse_moe.experts{name}": kind for name, kind in _OF_EXPERTS.items()}
# Families that transformers, or its oldest allowed version, has no plan for, or whose plan cannot be used here because
# of fused projections.
_OWN: Mapping[str, Plan] = {
    "falcon": {
        "self_attention.query_key_value": Kind.GROUPS,
        "self_attention.dense": Kind.INPUTS,
        "mlp.dense_h_to_4h": Kind.OUTPUTS,
        "mlp.dense_4h_to_h": Kind.INPUTS,
    },
    "gpt2": {"attn.c_attn": Kind.QKV, **_GPT},
    "gpt_bigcode": {"attn.c_attn": Kind.GROUPS, **_GPT},
    "gpt_neox": {
        "attention.query_key_value": Kind.GROUPS,
        "attention.dense": Kind.INPUTS,
        "mlp.dense_h_to_4h": Kind.OUTPUTS,
        "mlp.dense_4h_to_h": Kind.INPUTS,
    },
    "gpt_oss": {
        **_ATTENTION,
        "self_attn.o_proj": Kind.INPUTS,
        "self_attn.sinks": (Kind.OUTPUTS, 0),
        "mlp.experts.gate_up_proj": (Kind.PAIRS, 2),
        "mlp.experts.gate_up_proj_bias": (Kind.PAIRS, 1),
        "mlp.experts.down_proj": (Kind.INPUTS, 1),
        "mlp.experts.down_proj_bias": (Kind.ONCE, 1),
        "mlp.experts": Kind.SUM,
    },
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "mpt": {
        "attn.Wqkv": Kind.QKV,
        "attn.out_proj": Kind.INPUTS,
        "ffn.up_proj": Kind.OUTPUTS,
        "ffn.down_proj": Kind.INPUTS,
    },
    "opt": {**_ATTENTION, "self_attn.out_proj": Kind.INPUTS, "fc1": Kind.OUTPUTS, "fc2": Kind.INPUTS},
    "phi3": {
        "self_attn.qkv_proj": Kind.QKV,
        "self_attn.o_proj": Kind.INPUTS,
        "mlp.gate_up_proj": Kind.HALVES,
        "mlp.down_proj": Kind.INPUTS,
    },
    "phimoe": {f"mlp.experts{name}": kind for name, kind in _OF_EXPERTS.items()},
}
# Families with layers without attention, which are split as their classes have it: what is around those layers.
_BY_NAME: Plan = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), Kind.OUTPUTS),
    **dict.fromkeys(("down_proj", "w2"), Kind.INPUTS),
}
_OF_HEADS: Plan = {
    **dict.fromkeys(("q_proj", "g_proj"), Kind.OUTPUTS),
    **dict.fromkeys(("k_proj", "v_proj"), Kind.KV),
    **dict.fromkeys(("o_proj", "out_proj"), Kind.INPUTS),
}
_BLOCKS = (
    "mlp",
    "feed_forward",
    "mlp_block",
    "mixer",
    "mlp.shared_expert",
    "mlp.shared_experts",
    "mixer.shared_experts",
)
_MIXED: Plan = {
    **{f"{outer}.{name}": kind for outer in _BLOCKS for name, kind in _BY_NAME.items()},
    **{
        f"{outer}.experts{name}": kind for outer in (*_BLOCKS, "block_sparse_moe") for name, kind in _OF_EXPERTS.items()
    },
    "shared_mlp.input_linear": Kind.HALVES,
    "shared_mlp.output_linear": Kind.INPUTS,
}
_MIXED_ATTENTION: Plan = {
    f"{outer}.{name}": kind for outer in ("self_attn", "mixer", "temporal_block") for name, kind in _OF_HEADS.items()
}
# Their attention joins all heads, and each rank computes all of it.
_WHOLE_ATTENTION = frozenset({"olmo_hybrid", "kimi_linear", "bailing_hybrid"})
_IN_LAYERS = "layers.*."  # prefix of the names in transformers' plans
_WHOLE = {"replicated_with_grad_allreduce", "replicate"}
_KINDS = {
    "colwise": Kind.OUTPUTS,
    "rowwise": Kind.INPUTS,
    "rowwise_split_input": Kind.INPUTS,
    "moe_tp_experts": Kind.SUM,
}
_FUSED = {"gate_up_proj": Kind.HALVES}  # transformers gathers its results, because its split ignores the halves


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of a layer that one rank computes.

    Attributes:
        query: This rank's query heads, [start, end) of `num_query`.
        kv: This rank's KV heads, [start, end) of `num_kv`; they include those of all its query heads.
    """

    num_query: int
    num_kv: int
    query: range
    kv: range

    @classmethod
    def from_config(cls, config: Any, rank: int, size: int) -> "Heads":
        """Return the heads of rank `rank` in a group of `size`.

        Raises:
            ModelError: The heads cannot be divided by `size`; the message names the sizes that work.
        """
        config = config.get_text_config()
        if getattr(config, "num_attention_heads", None) is None:  # it has no attention
            return cls(0, 0, range(0), range(0))
        num_query, num_kv = int(config.num_attention_heads), num_kv_heads(config)
        if not _divides(num_query, num_kv, size):
            fitting = [str(n) for n in range(1, num_query + 1) if _divides(num_query, num_kv, n)]
            raise ModelError(
                f"tensor_parallel_size: {num_query} attention heads with {num_kv} for keys and values cannot be split "
                f"over {size} ranks; use {' or '.join(fitting)}, or pipeline_parallel_size"
            )
        each, each_kv = num_query // size, max(num_kv // size, 1)
        first_kv = rank * num_kv // size
        return cls(num_query, num_kv, range(rank * each, (rank + 1) * each), range(first_kv, first_kv + each_kv))


def _divides(num_query: int, num_kv: int, size: int) -> bool:
    return num_query % size == 0 and (num_kv % size == 0 or size % num_kv == 0)


def num_kv_heads(config: Any) -> int:
    """Return the number of heads for keys and values in a layer.

    Raises:
        ModelError: It is not the same in all layers.
    """
    if getattr(config, "is_heterogeneous", False):
        counts = {int(layer.num_key_value_heads) for layer in config.per_layer_config}
        if len(counts) > 1:
            raise _refusal(config.model_type, "its layers have different numbers of heads for keys and values")
        return counts.pop()
    if config.model_type == "falcon" and config.new_decoder_architecture:
        return int(config.num_kv_heads)
    if getattr(config, "multi_query", False):
        return 1
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def plan_of(config: Any) -> dict[re.Pattern[str], Kind | tuple[Kind, int]]:
    """Return the family's plan, by patterns of names within a layer.

    Raises:
        ModelError: There is no plan, or it has a style that is not supported.
    """
    config = config.get_text_config()
    family = config.model_type
    if LAYER_TYPES.intersection(getattr(config, "layer_types", None) or ()):
        mixed = _MIXED if family in _WHOLE_ATTENTION else {**_MIXED, **_MIXED_ATTENTION}
        return {re.compile(re.escape(name)): kind for name, kind in mixed.items()}
    plan = _OWN.get(family) or _translated(family, getattr(config, "base_model_tp_plan", None) or {})
    if not plan:
        raise _refusal(family, "it has no plan for that")
    return {re.compile(re.escape(name).replace(r"\*", r"\d+")): kind for name, kind in plan.items()}


def _translated(family: str, theirs: Mapping[str, str]) -> Plan:
    plan: dict[str, Kind | tuple[Kind, int]] = {}
    for name, style in theirs.items():
        if not name.startswith(_IN_LAYERS) or style in _WHOLE:
            continue  # embeddings and heads are not split
        own = name.removeprefix(_IN_LAYERS)
        last = own.rpartition(".")[2]
        if style == "packed_colwise":  # a stack of matrices, one for each expert
            plan[own] = (Kind.HALVES, 1)
        elif style == "rowwise" and f"{name.rpartition('.')[0]}" in theirs:
            plan[own] = (Kind.INPUTS, 2)
        elif style == "colwise" and last in ("k_proj", "v_proj"):
            plan[own] = Kind.KV
        elif style in _KINDS:
            plan[own] = _KINDS[style]
        elif last in _FUSED and style in ("colwise_gather_output", "colwise_rep"):
            plan[own] = _FUSED[last]
        else:
            raise _refusal(family, f"{own} would be {style}")
    return plan


def _refusal(family: str, why: str) -> ModelError:
    return ModelError(
        f"tensor_parallel_size: family {family!r} is not split over ranks ({why}); use 1, or pipeline_parallel_size"
    )
