"""The target as its own drafter: its own weights, or a copy in fewer bits."""

from dataclasses import replace

from torch import nn

from specinfer.core.config import OffloadConfig
from specinfer.core.errors import ModelError
from specinfer.core.lookups import SELF_DRAFTERS
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load import LoadedModel, load_model, num_bytes_of
from specinfer.model.offload.budget import Budget
from specinfer.model.offload.streamed_layer import LayerStream
from specinfer.model.recurrent.layers import is_hybrid

USUAL_COPY = "self:int4"


def load_self(name: str, target: LoadedModel, offload: OffloadConfig) -> LoadedModel:
    """Return the target's own weights, or load a quantized copy, all of it in memory, that shares its embedding.

    Of a target that is split over several ranks, each loads the copy of its shard.

    Args:
        name: One of `SELF_DRAFTERS`.
        offload: Settings of a streamed target; its copy is kept in the folder of the packed copies.

    Raises:
        ModelError: The target has this quantization itself, or layers that cannot leave out a part of the context.
        ValueError: A streamed target has no folder for copies, or the memory budget is too small.
    """
    quantization, is_sparse = SELF_DRAFTERS[name]
    if is_sparse and is_hybrid(target.model):
        raise ModelError(
            f"drafters: {name} leaves out tokens, and the target has layers without attention, which need all of them; "
            f"name {USUAL_COPY}"
        )
    if quantization is None:
        if target.stream is not None:
            raise ModelError(f"drafters: {name} would stream the target for each draft token; name {USUAL_COPY}")
        return replace(target, layer_shapes=())  # it needs no cache of its own
    if target.quantization == quantization:
        remedy = "name self:sparse" if is_sparse else "leave one out"
        raise ModelError(f"drafters: {name} is the target itself, which is {quantization} too; {remedy}")
    if target.stream is not None and offload.offload_folder is None:
        raise ValueError(f"offload_folder: {name} is read from a packed copy; name a folder for it")
    try:
        copy = load_model(
            target.folder, target.dtype, target.device, quantization, offload=offload, shard=target.shard,
            max_model_len=target.max_position,
        )  # fmt: skip
    except ModelError as error:
        raise ModelError(f"drafters: {str(error).removeprefix('model: ')}") from error
    if copy.layer_shapes != target.layer_shapes:
        raise ModelError(f"drafters: {name} stores other keys and values than its target; leave it out")
    num_shared = _share_embeddings(copy.model, target.model)
    if copy.stream is not None:
        _keep_all(name, copy.stream, Budget(offload.budget_bytes, target.device))
    num_bytes = num_bytes_of(copy.model) - num_shared
    return replace(copy, layer_shapes=(), num_bytes=num_bytes)  # it needs no cache of its own


def _share_embeddings(copy: nn.Module, target: nn.Module) -> int:
    """Let the copy look up tokens in the target's tables, and return the bytes of those among its modules."""
    if isinstance(copy, FusedDecoder) and isinstance(target, FusedDecoder):
        copy.embedding, copy.embedded = None, target.embedded  # type: ignore[method-assign]
        copy.layer_inputs = target.layer_inputs
        return 0
    theirs = dict(target.named_modules())
    names = [
        name
        for name, module in copy.named_modules()
        if isinstance(module, nn.Embedding) and type(module) is type(theirs.get(name))
    ]
    for name in names:
        copy.set_submodule(name, theirs[name])
    return num_bytes_of(nn.ModuleList(theirs[name] for name in names))


def _keep_all(name: str, stream: LayerStream, budget: Budget) -> None:
    """Read all layers of a copy, which stay in memory.

    Raises:
        ValueError: The memory budget is too small for them.
    """
    num_bytes = stream.num_layers * stream.buffer_bytes
    try:
        budget.spare(num_bytes, what=f"{name}, two layers of the target, and the cache")
        stream.settle(num_bytes)
        for layer in range(stream.num_layers):
            stream.acquire(layer)
            stream.release(layer)
    except BaseException:
        stream.close()
        raise
