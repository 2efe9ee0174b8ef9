"""LoadConfig: what one rank loads, and how it is to run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specinfer.core.config import OffloadConfig
from specinfer.model import experts
from specinfer.model.layers.fused import can_fuse, has_sums
from specinfer.model.layers.routing import has_numbers
from specinfer.ops.quantization import BITS
from specinfer.parallel.group import ShardSpec


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """The arguments of `load_model`, and the configuration of the model in the folder."""

    folder: Path
    config: Any  # of transformers
    dtype: str | torch.dtype
    device: torch.device
    quantization: str | None = None
    native: bool = True
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    shard: ShardSpec = field(default_factory=ShardSpec)
    token_map: Tensor | None = None
    kv_dtype: torch.dtype | None = None
    num_sharing: int = 1  # processes that keep layers in this machine's memory
    allows_fusing: bool = True

    @property
    def num_layers(self) -> int:
        """Number of layers of the whole model."""
        return int(self.config.get_text_config().num_hidden_layers)

    @property
    def layers(self) -> range:
        """Layers of this rank."""
        return self.shard.layers(self.num_layers)

    @property
    def in_host_memory(self) -> bool:
        """True if streamed layers are read once, into host memory."""
        return self.offload.offload == "cpu"

    @property
    def is_direct(self) -> bool:
        """True if streamed layers are read from the model's own files for each pass."""
        return self.offload.offload_folder is None and not self.in_host_memory

    @property
    def has_native_kernels(self) -> bool:
        return self.native and self.device.type == "cpu"

    @property
    def keeps_codes(self) -> bool:
        """True if weights that are stored as codes are computed with as they are."""
        return (
            self._has_kernels_for_codes
            and self.dtype != torch.float32  # which asks for the weights' exact values
            and self.quantization is None
        )

    @property
    def _has_kernels_for_codes(self) -> bool:
        if self.device.type == "cuda":
            return self.native and self.offload.offload is None
        return self.has_native_kernels

    def keeps_codes_of(self, name: str, source: Any) -> bool:
        """Return whether a weight is computed with as it is stored."""
        keeps_experts = self.config.model_type in experts.FAMILIES
        return self.keeps_codes and (".experts." not in name or keeps_experts) and bool(source.has_codes)

    def fuses(self, definition: Any) -> bool:
        """Return whether `FusedDecoder` runs the definition. It streams only experts that are codes."""
        if self.offload.offload is not None and self.quantization is None and has_numbers(definition):
            return False
        return self.may_fuse(definition)

    def may_fuse(self, definition: Any) -> bool:
        """Return the same before experts are replaced by their codes. Of quantized weights it has integers only.

        Of results that are normed before they are added up, no rank has its share.
        """
        if self.shard.tensor.size > 1 and has_sums(definition):
            return False
        is_allowed = self.allows_fusing and self.has_native_kernels and self.quantization in (None, *BITS)
        return is_allowed and can_fuse(definition)
