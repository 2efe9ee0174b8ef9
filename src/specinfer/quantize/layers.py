"""The linear layers of a checkpoint, by the names that its files have for them and by those of its definition."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from specinfer.core.errors import ModelError
from specinfer.model.definition import load_config, outline
from specinfer.model.folder import weight_shapes
from specinfer.model.gguf.stored import mtp_names
from specinfer.model.linears import ROUTER, layer_names, quantizable_names
from specinfer.model.offload.meta_weights import MetaWeight, origin_of
from specinfer.ops.quantization import Bits
from specinfer.ops.quantized_weight import GROUP_SIZES
from specinfer.quantize.experts import Place, StoredExperts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Layers:
    """The linear layers of a model, by the names that they are written under.

    Attributes:
        places: Those to quantize, and their places in a model with split experts.
        ignored: Those that stay as they are.
    """

    places: dict[str, Place]
    ignored: list[str]
    experts: StoredExperts

    @classmethod
    def from_folder(cls, source: Path, bits: Bits) -> "Layers":
        """Find the linear layers of a folder's model.

        Raises:
            ModelError: There are none to quantize.
        """
        shapes, config = weight_shapes(source), load_config(source).get_text_config()
        model = outline(
            source, {name: MetaWeight.from_source(name, shape, torch.bfloat16) for name, shape in shapes.items()}
        )
        linears = {
            _stored_name(name, module): name for name, module in model.named_modules() if type(module) is nn.Linear
        }
        quantizable = set(quantizable_names(model, layer_names(model, config.num_hidden_layers)))
        plain = {stored: name for stored, name in linears.items() if name in quantizable}
        experts, mtp = StoredExperts(model, shapes), mtp_names(shapes)
        places, others, stacks = dict[str, Place](), list[str](), list[str]()
        for weight, shape in experts.shapes.items():
            layer = weight.removesuffix(".weight")
            place = Place(plain[layer], slice(None)) if layer in plain else experts.place(layer)
            if place is not None and weight != layer and shape[1] % GROUP_SIZES[bits] == 0:
                places[layer] = place
            elif len(shape) == 2 and (place is not None or weight in mtp or ROUTER.search(layer)):
                others.append(layer)
            elif len(shape) > 2 and ".expert" in weight:
                stacks.append(weight)
        if not places:
            raise ModelError(
                f"model: {source} has no linear layers with whole groups of {GROUP_SIZES[bits]} inputs, and cannot be "
                "quantized; use it as it is"
            )
        if stacks:
            logger.warning("stacked matrices stay as they are: %s and %d others", stacks[0], len(stacks) - 1)
        # By both names, because transformers looks for its own and vLLM for those of the files.
        ignored = list(dict.fromkeys(name for pair in linears.items() if pair[0] not in places for name in pair))
        return cls(places, ignored + sorted(set(others) - set(ignored)), experts)


def _stored_name(name: str, linear: nn.Linear) -> str:
    """Return the name in the files of a layer with a meta weight; a tied output head has its own."""
    origin = origin_of(linear.weight)
    stored = name if origin is None else origin[0].removesuffix(".weight")
    return stored if stored.rpartition(".")[2] == name.rpartition(".")[2] else name
