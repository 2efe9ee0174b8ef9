"""Multi-token prediction (MTP) layers, which some models have in their own checkpoints.

transformers leaves them out. Their tensors are found by name, and only they are read. What the families have in common
is in `pair.py`; the decoder layer is of the target's own family.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specinfer.core.errors import ModelError, WeightsError
from specinfer.model.definition import load_config
from specinfer.model.gguf.stored import MTP_COPIES
from specinfer.model.heads.checkpoint import HeadCheckpoint, TensorSource
from specinfer.model.heads.head import FeatureHead, TargetEnds, TargetShape
from specinfer.model.heads.pair import Normed, PairHead
from specinfer.model.offload.shards import Shards
from specinfer.model.stacked_source import stacked

logger = logging.getLogger(__name__)
_RENAMED = {"pre_mlp_layernorm": "post_attention_layernorm", "self_attn.attention_sink_bias": "self_attn.sinks"}


class Layout(NamedTuple):
    """The names of an MTP layer's tensors in a checkpoint.

    Attributes:
        prefix: Prefix of all names; {n} stands for the number of the target's layers.
        output_norm: Name of the norm before the head, or None for the target's.
        block: Prefix of the decoder layer's tensors.
        numbered: Pattern of the prefixes of all stored layers.
    """

    prefix: str
    embedding_norm: str
    feature_norm: str
    join: str
    output_norm: str | None
    block: str = ""
    numbered: str = ""
    feature_is_first: bool = False
    blanks_first: bool = True
    layer_type: str = "full_attention"

    def names(self) -> tuple[str, ...]:
        """Return the names by which this layout is recognized."""
        return self.embedding_norm, self.feature_norm, self.join, *([self.output_norm] if self.output_norm else [])


# The first one serves DeepSeek-V3, GLM-4.5 and their relatives, the others MiMo, MiMo-V2, Ernie 4.5, and Qwen3-Next.
_LAYOUTS = (
    Layout("model.layers.{n}.", "enorm", "hnorm", "eh_proj", "shared_head.norm", numbered=r"model\.layers\.\d+\.eh"),
    Layout(
        "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm",
        numbered=r"model\.mtp_layers\.\d+\.input_proj", feature_is_first=True,
    ),
    Layout(
        "model.mtp.layers.0.", "enorm", "hnorm", "eh_proj", "final_layernorm",
        numbered=r"model\.mtp\.layers\.\d+\.eh", layer_type="sliding_attention",
    ),
    Layout(
        "model.", "mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0", None, "mtp_block.0.",
        r"model\.mtp_linear_proj\.\d+",
    ),
    Layout(
        "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.",
        r"mtp\.layers\.\d+\.input_layernorm", blanks_first=False,
    ),
)  # fmt: skip


class MtpHead(PairHead):
    """The first MTP layer of a target, used for all levels."""

    # Some families were trained with hidden states before the norm; other engines read them after it.
    dialects = (Normed(True), Normed(False))

    def __init__(self, checkpoint: "MtpCheckpoint", target: TargetShape, ends: TargetEnds) -> None:
        layout, at = checkpoint.layout, checkpoint.prefix
        super().__init__(checkpoint, target, ends, checkpoint.layer_fields())
        self.feature_is_first, self.blanks_first = layout.feature_is_first, layout.blanks_first
        if "full_attention" in (getattr(self.rotary.config, "rope_parameters", None) or {}):
            self.definition.layer_type = layout.layer_type
        self.embedding_norm = self._take_norm(checkpoint, f"{at}{layout.embedding_norm}.")
        self.feature_norm = self._take_norm(checkpoint, f"{at}{layout.feature_norm}.")
        self.join = self.take_join(checkpoint, f"{at}{layout.join}")
        checkpoint.fill(self.layers[0], f"{at}{layout.block}", self.precise)
        self.output_norm = _Function(self.last_norm)
        if layout.output_norm is not None:
            self.output_norm = self._take_norm(checkpoint, f"{at}{layout.output_norm}.")
        self.take_ends(checkpoint, target, ends)

    def _take_norm(self, checkpoint: HeadCheckpoint, prefix: str) -> nn.Module:
        norm: nn.Module = self.norm_class(self.width, eps=self.eps)
        checkpoint.fill(norm, prefix)
        return norm


class _Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self._function = function

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self._function(hidden).to(hidden.dtype)
        return result


class MtpCheckpoint(HeadCheckpoint):
    """The tensors of the first MTP layer in a target's folder."""

    def __init__(
        self, folder: Path, sources: Mapping[str, TensorSource], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = load_config(folder).get_text_config()
        self.layout, self.prefix = _find_layout(folder, sources, self._config.num_hidden_layers)
        try:
            tensors = stacked(self._own(sources), is_transposed=False)
        except ModelError as error:
            raise ModelError(f"drafters: {str(error).removeprefix('model: ')}") from error
        super().__init__(folder, dtype, device, tensors)
        if (count := len({found[0] for name in sources if (found := re.match(self.layout.numbered, name))})) > 1:
            logger.info("%s has %d MTP layers; the first drafts all levels", folder, count)

    def _own(self, sources: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
        """Return the layer's tensors by the names that transformers has for their kind."""
        starts = tuple(f"{self.prefix}{name}" for name in (*self.layout.names(), self.layout.block))
        own = {}
        for name, source in sources.items():
            if name.startswith(starts) and not name.endswith(MTP_COPIES):
                for old, new in _RENAMED.items():
                    name = name.replace(old, new)
                own[name] = source
        return own

    def layer_fields(self) -> dict[str, Any]:
        is_sparse = f"{self.prefix}{self.layout.block}mlp.experts.gate_up_proj" in self
        fields = {
            name: value
            for name, value in self._config.to_dict().items()
            if name not in ("architectures", "torch_dtype", "dtype")
        }
        of_one = {
            "num_hidden_layers": 1,
            "layer_types": [self.layout.layer_type],
            "mlp_layer_types": ["sparse" if is_sparse else "dense"],
            "first_k_dense_replace": 0 if is_sparse else 1,
            "moe_layer_start_index": 0 if is_sparse else 1,
            "mlp_only_layers": [] if is_sparse else [0],
        }
        changes = {name: value for name, value in of_one.items() if fields.get(name) is not None}
        return fields | changes | {"model_type": self._config.model_type}


def _find_layout(folder: Path, names: Mapping[str, TensorSource], num_layers: int) -> tuple[Layout, str]:
    for layout in _LAYOUTS:
        prefix = layout.prefix.format(n=num_layers)
        if all(f"{prefix}{name}.weight" in names for name in layout.names()):
            return layout, prefix
    raise ModelError(
        f'drafters: "mtp" stands for MTP layers in the target\'s own checkpoint, and {folder} has none that are known; '
        'name a small model or an EAGLE head, or use "suffix"'
    )


def has_mtp(folder: Path) -> bool:
    """Return whether a target's folder has MTP layers that can be loaded."""
    try:
        with Shards(folder) as shards:
            num_layers = getattr(load_config(folder).get_text_config(), "num_hidden_layers", None)
            return num_layers is not None and bool(_find_layout(folder, shards.sources, num_layers))
    except (ModelError, WeightsError):
        return False


def load_mtp(
    folder: Path, dtype: torch.dtype, device: torch.device, target: TargetShape, ends: TargetEnds
) -> FeatureHead:
    """Load the MTP layer in a target's folder.

    Raises:
        ModelError: There is none, or its files cannot be read.
    """
    try:
        with Shards(folder) as shards:
            checkpoint = MtpCheckpoint(folder, shards.sources, dtype, device)
            head = MtpHead(checkpoint, target, ends)
            checkpoint.check_all_taken()
            return head
    except WeightsError as error:
        raise ModelError(f"drafters: {error}") from error
