"""The structure of decoder layers, for the decoders that compute layers themselves (families: `layer_families.py`).

A layer is a list of parts. Each is a norm, linear layers with the same input, what lies between, and a linear layer
whose results are added to the hidden states. A Llama layer consists of two: attention with rotated queries and keys,
and a gated MLP. `LayerKind` describes the differences of other kinds.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class PartKind:
    """A part of a decoder layer, by the module names of transformers.

    Attributes:
        between: What lies between the linear layers. "mlp": gates and values are two layers; "halves": their outputs
            follow one another; "squares": there are no gates; "inputs": values are other inputs of the layer than
            hidden states; "experts": the routed ones.
        first: The linear layers with the same input, within a layer; of experts the router. A layer that does not have
            the first of them does not have the part, and may lack others.
        second: The linear layer of the results; of experts their module.
        norm: The norm of what it reads, or None if it reads the hidden states as they are.
        post_norm: The norm of the results before they are added, or None.
        gate: The linear layer of one output whose sigmoid the results are multiplied by, or None.
        beside: A module that a layer has if it has the part, too, or None: layers may differ in the norms of a part.
        without: A module that a layer does not have if it has the part, or None.
        sum: Whether it is the first or the last of neighbouring parts whose results, normed one by one, are added up
            and normed once more before they are added, or None.
        sum_norm: The norm of that sum, for its last part.
        num_missing: Number of the first linear layers that a layer lacks, from the last; see `LayerKind.parts_of`.
        reads_again: Whether it reads what the part before it has read, whose norm is the same: see
            `LayerKind.parts_of`.
    """

    between: Literal["attention", "recurrence", "mlp", "halves", "squares", "inputs", "experts"]
    first: tuple[str, ...]
    second: str
    norm: str | None
    post_norm: str | None = None
    gate: str | None = None
    beside: str | None = None
    without: str | None = None
    sum: Literal["first", "last"] | None = None
    sum_norm: str | None = None
    num_missing: int = 0
    reads_again: bool = False

    @property
    def module(self) -> str:
        """The module within a layer that has the linear layers."""
        return self.first[0].rpartition(".")[0]

    @property
    def linear_names(self) -> tuple[tuple[str, ...], ...]:
        """Names of the linear layers, those with the same input together; but for those of experts."""
        if self.between == "experts":
            return ()
        return (self.first, (self.second,), *(() if self.gate is None else ((self.gate,),)))


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
        """Return the parts that a decoder layer has."""
        found = [part for part in self.parts if find(layer, part.first[0]) is not None]
        found = [part for part in found if part.beside is None or find(layer, part.beside) is not None]
        found = [part for part in found if part.without is None or find(layer, part.without) is None]
        again = [i for i in range(1, len(found)) if found[i].norm is not None and found[i].norm == found[i - 1].norm]
        return [replace(_as_in(layer, part), reads_again=i in again) for i, part in enumerate(found)]

    def linear_names(self, layer: Any) -> tuple[tuple[str, ...], ...]:
        """Return the names of the linear layers of a decoder layer, those with the same input together."""
        return tuple(names for part in self.parts_of(layer) for names in part.linear_names)

    def head_scale(self, config: Any) -> float:
        """Return what logits are multiplied by."""
        factor = 1.0 if self.head_factor is None else getattr(config, self.head_factor)
        return float(factor / (1.0 if self.head_divisor is None else getattr(config, self.head_divisor)))

    def cap_of(self, config: Any) -> float | None:
        """Return the soft cap of logits, or None if there is none."""
        return None if self.head_cap is None else getattr(config, self.head_cap)


def _as_in(layer: Any, part: PartKind) -> PartKind:
    """Return a part with the linear layers that a decoder layer has."""
    first = tuple(name for name in part.first if find(layer, name) is not None)
    return replace(part, first=first, num_missing=len(part.first) - len(first))


def find(module: Any, name: str) -> Any:
    """Return a submodule by its name, or None if there is none."""
    for one in name.split("."):
        module = getattr(module, one, None)
    return module


def linears_of(layer: Any, kind: LayerKind) -> tuple[tuple[Any, ...], ...]:
    """Return the linear layers of a decoder layer, those with the same input together."""
    return tuple(tuple(layer.get_submodule(name) for name in names) for names in kind.linear_names(layer))


def type_of(attention: Any) -> str:
    """Return the type of a layer with attention, which selects its rotation."""
    return str(attention.attention_type if hasattr(attention, "attention_type") else attention.layer_type)


def window_of(attention: Any) -> int | None:
    """Return how many positions back a layer sees, or None for all; families set it per layer or in the config."""
    if not getattr(attention, "is_sliding", True):
        return None
    window: int | None = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return window
