"""Which parts of a decoder layer a rank of a tensor group holds, family by family.

A projection that opens (queries, keys, values, an MLP's first) is cut by its outputs, the one that closes after it by
its inputs, so that a layer is added up over the ranks twice (Megatron-LM, arXiv 1909.08053, section 3). Attention is
cut by heads; where there are fewer KV heads than ranks, several ranks hold the same one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from specinfer.errors import ModelError


class Kind(Enum):
    """How a projection is cut."""

    OUTPUTS = auto()  # evenly by outputs
    KV = auto()  # by outputs: one KV head after the other
    QKV = auto()  # by outputs: all queries, all keys, all values
    GROUPS = auto()  # by outputs: of each KV head its queries, its key, its value
    HALVES = auto()  # by outputs: gates, then values
    PAIRS = auto()  # by outputs: a gate and a value by turns
    INPUTS = auto()  # evenly by inputs; results are added up
    ONCE = auto()  # what the first rank alone adds
    SUM = auto()  # no weight: a module whose results are added up


# Modules, or weights with their dimension (a bare weight has no inputs and outputs by itself), by name within a layer.
Plan = Mapping[str, Kind | tuple[Kind, int]]

_GPT: Plan = {"attn.c_proj": Kind.INPUTS, "mlp.c_fc": Kind.OUTPUTS, "mlp.c_proj": Kind.INPUTS}
_ATTENTION: Plan = {
    "self_attn.q_proj": Kind.OUTPUTS,
    "self_attn.k_proj": Kind.KV,
    "self_attn.v_proj": Kind.KV,
}
# Families that transformers has no plan for, or one that its fused projections make useless here.
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
    "mpt": {
        "attn.Wqkv": Kind.QKV,
        "attn.out_proj": Kind.INPUTS,
        "ffn.up_proj": Kind.OUTPUTS,
        "ffn.down_proj": Kind.INPUTS,
    },
    "opt": {
        **_ATTENTION,
        "self_attn.out_proj": Kind.INPUTS,
        "fc1": Kind.OUTPUTS,
        "fc2": Kind.INPUTS,
    },
    "phi3": {
        "self_attn.qkv_proj": Kind.QKV,
        "self_attn.o_proj": Kind.INPUTS,
        "mlp.gate_up_proj": Kind.HALVES,
        "mlp.down_proj": Kind.INPUTS,
    },
}
_IN_LAYERS = "layers.*."  # what names of transformers' plans begin with
_WHOLE = {"replicated_with_grad_allreduce", "replicate"}
_KINDS = {
    "colwise": Kind.OUTPUTS,
    "rowwise": Kind.INPUTS,
    "rowwise_split_input": Kind.INPUTS,
    "moe_tp_experts": Kind.SUM,
}
_FUSED = {"gate_up_proj": Kind.HALVES}  # whose results transformers gathers, since its cut is none of their parts


@dataclass(frozen=True, slots=True)
class Heads:
    """Of a layer's attention heads those of one rank.

    Attributes:
        query: [start, end) of `num_query`.
        kv: [start, end) of `num_kv`; each query head with its own.
    """

    num_query: int
    num_kv: int
    query: range
    kv: range

    @classmethod
    def of(cls, config: Any, rank: int, size: int) -> "Heads":
        """Those of a rank of `size`.

        Raises:
            ModelError: They cannot be divided by so many; the message names the numbers that would do.
        """
        config = config.get_text_config()
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
    """Heads for keys and values in a layer."""
    if config.model_type == "falcon" and config.new_decoder_architecture:
        return int(config.num_kv_heads)
    if getattr(config, "multi_query", False):
        return 1
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def plan_of(config: Any) -> dict[re.Pattern[str], Kind | tuple[Kind, int]]:
    """The family's plan, by patterns of names within a layer.

    Raises:
        ModelError: There is none, or it asks for what is not done here.
    """
    config = config.get_text_config()
    family = config.model_type
    plan = _OWN.get(family) or _translated(family, getattr(config, "base_model_tp_plan", None) or {})
    if not plan:
        raise _refusal(family, "it has no plan for that")
    return {re.compile(re.escape(name).replace(r"\*", r"\d+")): kind for name, kind in plan.items()}


def _translated(family: str, theirs: Mapping[str, str]) -> Plan:
    plan: dict[str, Kind | tuple[Kind, int]] = {}
    for name, style in theirs.items():
        if not name.startswith(_IN_LAYERS) or style in _WHOLE:
            continue  # embeddings and heads are whole here
        own = name.removeprefix(_IN_LAYERS)
        last = own.rpartition(".")[2]
        if style == "packed_colwise":  # of a stack of matrices, one for each expert
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
