"""One pass through a model, or through one stage of it, however it is computed."""

from dataclasses import replace

from torch import Tensor, nn

from specinfer.model.batch import ForwardBatch
from specinfer.model.device_decoder import DeviceDecoder
from specinfer.model.fused import FusedDecoder, Watch
from specinfer.model.left_out import StageEnd


def forward(model: nn.Module, batch: ForwardBatch, hidden: Tensor | None = None, watch: Watch | None = None) -> Tensor:
    """[rows, vocab] float32 logits of the tokens the batch asks for; a stage that is not the last has hidden states.

    Args:
        hidden: [tokens, width] what the stage before has returned, which is used up; None: this is the first.
        watch: Of models whose layers are fused, called after the embedding and after each layer.

    Returns:
        Of a stage that is not the last: [tokens, width] hidden states after its last layer.
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
