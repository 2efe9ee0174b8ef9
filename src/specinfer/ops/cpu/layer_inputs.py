"""The inputs that layers read in addition to hidden states, on the native kernels: see layer_inputs.h."""

import ctypes
from typing import Self

import torch
from torch import Tensor

from specinfer.ops.cpu.library import call
from specinfer.ops.cpu.linear_call import LinearCall
from specinfer.ops.cpu.panels import TYPES


class _LayerInputs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("embedding", "rows", "projection", "norm")),
        *((name, ctypes.c_int64) for name in ("layers", "size")),
        *((name, ctypes.c_float) for name in ("scale", "eps")),
        ("type", ctypes.c_int32),
    )


class LayerInputsCall:
    """Rows of a table times a scale, plus the norm of a projection of the embeddings. Copies of a model share it.

    Args:
        table: Panels with the table's rows, or [vocab, layers * size] in one of `TYPES`.
        projection: From embeddings to [layers * size].
        weight: [size] float32 of the norm of what the projection makes, layer by layer.
    """

    def __init__(
        self, table: LinearCall | Tensor, scale: float, projection: LinearCall, weight: Tensor, eps: float
    ) -> None:
        self.table, self.projection, self._weight = table, projection, weight
        self._width, size = projection.outputs, len(weight)
        assert self._width % size == 0
        self._structure = _LayerInputs(
            table.address if isinstance(table, LinearCall) else None,
            table.data_ptr() if isinstance(table, Tensor) else None,
            projection.address, weight.data_ptr(), self._width // size, size, scale, eps,
            TYPES[table.dtype] if isinstance(table, Tensor) else 0,
        )  # fmt: skip
        self.address = ctypes.addressof(self._structure)
        self.scratch_floats = projection.scratch_floats  # of the projection, for each token
        self.floats_per_token = 2 * self._width + self.scratch_floats

    def __deepcopy__(self, memo: object) -> Self:
        return self

    @property
    def num_bytes(self) -> int:
        table = self.table.num_bytes if isinstance(self.table, LinearCall) else int(self.table.nbytes)
        return table + self.projection.num_bytes

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """Return [tokens, layers * size] float32 for contiguous [tokens] and float32 [tokens, hidden]."""
        count = len(token_ids)
        result = torch.empty(count, self._width)
        room = torch.empty(count * (self._width + self.scratch_floats))
        addresses = [tensor.data_ptr() for tensor in (token_ids, embedded, result, room)]
        call("specinfer_layer_inputs", self.address, *addresses, count)
        return result
