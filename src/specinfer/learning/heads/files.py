"""Heads of folders, ready for training."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from specinfer.core.errors import ModelError
from specinfer.learning.heads.block import TrainableBlock
from specinfer.learning.heads.eagle3 import TrainableEagle3
from specinfer.learning.heads.head import EMBEDDING, OUTPUT_HEADS, TrainableHead
from specinfer.model.definition import load_config
from specinfer.model.folder import read_weight
from specinfer.model.heads.block import BlockHead
from specinfer.model.heads.checkpoint import HeadCheckpoint
from specinfer.model.heads.eagle3 import Eagle3Head
from specinfer.model.heads.head import TargetEnds, TargetShape
from specinfer.model.heads.load import find_format

TRAINED = ("EAGLE-3", "DSpark", "DFlash", "JetSpec")


def can_train(folder: Path) -> bool:
    """Return whether the folder has a head of a kind that can be trained."""
    return find_format(folder) in TRAINED


def read_head(folder: Path, target: Path, embed: Callable[[Tensor], Tensor] | None = None) -> TrainableHead:
    """Return the head of a folder, ready for training.

    Args:
        embed: The target's embedding, or None to read it from the target's folder.

    Raises:
        ModelError: The head was made for another target, its files are damaged, or its kind cannot be trained.
    """
    kind, shape = find_format(folder), TargetShape.from_config(load_config(target))
    ends = _read_ends(target, embed)
    checkpoint = HeadCheckpoint(folder, torch.float32, torch.device("cpu"))
    if kind == "EAGLE-3":
        trained: TrainableHead = TrainableEagle3(Eagle3Head(checkpoint, shape, ends), checkpoint, target)
    elif kind in TRAINED:
        trained = TrainableBlock(BlockHead(checkpoint, shape, ends), checkpoint, target)
    else:
        raise ModelError(f"drafter: {folder} is a head of the kind {kind}, which cannot be trained; take new:eagle3")
    checkpoint.check_all_taken()
    return trained


def _read_ends(target: Path, embed: Callable[[Tensor], Tensor] | None) -> TargetEnds:
    head: Tensor | None = None
    table = read_weight(target, EMBEDDING) if embed is None else None

    def read_rows(ids: Tensor) -> Tensor:
        nonlocal table
        assert table is not None
        table = table.to(ids.device)
        return table[ids]

    def logits(hidden: Tensor) -> Tensor:
        nonlocal head
        head = read_weight(target, *OUTPUT_HEADS) if head is None else head
        head = head.to(hidden.device)
        product: Tensor = hidden @ head.T
        return product

    return TargetEnds(embed or read_rows, logits)
