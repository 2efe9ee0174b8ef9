"""Tensor parallelism: split a definition's decoder layers over ranks, and sum their results over the ranks.

Weights may be real or meta weights. Only the slice that a meta weight is cut to is read later.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specinfer.core.errors import ModelError
from specinfer.model.linears import layer_names
from specinfer.model.offload.buffer_layout import set_tensor
from specinfer.model.offload.meta_weights import Cut, LinearCut, MetaWeight
from specinfer.model.quantized_experts import can_quantize_experts
from specinfer.model.recurrent.layers import is_recurrent
from specinfer.model.recurrent.mixer import Block
from specinfer.model.sharding.joined_norm import JoinedNorm
from specinfer.model.sharding.split_plan import Heads, Kind, SplitPlan
from specinfer.ops.quantization import BITS
from specinfer.ops.quantized_weight import GROUP_SIZES
from specinfer.parallel.group import Group
from specinfer.parallel.rank_sums import RankSums

_BY_HEADS = {Kind.KV, Kind.QKV, Kind.GROUPS}
_QUERY_COUNTS = ("num_heads", "n_heads", "num_attention_heads")
_KV_COUNTS = ("num_kv_heads", "num_key_value_heads", "kv_heads")
_WIDTHS = ("embed_dim", "split_size")  # of all query heads together


class Split(NamedTuple):
    """The cuts of a rank's decoder layers.

    Attributes:
        sums: Names of the modules whose results have to be summed over the ranks, see `sum_over_ranks`.
        cuts: The cuts of linear layers by name.
    """

    sums: list[str]
    cuts: dict[str, LinearCut]


def split_layers(
    model: nn.Module, config: Any, group: Group, quantization: str | None = None, *, rounds_experts: bool = False
) -> Split:
    """Cut the decoder layers that are left in a definition to this rank's shard.

    Args:
        quantization: Quantization that will be applied to the layers afterwards.
        rounds_experts: Whether to experts, too.

    Raises:
        ModelError: The family, or one of its sizes, cannot be split over this many ranks.
    """
    if group.size == 1:
        return Split([], {})
    split = _Splitter(config, group, quantization, rounds_experts=rounds_experts)
    prefixes = layer_names(model, config.get_text_config().num_hidden_layers)
    sums: list[str] = []
    recurrent: list[str] = []
    for name, module in list(model.named_modules()):
        prefix = next((one for one in prefixes if name.startswith(one)), None)
        if prefix is None or any(name.startswith(f"{outer}.") for outer in recurrent):
            continue
        own = name.removeprefix(prefix)
        if is_recurrent(module):
            recurrent.append(name)
            sums += [f"{name}.{one}" for one in split.recurrent(own, module)]
            continue
        if split.module(own, module):
            sums.append(name)
        if any(split.plan.way(f"{own}.{child}") in _BY_HEADS for child, _ in module.named_children()):
            sums += [f"{name}.{norm}" for norm in split.attention(module)]
    if isinstance(bias := getattr(model, "key_bias", None), Tensor):  # [heads, positions]
        model.key_bias = bias[split.heads.query.start : split.heads.query.stop].clone()
    cuts = {name: split.cuts[module] for name, module in model.named_modules() if module in split.cuts}
    return Split(sums, cuts)


def sum_over_ranks(model: nn.Module, names: Sequence[str], group: Group) -> None:
    """Sum the results of these modules over all ranks from now on, by `rank_sums` of the model."""
    sums = RankSums(group, copies=True)
    model.rank_sums = sums  # type: ignore[assignment]  # no module
    for name in names:
        module = model.get_submodule(name)
        if isinstance(module, JoinedNorm):
            module.all_reduce = sums.all_reduce
        else:
            module.register_forward_hook(partial(_sum, sums.all_reduce))


def _sum(all_reduce: Callable[[Tensor], Tensor], _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return all_reduce(output.contiguous().flatten(0, -2)).view_as(output)  # as the fused decoder's


class _Splitter:
    """The cuts of one rank."""

    def __init__(self, config: Any, group: Group, quantization: str | None, *, rounds_experts: bool) -> None:
        self._rounds_experts = rounds_experts
        self.rank, self.size = group.rank, group.size
        self.heads = Heads.from_config(config, group.rank, group.size)
        self.plan = SplitPlan.from_config(config)
        self._group_size = GROUP_SIZES[BITS[quantization]] if quantization in BITS else None
        self._configs: dict[int, Any] = {}
        self.cuts: dict[nn.Module, LinearCut] = {}

    def module(self, own: str, module: nn.Module) -> bool:
        """Cut a module's own weights, and return whether its results have to be summed over the ranks."""
        kind = self.plan.way(own)
        for name, tensor in list(module.named_parameters(recurse=False)):
            way = self.plan.way(f"{own}.{name}")
            if isinstance(way, tuple):
                self._bare(f"{own}.{name}", module, name, tensor, *way)
        if kind is None or kind is Kind.SUM:
            return kind is Kind.SUM
        assert isinstance(kind, Kind)
        self._linear(own, module, kind)
        return kind is Kind.INPUTS

    def recurrent(self, own: str, layer: Any) -> list[str]:
        """Cut a layer without attention; return the modules within it that sum over the ranks."""
        sums = []
        for name, blocks in layer.blocks.items():
            outer, _, last = name.rpartition(".")
            module = layer.get_submodule(outer)
            found = getattr(module, last)
            if blocks is None:
                self._linear(f"{own}.{name}", found, Kind.INPUTS)
                sums.append(name)
                continue
            weight = found if isinstance(found, Tensor) else found.weight
            dim = weight.shape.index(sum(block.size for block in blocks)) if blocks else 0
            cut = Cut(dim, self._blocks(f"{own}.{name}", blocks or (Block(weight.shape[0]),)))
            if isinstance(found, Tensor):
                _cut(module, last, cut)
            elif isinstance(found, nn.Linear | nn.Conv1d):
                self.cuts[found] = LinearCut(cut, found.weight.shape[dim])
                _cut_outputs(found, cut)
            elif self._norm(f"{own}.{name}", layer, found, cut):
                sums.append(name)
        for name in layer.counts:
            setattr(layer, name, self._even(f"{own}.{name}", getattr(layer, name)))
        return sums

    def _norm(self, own: str, layer: Any, norm: Any, cut: Cut) -> bool:
        """Cut a norm over all heads, and return whether ranks share a group that is normalized together."""
        if hasattr(norm, "n_groups"):
            norm.n_groups = self._even(own, norm.n_groups)
        elif cut.size % getattr(norm, "group_size", len(norm.weight)):
            norm = layer.norm = JoinedNorm(norm, self.size)
        _cut(norm, "weight", cut)
        return isinstance(norm, JoinedNorm)

    def _blocks(self, own: str, blocks: Sequence[Block]) -> tuple[range, ...]:
        """Return the ranges of this rank in neighbouring blocks."""
        ranges, first = [], 0
        for size, is_split in blocks:
            part = self._even(own, size) if is_split else size
            start = first + (self.rank * part if is_split else 0)
            ranges.append(range(start, start + part))
            first += size
        return tuple(ranges)

    def _even(self, own: str, size: int) -> int:
        if size % self.size:
            raise ModelError(
                f"tensor_parallel_size: {size} numbers of {own} cannot be split over {self.size} ranks; use a divisor, "
                "or pipeline_parallel_size"
            )
        return size // self.size

    def attention(self, attention: Any) -> list[str]:
        """Set the numbers of heads in an attention module to those of this rank, and cut norms over all heads.

        Returns:
            The names of these norms, which ranks compute together.
        """
        self._count_heads(attention)
        norms = [name for name in self.plan.head_norms if getattr(attention, name, None) is not None]
        spans_heads = any(len(getattr(attention, name).weight) > attention.head_dim for name in norms)
        for name, part in zip(norms, (self.heads.query, self.heads.kv), strict=True) if spans_heads else ():
            norm = JoinedNorm(getattr(attention, name), self.size)
            _cut(norm, "weight", Cut(0, (_times(part, attention.head_dim),)))
            setattr(attention, name, norm)
        return norms if spans_heads else []

    def _count_heads(self, attention: Any) -> None:
        heads = self.heads
        width = heads.num_query * int(getattr(attention, "head_dim", 0))
        counted = (
            (_QUERY_COUNTS, heads.num_query, len(heads.query)),
            (_KV_COUNTS, heads.num_kv, len(heads.kv)),
            (_WIDTHS, width, width // self.size),
        )
        for names, whole, part in counted:
            for name in names:
                if getattr(attention, name, None) == whole:
                    setattr(attention, name, part)
        if (config := getattr(attention, "config", None)) is not None:
            attention.config = self._configs.setdefault(id(config), self._counted(config))

    def _counted(self, config: Any) -> Any:
        """Return a copy of the definition's configuration with this rank's numbers of heads."""
        config = copy.copy(config)
        config.num_attention_heads = len(self.heads.query)
        if getattr(config, "num_key_value_heads", None) is not None:
            config.num_key_value_heads = len(self.heads.kv)
        return config

    def _linear(self, own: str, layer: Any, kind: Kind) -> None:
        # GPT-2 stores its weights transposed.
        outputs = 1 if type(layer).__name__ == "Conv1D" else 0
        by_inputs = kind is Kind.INPUTS
        dim = 1 - outputs if by_inputs else outputs
        whole = layer.weight.shape[dim]
        ranges = self._ranges(own, whole, kind)
        if by_inputs:
            self._check_groups(own, len(ranges[0]))
        self.cuts[layer] = LinearCut(Cut(int(by_inputs), ranges), whole)
        if not by_inputs and not outputs:
            _cut_outputs(layer, Cut(dim, ranges))
            return
        _cut(layer, "weight", Cut(dim, ranges))
        if layer.bias is not None and not by_inputs:
            _cut(layer, "bias", Cut(0, ranges))
        elif layer.bias is not None and self.rank:  # only the first rank adds the bias
            set_tensor(layer, "bias", torch.zeros(layer.bias.shape, dtype=layer.bias.dtype))
        size = sum(map(len, ranges))
        if outputs:
            layer.nf = layer.nf if by_inputs else size
        else:
            layer.in_features = size

    def _check_groups(self, own: str, size: int) -> None:
        """Refuse a rank's `size` inputs of a layer to quantize if they are not whole groups."""
        if self._group_size is not None and size % self._group_size:
            raise ModelError(
                f"tensor_parallel_size: {self.size} ranks would have {size} inputs of {own} each, no whole number of "
                f"the groups of {self._group_size} that share a scale; use fewer ranks, or leave quantization out"
            )

    def _bare(self, own: str, module: nn.Module, name: str, tensor: Tensor, kind: Kind, dim: int) -> None:
        if kind is Kind.ONCE:
            if self.rank:
                set_tensor(module, name, torch.zeros(tensor.shape, dtype=tensor.dtype))
            return
        ranges = self._ranges(own, tensor.shape[dim], kind)
        if kind is Kind.INPUTS and self._rounds_experts and can_quantize_experts(module):
            self._check_groups(own, len(ranges[0]))
        _cut(module, name, Cut(dim, ranges))

    def _ranges(self, own: str, size: int, kind: Kind) -> tuple[range, ...]:
        """Return the ranges of a projection's outputs, or inputs, of this rank."""
        heads = self.heads
        if kind in _BY_HEADS:
            q, kv = heads.query, heads.kv
            each = size // (heads.num_kv if kind is Kind.KV else heads.num_query + 2 * heads.num_kv)  # rows of one head
            if kind is Kind.KV:
                return (_times(kv, each),)
            if kind is Kind.QKV:
                keys = heads.num_query + kv.start
                values = keys + heads.num_kv
                blocks = (q, range(keys, keys + len(kv)), range(values, values + len(kv)))
                return tuple(_times(block, each) for block in blocks)
            per = heads.num_query // heads.num_kv
            if heads.num_kv % self.size == 0:
                return (_times(range(kv.start * (per + 2), kv.stop * (per + 2)), each),)
            first = kv.start * (per + 2)
            own_queries = range(first + q.start - kv.start * per, first + q.stop - kv.start * per)
            return _times(own_queries, each), _times(range(first + per, first + per + 2), each)
        if kind is Kind.HALVES:
            return self._blocks(own, (Block(size // 2), Block(size // 2)))
        if kind is Kind.PAIRS:
            return tuple(_times(pairs, 2) for pairs in self._blocks(own, (Block(size // 2),)))
        return self._blocks(own, (Block(size),))


def _times(heads: range, each: int) -> range:
    return range(heads.start * each, heads.stop * each)


def _cut_outputs(layer: Any, cut: Cut) -> None:
    """Cut a linear layer, or a convolution with a filter for each channel."""
    _cut(layer, "weight", cut)
    if layer.bias is not None:
        _cut(layer, "bias", Cut(0, cut.ranges))
    if isinstance(layer, nn.Linear):
        layer.out_features = cut.size


def _cut(module: nn.Module, name: str, cut: Cut) -> None:
    tensor = getattr(module, name)
    set_tensor(module, name, tensor.part(cut) if isinstance(tensor, MetaWeight) else cut.taken_from(tensor.detach()))
