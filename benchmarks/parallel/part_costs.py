"""Time that one of several tensor ranks computes in a pass, measured without the other ranks."""

import torch
from torch import Tensor

from specinfer.drafters.base import Drafter
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.runner import ModelRunner
from specinfer.parallel.group import ShardSpec
from specinfer.policy.cost_measurement import measure_costs
from specinfer.policy.curves import Curve

_NUM_SLOTS = 2048


class Echo:
    """A group of ranks without communication: every collective returns at once. Results are wrong, times are right."""

    rank = 1  # not 0, since only rank 0 computes the head

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor] * self.size

    def send(self, tensor: Tensor, to: int) -> None:
        raise AssertionError("a part that is measured hands nothing on")

    def recv(self, tensor: Tensor, source: int) -> None:
        raise AssertionError("a part that is measured is handed nothing")


def measure_part(whole: LoadedModel, drafter: Drafter, num_ranks: int) -> Curve:
    """Return the seconds of all layers of this target by rows, on one of this many tensor ranks.

    Args:
        drafter: Any drafter. Its levels are timed too, and not used.

    Raises:
        ModelError: The target cannot be split in this way.
    """
    shard = ShardSpec(Echo(num_ranks))
    loaded = load_model(whole.folder, whole.dtype, torch.device("cpu"), whole.quantization, shard=shard)
    curve = measure_costs(ModelRunner(loaded, _NUM_SLOTS), drafter).target
    assert isinstance(curve, Curve), "nothing is streamed"
    return curve
