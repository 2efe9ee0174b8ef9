"""The shard of a definition that one rank computes: some of its layers, and a slice of each."""

from typing import Any

from torch import nn

from specinfer.core.errors import ModelError
from specinfer.model.layers.device import Decoder
from specinfer.model.recurrent.layers import check_stages
from specinfer.model.sharding.split_plan import Heads
from specinfer.model.sharding.stage import make_stage
from specinfer.model.sharding.tensor_parallel import Split, split_layers, sum_over_ranks
from specinfer.parallel.group import ShardSpec


def rank_layers(config: Any, shard: ShardSpec) -> range:
    """Return the decoder layers of a rank.

    Raises:
        ModelError: There are more stages than layers.
    """
    num_layers = int(config.get_text_config().num_hidden_layers)
    if shard.num_stages > num_layers:
        raise ModelError(
            f"pipeline_parallel_size: {num_layers} layers cannot be split into {shard.num_stages} stages; use at most "
            f"{num_layers}"
        )
    return shard.layers(num_layers)


def check_sizes(config: Any, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    """Refuse, before any process is started, a split that the model's heads or layers do not allow.

    Raises:
        ModelError: The model cannot be split like this; the message names the sizes that work.
    """
    check_stages(config, pipeline_parallel_size)
    Heads.from_config(config, 0, tensor_parallel_size)
    rank_layers(config, ShardSpec(num_stages=pipeline_parallel_size))


def shard_model(
    model: nn.Module, config: Any, shard: ShardSpec, quantization: str | None, *, rounds_experts: bool = False
) -> Split:
    """Remove from a definition, with weights or meta weights, all that is not in a rank's shard.

    Args:
        quantization, rounds_experts: As for `split_layers`.

    Raises:
        ModelError: The family, or one of its sizes, cannot be split like this.
    """
    if shard.num_stages > 1 or not shard.has_head:
        make_stage(model, rank_layers(config, shard), is_first=shard.is_first, is_last=shard.has_head)
    return split_layers(model, config, shard.tensor, quantization, rounds_experts=rounds_experts)


def connect_shards(model: nn.Module, sums: list[str], shard: ShardSpec) -> None:
    """Make passes of the model exchange results with the other ranks of its tensor group from now on."""
    if isinstance(model, Decoder):
        model.connect(shard.tensor, sums)
    elif sums:
        sum_over_ranks(model, sums, shard.tensor)
