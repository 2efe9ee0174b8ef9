"""The part of a definition that one rank holds: some of its layers, and a part of each."""

from typing import Any

from torch import nn

from specinfer.core.errors import ModelError
from specinfer.model.fused import FusedDecoder
from specinfer.model.sharding.split_plan import Heads
from specinfer.model.sharding.stage import make_stage
from specinfer.model.sharding.tensor_parallel import add_up, split_layers
from specinfer.parallel.shard_spec import Share


def rank_layers(config: Any, share: Share) -> range:
    """Return the decoder layers of a rank.

    Raises:
        ModelError: There are more stages than layers.
    """
    num_layers = int(config.get_text_config().num_hidden_layers)
    if share.num_stages > num_layers:
        raise ModelError(
            f"pipeline_parallel_size: {num_layers} layers cannot be split into {share.num_stages} stages; use at most "
            f"{num_layers}"
        )
    return share.layers(num_layers)


def check_sizes(config: Any, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    """Refuse, before any process is started, a split that the model's heads or layers do not allow.

    Raises:
        ModelError: The model cannot be split like this; the message names the sizes that work.
    """
    Heads.of(config, 0, tensor_parallel_size)
    rank_layers(config, Share(num_stages=pipeline_parallel_size))


def hold(model: nn.Module, config: Any, share: Share, quantization: str | None) -> list[str]:
    """Remove from a definition, which may have stand-ins for its weights, all that a rank does not hold.

    Args:
        quantization: Quantization that will be applied to the weights.

    Returns:
        The `sums` argument of `join`.

    Raises:
        ModelError: The family, or one of its sizes, cannot be split like this.
    """
    if share.num_stages > 1 or not share.has_head:
        make_stage(model, rank_layers(config, share), is_first=share.is_first, is_last=share.has_head)
    return split_layers(model, config, share.tensor, quantization)


def join(model: nn.Module, sums: list[str], share: Share) -> None:
    """Make passes of the model exchange results with the other ranks of its tensor group from now on."""
    if isinstance(model, FusedDecoder):
        model.group = share.tensor
    elif sums:
        add_up(model, sums, share.tensor)
