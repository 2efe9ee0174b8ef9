"""One pass through a model, or through one pipeline stage of it, for all kinds of decoders."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from specinfer.model.adapters.hooks import adapting
from specinfer.model.batch import ForwardBatch
from specinfer.model.heads.head import FeatureHead
from specinfer.model.kv_tensors import put_rows
from specinfer.model.layers.device import Decoder
from specinfer.model.layers.native import Watch
from specinfer.model.linears import layer_lists
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
    if batch.store.taps and watch is None and not isinstance(model, FeatureHead):
        watch = _Tapping(batch)
    if isinstance(model, Decoder | FeatureHead):
        with adapting(batch.adapters or batch.adapter_rows):  # native layers take adapters with the batch
            result: Tensor = model(batch) if isinstance(model, FeatureHead) else model(batch, hidden, watch)
        return result
    if hidden is not None:
        batch = replace(batch, hidden=hidden.unsqueeze(0))
    try:
        with _watched(model, watch), adapting(batch.adapters or batch.adapter_rows):
            output = model(
                input_ids=batch.token_ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=batch.logit_rows,
                forward_batch=batch,
            )
    except StageEnd as end:
        return end.hidden[0]
    logits: Tensor = output.logits[0]
    return logits.float()


class _Tapping:
    """A `Watch` that stores hidden states under the slots of their tokens."""

    def __init__(self, batch: ForwardBatch) -> None:
        self._batch = batch

    def __call__(self, num_layers: int, hidden: Tensor) -> None:
        rows = self._batch.store.taps.get(num_layers)
        if rows is not None:
            put_rows(rows, self._batch.slots, hidden)


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
        watch(0, (args[0] if args else kwargs["hidden_states"])[0])

    def after(number: int, output: Any) -> None:
        watch(number, (output[0] if isinstance(output, tuple) else output)[0])

    handles = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    for i, layer in enumerate(layers):
        handles.append(layer.register_forward_hook(lambda _, __, output, i=i: after(i + 1, output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
