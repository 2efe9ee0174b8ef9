"""One pass through a model, or through one pipeline stage of it, for all kinds of decoders."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from specinfer.model.adapters.hooks import adapting
from specinfer.model.batch import AttentionGroup, ForwardBatch
from specinfer.model.families import REPLACED
from specinfer.model.fixed_passes import in_order_of
from specinfer.model.heads.head import FeatureHead
from specinfer.model.kv_tensors import put_rows
from specinfer.model.layers.device import Decoder
from specinfer.model.layers.native import Watch
from specinfer.model.linears import layer_lists
from specinfer.model.past import OWN, PACKED_WITH_PAST, GroupPast, PackedPast, way_of
from specinfer.model.sharding.placeholder import Placeholder, StageEnd

_LAYERS: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()


def forward(
    model: nn.Module,
    batch: ForwardBatch,
    hidden: Tensor | None = None,
    watch: Watch | None = None,
) -> Tensor:
    """Return [rows, vocab] float32 logits of the tokens that the batch asks for, or hidden states (see Returns).

    Hidden states that the batch's store has a place for are stored.

    Args:
        hidden: [tokens, width] output of the previous stage, which may be overwritten. None for the first stage.
        watch: Callback after the embedding and after each layer; only for models whose layers are fused.

    Returns:
        The logits, or for a stage that is not the last: [tokens, width] hidden states after its last layer.
    """
    # Checks at load compare with passes without a layout, whose attention is PyTorch's.
    with nullcontext() if batch.layout is None else in_order_of(model):
        return _forward(model, batch, hidden, watch)


def _forward(model: nn.Module, batch: ForwardBatch, hidden: Tensor | None, watch: Watch | None) -> Tensor:
    if batch.store.taps and watch is None and not isinstance(model, FeatureHead):
        watch = _Tapping(batch)
    if isinstance(model, Decoder | FeatureHead):
        with adapting(batch.adapters or batch.adapter_rows):  # native layers take adapters with the batch
            result: Tensor = model(batch) if isinstance(model, FeatureHead) else model(batch, hidden, watch)
        return result
    if hidden is not None:
        batch = replace(batch, hidden=hidden.unsqueeze(0))
    if attends_by_itself(model):
        return _by_groups(model, batch)
    past = {"past_key_values": PackedPast(batch)} if way_of(model) == PACKED_WITH_PAST else {}
    try:
        with _watched(model, watch), adapting(batch.adapters or batch.adapter_rows):
            output = model(
                input_ids=batch.token_ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=batch.logit_rows,
                forward_batch=batch,
                **past,
            )
    except StageEnd as end:
        return end.hidden[0]
    logits: Tensor = output.logits[0]
    return logits.float()


def attends_by_itself(model: nn.Module) -> bool:
    """Return whether a definition attends to what a stand-in for its cache returns."""
    return way_of(model) == OWN and not isinstance(model, tuple(REPLACED.values()))


def _by_groups(model: nn.Module, batch: ForwardBatch) -> Tensor:
    """Return the logits of a definition that attends by itself, a group of requests at a time."""
    wanted = {row: place for place, row in enumerate(batch.logit_rows.tolist())}
    parts: list[tuple[list[int], Tensor]] = []
    for group in batch.groups:
        new = group.rows.shape[1]
        rows = [
            (wanted[row], at)
            for row, at in zip(group.packed_rows.tolist(), group.out_rows.tolist(), strict=True)
            if row in wanted
        ]
        columns = sorted({at % new for _, at in rows}) or [new - 1]
        with _watched(model, _Tapping(batch, group) if batch.store.taps else None):
            output = model(
                input_ids=batch.token_ids[group.rows],
                position_ids=group.query_positions.clone(),  # some add to it in place
                past_key_values=GroupPast(batch, group),
                use_cache=True,
                logits_to_keep=torch.tensor(columns, device=batch.slots.device),
            )
        logits = output.logits if output.logits.shape[1] == len(columns) else output.logits[:, columns]
        places = [at // new * len(columns) + columns.index(at % new) for _, at in rows]
        parts.append(([place for place, _ in rows], logits.flatten(0, 1)[places].float()))
    result = torch.cat([logits for _, logits in parts])
    order = [place for places, _ in parts for place in places]
    return result[torch.tensor(order, device=result.device).argsort()]


class _Tapping:
    """A `Watch` that stores hidden states under the slots of their tokens.

    Args:
        group: The group that a pass computes, or None if it computes all tokens in their order.
    """

    def __init__(self, batch: ForwardBatch, group: AttentionGroup | None = None) -> None:
        self._batch, self._group = batch, group
        self._slots = batch.slots if group is None else batch.slots[group.packed_rows]

    def __call__(self, num_layers: int, hidden: Tensor) -> None:
        rows = self._batch.store.taps.get(num_layers)
        if rows is not None:
            put_rows(rows, self._slots, hidden if self._group is None else hidden[self._group.out_rows])


def _layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of a definition, or those of its stage; the search is done once for each model."""
    if model not in _LAYERS:
        config: Any = model.config
        modules = next(iter(layer_lists(model, config.get_text_config().num_hidden_layers).values()))
        _LAYERS[model] = [layer for layer in modules if not isinstance(layer, Placeholder)]
    return _LAYERS[model]


@contextmanager
def _watched(model: nn.Module, watch: Watch | None) -> Iterator[None]:
    """Call `watch` for the layers of a definition of transformers within the context."""
    if watch is None:
        yield
        return
    layers = _layers_of(model)

    def before(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watch(0, (args[0] if args else kwargs["hidden_states"]).flatten(0, 1))

    def after(number: int, output: Any) -> None:
        watch(number, (output[0] if isinstance(output, tuple) else output).flatten(0, 1))

    handles = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    for i, layer in enumerate(layers):
        handles.append(layer.register_forward_hook(lambda _, __, output, i=i: after(i + 1, output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
