"""Native code for what PyTorch does slowly on a CPU, and the choice where to use it.

It is built when the package is installed with a compiler at hand. Without it models run as PyTorch has them.
"""

from specinfer.kernels.attention import AttentionCall, FlatPieces, NativePieces, attends, norm
from specinfer.kernels.library import describe, library
from specinfer.kernels.linear import PackedLinear, choose, pack_linears, packs
from specinfer.kernels.panels import Ending, LinearCall, Panels

__all__ = [
    "AttentionCall",
    "Ending",
    "FlatPieces",
    "LinearCall",
    "NativePieces",
    "PackedLinear",
    "Panels",
    "attends",
    "choose",
    "describe",
    "library",
    "norm",
    "pack_linears",
    "packs",
]
