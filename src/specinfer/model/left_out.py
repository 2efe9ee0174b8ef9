"""What stands in a definition where a stage of a pipeline holds nothing.

The definition goes through all its layers as always. Those before the stage hand their input on, what the stage's
first layer is given is replaced by what was received, and the first layer after the stage ends the pass.
"""

from typing import Any

import torch
from torch import Tensor, nn


class StageEnd(Exception):  # noqa: N818 - nothing is wrong
    """Leaves a definition with what came out of the last layer that is held.

    Attributes:
        hidden: [1, tokens, width].
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the last layer of this stage was computed")
        self.hidden = hidden


class LeftOut(nn.Module):
    """A layer, norm or head that is not held. Before the stage it is called, and what it returns does not matter.

    Args:
        replaced: Models look at plain attributes of their layers, as which kind of attention they have.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        for name, value in vars(replaced).items():
            if isinstance(value, str | int) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        # One dimension more: the same again for a definition that takes the first of several results.
        return hidden_of(args, kwargs).unsqueeze(0)


class End(LeftOut):
    """What comes first after the layers that are held."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        # Here, not where the layer before returns: some definitions do something between two layers.
        raise StageEnd(hidden_of(args, kwargs))


class EmbeddingLeftOut(nn.Module):
    """An embedding that is not held.

    Attributes:
        value: That all its rows consist of; nothing may depend on it.
    """

    def __init__(self, replaced: nn.Embedding) -> None:
        super().__init__()
        self.width, self.dtype = replaced.weight.shape[1], replaced.weight.dtype
        self.value = 0.0

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        ids = next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        return torch.full((*ids.shape, self.width), self.value, dtype=self.dtype, device=ids.device)


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states that a layer is called with."""
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden
