"""A head in training, next to its frozen target, whose hidden states a batch contains or are computed for it anew."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from specinfer.core.errors import ModelError
from specinfer.learning.batches import Batch
from specinfer.learning.trainable import TrainableDrafter, copy_tokenizer
from specinfer.model.definition import load_config, load_plain
from specinfer.model.folder import read_weight
from specinfer.model.heads.checkpoint import HeadCheckpoint
from specinfer.model.heads.head import FeatureHead

_SPREAD = 0.02  # of random weights
_FORMAT_VERSION = "0.9.0"  # of the speculators library whose format is written
EMBEDDING = "embed_tokens.weight"
OUTPUT_HEADS = ("lm_head.weight", EMBEDDING)  # the second one if they are tied
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")  # of a Llama-like target


class HeadSizes(NamedTuple):
    """Sizes of a new head, or None for those that follow from the target's.

    Attributes:
        num_layers: Number of its decoder layers.
        mlp_width: Number of rows of their MLP's first matrices.
        rank: Number of columns of the matrices of its pairwise head.
    """

    num_layers: int | None = None
    mlp_width: int | None = None
    rank: int | None = None


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


def sizes_of(target: Path) -> dict[str, Any]:
    """Return the fields of a configuration of transformers that a head's layers share with a Llama-like target.

    Raises:
        ValueError: The target is none.
    """
    config = load_config(target).get_text_config()
    if missing := [name for name in _SIZES if getattr(config, name, None) is None]:
        raise ValueError(f"drafter: {target} has no {missing[0]} in config.json; a new head needs a Llama-like target")
    heads = int(config.num_attention_heads)
    fields = {
        "hidden_size": int(config.hidden_size),
        "intermediate_size": int(config.intermediate_size),
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        "vocab_size": int(config.vocab_size),
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    for name in ("max_position_embeddings", "rms_norm_eps", "rope_parameters"):
        if value := getattr(config, name, None):
            fields[name] = value
    return fields


def layer_tensors(prefix: str, sizes: Mapping[str, Any], inputs: int, source: torch.Generator) -> dict[str, Tensor]:
    """Return the random tensors of a decoder layer by name.

    Args:
        inputs: Size of what queries, keys and values are made of.
    """
    width, inner, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * dim, sizes["num_key_value_heads"] * dim
    shapes = {
        "self_attn.q_proj": (queries, inputs), "self_attn.k_proj": (keys, inputs), "self_attn.v_proj": (keys, inputs),
        "self_attn.o_proj": (width, queries), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }  # fmt: skip
    tensors = {f"{prefix}{name}.weight": random(shape, source) for name, shape in shapes.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}{name}.weight"] = torch.ones(width)
    return tensors


def target_ends(target: Path, token_map: Sequence[int] | None) -> dict[str, Tensor]:
    """Return the target's last norm and its output head, or the rows of these tokens."""
    head = read_weight(target, *OUTPUT_HEADS)
    return {
        "norm.weight": read_weight(target, "model.norm.weight"),
        "lm_head.weight": head if token_map is None else head[torch.tensor(list(token_map))],
    }


def random(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Return random weights."""
    return torch.randn(*shape, generator=source) * _SPREAD


def joining(num_taps: int, width: int, source: torch.Generator) -> Tensor:
    """Return the first weight of `fc`, which takes the last of the hidden states and a little of the others."""
    return torch.cat([random((width, (num_taps - 1) * width), source), torch.eye(width)], dim=1)


def speculators_fields(target: Path, kind: str, layer: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
    """Return what config.json has for every kind of head.

    Args:
        kind: The format's name of it, such as "eagle3".
        layer: The fields of its layers' configuration.
        num_tokens: Number of tokens that it drafts in a chain.
    """
    config = load_config(target).get_text_config()
    return {
        "speculators_model_type": kind,
        "speculators_version": _FORMAT_VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
            "verifier": {"name_or_path": target.name, "architectures": list(config.architectures or ())},
        },
        "target_hidden_size": int(config.hidden_size),
        "tie_word_embeddings": False,
        "transformer_layer_config": dict(layer),
    }
