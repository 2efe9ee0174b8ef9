"""The interface of heads, and the target's embedding and output head, which they share."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from specinfer.core.errors import ModelError
from specinfer.model.batch import ForwardBatch
from specinfer.model.heads.checkpoint import HeadCheckpoint
from specinfer.model.heads.definition_layers import DefinitionLayers
from specinfer.model.kv_tensors import KVTensors, LayerShape, put_rows
from specinfer.model.layers.device import DeviceDecoder, DeviceLayers, DeviceNorm, device_layers
from specinfer.model.layers.families import layer_kind
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.layers.native import NativeLayers, native_layers
from specinfer.model.linears import output_head
from specinfer.ops import LinearCall, PackedLinear, QuantizedEmbedding, QuantizedLinear, norm
from specinfer.ops.cpu.draft import DecoderParts, FeatureParts


class TargetShape(NamedTuple):
    """The properties of a target that a head must fit.

    Attributes:
        width: Size of a hidden state.
    """

    width: int
    num_layers: int
    vocab_size: int

    @classmethod
    def from_config(cls, config: Any) -> "TargetShape":
        text = config.get_text_config()
        return cls(int(text.hidden_size), int(text.num_hidden_layers), int(text.vocab_size))


class TargetEnds(NamedTuple):
    """The target's embedding without its scale, its output head, and the norm before it.

    Attributes:
        embed: Function from [tokens] ids to [tokens, width].
        head: Function from [rows, width] to [rows, vocab] logits, without the cap or the scale of some targets.
        norm: Function from [tokens, width] to the same, or None where it is not known.
        table: The rows of the embedding, as in `DecoderParts`, or None if native code cannot read them.
        head_call: The native call of the output head, or None if it is not one.
    """

    embed: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    norm: Callable[[Tensor], Tensor] | None = None
    table: LinearCall | Tensor | None = None
    head_call: LinearCall | None = None

    @classmethod
    def from_model(cls, model: nn.Module) -> "TargetEnds":
        """Return those of a target, or of its last pipeline stage, whose embedding cannot be used."""
        if isinstance(model, FusedDecoder):
            assert model.head is not None
            call, last = model.head.call, model.head
            return cls(
                model.embedded,
                lambda hidden: call(hidden.float().contiguous()),
                lambda hidden: norm(hidden.float().contiguous(), last.norm, last.eps),
                model.table,
                call,
            )
        if isinstance(model, DeviceDecoder):
            own = model.norm
            assert own is not None
            assert model.head is not None
            return cls(
                model.embedded,
                model.head,
                lambda hidden: functional.rms_norm(hidden, hidden.shape[-1:], own.weight, own.eps),
            )
        trunk: Any = model
        head = output_head(model)
        assert head is not None
        last_norm = getattr(trunk.get_decoder(), "norm", None)
        embedding = trunk.get_input_embeddings()
        head_call = getattr(head, "call", None)
        if isinstance(embedding, QuantizedEmbedding):
            return cls(embedding.rows, head, last_norm, embedding.call, head_call)
        table = getattr(embedding, "weight", None)
        return cls(lambda ids: functional.embedding(ids, embedding.weight), head, last_norm, table, head_call)


MAX_BLOCK = 128  # rows of a pass


class Block(NamedTuple):
    """The rows of a pass that drafts a whole tree.

    Attributes:
        size: Number of rows: the last known token, and mask tokens after it.
        mask_token: Token of these rows.
        from_anchor: True if the first row predicts the next token; else the row after it does.
        is_causal: True if rows do not see later ones.
    """

    size: int
    mask_token: int
    from_anchor: bool = True
    is_causal: bool = True

    @property
    def max_depth(self) -> int:
        """Largest depth of a tree: the number of rows that predict a token."""
        return self.size - (0 if self.from_anchor else 1)


class FeatureHead(nn.Module):
    """A drafter's layers. A token's features are those of the token before it; what it computes is a feature again.

    Attributes:
        reads: Numbers of the target's layers after which hidden states are read, ascending.
        width: Size of a feature.
        layer_shapes: What its layers store for each token. A head that stores nothing also has no features stored for
            it, and needs a runner that reads the target's cache, such as that of `AssistantHead`.
        token_map: [map] the target's ids of its logits, or None for the whole vocabulary.
        dialects: All ways in which its configuration can be read, the most likely one first.
        block: The rows of a pass that drafts a whole tree, or None for a pass for each level.
        is_pairwise: True if a row gives a token's logits only together with the token before it.
        reads_pairs: True if it reads a token's feature together with the token after it; else the feature alone.
    """

    dialects: Sequence[Any] = ()
    block: Block | None = None
    is_pairwise = False
    reads_pairs = True

    reads: tuple[int, ...]
    width: int
    eps: float  # of its norms
    layer_shapes: tuple[LayerShape, ...]
    token_map: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.fused: NativeLayers | None = None  # its decoder layers, if they are computed natively
        self.on_device: DeviceLayers | None = None  # the same, if they are computed with few launches on a GPU
        self.norm_weights: dict[str, Tensor] = {}  # [width] float32 of norms outside of layers, for native code

    @property
    def may_read(self) -> frozenset[int]:
        """Numbers of layers that are read in any dialect."""
        return frozenset(self.reads)

    def take_layers(self, trunk: Any) -> None:
        """Take the decoder layers of a trunk."""
        self.layers, self.rotary, self._config, self.norm_class = (
            trunk.layers, trunk.rotary_emb, trunk.config, type(trunk.norm)
        )  # fmt: skip
        self.width, self.eps = int(trunk.config.hidden_size), float(trunk.config.rms_norm_eps)
        self.layer_shapes = shapes_of(trunk)
        self.definition = DefinitionLayers(self.layers, self.rotary, self.layer_shapes)

    def fuse(self, quantization: str | None) -> None:
        """Compute the decoder layers natively from now on, on a CPU, if that is possible.

        Args:
            quantization: What the linear layers of the decoder layers are rounded to, or None.
        """
        self.fused = native_layers(self.layers, self.rotary, self._config, quantization)
        if self.fused is not None:
            kind = layer_kind(self._config)
            assert kind is not None
            self.norm_weights = {name: kind.norm_weight(child) for name, child in self._norms()}

    def fuse_on_device(self, max_position: int) -> None:
        """Compute the decoder layers with few launches from now on, on a GPU, if that is possible.

        Linear layers may be quantized afterwards.

        Args:
            max_position: Length of the longest text.
        """
        self.on_device = device_layers(self.layers, self.rotary, self._config, max_position)
        for name, child in self._norms() if self.on_device is not None else ():
            setattr(self, name, DeviceNorm(child))

    def _norms(self) -> list[tuple[str, nn.Module]]:
        """Return the norms outside of layers, by name."""
        return [(name, child) for name, child in self.named_children() if type(child) is self.norm_class]

    def speak(self, dialect: Any) -> None:
        """Compute in one of `dialects` from now on."""

    def project(self, taps: Sequence[Tensor]) -> Tensor:
        """Return the [tokens, width] features of the target's hidden states, [tokens, target width] for each layer."""
        raise NotImplementedError

    @property
    def mask_features(self) -> Tensor | None:
        """Return the [1, width] feature of mask tokens, or None if rows of a block have none."""
        return None

    def parts(self, store: KVTensors, positions: int) -> DecoderParts | None:
        """Return the native calls of a whole pass for positions up to a number, or None if it has other parts."""
        inputs, ends = self.native_inputs(store), self.ends
        if self.fused is None or inputs is None or ends is None:
            return None
        (features, last_norm), (table, head) = inputs, ends
        layers, floats = self.fused.call_on(store, positions), self.fused.scratch_floats
        return DecoderParts(layers, floats, table, 1.0, last_norm, self.eps, head, features=features)

    def native_inputs(self, store: KVTensors) -> tuple[FeatureParts, Tensor | None] | None:
        """Return how native code reads features, and the weight of the norm before the output head, if there is one.

        None if it cannot read them.
        """
        return None

    def conditional(self, logits: Tensor, rows: Tensor, before: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return [nodes, vocab] logits after each node's token, and [nodes] probabilities of acceptance if predicted.

        Args:
            logits: [nodes, vocab] logits of the rows.
            rows: [nodes, width] rows of the block that predict the nodes' children.
            before: [nodes] target ids of the nodes' tokens.
        """
        raise NotImplementedError

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return [rows, vocab] float32 logits, and store the features of all tokens in the batch's store."""
        raise NotImplementedError

    def take_ends(self, checkpoint: HeadCheckpoint, target: TargetShape, ends: TargetEnds) -> None:
        """Take the embedding and the output head, which are the target's unless the checkpoint has them."""
        table = checkpoint.get("embed_tokens.weight", target.vocab_size, self.width)
        if table is None and target.width != self.width:
            raise ModelError(
                f"drafters: {checkpoint.folder} has no tensor embed_tokens.weight, and its hidden size {self.width} is "
                f"not the target's {target.width}; take a drafter that was trained for this target"
            )
        self.embedding = None if table is None else nn.Parameter(table, requires_grad=False)
        self.token_map = checkpoint.token_map(target.vocab_size)
        size = target.vocab_size if self.token_map is None else len(self.token_map)
        self.lm_head: nn.Linear | None = None
        if "lm_head.weight" in checkpoint:
            self.lm_head = nn.Linear(self.width, size, bias=False, device="meta")
            checkpoint.fill(self.lm_head, "lm_head.")
        elif self.token_map is not None or target.width != self.width:
            checkpoint.take("lm_head.weight", size, self.width)
        self._ends = ends

    def embedded(self, token_ids: Tensor) -> Tensor:
        """Return the [tokens, width] embeddings, without the scale of some targets."""
        if self.embedding is None:
            return self._ends.embed(token_ids)
        return nn.functional.embedding(token_ids, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, vocab] float32 logits of [rows, width] hidden states after the last norm."""
        head = self._ends.head if self.lm_head is None else self.lm_head
        if hidden.device.type == "cpu" and isinstance(head, PackedLinear | QuantizedLinear):
            hidden = hidden.float()  # what they multiply: logits are not rounded to fewer bits and back
        logits: Tensor = head(hidden)
        return logits.float()

    def asked_logits(self, batch: ForwardBatch, last: Tensor) -> Tensor:
        """Return [rows, vocab] float32 logits of the tokens that the batch asks for, of [tokens, width] of all."""
        rows = batch.logit_rows
        return self.logits(last if len(rows) == len(last) else last.index_select(0, rows))

    @property
    def ends(self) -> tuple[LinearCall | Tensor, LinearCall] | None:
        """The rows of the embedding and the call of the output head, or None if native code cannot read them."""
        table = self._ends.table if self.embedding is None else self.embedding.detach()
        head: Any = self.lm_head
        call: LinearCall | None = self._ends.head_call if head is None else getattr(head, "call", None)
        return None if table is None or call is None else (table, call)

    @staticmethod
    def store(batch: ForwardBatch, features: Tensor) -> None:
        """Store [tokens, width] features that the next level reads."""
        put_rows(batch.store.taps[0], batch.slots, features)


def shapes_of(trunk: Any) -> tuple[LayerShape, ...]:
    """Return what the layers of a Llama-like trunk store for each token."""
    shapes = []
    for layer in trunk.layers:
        attention = layer.self_attn
        if hasattr(attention, "kv_b_proj"):  # multi-head latent attention
            shapes.append(LayerShape(attention.num_heads, attention.qk_head_dim, attention.v_head_dim))
            continue
        size = int(attention.head_dim)
        heads = attention.k_proj.out_features // size
        shapes.append(LayerShape(heads, size, attention.v_proj.out_features // heads))
    return tuple(shapes)
