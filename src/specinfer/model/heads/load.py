"""Loading of a head next to its target."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.nn import functional

from specinfer.core.errors import ModelError
from specinfer.hub.files import ASSISTANT, HEADS, MTP_LAYER, head_format, may_be_eagle, read_object
from specinfer.model.attention import register
from specinfer.model.definition import load_config, storing_layers
from specinfer.model.families import REPLACED
from specinfer.model.folder import read_weight
from specinfer.model.heads.checkpoint import HeadCheckpoint, check_stated_target, tensor_names
from specinfer.model.heads.head import FeatureHead, TargetEnds, TargetShape
from specinfer.model.kv_tensors import LayerShape, TapShape
from specinfer.model.linears import quantize_linears
from specinfer.model.load import LoadedModel, num_bytes_of, path_of
from specinfer.model.recurrent.layers import LOOP_REPLACED
from specinfer.ops import pack_linears


def find_format(folder: Path) -> str | None:
    """Return the format of the head in a folder, or None for a model of its own."""
    config = read_object(folder / "config.json") or {}
    if may_be_eagle(config) and "fc.weight" in tensor_names(folder):
        return "EAGLE"
    return head_format(config)


def shows_hidden_states(config: Any) -> bool:
    """Return whether heads can read the hidden states of a target with this configuration."""
    return config.model_type not in REPLACED and config.model_type not in LOOP_REPLACED


def load_head(folder: Path, target: LoadedModel, quantization: str | None = None) -> LoadedModel:
    """Load a head for this target, whose type, device, embedding and output head it shares.

    Args:
        folder: Folder of the head; the target's own for its MTP layer.

    Raises:
        ModelError: The files are damaged, the head was made for another target, or its format is not supported.
    """
    register()
    config = load_config(target.folder)
    if not shows_hidden_states(config):
        raise ModelError(
            f"drafters: {folder} reads hidden states, which targets of family {config.model_type!r} do not show; name "
            "a small model"
        )
    shape = TargetShape.from_config(config)
    ends = _ends_of(target)
    if folder == target.folder:
        kind = MTP_LAYER
        head: FeatureHead = HEADS[kind].find()(folder, target.dtype, target.device, shape, ends)
    else:
        checkpoint = HeadCheckpoint(folder, target.dtype, target.device)
        check_stated_target(checkpoint, config)
        kind = str(find_format(folder))
        cache = _target_cache(folder, target, config) if kind == ASSISTANT else ()
        head = HEADS[kind].find()(checkpoint, shape, ends, *cache)
        checkpoint.check_all_taken()
    if not head.layer_shapes and kind != ASSISTANT:
        raise ModelError(f"drafters: {folder} has no layer that stores keys and values; name another head")
    head.to(target.device)  # rotations are computed, on the CPU
    num_parameters = sum(parameter.numel() for parameter in head.parameters())
    if target.native and target.device.type == "cpu":
        head.fuse(quantization)
    elif target.native and target.device.type == "cuda":
        head.fuse_on_device(target.max_position)
    if quantization is not None:
        quantize_linears(head, quantization, None, target.device)
    head.eval().requires_grad_(False)
    if target.device.type == "cpu":
        pack_linears(head)
    return replace(
        target,
        model=head,
        folder=folder,
        layer_shapes=head.layer_shapes,
        num_parameters=num_parameters,
        num_bytes=num_bytes_of(head),
        quantization=quantization,
        compute_path=path_of(head),
        stream=None,
        token_map=head.token_map,
        taps=TapShape((0,), head.width) if head.layer_shapes else None,
    )


def _target_cache(folder: Path, target: LoadedModel, config: Any) -> tuple[dict[str, int], tuple[LayerShape, ...]]:
    """Return what an assistant may read of its target's cache: the layers by their kind, and what each layer stores."""
    if not target.shard.is_whole:
        raise ModelError(
            f"drafters: {folder} reads keys and values of its target, which must be in one process; leave its parallel "
            "sizes out"
        )
    return storing_layers(config), target.layer_shapes


def _ends_of(target: LoadedModel) -> TargetEnds:
    ends = TargetEnds.from_model(target.model)
    if target.shard.is_first:
        return ends
    table = read_weight(target.folder, "embed_tokens.weight").to(target.device, target.dtype)  # in another stage
    return ends._replace(embed=lambda ids: functional.embedding(ids, table), table=table)


def taps_of(target: LoadedModel, drafters: Iterable[LoadedModel]) -> TapShape | None:
    """Return the hidden states that a target has to store for the heads among its drafters, or None for none."""
    heads = [one.model for one in drafters if isinstance(one.model, FeatureHead)]
    layers = {layer for head in heads for layer in head.may_read}
    width = load_config(target.folder).get_text_config().hidden_size if heads else 0
    return TapShape(tuple(sorted(layers)), int(width)) if layers else None
