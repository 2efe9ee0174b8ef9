"""Tiny Gemma 4 assistants with the public tensor names, and a slow version of what they compute."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import gelu
from transformers import DynamicCache

from heads import norm, random_tensors, tensors_of
from specinfer.core.tree import TokenTree

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW, OWN, VOCAB = 8, 16, 96
_HEAD_SIZES = {SLIDING: 8, FULL: 16}
_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
KINDS = (SLIDING, SLIDING, FULL)  # of an assistant's layers


def save_assistant(
    folder: Path,
    *,
    clusters: int = 0,
    drop: Sequence[str] = (),
    target_width: int = 32,
    text: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
    **fields: Any,
) -> Path:
    """Write an assistant of three layers.

    Args:
        clusters: Number of clusters of the output head, or 0 for a plain one.
        drop: Tensors to leave out.
        text: Changes of its text_config.
        tensors: Changes of its tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shapes: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (OWN, 2 * target_width), "post_projection.weight": (target_width, OWN),
        "model.embed_tokens.weight": (VOCAB, OWN), "model.norm.weight": (OWN,),
    }  # fmt: skip
    for i, kind in enumerate(KINDS):
        size, at = _HEAD_SIZES[kind], f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{name}.weight": shape for name, shape in (
            ("q_proj", (4 * size, OWN)), ("o_proj", (OWN, 4 * size)), ("q_norm", (size,)),
        )}  # fmt: skip
        shapes |= {f"{at}mlp.{name}_proj.weight": (24, OWN) for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (OWN, 24), f"{at}layer_scalar": (1,)}
        shapes |= {f"{at}{name}.weight": (OWN,) for name in _NORMS}
    if clusters:
        shapes["masked_embedding.centroids.weight"] = (clusters, OWN)
    found = random_tensors(shapes)
    if clusters:
        found["masked_embedding.token_ordering"] = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))
    found |= tensors or {}
    save_file({name: one for name, one in found.items() if name not in drop}, folder / "model.safetensors")
    own = {
        "model_type": "gemma4_text", "vocab_size": VOCAB, "hidden_size": OWN, "intermediate_size": 24,
        "num_hidden_layers": len(KINDS), "num_kv_shared_layers": len(KINDS), "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW,
        "layer_types": list(KINDS), "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    config = {
        "architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant",
        "text_config": own | (text or {}), "backbone_hidden_size": target_width,
        "use_ordered_embeddings": bool(clusters), "num_centroids": clusters or 2048,
        "centroid_intermediate_top_k": 3 if clusters else 32,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


class SlowAssistant:
    """The formulas of an assistant, over the keys and values that transformers has for a text."""

    def __init__(self, folder: Path, model: Any, *, at_last: bool = False) -> None:
        self.w, self.model, self.at_last = tensors_of(folder), model, at_last
        self.num_best = json.loads((folder / "config.json").read_text())["centroid_intermediate_top_k"]

    def tree(self, tokens: Sequence[int], widths: Sequence[int]) -> TokenTree:
        """Grow an expansion after a text, whose last token the target has not computed."""
        feature, known = self.read(tokens[:-1])
        trees = [TokenTree.root(tokens[-1])]

        def grow(path: list[int], feature: Tensor) -> None:
            if len(path) == len(widths):
                return
            logits, output = self.step(path[-1] if path else tokens[-1], feature, known)
            for token in logits.topk(widths[len(path)]).indices.tolist():
                chain = [tokens[-1], *path, token]
                trees.append(TokenTree(tuple(chain), tuple(range(-1, len(chain) - 1))))
                grow([*path, token], output)

        grow([], feature)
        return TokenTree.merge(trees)

    def read(self, tokens: Sequence[int]) -> tuple[Tensor, dict[str, list[Tensor]]]:
        """Return the feature after a text, and by kind the keys and values of the last layer that has its own."""
        with torch.no_grad():
            out = self.model.model(torch.tensor([list(tokens)]), past_key_values=DynamicCache(), use_cache=True)
        config = self.model.config
        kinds = config.layer_types[: len(config.layer_types) - config.num_kv_shared_layers]
        layers = [out.past_key_values.layers[layer] for layer in range(len(kinds))]
        known = {kind: [one.keys[0], one.values[0]] for kind, one in zip(kinds, layers, strict=True)}
        return out.last_hidden_state[0, -1], known

    def step(self, token: int, feature: Tensor, known: dict[str, list[Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the [vocab] logits after a token, and the feature of the next level."""
        w = self.w
        embedding = self.model.get_input_embeddings().weight[token].detach()
        x = w["pre_projection.weight"] @ torch.cat([embedding * len(embedding) ** 0.5, feature])
        for i, kind in enumerate(KINDS):
            at = f"model.layers.{i}."
            h = self._attend(f"{at}self_attn.", norm(x, w[f"{at}input_layernorm.weight"], 1e-6), kind, *known[kind])
            x = x + norm(h, w[f"{at}post_attention_layernorm.weight"], 1e-6)
            h = norm(x, w[f"{at}pre_feedforward_layernorm.weight"], 1e-6)
            gate = gelu(w[f"{at}mlp.gate_proj.weight"] @ h, approximate="tanh")
            h = w[f"{at}mlp.down_proj.weight"] @ (gate * (w[f"{at}mlp.up_proj.weight"] @ h))
            x = (x + norm(h, w[f"{at}post_feedforward_layernorm.weight"], 1e-6)) * w[f"{at}layer_scalar"]
        m = norm(x, w["model.norm.weight"], 1e-6)
        logits = w["model.embed_tokens.weight"] @ m
        if "masked_embedding.centroids.weight" in w:
            scores = w["masked_embedding.centroids.weight"] @ m
            best = scores.topk(self.num_best).indices
            members = w["masked_embedding.token_ordering"].view(len(scores), -1)
            scored = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, members[best].flatten(), True)
            logits = logits.masked_fill(~scored, -torch.inf)
        return logits, w["post_projection.weight"] @ m

    def _attend(self, at: str, x: Tensor, kind: str, keys: Tensor, values: Tensor) -> Tensor:
        count, size = keys.shape[1:]
        position = count - (0 if self.at_last else 1)
        query = norm((self.w[f"{at}q_proj.weight"] @ x).view(4, size), self.w[f"{at}q_norm.weight"], 1e-6)
        if kind == SLIDING:
            speeds = 1e4 ** -(torch.arange(0, size, 2).double() / size)
        else:  # a quarter of the pairs turns, at the speeds of the whole head
            speeds = 1e6 ** -(torch.arange(0, size, 2).double() / size) * (torch.arange(size // 2) < size // 8)
        angles = torch.cat([speeds, speeds]) * position
        a, b = query.chunk(2, dim=-1)
        query = query * angles.cos().float() + torch.cat([-b, a], dim=-1) * angles.sin().float()
        seen = torch.arange(count) > position - (WINDOW if kind == SLIDING else count + 1)
        heads = 4 // len(keys)
        scores = torch.einsum("hd,hkd->hk", query, keys.repeat_interleave(heads, dim=0))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        found = torch.einsum("hk,hkd->hd", weights, values.repeat_interleave(heads, dim=0))
        return self.w[f"{at}o_proj.weight"] @ found.flatten()
