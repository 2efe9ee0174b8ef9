"""Models whose rows are computed with one order of sums, whatever else is in a pass: the checks at load.

A row then has the same bits in plain decoding, in a tree, in a chunk of a prompt and in any batch. On CPUs native fused
layers compute so always. On GPUs passes have a fixed order (`fixed_passes.py`). What cannot is refused.
"""

from typing import Any

from torch import nn

from specinfer.core.errors import ModelError
from specinfer.model.fixed_passes import fix_order, has_fixed_order
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load_config import LoadConfig
from specinfer.model.recurrent.layers import has_recurrent_layers

_OTHER = "use another model (docs/verification.md has those that can be)"
_REMEDY = f"leave batch_invariant out, or {_OTHER}"


def check_can_be_invariant(job: LoadConfig) -> None:
    """Check what is known before weights are read.

    Raises:
        ModelError: The model cannot be computed so; the message has the reason.
    """
    if job.device.type != "cuda":
        return
    reasons = {
        "Triton cannot run here": not job.native,
        "its layers are streamed": job.offload.offload is not None,
        "it has layers without attention": has_recurrent_layers(job.config),
    }
    for reason, is_given in reasons.items():
        if is_given:
            raise ModelError(f"batch_invariant: family {job.config.model_type!r} on a GPU: {reason}; {_REMEDY}")


def make_invariant(loaded: Any) -> None:
    """Let a loaded model compute so; where it cannot, its first padded pass raises an error that names the operation.

    Raises:
        ModelError: It runs on a CPU, without native layers.
    """
    if loaded.device.type == "cuda":
        fix_order(loaded.model)
    elif not isinstance(loaded.model, FusedDecoder):
        raise ModelError(
            f"batch_invariant: family {loaded.model.config.model_type!r} runs as transformers defines it, with sums of "
            f"PyTorch whose order depends on the number of rows; {_REMEDY}"
        )


def check_order(model: nn.Module, why: str | None) -> None:
    """Check that no order is promised for passes that are not padded.

    Args:
        why: The reason why they are not.

    Raises:
        ModelError: The model was loaded with a fixed order.
    """
    if has_fixed_order(model):
        raise ModelError(
            f"batch_invariant: this model has no passes of one order of sums: {why}; leave enforce_eager or "
            f"batch_invariant out, or {_OTHER}"
        )
