"""Native code for what PyTorch does slowly on a CPU, and the choice where to use it.

It is built when the package is installed with a compiler at hand. Without it models run as PyTorch has them.
"""

from specinfer.kernels.library import describe
from specinfer.kernels.linear import PackedLinear, pack_linears

__all__ = ["PackedLinear", "describe", "pack_linears"]
