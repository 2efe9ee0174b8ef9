"""Plans of decoder layers: what a layer consists of, read once from transformers' definition of it.

A layer is a list of parts. Each is a norm, linear layers with the same input, what lies between, and a linear layer
whose results are added to the hidden states. A Llama layer consists of two: attention with rotated queries and keys,
and a gated MLP. `LayerKind` states what other families have as data, by the module names of transformers (tables in
`families.py`). `LayerPlan` is one loaded layer: the native decoder and that of GPUs are made of it, and ranks split
layers by its names.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from specinfer.model.offload.budget import release_freed_memory
from specinfer.model.offload.meta_weights import Cut, origin_of


@dataclass(frozen=True, slots=True)
class PartKind:
    """A part of a decoder layer, by the module names of transformers.

    Attributes:
        between: What lies between the linear layers. "mlp": gates and values are two layers; "halves": their outputs
            follow one another; "ungated": there are no gates; "inputs": values are other inputs of the layer than
            hidden states; "experts": the routed ones.
        inputs: The linear layers with the same input, within a layer; of experts the router. A layer that does not have
            the first of them does not have the part, and may lack others.
        output: The linear layer of the results; of experts their module.
        norm: The norm of what it reads, or None if it reads the hidden states as they are.
        post_norm: The norm of the results before they are added, or None.
        gate: The linear layer of one output whose sigmoid the results are multiplied by, or None.
        beside: A module that a layer has if it has the part, too, or None: layers may differ in the norms of a part.
        without: A module that a layer does not have if it has the part, or None.
        sum: Whether it is the first or the last of neighbouring parts whose results, normed one by one, are added up
            and normed once more before they are added, or None.
        sum_norm: The norm of that sum, for its last part.
        layout: The order of the outputs of one linear layer, if it is not queries, keys, values, or gates, values.
            "groups": for each KV head its queries, its key, its value; "pairs": gates and values alternate, and the
            matrices of experts are stored by inputs.
        num_missing: Number of the linear layers in `inputs` that a layer lacks, set by `LayerKind.parts_of`.
        reads_again: Whether it has the norm of the part before it, and so reads what that part has read, set by
            `LayerKind.parts_of`.
    """

    between: Literal["attention", "recurrence", "mlp", "halves", "ungated", "inputs", "experts"]
    inputs: tuple[str, ...]
    output: str
    norm: str | None
    post_norm: str | None = None
    gate: str | None = None
    beside: str | None = None
    without: str | None = None
    sum: Literal["first", "last"] | None = None
    sum_norm: str | None = None
    layout: Literal["groups", "pairs"] | None = None
    num_missing: int = 0
    reads_again: bool = False

    @property
    def linear_names(self) -> tuple[tuple[str, ...], ...]:
        """Names of the linear layers, those with the same input together; but for those of experts."""
        if self.between == "experts":
            return ()
        return (self.inputs, (self.output,), *(() if self.gate is None else ((self.gate,),)))


@dataclass(frozen=True)
class LayerKind:
    """The structure of the decoder layers of some families, by the module names of transformers.

    Attributes:
        parts: The parts that layers may have, in order.
        norm_offset: Number added to the weights of all norms, for checkpoints that store differences from it.
        rotates_by_type: Whether each layer type (sliding and full attention) has its own rotation.
        rotates_pairs: Whether neighbouring numbers of a head are rotated together, not those half a head apart.
        rotates: Function of an attention module, whether it rotates queries and keys.
        head_norms: Norms of queries and keys in attention, which may have none: of each head, or of all together.
        value_norm: The norm, without a weight, of each head's values in attention, which may have none.
        layer_factor: The number within a layer that hidden states are multiplied by at its end, or None.
        is_gated: Whether the outputs of `q_proj` alternate, head by head, with gates of the results.
        trunk, embedding, rotary, last_norm: The module with the layers, and within it the embedding, the rotary
            embedding and the norm before the head.
        eps: The field of the configuration with the epsilon of norms.
        embedding_factor, head_factor, head_divisor: Fields with what embeddings and logits are multiplied by or divided
            by, or None.
        head_cap: The field with the soft cap of logits, which become cap * tanh(logits / cap), or None.
    """

    parts: tuple[PartKind, ...]
    norm_offset: float = 0.0
    rotates_by_type: bool = False
    rotates_pairs: bool = False
    rotates: Callable[[Any], bool] = lambda _: True
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    value_norm: str | None = None
    layer_factor: str | None = None
    is_gated: bool = False
    trunk: str = "model"
    embedding: str = "embed_tokens"
    rotary: str = "rotary_emb"
    last_norm: str = "norm"
    eps: str = "rms_norm_eps"
    embedding_factor: str | None = None
    head_factor: str | None = None
    head_divisor: str | None = None
    head_cap: str | None = None

    def parts_of(self, layer: Any) -> list[PartKind]:
        """Return the parts that a decoder layer has, with the linear layers that it has.

        `num_missing` and `reads_again` are set from the layer.
        """
        parts: list[PartKind] = []
        for part in self.parts:
            inputs = tuple(name for name in part.inputs if find(layer, name) is not None)
            if part.inputs[0] not in inputs or (part.beside is not None and find(layer, part.beside) is None):
                continue
            if part.without is not None and find(layer, part.without) is not None:
                continue
            again = bool(parts) and part.norm is not None and part.norm == parts[-1].norm
            parts.append(replace(part, inputs=inputs, num_missing=len(part.inputs) - len(inputs), reads_again=again))
        return parts

    def head_scale(self, config: Any) -> float:
        """Return what logits are multiplied by."""
        factor = 1.0 if self.head_factor is None else getattr(config, self.head_factor)
        return float(factor / (1.0 if self.head_divisor is None else getattr(config, self.head_divisor)))

    def norm_weight(self, norm: Any) -> Tensor:
        """Return the [size] float32 weight of a norm."""
        weight: Tensor = norm.weight.float() + self.norm_offset
        return weight


class AttentionPlan(NamedTuple):
    """The attention of a layer.

    Attributes:
        rotation: Arguments that select this layer's rotation in the model's rotary embedding, or None for no rotation.
        window: How many positions back a layer sees, or None for all.
        num_stored: Number of things that it stores, see `AttentionCall`.
    """

    num_heads: int
    head_dim: int
    scale: float
    window: int | None
    rotation: tuple[str, ...] | None
    num_stored: int
    has_value_norm: bool
    is_gated: bool
    rotates_pairs: bool


class PartPlan(NamedTuple):
    """A part of a loaded layer.

    Attributes:
        linears: The modules of `PartKind.linear_names`.
        module: The module that has the linear layers.
        norm, post_norm, sum_norm: Modules, or None.
        head_norms: Norms of queries and keys, modules or None.
        columns: [outputs] float32 what the outputs of its first linear layers are multiplied by, or None.
        factor: What its results are multiplied by.
        hidden_factor: What hidden states are multiplied by after it.
    """

    kind: PartKind
    linears: tuple[tuple[Any, ...], ...]
    module: Any
    norm: Any
    post_norm: Any
    sum_norm: Any
    head_norms: tuple[Any, Any]
    attention: AttentionPlan | None
    columns: Tensor | None
    factor: float
    hidden_factor: float

    @property
    def has_factors(self) -> bool:
        return self.columns is not None or self.factor != 1.0


class LayerPlan(NamedTuple):
    """A loaded layer, as the decoders take it apart."""

    layer: Any
    kind: LayerKind
    parts: tuple[PartPlan, ...]
    eps: float
    activation: str

    @classmethod
    def from_layer(cls, layer: Any, kind: LayerKind, config: Any) -> "LayerPlan":
        """Read the plan of a decoder layer of this kind."""
        kinds = kind.parts_of(layer)
        factors = [1.0] * len(kinds)
        if kind.layer_factor is not None:
            number = getattr(layer, kind.layer_factor)
            factors[-1:] = [1.0 if number.is_meta else float(number)]  # that of another layer is not read
        parts = tuple(_plan_of(layer, kind, part, factor) for part, factor in zip(kinds, factors, strict=True))
        return cls(layer, kind, parts, eps_of(config, kind), activation_of(config))


def _plan_of(layer: Any, kind: LayerKind, part: PartKind, hidden_factor: float) -> PartPlan:
    module = find(layer, part.inputs[0].rpartition(".")[0])
    norm, post_norm, sum_norm = (
        name and layer.get_submodule(name) for name in (part.norm, part.post_norm, part.sum_norm)
    )
    attends = part.between == "attention"
    names = kind.head_norms if attends else ("", "")
    return PartPlan(
        part,
        tuple(tuple(layer.get_submodule(name) for name in names) for names in part.linear_names),
        module,
        norm,
        post_norm,
        sum_norm,
        (getattr(module, names[0], None), getattr(module, names[1], None)),
        _attention_of(layer, kind, part, module) if attends else None,
        *_factors_of(layer, part, module),
        hidden_factor,
    )


def _attention_of(layer: Any, kind: LayerKind, part: PartKind, module: Any) -> AttentionPlan:
    rotation: tuple[str, ...] | None = None
    if kind.rotates(module):
        rotation = (_type_of(module),) if kind.rotates_by_type else ()
    heads = layer.get_submodule(part.output).in_features // module.head_dim
    has_value_norm = kind.value_norm is not None and hasattr(module, kind.value_norm)
    own = (float(module.scaling), _window_of(module), rotation, 2 - part.num_missing)
    return AttentionPlan(heads, module.head_dim, *own, has_value_norm, kind.is_gated, kind.rotates_pairs)


def _type_of(attention: Any) -> str:
    """Return the type of a layer with attention, which selects its rotation."""
    return str(attention.attention_type if hasattr(attention, "attention_type") else attention.layer_type)


def _window_of(attention: Any) -> int | None:
    """Return how many positions back a layer sees, or None for all; families set it per layer or in the config."""
    if not getattr(attention, "is_sliding", True):
        return None
    window: int | None = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return window


def _factors_of(layer: Any, part: PartKind, module: Any) -> tuple[Tensor | None, float]:
    """Return the factors of columns and of results, which Granite 4 and Falcon-H1 have; of inputs in the columns."""
    results, columns = float(getattr(layer, "residual_multiplier", 1.0)), None
    each: tuple[float, ...] = ()  # of the first linear layers
    if part.between == "recurrence":
        results *= getattr(layer, "recurrent_factor", 1.0)
        given = getattr(module, "in_factor", 1.0)
        if (factors := getattr(module, "factors", None)) is not None:
            columns = factors.float() * given
        assert columns is not None or given == 1.0
    elif part.between == "attention":
        results *= getattr(layer, "out_factor", 1.0)
        given, keys = getattr(layer, "in_factor", 1.0), getattr(module, "key_multiplier", 1.0)
        each = (given, given * keys, given)
    elif part.between == "halves" and len(part.inputs) > 1:
        results *= getattr(module, "down_multiplier", 1.0)
        each = (getattr(module, "gate_multiplier", 1.0), 1.0)
    if any(factor != 1.0 for factor in each):
        sizes = [find(layer, name).out_features for name in part.inputs]
        columns = torch.cat([torch.full((size,), factor) for size, factor in zip(sizes, each, strict=True)])
    return columns, float(results)


class JoinedLinears(NamedTuple):
    """Linear layers of a definition that are computed at once.

    Attributes:
        names: Their names within the decoder layer.
        shapes: Their inputs and outputs.
        computed: The call or the module that computes them.
        sources: The checkpoint's tensors that they are made of, see `origin_of`.
        interleaved: Whether their outputs alternate in blocks, see `packing.together`.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    computed: Any
    sources: tuple[tuple[str, Cut | None] | None, ...]
    interleaved: bool = False

    @classmethod
    def from_linears(
        cls, names: tuple[str, ...], linears: tuple[Any, ...], computed: Any, *, interleaved: bool = False
    ) -> "JoinedLinears":
        shapes = tuple((one.in_features, one.out_features) for one in linears)
        sources = tuple(origin_of(one._parameters.get("weight")) for one in linears)
        return cls(names, shapes, computed, sources, interleaved)


def find(module: Any, name: str) -> Any:
    """Return a submodule by its name, or None if there is none."""
    for child in name.split("."):
        module = getattr(module, child, None)
    return module


def taken_apart(layers: nn.ModuleList) -> Iterator[nn.Module]:
    """Yield the layers one after the other and remove each, so that its weights are not in memory twice for long."""
    while len(layers):
        yield layers[0]
        del layers[0]
        release_freed_memory()  # else half of the weights are in memory once more in the end


def activation_of(config: Any) -> str:
    """Return the name of the activation of an MLP's gates."""
    names = ("hidden_activation", "mlp_hidden_act", "hidden_act")
    given = (getattr(config, name, None) for name in names)
    return str(next(filter(None, given), "silu"))  # LFM2 has no other


def eps_of(config: Any, kind: LayerKind) -> float:
    """Return the epsilon of a model's norms."""
    return float(getattr(config.get_text_config(), kind.eps))
