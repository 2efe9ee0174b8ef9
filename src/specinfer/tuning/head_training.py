"""EAGLE-3 heads in training, next to their frozen target, whose hidden states are computed for each batch anew.

Training-time test (EAGLE-3, arXiv 2503.01840, section 3.2): each pair of a text is computed at several levels. At level
0 its feature is made of the target's hidden states; at level j it is the head's own output of level j - 1 for the pair
before, and attention sees at the last j places what those levels computed. So a head learns to draft from its drafts.
"""

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from specinfer.drafters.vocabulary.token_map import TokenMap
from specinfer.learning.distillation import DraftLogits
from specinfer.learning.training_examples import Batch
from specinfer.model.definition import load_config, load_plain
from specinfer.model.families import rotate
from specinfer.model.folder import read_weight, replacing
from specinfer.model.heads.checkpoint import HeadCheckpoint
from specinfer.model.heads.eagle3 import Eagle3Head, usual_reads
from specinfer.model.heads.head import TargetEnds, TargetShape

NUM_LEVELS = 4  # levels of training-time test; each costs a pass
_SPREAD = 0.02  # of random weights
_FORMAT_VERSION = "0.9.0"  # of the speculators library whose format is written
_EMBEDDING = "embed_tokens.weight"
_HEADS = ("lm_head.weight", _EMBEDDING)  # the second one if they are tied
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")  # of a Llama-like target
Keys = list[tuple[Tensor, Tensor]]  # keys and values of each level, [rows, heads, pairs, dim]


class TrainableHead(DraftLogits):
    """A head of the EAGLE-3 format whose weights take gradients.

    Args:
        head: The head in float32.
        target: Folder of the target, which is loaded when its hidden states are needed first.
    """

    def __init__(self, head: Eagle3Head, target: Path) -> None:
        super().__init__(head.requires_grad_(True), head.token_map)
        self.config = load_config(target)
        self._folder, self._target = target, list[Any]()  # in a list: it is no part of what is trained
        if head.embedding is not None:
            head.embedding.requires_grad_(False)

    def forward(self, batch: Batch) -> Tensor:
        """Return [levels, outputs, draft vocabulary] float32 logits; outside of training [outputs, draft vocabulary].

        An output that is the second token of a text has no pair to be predicted from, and the logits of the third.
        """
        head: Eagle3Head = self.model
        taps = self._hidden_states(batch.tokens)
        features = head.project([tap.flatten(0, 1) for tap in taps]).unflatten(0, batch.tokens.shape)[:, :-1]
        tokens = batch.tokens[:, 1:]
        embedded = head.embedded(tokens.flatten()).unflatten(0, tokens.shape).to(features.dtype)
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        rotation = head.rotary(features, positions)
        places = (batch.places - 1).clamp_min(0)
        memory: list[Keys] = [[] for _ in head.layers]

        def attend(layer: int, inputs: Tensor) -> Tensor:
            return _attend(head.layers[layer].self_attn, inputs, rotation, memory[layer])

        found, own = [], features
        for _ in range(NUM_LEVELS if self.training else 1):
            last, output = head.compute(own, embedded, attend)
            found.append(head.logits(last[batch.rows, places]))
            own = torch.cat([features[:, :1], output[:, :-1]], dim=1)
        return torch.stack(found) if self.training else found[0]

    @torch.no_grad()
    def _hidden_states(self, tokens: Tensor) -> list[Tensor]:
        """Return the target's [rows, tokens, width] hidden states after each layer that the head reads."""
        if not self._target:
            self._target.append(load_plain(self._folder, "auto").eval().requires_grad_(False).to(tokens.device))
        states = self._target[0].base_model(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
        return [states[layer].float() for layer in self.model.reads]

    def expand(self, logits: Tensor) -> Tensor:
        if self.token_map is None:
            return logits
        return TokenMap(self.token_map, int(self.config.get_text_config().vocab_size)).expand(logits)


def _attend(attention: Any, x: Tensor, rotation: tuple[Tensor, Tensor], memory: Keys) -> Tensor:
    """Return the attention of the next level, and append its keys and values.

    A pair sees the true pairs up to j places before it, and then one pair of each later level, up to itself.
    """
    size = int(attention.head_dim)

    def heads(name: str) -> Tensor:
        parts = getattr(attention, f"{name}_proj")(x).unflatten(-1, (-1, size))
        norm = getattr(attention, f"{name}_norm", None)
        by_head: Tensor = (parts if norm is None else norm(parts)).transpose(1, 2)
        return by_head

    query, key, value = rotate(heads("q"), *rotation), rotate(heads("k"), *rotation), heads("v")
    repeats = query.shape[1] // key.shape[1]
    memory.append((key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)))
    level, pairs = len(memory) - 1, x.shape[1]
    true_key, true_value = memory[0]
    seen = torch.ones(pairs, pairs, dtype=torch.bool, device=x.device).tril(-level)
    scores = [(query @ true_key.transpose(-1, -2)).masked_fill(~seen, -torch.inf)]
    values = []
    for i in range(1, level + 1):
        key, value = (_later(part, level - i) for part in memory[i])
        score = (query * key).sum(-1, keepdim=True)
        missing = torch.arange(pairs, device=x.device)[:, None] < level - i
        scores.append(score.masked_fill(missing, -torch.inf))
        values.append(value)
    probs = (torch.cat(scores, dim=-1).float() * attention.scaling).softmax(-1).to(true_value.dtype)
    out = probs[..., :pairs] @ true_value
    for i, value in enumerate(values):
        out = out + probs[..., pairs + i : pairs + i + 1] * value
    result: Tensor = attention.o_proj(out.transpose(1, 2).flatten(2))
    return result


def _later(x: Tensor, count: int) -> Tensor:
    """Return [rows, heads, pairs, dim] moved later by this many pairs."""
    return x if not count else nn.functional.pad(x, (0, 0, count, 0))[:, :, : x.shape[2]]


def read_head(folder: Path, target: Path) -> TrainableHead:
    """Return an EAGLE-3 head of a folder, ready for training.

    Raises:
        ModelError: The head was made for another target, or its files are damaged.
    """
    shape = TargetShape.of(load_config(target))
    ends = _read_ends(target, torch.device("cpu"))
    checkpoint = HeadCheckpoint(folder, torch.float32, torch.device("cpu"))
    head = Eagle3Head(checkpoint, shape, ends)
    checkpoint.check_all_taken()
    return TrainableHead(head, target)


def new_head(target: Path, seed: int, token_map: Sequence[int] | None = None) -> TrainableHead:
    """Return a new head for a target, with its output head and last norm, and random weights elsewhere.

    Args:
        token_map: The only tokens that it is to predict, ascending, or None for all.
    """
    source = torch.Generator().manual_seed(seed)
    config = load_config(target).get_text_config()
    if missing := [name for name in _SIZES if getattr(config, name, None) is None]:
        raise ValueError(f"drafter: {target} has no {missing[0]} in config.json; new:eagle3 needs a Llama-like target")
    width, size = int(config.hidden_size), int(getattr(config, "head_dim", None) or 0)
    size = size or width // int(config.num_attention_heads)
    num_queries, inner = int(config.num_attention_heads) * size, int(config.intermediate_size)
    num_keys = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * size

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source) * _SPREAD

    head, norm = read_weight(target, *_HEADS), read_weight(target, "model.norm.weight")
    reads = usual_reads(int(config.num_hidden_layers))
    first = "layers.0."
    tensors = {
        "fc.weight": torch.cat([random(width, 2 * width), torch.eye(width)], dim=1),
        "norm.weight": norm,
        "lm_head.weight": head if token_map is None else head[torch.tensor(list(token_map))],
        f"{first}self_attn.q_proj.weight": random(num_queries, 2 * width),
        f"{first}self_attn.k_proj.weight": random(num_keys, 2 * width),
        f"{first}self_attn.v_proj.weight": random(num_keys, 2 * width),
        f"{first}self_attn.o_proj.weight": random(width, num_queries),
        f"{first}mlp.gate_proj.weight": random(inner, width),
        f"{first}mlp.up_proj.weight": random(inner, width),
        f"{first}mlp.down_proj.weight": random(width, inner),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{first}{name}.weight"] = torch.ones(width)
    with tempfile.TemporaryDirectory(prefix="specinfer-head-") as folder:
        _write(Path(folder), tensors, _fields(config, target, reads), token_map, int(config.vocab_size))
        return read_head(Path(folder), target)


def export_head(trained: TrainableHead, target: Path, folder: Path) -> None:
    """Write a head in the format of the speculators library, atomically.

    Raises:
        OSError: The folder cannot be written.
    """
    head: Eagle3Head = trained.model
    config = load_config(target).get_text_config()
    names = {"hidden_norm.weight": "layers.0.hidden_norm.weight", "embedding": "embed_tokens.weight"}
    tensors = {names.get(name, name): weight.detach().cpu() for name, weight in head.named_parameters()}
    fields = _fields(config, target, head.reads) | {
        "norm_output": head.dialect.norm_output, "norm_before_residual": head.dialect.norm_before_residual,
    }  # fmt: skip
    token_map = None if head.token_map is None else head.token_map.tolist()
    with replacing(folder) as partial:
        _write(partial, tensors, fields, token_map, int(config.vocab_size))


def _write(
    folder: Path,
    tensors: dict[str, Tensor],
    fields: dict[str, Any],
    token_map: Sequence[int] | None,
    vocab_size: int,
) -> None:
    if token_map is not None:
        ids = torch.tensor(list(token_map))
        members = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, value=True)
        tensors = tensors | {"d2t": ids - torch.arange(len(ids)), "t2d": members}
    fields["draft_vocab_size"] = len(tensors["lm_head.weight"])
    save_file({name: one.contiguous().clone() for name, one in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _fields(config: Any, target: Path, reads: Iterable[int]) -> dict[str, Any]:
    """Return a config.json in the format of the speculators library."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
             "max_position_embeddings", "vocab_size", "rms_norm_eps")  # fmt: skip
    layer = {name: value for name in names if (value := getattr(config, name, None)) is not None}
    layer |= {"model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu", "tie_word_embeddings": False}
    if rope := getattr(config, "rope_parameters", None):
        layer["rope_parameters"] = rope
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _FORMAT_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.name, "architectures": list(config.architectures or ())},
        },
        "eagle_aux_hidden_state_layer_ids": list(reads),
        "norm_before_residual": True,
        "norm_before_fc": False,
        "target_hidden_size": int(config.hidden_size),
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    }


def _read_ends(target: Path, device: torch.device) -> TargetEnds:
    table, head = read_weight(target, _EMBEDDING).to(device), None

    def logits(hidden: Tensor) -> Tensor:
        nonlocal head
        head = read_weight(target, *_HEADS).to(device) if head is None else head
        product: Tensor = hidden @ head.T
        return product

    return TargetEnds(lambda ids: table[ids.cpu()].to(ids.device), logits)
