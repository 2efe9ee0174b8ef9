"""Placeholders for the modules of a definition that are not in a pipeline stage.

The definition still iterates over all its layers. Placeholders before the stage pass their input on. The input of the
stage's first layer is replaced by the received hidden states. The first placeholder after the stage ends the pass.
"""

from typing import Any

import torch
from torch import Tensor, nn


class StageEnd(Exception):  # noqa: N818 - nothing is wrong
    """Signal that leaves a definition with the output of the stage's last layer.

    Attributes:
        hidden: [1, tokens, width].
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the last layer of this stage was computed")
        self.hidden = hidden


class Placeholder(nn.Module):
    """Placeholder for a layer, norm or head. Placeholders before the stage are called; their results do not matter.

    Args:
        replaced: The original module. Its plain attributes are copied, because models read some, such as the kind of
            attention.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        for name, value in vars(replaced).items():
            if isinstance(value, str | int) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        # An extra dimension, so that a definition that takes the first of several results gets the same tensor.
        return hidden_of(args, kwargs).unsqueeze(0)


class End(Placeholder):
    """Placeholder for the first module after the stage's layers."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        # The pass ends here, not after the last layer, because some definitions do something between two layers.
        raise StageEnd(hidden_of(args, kwargs))


class EmbeddingPlaceholder(nn.Module):
    """Placeholder for an embedding.

    Attributes:
        value: Value of all its elements; no result may depend on it.
    """

    def __init__(self, replaced: nn.Embedding) -> None:
        super().__init__()
        self.width, self.dtype = replaced.weight.shape[1], replaced.weight.dtype
        self.value = 0.0

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        ids = next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        return torch.full((*ids.shape, self.width), self.value, dtype=self.dtype, device=ids.device)


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states that a layer is called with."""
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden
