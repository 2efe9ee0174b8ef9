"""The packed form of models in the package: int8 with one scale per row, or 4 bits with one for each 32 weights."""

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from specinfer.demo.chat_model import CHAT, PACKED_HEADS
from specinfer.demo.pair import (
    CHAT_DRAFTER,
    CHECKSUMS,
    EMBEDDING,
    GROUP_SCALES,
    OUTPUT_HEAD,
    ROW_SCALE,
    WEIGHTS,
    digest,
    save,
)
from specinfer.ops.quantization import quantize
from specinfer.ops.quantized_weight import GROUP_SIZES

_TIED = "lm_head.weight"
_COMPACT = ("tokenizer.json", "token_map.json")  # written on one line, which takes less than half of the bytes
_COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "token_map.json")


def quantize_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to int8: the values [rows, columns] and the scales [rows, 1]."""
    matrix = matrix.float()
    scales = (matrix.abs().amax(dim=1, keepdim=True) / 127).clamp_min(1e-12)
    return (matrix / scales).round().to(torch.int8), scales


def pack(
    source_folder: Path,
    target_folder: Path,
    without: Collection[str] = (),
    bits: Literal[8, 4] = 8,
    **settings: str,
) -> None:
    """Write an ordinary Hugging Face folder in the packed form.

    Args:
        without: Names of weights and files to leave out.
        bits: Size of the codes. Rows that are not a multiple of 32 long get 8 bits.
        settings: Entries to add to the packed config.json.
    """
    tensors: dict[str, Tensor] = {}
    config = json.loads((source_folder / "config.json").read_text())
    for name, tensor in load_file(source_folder / WEIGHTS).items():
        if name in without or (name == _TIED and config.get("tie_word_embeddings")):
            continue
        if tensor.ndim == 2 and bits == 4 and tensor.shape[1] % GROUP_SIZES[4] == 0:
            rounded = quantize(tensor, 4)
            tensors[name] = rounded.codes[:, ::2] | rounded.codes[:, 1::2] << 4
            tensors[name + GROUP_SCALES] = rounded.scales
        elif tensor.ndim == 2:
            tensors[name], tensors[name + ROW_SCALE] = quantize_rows(tensor)
        else:
            tensors[name] = tensor.float() if tensor.is_floating_point() else tensor.int()
    target_folder.mkdir(parents=True, exist_ok=True)
    save(tensors, target_folder / WEIGHTS)
    copied = [name for name in _COPIED if name not in without and (source_folder / name).is_file()]
    for name in copied:
        if name in _COMPACT:
            found = json.loads((source_folder / name).read_text(encoding="utf-8"))
            text = json.dumps(found, separators=(",", ":"), ensure_ascii=False)
            (target_folder / name).write_text(text + "\n", encoding="utf-8")
        else:
            shutil.copyfile(source_folder / name, target_folder / name)
    if settings:
        (target_folder / "config.json").write_text(json.dumps(config | settings, indent=2, sort_keys=True) + "\n")
    sums = {name: digest(target_folder / name) for name in (WEIGHTS, *copied)}
    (target_folder / CHECKSUMS).write_text(json.dumps(sums, indent=2) + "\n")


def pack_chat_drafter(folder: Path) -> None:
    """Embed a drafter of the chat model that was trained with frozen embeddings, and rounded to 4 bits."""
    others = (EMBEDDING, "tokenizer.json", "tokenizer_config.json")
    # Computed in the precision of the embedded weights.
    pack(folder, CHAT_DRAFTER, without=others, bits=4, drafter_quantization="int4")


def pack_head(folder: Path, name: str, bits: Literal[8, 4] = 4) -> None:
    """Embed a head that `specinfer tune` has made for the code target (demo-*) or the chat model (demo-chat-*)."""
    # The tensor t2d is for trainers only. The chat model's heads are trained with its own output head, frozen.
    without = ("t2d", OUTPUT_HEAD) if name.startswith(CHAT) else ("t2d",)
    # Computed in the precision of the embedded weights.
    pack(folder, PACKED_HEADS / name, without=without, bits=bits, drafter_quantization=f"int{bits}")
