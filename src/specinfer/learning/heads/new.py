"""New heads for a target, in the format of the speculators library, with random weights where they are not its own."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specinfer.core.errors import ModelError
from specinfer.learning.heads.files import read_head
from specinfer.learning.heads.head import OUTPUT_HEADS, TrainableHead, write_head
from specinfer.model.definition import load_config
from specinfer.model.folder import read_weight
from specinfer.model.heads import block, eagle3
from specinfer.model.heads.head import TargetShape

_FORMAT_VERSION = "0.9.0"  # of the speculators library
_SPREAD, _PAIR_SPREAD = 0.02, 0.1  # of random weights, and of vectors of tokens, whose following ones are learned
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")  # of a Llama-like target
_CHAIN = 5  # tokens that an EAGLE-3 head drafts for other engines
_BLOCK_SIZE = 8
_MOST_LAYERS, _LAYERS_PER_LAYER = 5, 6  # of a block head; the target's for each of its own
_LEAST_TAPS, _MOST_RANK = 3, 256


class HeadSizes(NamedTuple):
    """Sizes of a new block head, or None for those that follow from the target's.

    Attributes:
        num_layers: Number of its decoder layers.
        mlp_width: Number of rows of their MLP's first matrices.
        rank: Number of columns of the matrices of its pairwise head.
    """

    num_layers: int | None = None
    mlp_width: int | None = None
    rank: int | None = None


def new_head(
    name: str, target: Path, seed: int, token_map: Sequence[int] | None = None, sizes: HeadSizes | None = None
) -> TrainableHead:
    """Return a new head for a target.

    Args:
        name: One of `NEW_HEADS`.
        token_map: The only tokens that it is to predict, ascending, or None for all.
        sizes: The sizes of a block head, or None for the usual ones.

    Raises:
        ValueError: The target is not Llama-like, or has too few layers.
    """
    maker = _Maker(target, seed, token_map)
    tensors, fields = NEW_HEADS[name](maker, sizes or HeadSizes())
    vocab_size = TargetShape.from_config(load_config(target)).vocab_size
    fields["draft_vocab_size"] = vocab_size if token_map is None else len(token_map)
    if token_map is not None:
        ids = torch.tensor(list(token_map))
        members = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, value=True)
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": members}
    with tempfile.TemporaryDirectory(prefix="specinfer-head-") as folder:
        write_head(Path(folder), tensors, fields)
        return read_head(Path(folder), target)


class _Maker:
    """The tensors and fields that all kinds of heads for a target share."""

    def __init__(self, target: Path, seed: int, token_map: Sequence[int] | None) -> None:
        self.target, self.token_map = target, token_map
        self.config = load_config(target).get_text_config()
        self.source = torch.Generator().manual_seed(seed)

    def sizes(self) -> dict[str, Any]:
        """Return the fields of a configuration of transformers that a head's layers share with a Llama-like target.

        Raises:
            ValueError: The target is not Llama-like.
        """
        config = self.config
        if missing := [name for name in _SIZES if getattr(config, name, None) is None]:
            raise ValueError(
                f"drafter: {self.target} has no {missing[0]} in config.json; a new head needs a Llama-like target"
            )
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

    def random(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(*shape, generator=self.source) * _SPREAD

    def joining(self, num_taps: int, width: int) -> Tensor:
        """Return the first weight of `fc`, which takes the last of the hidden states and a little of the others."""
        return torch.cat([self.random((width, (num_taps - 1) * width)), torch.eye(width)], dim=1)

    def layer(self, sizes: Mapping[str, Any], inputs: int) -> dict[str, Tensor]:
        """Return the random tensors of a decoder layer by name.

        Args:
            inputs: Size of what queries, keys and values are made of.
        """
        width, inner, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
        queries, keys = sizes["num_attention_heads"] * dim, sizes["num_key_value_heads"] * dim
        shapes = {
            "self_attn.q_proj": (queries, inputs), "self_attn.k_proj": (keys, inputs),
            "self_attn.v_proj": (keys, inputs), "self_attn.o_proj": (width, queries), "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
        }  # fmt: skip
        tensors = {f"{name}.weight": self.random(shape) for name, shape in shapes.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        return tensors | {f"{name}.weight": torch.ones(width) for name in norms}

    def ends(self) -> dict[str, Tensor]:
        """Return the target's last norm and its output head, or the rows of the mapped tokens."""
        head = read_weight(self.target, *OUTPUT_HEADS)
        return {
            "norm.weight": read_weight(self.target, "model.norm.weight"),
            "lm_head.weight": head if self.token_map is None else head[torch.tensor(list(self.token_map))],
        }

    def layer_weight(self, layer: int, name: str, otherwise: Tensor) -> Tensor:
        """Return a weight of one of the target's layers, or the other one if it has none of this shape."""
        try:
            weight = read_weight(self.target, f"layers.{layer}.{name}")
        except ModelError:
            return otherwise
        return weight if weight.shape == otherwise.shape else otherwise

    def fields(self, kind: str, layer: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
        """Return what config.json has for every kind of head.

        Args:
            kind: The format's name of it, such as "eagle3".
            layer: The fields of its layers' configuration.
            num_tokens: Number of tokens that it drafts in a chain.
        """
        return {
            "speculators_model_type": kind,
            "speculators_version": _FORMAT_VERSION,
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
                "verifier": {
                    "name_or_path": self.target.name, "architectures": list(self.config.architectures or ())
                },
            },
            "target_hidden_size": int(self.config.hidden_size),
            "tie_word_embeddings": False,
            "transformer_layer_config": dict(layer),
        }  # fmt: skip


Made = tuple[dict[str, Tensor], dict[str, Any]]  # the tensors of a head, and its config.json


def _eagle3(maker: _Maker, _: HeadSizes) -> Made:
    """Make an EAGLE-3 head, whose last norm and output head are the target's."""
    sizes, first = maker.sizes(), "layers.0."
    reads = eagle3.usual_reads(TargetShape.from_config(load_config(maker.target)).num_layers)
    width = sizes["hidden_size"]
    tensors = maker.ends() | {f"{first}{name}": weight for name, weight in maker.layer(sizes, 2 * width).items()}
    tensors |= {"fc.weight": maker.joining(len(reads), width), f"{first}hidden_norm.weight": torch.ones(width)}
    layer = sizes | {"model_type": "llama", "num_hidden_layers": 1}
    return tensors, maker.fields("eagle3", layer, _CHAIN) | {
        "architectures": ["Eagle3Speculator"],
        "eagle_aux_hidden_state_layer_ids": list(reads),
        "norm_before_residual": True,
        "norm_before_fc": False,
    }


def _dspark(maker: _Maker, chosen: HeadSizes) -> Made:
    """Make a DSpark head.

    Its layers start as the target's last ones, where they are alike. Its last norm and output head are the target's.
    The output head is not written, nor trained, if it predicts the whole vocabulary.

    Raises:
        ValueError: The target has fewer layers than the head is to have.
    """
    config = maker.config
    sizes, num_target = maker.sizes(), int(config.num_hidden_layers)
    sizes["intermediate_size"] = chosen.mlp_width or sizes["intermediate_size"]
    width, vocab_size = sizes["hidden_size"], sizes["vocab_size"]
    num_layers = chosen.num_layers or min(max(num_target // _LAYERS_PER_LAYER, 1), _MOST_LAYERS)
    if num_layers > num_target:
        raise ValueError(
            f"drafter: a head of {num_layers} layers is too large: the target has {num_target}; ask for fewer"
        )
    usual = block.usual_reads(num_target, max(num_layers, _LEAST_TAPS))
    reads = sorted({min(max(layer, 1), num_target - 1) for layer in usual})
    rank = chosen.rank or min(max(width // 4, 1), _MOST_RANK)
    ends = maker.ends()
    tensors = {
        "fc.weight": maker.joining(len(reads), width),
        "hidden_norm.weight": maker.layer_weight(reads[-1], "input_layernorm.weight", torch.ones(width)),
        "markov_head.markov_w1.weight": torch.randn(vocab_size, rank, generator=maker.source) * _PAIR_SPREAD,
        "markov_head.markov_w2.weight": torch.zeros(len(ends["lm_head.weight"]), rank),
        "confidence_head.proj.weight": torch.zeros(1, width + rank),
        "confidence_head.proj.bias": torch.zeros(1),
    }
    tensors |= {name: end for name, end in ends.items() if name == "norm.weight" or maker.token_map is not None}
    for i in range(num_layers):
        for name, weight in maker.layer(sizes, width).items():
            tensors[f"layers.{i}.{name}"] = maker.layer_weight(num_target - num_layers + i, name, weight)
        tensors |= {f"layers.{i}.self_attn.{name}_norm.weight": torch.ones(sizes["head_dim"]) for name in "qk"}
    layer = sizes | {"model_type": "qwen3", "num_hidden_layers": num_layers, "attention_bias": False}
    ends_of_text = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    rare = (token for token in (config.pad_token_id, *ends_of_text) if token is not None)
    return tensors, maker.fields("dspark", layer, _BLOCK_SIZE) | {
        "architectures": ["DSparkSpeculator"],
        "aux_hidden_state_layer_ids": reads,
        "block_size": _BLOCK_SIZE,
        "mask_token_id": int(next(rare, config.vocab_size - 1)),  # a token that text hardly has
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


NEW_HEADS: Mapping[str, Callable[[_Maker, HeadSizes], Made]] = {"new:eagle3": _eagle3, "new:dspark": _dspark}
