"""Formulas of heads on a target's hidden states over whole texts, with no cache."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import gelu, silu
from transformers import DynamicCache

from assistants import KINDS, SLIDING, VOCAB, WINDOW
from specinfer.core.tree import TokenTree


def tensors_of(folder: Path) -> dict[str, Tensor]:
    file = folder / "model.safetensors"
    return load_file(file) if file.is_file() else torch.load(folder / "pytorch_model.bin", weights_only=True)


def norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Rotate [tokens, heads, dim] in halves."""
    dim = x.shape[-1]
    angles = positions[:, None].double() / base ** (torch.arange(0, dim, 2).double() / dim)
    cosines, sines = (f(torch.cat([angles, angles], dim=-1)).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-b, a], dim=-1) * sines


def attention(
    w: Mapping[str, Tensor], prefix: str, x: Tensor, context: Tensor | None = None, *, causal: bool = True
) -> Tensor:
    """Return attention of a chain of tokens [tokens, inputs] after those of a context, which all of them see."""
    every = x if context is None else torch.cat([context, x])
    names = ((x, "q_proj", 4), (every, "k_proj", 2), (every, "v_proj", 2))
    q, k, v = ((of @ w[f"{prefix}{name}.weight"].T).unflatten(-1, (heads, 8)) for of, name, heads in names)
    if f"{prefix}q_norm.weight" in w:
        q, k = norm(q, w[f"{prefix}q_norm.weight"]), norm(k, w[f"{prefix}k_norm.weight"])
    places = torch.arange(len(every))
    q, k = rotated(q, places[len(every) - len(x) :]), rotated(k, places)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, dim=1)) * 8**-0.5
    if causal:
        hidden = ~torch.ones(len(x), len(every)).tril(len(every) - len(x)).bool()
        scores = scores.masked_fill(hidden, -torch.inf)
    seen = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(2, dim=1))
    return seen.flatten(1) @ w[f"{prefix}o_proj.weight"].T


def mlp(w: Mapping[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    return (silu(x @ w[f"{prefix}gate_proj.weight"].T) * (x @ w[f"{prefix}up_proj.weight"].T)) @ w[
        f"{prefix}down_proj.weight"
    ].T


class SlowEagle3:
    """The formulas of an EAGLE-3 head over whole texts, with no cache.

    Args:
        embedding: The target's embedding, used if the head has none.
    """

    def __init__(
        self, folder: Path, embedding: Tensor, *, norm_output: bool = False, norm_before_residual: bool = False
    ) -> None:
        self.w = tensors_of(folder)
        self.prefix = "midlayer." if "midlayer.hidden_norm.weight" in self.w else "layers.0."
        self.embedding = self.w.get("embed_tokens.weight", embedding)
        self.norm_output, self.norm_before_residual = norm_output, norm_before_residual

    def project(self, taps: Sequence[Tensor]) -> Tensor:
        """Return [tokens, width] features of the target's hidden states."""
        if "fc_norm.0.weight" in self.w:
            taps = [norm(tap, self.w[f"fc_norm.{i}.weight"]) for i, tap in enumerate(taps)]
        joined = torch.cat(list(taps), dim=-1)
        if "input_norm.weight" in self.w:
            joined = norm(joined, self.w["input_norm.weight"])
        return joined @ self.w["fc.weight"].T

    def run(self, features: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return [pairs, vocab] logits and [pairs, width] features for pairs of a feature and the next token."""
        w, at = self.w, self.prefix
        e = self.embedding[torch.tensor(list(tokens))]
        g = norm(features, w[f"{at}hidden_norm.weight"])
        a = torch.cat([norm(e, w[f"{at}input_layernorm.weight"]), g], dim=-1)
        h = (g if self.norm_before_residual else features) + attention(w, f"{at}self_attn.", a)
        h = h + mlp(w, f"{at}mlp.", norm(h, w[f"{at}post_attention_layernorm.weight"]))
        for at in (f"layers.{i}." for i in range(1, 9) if f"layers.{i}.input_layernorm.weight" in w):
            h = h + attention(w, f"{at}self_attn.", norm(h, w[f"{at}input_layernorm.weight"]))
            h = h + mlp(w, f"{at}mlp.", norm(h, w[f"{at}post_attention_layernorm.weight"]))
        last = norm(h, w["norm.weight"])
        return last @ w["lm_head.weight"].T, last if self.norm_output else h

    def ids(self, count: int) -> Tensor:
        """Return the target ids of the logits, of which the target has `count`."""
        if "d2t" not in self.w:
            return torch.arange(count)
        return self.w["d2t"] + torch.arange(len(self.w["d2t"]))


class SlowBlock:
    """The formulas of a block head, with no cache."""

    def __init__(self, folder: Path, embedding: Tensor, head: Tensor, num_layers: int = 2) -> None:
        self.w, self.embedding, self.num_layers = tensors_of(folder), embedding, num_layers
        self.head = self.w.get("lm_head.weight", head)

    def rows(self, taps: Sequence[Tensor], anchor: int, size: int, *, causal: bool = False) -> Tensor:
        """Return the [size, width] rows of a block after the tokens of these hidden states."""
        w = self.w
        context = norm(torch.cat(list(taps), dim=-1) @ w["fc.weight"].T, w["hidden_norm.weight"])
        x = self.embedding[torch.tensor([anchor] + [95] * (size - 1))]
        for i in range(self.num_layers):
            at = f"layers.{i}."
            read = norm(x, w[f"{at}input_layernorm.weight"])
            x = x + attention(w, f"{at}self_attn.", read, context, causal=causal)
            x = x + mlp(w, f"{at}mlp.", norm(x, w[f"{at}post_attention_layernorm.weight"]))
        return norm(x, w["norm.weight"])

    def logits(self, row: Tensor, before: int) -> Tensor:
        """Return the [vocab] logits of a row for the token after `before`."""
        logits = self.head @ row
        if "markov_head.markov_w1.weight" in self.w:
            logits = logits + self.w["markov_head.markov_w2.weight"] @ self.w["markov_head.markov_w1.weight"][before]
        return logits


class SlowPair:
    """The formulas of a head that joins embedding and feature, over whole texts, with no cache.

    Args:
        layer: Function from [1, tokens, width] to the same, over a chain of tokens.
        embedding_norm: Function of the embeddings; as the other norms, the identity in EAGLE heads.
    """

    def __init__(
        self,
        embedding: Tensor,
        head: Tensor,
        join: Callable[[Tensor], Tensor],
        layer: Callable[[Tensor], Tensor],
        *,
        embedding_norm: Callable[[Tensor], Tensor] = lambda x: x,
        feature_norm: Callable[[Tensor], Tensor] = lambda x: x,
        output_norm: Callable[[Tensor], Tensor] = lambda x: x,
        feature_is_first: bool = False,
        blanks_first: bool = False,
        is_normed: bool = True,
    ) -> None:
        self.embedding, self.head, self.join, self.layer = embedding, head, join, layer
        self.embedding_norm, self.feature_norm, self.output_norm = embedding_norm, feature_norm, output_norm
        self.feature_is_first, self.blanks_first, self.is_normed = feature_is_first, blanks_first, is_normed

    def run(self, features: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return [pairs, vocab] logits and [pairs, width] features for pairs of a feature and the next token."""
        e = self.embedding[torch.tensor(list(tokens))].clone()
        if self.blanks_first:
            e[0] = 0
        pair = [self.embedding_norm(e), self.feature_norm(features)]
        with torch.no_grad():
            h = self.layer(self.join(torch.cat(pair[::-1] if self.feature_is_first else pair, dim=-1)))
        last = self.output_norm(h)
        return last @ self.head.T, last if self.is_normed else h

    def ids(self, count: int) -> Tensor:
        return torch.arange(count)


def slow_eagle(folder: Path, model: Any) -> SlowPair:
    w = tensors_of(folder)

    def layer(z: Tensor) -> Tensor:
        h = z + attention(w, "layers.0.self_attn.", z)
        return h + mlp(w, "layers.0.mlp.", norm(h, w["layers.0.post_attention_layernorm.weight"]))

    embedding = w.get("embed_tokens.weight", model.model.embed_tokens.weight.detach())
    return SlowPair(
        embedding, model.lm_head.weight.detach(), lambda x: x @ w["fc.weight"].T + w.get("fc.bias", 0.0), layer
    )


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


def slow_tree(
    slow: Any, features: Tensor, tokens: Sequence[int], widths: Sequence[int], vocab_size: int = 96
) -> TokenTree:
    """Grow an expansion by running the whole text again for each node."""
    trees = [TokenTree.root(tokens[-1])]
    ids = slow.ids(vocab_size)

    def grow(path: list[int], recycled: Tensor) -> None:
        if len(path) == len(widths):
            return
        logits, output = slow.run(torch.cat([features, recycled]), [*tokens[1:], *path])
        best = ids[logits[-1].topk(widths[len(path)]).indices].tolist()
        for token in best:
            chain = [tokens[-1], *path, token]
            trees.append(TokenTree(tuple(chain), tuple(range(-1, len(chain) - 1))))
            grow([*path, token], torch.cat([recycled, output[-1:]]))

    grow([], torch.empty(0, features.shape[1]))
    return TokenTree.merge(trees)
