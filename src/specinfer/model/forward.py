"""One pass through a model, or through one pipeline stage of it, for all kinds of decoders."""

from dataclasses import replace

from torch import Tensor, nn

from specinfer.model.batch import ForwardBatch
from specinfer.model.device_decoder import DeviceDecoder
from specinfer.model.fused import FusedDecoder, Watch
from specinfer.model.sharding.placeholder import StageEnd


def forward(model: nn.Module, batch: ForwardBatch, hidden: Tensor | None = None, watch: Watch | None = None) -> Tensor:
    """Return [rows, vocab] float32 logits of the tokens that the batch asks for, or hidden states (see Returns).

    Args:
        hidden: [tokens, width] output of the previous stage, which may be overwritten. None for the first stage.
        watch: Callback after the embedding and after each layer; only for models whose layers are fused.

    Returns:
        The logits, or for a stage that is not the last: [tokens, width] hidden states after its last layer.
    """
    if isinstance(model, FusedDecoder):
        fused: Tensor = model(batch, hidden, watch)
        return fused
    if isinstance(model, DeviceDecoder):
        assert hidden is None
        on_device: Tensor = model(batch, watch)
        return on_device
    assert watch is None
    if hidden is not None:
        batch = replace(batch, hidden=hidden.unsqueeze(0))
    try:
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
