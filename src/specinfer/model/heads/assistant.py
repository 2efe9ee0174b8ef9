"""Gemma 4 assistants: a few layers that attend to the keys and values of their target, and store none.

    u = pre_projection([embedding of the token; feature])     h = layers(u)      m = norm(h)
    logits = lm_head(m)                                        feature of the next level = post_projection(m)

The first feature is the target's last hidden state after its last norm, of the token before the last known one. All
levels are computed at one position over the same keys and values: those of the tokens that the target has computed. So
a level follows from the one before by its feature and its token alone.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specinfer.core.errors import ModelError
from specinfer.model.batch import ForwardBatch
from specinfer.model.definition import make_trunk
from specinfer.model.heads.checkpoint import HeadCheckpoint
from specinfer.model.heads.head import FeatureHead, TargetEnds, TargetShape
from specinfer.model.kv_tensors import LayerShape

_OWN_KEYS = ("k_proj", "v_proj", "k_norm", "v_norm")  # of an attention that has keys and values of its own


class Position(NamedTuple):
    """The position at which all levels are computed: that of the last known token, or of the token before it."""

    is_last: bool

    def __str__(self) -> str:
        return f"at the position of the {'last known token' if self.is_last else 'token before the last known one'}"


class AssistantHead(FeatureHead):
    """The layers of an assistant.

    Args:
        target_layers: For each kind of attention, the target's layer whose keys and values are read.
        target_shapes: What each layer of the target stores.
    """

    dialects = (Position(False), Position(True))  # vLLM computes at the first, transformers at the second
    layer_shapes = ()
    token_map = None
    reads_pairs = False

    def __init__(
        self,
        checkpoint: HeadCheckpoint,
        target: TargetShape,
        ends: TargetEnds,
        target_layers: dict[str, int],
        target_shapes: Sequence[LayerShape],
    ) -> None:
        super().__init__()
        assert ends.norm is not None
        checkpoint.number("backbone_hidden_size", target.width, target.width)
        fields = checkpoint.fields.get("text_config")
        if not isinstance(fields, dict):
            raise ModelError(f"drafters: config.json of {checkpoint.folder} has no text_config")
        checkpoint.number("vocab_size", target.vocab_size, target.vocab_size, fields)
        # transformers does not make a model of layers that all share keys and values.
        trunk = make_trunk(fields | {"num_kv_shared_layers": 0})
        self._ends, self.last_norm, self.dtype = ends, ends.norm, checkpoint.dtype
        self.reads, self.width = (target.num_layers,), target.width
        self._scale = float(torch.tensor(self.width**0.5, dtype=self.dtype))  # rounded as transformers rounds it
        own = int(trunk.config.hidden_size)
        self.pre_projection = nn.Linear(2 * target.width, own, bias=False, device="meta")
        self.post_projection = nn.Linear(own, target.width, bias=False, device="meta")
        self.layers, self.norm, self.rotary = trunk.layers, trunk.norm, trunk.rotary_emb
        for layer in self.layers:
            _read_target(checkpoint, layer.self_attn, target_layers, target_shapes)
        for name in ("pre_projection", "post_projection"):
            checkpoint.fill(getattr(self, name), f"{name}.")
        for name in ("layers", "norm"):
            checkpoint.fill(getattr(self, name), f"model.{name}.")
        self.embedding = None
        self.lm_head = nn.Linear(own, target.vocab_size, bias=False, device="meta")
        name = "lm_head.weight" if "lm_head.weight" in checkpoint else "model.embed_tokens.weight"
        self.lm_head.weight = nn.Parameter(checkpoint.take(name, target.vocab_size, own), requires_grad=False)
        checkpoint.get("model.embed_tokens.weight", target.vocab_size, own)  # the same, where both are stored
        self._take_clusters(checkpoint, target.vocab_size, own)
        self.speak(self.dialects[0])

    def _take_clusters(self, checkpoint: HeadCheckpoint, vocab_size: int, own: int) -> None:
        """Take the clusters of tokens, of which only the best are scored: [clusters, own] and their tokens."""
        self.centroids: nn.Linear | None = None
        if not checkpoint.fields.get("use_ordered_embeddings", False):
            return
        count = checkpoint.number("num_centroids", 1, vocab_size)
        self.num_best = checkpoint.number("centroid_intermediate_top_k", 1, count)
        self.centroids = nn.Linear(own, count, bias=False, device="meta")
        checkpoint.fill(self.centroids, "masked_embedding.centroids.")
        ordering = checkpoint.take("masked_embedding.token_ordering", vocab_size).long()
        every = torch.arange(vocab_size, device=ordering.device)
        if vocab_size % count or not torch.equal(ordering.sort().values, every):
            raise ModelError(
                f"drafters: tensor masked_embedding.token_ordering of {checkpoint.folder} does not divide the "
                f"{vocab_size} tokens of the target into {count} clusters; take the assistant of this target"
            )
        self.members = ordering.view(count, -1)

    def fuse(self, quantization: str | None) -> None:
        """Leave the layers as they are: native ones read keys and values of their own."""

    def fuse_on_device(self, max_position: int) -> None:
        """Leave the layers as they are, as `fuse` does."""

    def speak(self, dialect: Position) -> None:
        self.dialect = dialect

    def project(self, taps: Sequence[Tensor]) -> Tensor:
        (hidden,) = taps
        return self.last_norm(hidden)

    @property
    def offset(self) -> int:
        """Distance from the last known token to the position at which all levels are computed."""
        return 0 if self.dialect.is_last else -1

    def forward(self, batch: ForwardBatch) -> Tensor:
        last = self._hidden(batch)
        self.store(batch, self.post_projection(last))
        return self.asked_logits(batch, last)

    def compute(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return [tokens, vocab] float32 logits and the [tokens, width] features of the next level."""
        last = self._hidden(batch)
        return self.logits(last), self.post_projection(last)

    def _hidden(self, batch: ForwardBatch) -> Tensor:
        """Return [tokens, own width] hidden states after the last norm."""
        assert batch.features is not None
        embedded = self._ends.embed(batch.token_ids).to(self.dtype)
        joined = torch.cat([embedded * self._scale, batch.features.to(self.dtype)], dim=-1)
        hidden, positions = self.pre_projection(joined).unsqueeze(0), batch.positions.unsqueeze(0)
        nothing = hidden.new_empty(1, 1, 0, 1)  # in place of new keys and values
        rotations: dict[str, Any] = {}
        for layer in self.layers:
            kind = layer.self_attn.layer_type
            if kind not in rotations:
                rotations[kind] = self.rotary(hidden, positions, kind)
            hidden = layer(
                hidden,
                shared_kv_states={kind: (nothing, nothing)},
                position_embeddings=rotations[kind],
                attention_mask=None,
                position_ids=positions,
                forward_batch=batch,
            )
        normalized: Tensor = self.norm(hidden)[0]
        return normalized

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, vocab] logits; those of tokens outside of the best clusters are -inf."""
        assert self.lm_head is not None
        if self.centroids is None:
            return super().logits(hidden)
        best = self.centroids(hidden).topk(self.num_best, dim=-1).indices
        tokens = self.members[best].flatten(1)
        scores = (self._rows(tokens).to(hidden.dtype) @ hidden.unsqueeze(-1)).squeeze(-1).float()
        rest = scores.new_full((len(hidden), self.lm_head.out_features), -torch.inf)
        return rest.scatter(1, tokens, scores)

    def _rows(self, tokens: Tensor) -> Tensor:
        """Return [rows, tokens, own width] rows of the output head, which may be packed or quantized."""
        head: Any = self.lm_head
        if isinstance(head, nn.Linear):
            return head.weight[tokens]
        rows: Tensor = head.rows(tokens.flatten())
        return rows.view(*tokens.shape, -1)


def _read_target(
    checkpoint: HeadCheckpoint, attention: Any, target_layers: dict[str, int], target_shapes: Sequence[LayerShape]
) -> None:
    """Let an attention read the keys and values of the target's layer of its kind, in place of its own.

    Raises:
        ModelError: The target has no such layer, or one of another size.
    """
    number, kind = attention.layer_idx, attention.layer_type
    if kind not in target_layers:
        raise ModelError(
            f"drafters: layer {number} of {checkpoint.folder} reads the keys and values of a layer with {kind}, which "
            "the target does not have; take the assistant of this target"
        )
    shape = target_shapes[target_layers[kind]]
    heads = attention.q_proj.out_features // attention.head_dim
    if (shape.key_dim, shape.value_dim) != (attention.head_dim,) * 2 or heads % shape.num_kv_heads:
        raise ModelError(
            f"drafters: tensor model.layers.{number}.self_attn.q_proj.weight of {checkpoint.folder} is of {heads} "
            f"heads of size {attention.head_dim}, and the target's layer {target_layers[kind]} stores keys of "
            f"{shape.num_kv_heads} heads of size {shape.key_dim}; take the assistant of this target"
        )
    attention.layer_idx, attention.is_kv_shared_layer = target_layers[kind], True
    for name in _OWN_KEYS:
        delattr(attention, name)
