"""One pass through a model, however it is computed."""

from torch import Tensor, nn

from specinfer.model.batch import ForwardBatch
from specinfer.model.fused import FusedDecoder


def forward(model: nn.Module, batch: ForwardBatch) -> Tensor:
    """[rows, vocab] float32 logits of the tokens the batch asks for."""
    if isinstance(model, FusedDecoder):
        fused: Tensor = model(batch)
        return fused
    output = model(
        input_ids=batch.token_ids.unsqueeze(0),
        position_ids=batch.positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=batch.logit_rows,
        forward_batch=batch,
    )
    logits: Tensor = output.logits[0]
    return logits.float()
