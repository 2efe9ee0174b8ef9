"""Heads of every kind, and their passes over a chain of tokens, then a tree; of a block head over two blocks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads import save_block, save_eagle3
from pair_heads import save_eagle, save_mtp
from specinfer.core.tree import TokenTree
from specinfer.drafters.block_drafter import block_piece
from specinfer.model.batch import Piece
from specinfer.model.heads.head import FeatureHead
from specinfer.model.load import LoadedModel
from specinfer.model.runner import ModelRunner
from tiny import random_prompts

TREE = TokenTree((8, 9, 10, 11, 9, 13), (-1, 0, 0, 1, 2, 1))
(CHAIN,) = random_prompts([20])


_SPECULATORS = {"layout": "speculators"}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
# Heads by what is before the comma; those of EAGLE-3 that have formulas in `reference.heads` first.
EAGLE3_KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3, of Qwen3": {"family": "qwen3"},
    "eagle3, norm before residual": _SPECULATORS | {"norm_before_residual": True},
    "eagle3, normed output": _SPECULATORS | {"norm_before_residual": False, "norm_output": True},
    "eagle3, both": _SPECULATORS | {"norm_before_residual": True, "norm_output": True},
    "eagle3, norms before fc": {"fc_norm": True, "norm_before_fc": True},
    "eagle3, reduced vocabulary": {"draft_ids": range(3, 90, 2), "own_embedding": True},
    "eagle3, several layers": {"num_layers": 3, "family": "qwen3"},
    "eagle3, several layers, both": _SPECULATORS | {"num_layers": 2, "norm_before_residual": True, "norm_output": True},
}
HEAD_KINDS: dict[str, dict[str, Any]] = EAGLE3_KINDS | {
    "eagle3, rotations of Llama 3": {"rope_parameters": _LLAMA3},
    "eagle3, windows of Qwen3": {
        "family": "qwen3", "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0,
    },
    "eagle3, parallel": {"parallel": True, "mask_token_id": 90},
    "eagle": {},
    "eagle, bias": {"bias": True},
    "mtp of mimo": {},
    "dflash": {},
    "dflash, causal windows": {
        "sliding_window_non_causal": False, "layer_types": ["full_attention", "sliding_attention"],
        "use_sliding_window": True, "sliding_window": 8,
    },
    "jetspec": {"num_layers": 1},
    "dspark": {},
}  # fmt: skip


def save_kind(kind: str, target: Path, folder: Path) -> tuple[Path, Path]:
    """Write a head, one of `HEAD_KINDS` or an MTP layer of another family; return its target and itself.

    Args:
        target: A Llama of eight layers; MTP layers come with their own target.
    """
    if kind.startswith("mtp of "):
        save_mtp(folder, kind.removeprefix("mtp of "))
        return folder, folder
    name = kind.partition(",")[0]
    if name in ("dflash", "jetspec", "dspark"):
        return target, save_block(folder, name, **HEAD_KINDS[kind])
    return target, (save_eagle3 if name == "eagle3" else save_eagle)(folder, **HEAD_KINDS[kind])


def chain_features(loaded: LoadedModel, count: int = len(CHAIN), seed: int = 0) -> Tensor:
    """Return [count, width] random features."""
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed)).to(loaded.device, loaded.dtype)


def head_passes(loaded: LoadedModel, num_logits: int = 7) -> tuple[Tensor, Tensor]:
    """Return the logits of both passes, and the features that they store.

    Args:
        num_logits: Rows of the chain with logits, the last ones.
    """
    head, runner = loaded.model, ModelRunner(loaded, 64)
    assert isinstance(head, FeatureHead)
    slots = runner.cache.reserve("one", len(CHAIN))
    chain = Piece.from_span(CHAIN, TokenTree.root(CHAIN[-1]), runner.cache.slots("one"), slots)
    features = chain_features(loaded)
    if head.block is not None and head.mask_features is None:
        runner.forward([replace(chain, features=features, num_logits=0)])
        runner.cache.commit("one", range(len(CHAIN)))
        own = runner.cache.reserve("one", 2 * head.block.size).reshape(2, -1)
        ends = zip((20, 7), own, strict=True)
        logits = runner.forward([block_piece(head.block, 5, slots[:end], new) for end, new in ends])
        return logits, runner.tensors.taps[0][own.reshape(-1)].float()
    first = runner.forward([replace(chain, features=features, num_logits=num_logits)]).clone()
    runner.cache.commit("one", range(len(CHAIN)))
    slots = runner.cache.reserve("one", len(TREE))
    tree = Piece.from_span(TREE.tokens[:1], TREE, runner.cache.slots("one"), slots)
    second = runner.forward([replace(tree, features=chain_features(loaded, len(TREE), seed=1))])
    return torch.cat([first, second]), runner.tensors.taps[0][: len(CHAIN) + len(TREE)].float()
