"""Conversion of a GGUF file's metadata to a Hugging Face configuration, and the tensors that such a model must have."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType

from specinfer.model.gguf.families import FAMILIES
from specinfer.model.gguf.families.parts import Family
from specinfer.model.gguf.header import GgufError, GgufHeader, TensorPlace, read_header
from specinfer.model.gguf.metadata import LLAMA3, LONGROPE, TAKE_ANOTHER, Metadata
from specinfer.model.gguf.tokenizer import token_id
from specinfer.model.gguf.weights import GgufSource, JoinedSource, Weight, read_tensor
from specinfer.model.stacked_source import StackedSource, stacked

_BLOCK = re.compile(r"blk\.(\d+)\.")
# Numbers that choose experts. Some families compute with them in 32 bits; in others loading rounds them to the dtype.
_ROUTING = re.compile(r".*\.(exp_probs_b\.bias|ffn_gate_inp\.weight)")
# Matrices of 32 bits in files of all types: convolutions, what recurrences decay by, and routers.
EXACT = re.compile(r".*\.(ssm_(a|d|conv1d.*|norm)|shortconv\.conv|ffn_gate_inp.*)(\.weight)?")
_Sources = dict[str, GgufSource | StackedSource | JoinedSource]


def read_config(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of config.json.

    Raises:
        GgufError: The file's architecture is not supported, or it lacks metadata that a configuration needs.
    """
    arch = header.get("general.architecture", str)
    if arch not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise GgufError(
            header.path, f"models of architecture {arch!r} are not read from GGUF ({known} are)", TAKE_ANOTHER
        )
    meta = Metadata(header, arch)
    if "token_embd.weight" not in header.tensors:
        raise meta.error("the tensor 'token_embd.weight' is missing")
    fields = _common_fields(meta)
    fields |= FAMILIES[arch].fields(meta, fields)
    if meta.get("nextn_predict_layers", int, 0) and _mtp_plan(header, fields):
        fields["num_nextn_predict_layers"] = 1  # the first is read, and drafts all levels
    _check_tensors(meta, fields["num_hidden_layers"], _plan(header, fields))
    return fields


def _plan(header: GgufHeader, fields: Mapping[str, Any]) -> Iterable[tuple[str, Weight]]:
    yield from _family(header).plan(fields, header.tensors)
    if fields.get("num_nextn_predict_layers"):
        yield from _mtp_plan(header, fields)


def _mtp_plan(header: GgufHeader, fields: Mapping[str, Any]) -> list[tuple[str, Weight]]:
    """Return the tensors of the first MTP layer, or none if the file lacks one: models run without it."""
    plan = list(mtp(fields)) if (mtp := _family(header).mtp) else []
    return plan if all(stored in header.tensors for stored, _ in plan) else []


def _family(header: GgufHeader) -> Family:
    return FAMILIES[header.metadata["general.architecture"]]


def _common_fields(meta: Metadata) -> dict[str, Any]:
    header, num_layers = meta.header, meta.size("block_count")
    if num_layers > len(header.tensors):
        raise meta.error(f"{meta.arch}.block_count is {num_layers}, and there are {len(header.tensors)} tensors")
    num_mtp_layers = meta.get("nextn_predict_layers", int, 0)  # after the last layer of the model itself
    if not 0 <= num_mtp_layers < num_layers:
        raise meta.error(f"{meta.arch}.nextn_predict_layers is {num_mtp_layers}, of {num_layers} layers")
    fields = {
        "dtype": str(own_dtype(header)).removeprefix("torch."),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": meta.size("embedding_length"),
        "num_hidden_layers": num_layers - num_mtp_layers,
        "max_position_embeddings": meta.size("context_length"),
        "rms_norm_eps": meta.positive("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        fields[f"{name}_token_id"] = token_id(header, f"{key}_token_id")
    return fields


def gguf_sources(path: Path, dtype: torch.dtype | None) -> _Sources:
    """Return the weights of a file by their names in the model, decoded to `dtype` or to the file's own type.

    Raises:
        GgufError: The file cannot be used.
    """
    header = read_header(path)
    config = read_config(header)
    dtype = own_dtype(header) if dtype is None else dtype
    pieces: dict[str, list[GgufSource]] = defaultdict(list)
    factors = _read_factors(header)
    for stored, one in _plan(header, config):
        kind = torch.float32 if _ROUTING.fullmatch(stored) else dtype
        pieces[one.name].append(GgufSource(_place(header, stored, one, factors.get(stored)), one, kind))
    sources = {name: found[0] if len(found) == 1 else JoinedSource(found) for name, found in pieces.items()}
    family = _family(header)
    return stacked(sources, is_transposed=family.transposes_experts) if family.stacks_experts else {**sources}


def _factor_names(header: GgufHeader, stored: str, *kinds: str) -> list[str]:
    """Return the names of the tensors that have factors of another one: of NVFP4, one for each matrix."""
    if header.tensors[stored].kind != GGMLQuantizationType.NVFP4 or not stored.endswith(".weight"):
        return []
    return [name for kind in kinds if (name := f"{stored.removesuffix('weight')}{kind}") in header.tensors]


def _read_factors(header: GgufHeader) -> dict[str, list[float]]:
    """Return the factors of matrices by the names of the tensors that have these."""
    return {
        stored: read_tensor(header.tensors[name], torch.float32).tolist()
        for stored in header.tensors
        for name in _factor_names(header, stored, "scale")
    }


def _place(header: GgufHeader, name: str, weight: Weight, factors: Sequence[float] | None) -> TensorPlace:
    """Return the place of a weight, which may be an expert's part of a tensor."""
    place = header.tensors[name]
    if factors is not None:
        place = replace(place, factor=factors[weight.expert or 0])
    if weight.expert is None:
        return place
    size = place.num_bytes // weight.num_experts
    return replace(place, shape=place.shape[1:], offset=place.offset + weight.expert * size, num_bytes=size)


def own_dtype(header: GgufHeader) -> torch.dtype:
    """Return the type that matrices are stored in, or bfloat16 if they are quantized or of several types."""
    kinds = {
        place.kind.name for name, place in header.tensors.items() if len(place.shape) > 1 and not EXACT.fullmatch(name)
    }
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return plain.get(kinds.pop(), torch.bfloat16) if len(kinds) == 1 else torch.bfloat16


def _check_tensors(meta: Metadata, num_layers: int, plan: Iterable[tuple[str, Weight]]) -> None:
    """Refuse a file whose tensors do not match its configuration, before either is used."""
    tensors, known = meta.header.tensors, {LLAMA3, *LONGROPE.values()}
    for name, weight in plan:
        if name not in tensors:
            raise meta.error(f"the tensor {name!r} is missing")
        shape, wanted = tensors[name].shape, weight.stored_shape
        if _without_ones(shape) != _without_ones(wanted):
            raise meta.error(
                f"the tensor {name!r} has the shape {list(shape)}, and the metadata ask for {list(wanted)}"
            )
        known.add(name)
        # Factors of inputs are for engines that round activations to 4 bits, too.
        for factor in _factor_names(meta.header, name, "scale", "input_scale"):
            if (shape := tensors[factor].shape) != (weight.num_experts,):
                raise meta.error(f"the tensor {factor!r} has the shape {list(shape)}, not [{weight.num_experts}]")
            known.add(factor)
    # Further MTP layers come last, and are not read.
    if meta.get("nextn_predict_layers", int, 0):
        known |= {name for name in tensors if (found := _BLOCK.match(name)) and int(found[1]) >= num_layers}
    if others := sorted(tensors.keys() - known):
        raise meta.error(f"the tensor {others[0][:80]!r} has no place in such a model", TAKE_ANOTHER)


def _without_ones(shape: Sequence[int]) -> list[int]:
    """Return the sizes that converters neither leave out nor add."""
    return [size for size in shape if size != 1]
