"""Drafters in training: transformers' definition in float32, its logits of a batch, its loss, and its files.

A language model is a `TrainableModel`; heads on the target's hidden states are in `heads/`.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from specinfer.core.errors import ModelError, first_line
from specinfer.drafters.vocabulary.token_map import TokenMap
from specinfer.learning.batches import Batch
from specinfer.learning.distillation import HeadLogits, restrict, training_loss
from specinfer.model.definition import load_plain, quietly
from specinfer.model.folder import TOKEN_MAP, replacing
from specinfer.model.gguf.folder import origin_of

# Files of a model folder other than weights, which are copied unchanged.
_COPIED = ("generation_config.json", "tokenizer*", "*_tokens*.json", "vocab.*", "merges.txt", "*.jinja", "*.model")
_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")  # of logits, in a config


class TrainableDrafter(nn.Module):
    """A drafter whose weights take gradients; its subclasses compute the logits.

    Args:
        model: The module that drafts.
        config: The configuration with the target's vocabulary.
        token_map: [mapped] int64 the only tokens that it predicts, or None for all.
    """

    token_map: Tensor | None

    def __init__(self, model: Any, config: Any, token_map: Tensor | None) -> None:
        super().__init__()
        self.model, self.config = model, config.get_text_config()
        self.register_buffer("token_map", token_map, persistent=False)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def stored(self) -> nn.Module:
        """The module whose state a checkpoint has."""
        return self

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.parameters())

    def loss(self, logits: Tensor | HeadLogits, batch: Batch, weights: Tensor | None = None) -> Tensor:
        """Return the loss of what `forward` returned for a batch.

        Args:
            weights: [outputs] the weight of each output token, or None for equal weights.
        """
        if self.token_map is not None:
            batch, mass = restrict(batch, self.token_map, self.vocab_size)
            weights = mass if weights is None else weights * mass
        return training_loss(logits, batch, weights)

    def next_logits(self, batch: Batch) -> Tensor:
        """Return [outputs, vocab] float32 logits of each output token, -inf for tokens that are never drafted."""
        logits: Tensor = self.eval()(batch)
        return logits if self.token_map is None else TokenMap(self.token_map, self.vocab_size).expand(logits)

    def freeze_embeddings(self) -> None:
        """Leave the embeddings, and an output head that is tied to them, as they are."""
        raise NotImplementedError

    def save(self, folder: Path, origin: Path | None) -> None:
        """Write the drafter as it is served, with the tokenizer and generation settings of `origin`.

        Raises:
            OSError, SafetensorError: The folder cannot be written.
        """
        raise NotImplementedError


class TrainableModel(TrainableDrafter):
    """A language model with the target's vocabulary."""

    def __init__(self, model: Any, token_map: Tensor | None = None) -> None:
        super().__init__(model, model.config, token_map)
        # The origin's file is copied instead; an error that transformers sees in its own must not prevent saving.
        model.generation_config = type(model.generation_config)()
        self.config.use_cache = False  # training reads whole texts, and models without attention have no cache

    @classmethod
    def load(cls, folder: Path, token_map: Tensor | None = None) -> Self:
        """Load a folder's model in float32.

        Raises:
            ModelError: transformers cannot load the folder.
        """
        return cls(load_float32(folder), token_map)

    @property
    def stored(self) -> nn.Module:
        stored: nn.Module = self.model
        return stored

    def forward(self, batch: Batch) -> Tensor:
        """Return [outputs, vocab] float32 logits; with a token map [outputs, mapped]."""
        # Padding is at the end, where no token attends to it, so no mask is needed.
        if self.token_map is None or any(getattr(self.config, name, None) for name in _SCALES):
            logits: Tensor = self.model(input_ids=batch.tokens).logits[batch.rows, batch.places].float()
            return logits if self.token_map is None else logits[:, self.token_map]
        hidden = self.model.base_model(input_ids=batch.tokens).last_hidden_state[batch.rows, batch.places]
        head = self.model.get_output_embeddings()
        bias = None if head.bias is None else head.bias[self.token_map]
        return linear(hidden, head.weight[self.token_map], bias).float()

    def freeze_embeddings(self) -> None:
        self.model.get_input_embeddings().requires_grad_(False)

    def save(self, folder: Path, origin: Path | None) -> None:
        self.config.use_cache = True  # in the folder
        with quietly():
            self.model.save_pretrained(folder)
        self.config.use_cache = False
        (folder / "generation_config.json").unlink(missing_ok=True)
        copy_tokenizer(origin, folder)
        if self.token_map is not None:
            (folder / TOKEN_MAP).write_text(json.dumps(self.token_map.tolist()) + "\n", encoding="utf-8")


def export(drafter: TrainableDrafter, folder: Path, origin: Path | None = None) -> None:
    """Write a drafter's folder, atomically; see `TrainableDrafter.save`.

    Raises:
        OSError: The folder cannot be written.
    """
    with replacing(folder) as partial:
        drafter.save(partial, origin)


def load_float32(folder: Path) -> Any:
    """Return transformers' definition of a folder's model in float32.

    Raises:
        ModelError: transformers cannot load the folder.
    """
    try:
        with quietly():
            return load_plain(folder, torch.float32)
    except Exception as error:  # transformers raises many types for a folder that it cannot load
        raise ModelError(f"drafter: {origin_of(folder)} cannot be loaded for training: {first_line(error)}") from error


def copy_tokenizer(origin: Path | None, folder: Path) -> None:
    """Copy the files other than weights and configuration, such as those of the tokenizer."""
    if origin is not None:
        for file in (file for pattern in _COPIED for file in origin.glob(pattern)):
            shutil.copyfile(file, folder / file.name)
