"""The shard of a decoder layer that one rank of a tensor group computes.

It follows from the parts of the layer (`layers/plan.py`). The first linear layers of a part (queries, keys, values, an
MLP's first) are split by their outputs, and the one after them by its inputs. Each layer then needs two sums over the
ranks (Megatron-LM, arXiv 1909.08053, section 3). Attention is split by heads. With fewer KV heads than ranks, several
ranks have the same KV head. Routers, gates of one output and norms are whole on each rank.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from specinfer.core.errors import ModelError
from specinfer.model.layers.families import structure_of
from specinfer.model.layers.plan import PartKind


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


# Of a module, or of a weight that is no layer of its own with the dimension to split.
Way = Kind | tuple[Kind, int]
_EXPERTS: Mapping[str, Way] = {
    "": Kind.SUM, ".gate_up_proj": (Kind.HALVES, 1), ".up_proj": (Kind.OUTPUTS, 1), ".down_proj": (Kind.INPUTS, 2),
}  # fmt: skip
_EXPERTS_OF_PAIRS: Mapping[str, Way] = {
    "": Kind.SUM, ".gate_up_proj": (Kind.PAIRS, 2), ".gate_up_proj_bias": (Kind.PAIRS, 1),
    ".down_proj": (Kind.INPUTS, 1), ".down_proj_bias": (Kind.ONCE, 1),
}  # fmt: skip
# What transformers' own plans have for families that are not described here; embeddings and heads are not split.
_IN_LAYERS = "layers.*."
_WHOLE = {"replicated_with_grad_allreduce", "replicate"}
_KINDS = {
    "colwise": Kind.OUTPUTS,
    "rowwise": Kind.INPUTS,
    "rowwise_split_input": Kind.INPUTS,
    "moe_tp_experts": Kind.SUM,
}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of an expert, for which such a plan has an asterisk


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


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The split of a family's decoder layers.

    Attributes:
        ways: How modules and weights are split, by name within a layer. Others are whole on each rank.
        head_norms: Names of the norms of queries and keys in an attention module.
    """

    ways: Mapping[str, Way]
    head_norms: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Any) -> "SplitPlan":
        """Return the plan that follows from the structure of the family's layers, or transformers' own.

        Raises:
            ModelError: There is no plan, or it has a style that is not supported.
        """
        config = config.get_text_config()
        if (kind := structure_of(config)) is not None:
            return cls({name: way for part in kind.parts for name, way in _ways_of(part).items()}, kind.head_norms)
        ways = _translated(config.model_type, getattr(config, "base_model_tp_plan", None) or {})
        if not ways:
            raise _refusal(config.model_type, "it has no plan for that")
        return cls(ways)

    def way(self, name: str) -> Way | None:
        """Return how a module or a weight is split, by its name within a layer."""
        return self.ways.get(name) or self.ways.get(_NUMBER.sub("*", name))


def _ways_of(part: PartKind) -> Mapping[str, Way]:
    """Return how the modules and weights of a part are split, by name within a layer."""
    if part.between in ("recurrence", "inputs"):  # a recurrence knows its blocks; projections of inputs are narrow
        return {}
    if part.between == "experts":
        ways = _EXPERTS_OF_PAIRS if part.layout == "pairs" else _EXPERTS
        return {f"{part.output}{name}": way for name, way in ways.items()}
    if part.between == "attention":
        return {**_ways_of_heads(part), part.output: Kind.INPUTS}
    is_joined = part.between == "halves" and len(part.inputs) == 1
    return {**dict.fromkeys(part.inputs, Kind.HALVES if is_joined else Kind.OUTPUTS), part.output: Kind.INPUTS}


def _ways_of_heads(part: PartKind) -> Mapping[str, Way]:
    if len(part.inputs) == 1:
        return {part.inputs[0]: Kind.GROUPS if part.layout == "groups" else Kind.QKV}
    queries, keys, values, *gates = part.inputs
    sinks = f"{queries.rpartition('.')[0]}.sinks"
    return {
        **dict.fromkeys((queries, *gates), Kind.OUTPUTS),
        **dict.fromkeys((keys, values), Kind.KV),
        sinks: (Kind.OUTPUTS, 0),
    }


def _translated(family: str, theirs: Mapping[str, str]) -> Mapping[str, Way]:
    """Return transformers' plan of a family, by name within a layer."""
    ways: dict[str, Way] = {}
    for name, style in theirs.items():
        if not name.startswith(_IN_LAYERS) or style in _WHOLE:
            continue
        own = name.removeprefix(_IN_LAYERS)
        outer, _, last = own.rpartition(".")
        if style == "packed_colwise":  # a stack of matrices, one for each expert
            ways[own] = (Kind.HALVES, 1)
        elif style == "rowwise" and f"{_IN_LAYERS}{outer}" in theirs:
            ways[own] = (Kind.INPUTS, 2)
        elif style == "colwise" and last in ("k_proj", "v_proj"):
            ways[own] = Kind.KV
        elif style in _KINDS:
            ways[own] = _KINDS[style]
        elif last == "gate_up_proj" and style in ("colwise_gather_output", "colwise_rep"):
            ways[own] = Kind.HALVES  # they gather its results, because their split ignores the halves
        else:
            raise _refusal(family, f"{own} would be {style}")
    return ways


def _refusal(family: str, why: str) -> ModelError:
    return ModelError(
        f"tensor_parallel_size: family {family!r} is not split over ranks ({why}); use 1, or pipeline_parallel_size"
    )
