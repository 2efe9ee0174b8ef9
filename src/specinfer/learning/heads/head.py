"""A head in training, next to its frozen target, whose hidden states a batch contains or are computed for it anew."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specinfer.core.errors import ModelError
from specinfer.learning.batches import Batch
from specinfer.learning.trainable import TrainableDrafter, copy_tokenizer
from specinfer.model.definition import load_config, load_plain
from specinfer.model.heads.checkpoint import HeadCheckpoint
from specinfer.model.heads.head import FeatureHead

EMBEDDING = "embed_tokens.weight"
OUTPUT_HEADS = ("lm_head.weight", EMBEDDING)  # the second one if they are tied


class TrainableHead(TrainableDrafter):
    """A head whose weights take gradients. Each kind of head computes its logits in a class of its own.

    Args:
        head: The head in float32.
        checkpoint: Its files, which decide the format that it is written in.
        target: Folder of the target, which is loaded when its hidden states are needed first.

    Raises:
        ModelError: The head reads hidden states that are not computed in training.
    """

    renamed: Mapping[str, str] = {"embedding": EMBEDDING}  # beginnings of names, in the head and its files

    def __init__(self, head: FeatureHead, checkpoint: HeadCheckpoint, target: Path) -> None:
        super().__init__(head.requires_grad_(True), load_config(target), head.token_map)
        self.checkpoint, self._folder = checkpoint, target
        if max(head.reads) >= int(self.config.num_hidden_layers):
            raise ModelError("drafter: a head that reads hidden states after the target's last layer cannot be trained")
        self._target = list[Any]()  # in a list: it is no part of what is trained
        if head.embedding is not None:
            head.embedding.requires_grad_(False)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of its files by name: the trained ones, and the others as they were read."""
        stored = self.checkpoint.tensors.items()
        tensors = {name: source if isinstance(source, Tensor) else source.read() for name, source in stored}
        for name, weight in self.model.named_parameters():
            prefix = next((prefix for prefix in self.renamed if name.startswith(prefix)), "")
            tensors[self.renamed.get(prefix, "") + name.removeprefix(prefix)] = weight.detach().cpu()
        return tensors

    @torch.no_grad()
    def hidden_states(self, batch: Batch) -> list[Tensor]:
        """Return the target's [rows, tokens, width] hidden states after each layer that the head reads."""
        tokens = batch.tokens
        if batch.taps is not None:
            return [batch.taps[layer] for layer in self.model.reads]
        if not self._target:
            self._target.append(load_plain(self._folder, "auto").eval().requires_grad_(False).to(tokens.device))
        states = self._target[0].base_model(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
        return [states[layer].float() for layer in self.model.reads]

    def features(self, batch: Batch) -> Tensor:
        """Return the [rows, tokens, width] features that the head makes of the target's hidden states."""
        taps = self.hidden_states(batch)
        features: Tensor = self.model.project([tap.flatten(0, 1) for tap in taps]).unflatten(0, batch.tokens.shape)
        return features

    def freeze_embeddings(self) -> None:
        """Do nothing: a head's embeddings are the target's, which are never trained."""

    def save(self, folder: Path, origin: Path | None) -> None:
        write_head(folder, self.tensors(), self.checkpoint.fields)
        copy_tokenizer(origin, folder)


def write_head(folder: Path, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> None:
    """Write the files of a head: its weights, and its config.json with these fields.

    Raises:
        OSError, SafetensorError: The folder cannot be written.
    """
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def by_heads(attention: Any, name: str, x: Tensor) -> Tensor:
    """Return the queries "q", keys "k" or values "v" of [rows, tokens, inputs], as [rows, query heads, tokens, dim]."""
    parts = getattr(attention, f"{name}_proj")(x).unflatten(-1, (-1, int(attention.head_dim)))
    norm = getattr(attention, f"{name}_norm", None)
    heads: Tensor = (parts if norm is None else norm(parts)).transpose(1, 2)
    return heads if name == "q" else heads.repeat_interleave(attention.num_key_value_groups, dim=1)
