"""A decoder layer of Llama's shape on the native kernels."""

import ctypes
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from specinfer.kernels.attention import AttentionCall, NativePieces, norm
from specinfer.kernels.library import call
from specinfer.kernels.panels import Ending, LinearCall


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "output", "gated", "down", "attention_norm", "mlp_norm")),
        ("hidden", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )


class LayerCall:
    """Norm and attention, norm and gated MLP, each added to the hidden states. A value: copies of a model share it.

    Args:
        linears: Queries, keys and values at once; the attention's output; gates and values by turns; the MLP's output.
        norms: [hidden] float32 weights of the norm before attention and of that before the MLP.
    """

    def __init__(
        self, linears: tuple[LinearCall, LinearCall, LinearCall, LinearCall], norms: tuple[Tensor, Tensor], eps: float
    ) -> None:
        self.linears, self.norms, self.eps = linears, norms, eps
        addresses = (*(one.address for one in linears), *(one.data_ptr() for one in norms))
        self._structure = _Layer(*addresses, norms[0].shape[0], eps)
        self._address = ctypes.addressof(self._structure)
        self._max_rows = min(one.max_rows for one in linears)
        qkv, output, _, down = (one.panels for one in linears)
        held = norms[0].shape[0] + qkv.outputs + output.inputs + down.inputs
        self._room = held + max(one.room for one in linears)  # floats for each token

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def room(self, tokens: int) -> int | None:
        """Floats that a pass over so many holds for each, beside its hidden states; None: PyTorch knows."""
        return self._room if tokens <= self._max_rows else None

    def __call__(
        self,
        attention: AttentionCall,
        pieces: NativePieces,
        cosines: Tensor,
        sines: Tensor,
        hidden: Tensor,
        room: Tensor | None = None,
        add_up: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """In place, on contiguous float32 `hidden` [tokens, hidden]; the others as for `AttentionCall.rotate`.

        Args:
            room: [at least tokens * `room(tokens)`] float32 to compute in, which layers may share.
            add_up: The sum of what the ranks that hold parts of the layer have; None: it is whole.
        """
        tokens = hidden.shape[0]
        if tokens > self._max_rows or add_up is not None:
            self._part_by_part(attention, pieces, cosines, sines, hidden, add_up)
            return
        room = torch.empty(tokens * self._room) if room is None else room
        assert len(room) >= tokens * self._room
        addresses = (self._address, attention.address, pieces.address, cosines.data_ptr(), sines.data_ptr())
        call("specinfer_decode", *addresses, hidden.data_ptr(), room.data_ptr())

    def _part_by_part(
        self,
        attention: AttentionCall,
        pieces: NativePieces,
        cosines: Tensor,
        sines: Tensor,
        hidden: Tensor,
        add_up: Callable[[Tensor], Tensor] | None,
    ) -> None:
        """For many rows, of which PyTorch multiplies some, and for several ranks."""
        qkv, output, gated, down = self.linears
        queries = qkv(norm(hidden, self.norms[0], self.eps))
        attention.rotate(pieces, cosines, sines, queries)
        _add(output, attention.attend(pieces, queries), hidden, add_up)
        _add(down, gated(norm(hidden, self.norms[1], self.eps), None, Ending.GATED), hidden, add_up)


def _add(linear: LinearCall, x: Tensor, hidden: Tensor, add_up: Callable[[Tensor], Tensor] | None) -> None:
    if add_up is None:
        linear(x, hidden, Ending.ADD)
    else:
        hidden += add_up(linear(x))
