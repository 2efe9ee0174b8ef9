"""What one of several tensor ranks computes of a pass, measured without the others."""

import torch
from torch import Tensor

from specinfer.drafters.base import Drafter
from specinfer.engine.costs import Curve, measure_costs
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.runner import ModelRunner
from specinfer.parallel.share import Share

_NUM_SLOTS = 2048


class Echo:
    """A group in which the others have nothing to add, and answer at once. Results are wrong, times are right."""

    rank = 1  # the head is rank 0's alone

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
    """Seconds of all layers of this target by rows, on one of so many tensor ranks.

    Args:
        drafter: Any; its levels are timed beside.

    Raises:
        ModelError: The target cannot be split so.
    """
    share = Share(Echo(num_ranks))
    loaded = load_model(whole.folder, whole.dtype, torch.device("cpu"), whole.quantization, share=share)
    curve = measure_costs(ModelRunner(loaded, _NUM_SLOTS), drafter).target
    assert isinstance(curve, Curve), "nothing is streamed"
    return curve
