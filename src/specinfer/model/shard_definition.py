"""Transformers' definition of a model, cut to the shard of one rank, with weights or with meta weights."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specinfer.core.errors import ModelError, WeightsError
from specinfer.core.progress import ProgressCallback
from specinfer.model.definition import eos_token_ids_of, read_definition
from specinfer.model.experts import place_experts
from specinfer.model.linears import layer_names, place_codes, rounds_experts
from specinfer.model.load_config import LoadConfig
from specinfer.model.offload.checkpoint import Checkpoint, layer_number
from specinfer.model.offload.meta_weights import origin_of
from specinfer.model.offload.shards import has_safetensors, has_usual_names
from specinfer.model.offload.streamed_layer import LayerStream
from specinfer.model.probe import Probe
from specinfer.model.sharding.shard import shard_model
from specinfer.model.sharding.tensor_parallel import Split
from specinfer.ops import QuantizedWeight


@dataclass(frozen=True, slots=True)
class ShardDefinition:
    """A rank's shard of a family's definition, and properties of the whole."""

    model: Any
    num_parameters: int
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    split: Split
    stored_types: str | None = None  # see `LoadedModel`

    def with_types(self, kinds: set[str]) -> "ShardDefinition":
        """Return it with more types that weights are stored in."""
        known = set() if self.stored_types is None else set(self.stored_types.split(", "))
        return replace(self, stored_types=", ".join(sorted(known | kinds)) or None)

    @classmethod
    def make(cls, job: LoadConfig, weights: dict[str, Tensor] | None = None) -> "ShardDefinition":
        """Make the definition with these weights, or with the folder's, and cut it to the shard."""
        model = read_definition(job.folder, job.config, job.dtype, weights)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        dtype = next(model.parameters()).dtype
        eos_token_ids = eos_token_ids_of(model, job.config, job.folder)
        model.requires_grad_(False)
        rounds = rounds_experts(job.quantization, job.device)
        split = shard_model(model, job.config, job.shard, job.quantization, rounds_experts=rounds)
        return cls(model, num_parameters, dtype, eos_token_ids, split)


def rounding_of(job: LoadConfig, definition: ShardDefinition) -> str | None:
    """Return the quantization whose rounding a comparison with the definition has to allow, or None."""
    # Codes are multiplied by activations of 8 bits, which may differ by a step where sums differ in the last bit.
    return job.quantization or (None if definition.stored_types is None else "int8")


class BuiltModel(NamedTuple):
    """A model ready to run, and what is known of it."""

    model: nn.Module
    definition: ShardDefinition
    probe: Probe
    stream: LayerStream | None = None


def read_shard(job: LoadConfig) -> ShardDefinition:
    """Read a definition with this rank's weights. Of a split model, no other weights are in memory at any time."""
    if job.shard.is_whole and has_safetensors(job.folder) and has_usual_names(job.folder):
        return ShardDefinition.make(job)
    with open_checkpoint(job) as checkpoint:
        # transformers would treat a GGUF file as quantized, and reads only some correctly.
        definition = ShardDefinition.make(job, checkpoint.weights(lambda _layer: job.shard.is_whole))
        prepare_conversion(checkpoint, definition.model, job)
        checkpoint.fill(definition.model)
        kinds = place_stored(definition.model, checkpoint, native=job.has_native_kernels)
        return definition.with_types(kinds)


def place_stored(
    model: nn.Module,
    checkpoint: Checkpoint,
    is_read: Callable[[int | None], bool] = lambda _: True,
    is_placed: Callable[[int | None], bool] = lambda _: True,
    *,
    native: bool = True,
) -> set[str]:
    """Let layers compute with the weights that the checkpoint keeps as they are stored, and return their types.

    Args:
        is_read: Function of a layer's number, or None outside of layers. What is not read is on the meta device.
        is_placed: Such a function; other layers stay as they are.
        native: False for the kernels of GPUs.
    """

    def codes_of(module: nn.Module, name: str, weight: Tensor) -> tuple[str, QuantizedWeight] | None:
        if not is_placed(layer_number(name)) or not checkpoint.keeps(module, name, weight):
            return None
        origin = origin_of(weight)
        assert origin is not None
        return checkpoint.codes(*origin, reads=is_read(layer_number(name)))

    kinds = place_codes(model, codes_of, native=native)
    if is_placed(0):
        kinds |= place_experts(model, checkpoint, lambda name: is_read(layer_number(name)), native=native)
    return kinds


@contextlib.contextmanager
def open_checkpoint(
    job: LoadConfig, progress: ProgressCallback | None = None, *, stays_open: bool = False
) -> Iterator[Checkpoint]:
    """Open a folder's weights, and close them at the end or on an error."""
    dtype = job.dtype if isinstance(job.dtype, torch.dtype) else None
    checkpoint = Checkpoint(
        job.folder, progress, dtype, job.keeps_codes_of, is_streamed=job.offload.offload is not None
    )
    try:
        yield checkpoint
    except BaseException as error:
        checkpoint.close()
        if isinstance(error, WeightsError):
            raise ModelError(str(error)) from error
        raise
    if not stays_open:
        checkpoint.close()


def prepare_conversion(checkpoint: Checkpoint, model: nn.Module, job: LoadConfig) -> None:
    """Let the checkpoint make weights that are not single tensors of the files, a layer at a time."""
    checkpoint.converts_by(partial(_layer_tensors, checkpoint, job), layer_names(model, job.num_layers))


def _layer_tensors(checkpoint: Checkpoint, job: LoadConfig, layer: int) -> dict[str, Tensor]:
    """Return a layer's weights by name, as in the family's definition."""
    model = ShardDefinition.make(job, checkpoint.weights(lambda number: number == layer, decodes=True)).model
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in tensors if checkpoint.layer_of(name) == layer}
