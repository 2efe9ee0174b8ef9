"""Models whose rows are computed with one order of sums, whatever else is in a pass: the checks at load.

A row then has the same bits in plain decoding, in a tree, in a chunk of a prompt and in any batch. On CPUs native fused
layers compute so always. What would compute in another way is refused.
"""

from typing import Any

from specinfer.core.errors import ModelError
from specinfer.model.layers.device import DeviceDecoder
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load_config import LoadConfig

_REMEDY = "leave batch_invariant out, or use another model (docs/verification.md has those that can be)"


def check_can_be_invariant(job: LoadConfig) -> None:
    """Check what is known before weights are read.

    Raises:
        ModelError: The model cannot be computed so; the message has the reason.
    """
    if job.device.type == "cuda":
        raise ModelError(f"batch_invariant: it is not supported on GPUs yet; {_REMEDY}")


def check_is_invariant(loaded: Any) -> None:
    """Check a loaded model.

    Raises:
        ModelError: Its rows depend on what else is in a pass.
    """
    if not isinstance(loaded.model, FusedDecoder | DeviceDecoder):
        raise ModelError(
            f"batch_invariant: family {loaded.model.config.model_type!r} runs as transformers defines it, with sums of "
            f"PyTorch whose order depends on the number of rows; {_REMEDY}"
        )
