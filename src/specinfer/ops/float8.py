"""Weights of 8 bits in floating point (e4m3 of arXiv 2209.05433: 4 bits of exponent, 3 of mantissa).

A weight is `code * scale of its output`. Activations are not rounded to such codes; only the weights read from memory
are smaller.
"""

import torch
from torch import Tensor

from specinfer.ops.quantized_weight import QuantizedWeight

CODES = torch.float8_e4m3fn
LEVELS = torch.arange(256, dtype=torch.uint8).view(CODES).float()  # the numbers that codes stand for; two are NaN
_LARGEST = torch.finfo(CODES).max  # 448
# The smallest magnitude that is not treated as 0: a smaller one would give a subnormal scale.
_TINY = 2.0**-100
_AT_ONCE = 2**22  # weights rounded at a time, to keep copies in other types small


def quantize(weight: Tensor) -> QuantizedWeight:
    """Round weights to the nearest values of the format; the largest of each output becomes the format's largest.

    All inputs are one group.

    Args:
        weight: [out, in], finite.
    """
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty((len(weight), 1), dtype=torch.float32, device=weight.device)
    size = weight.shape[1]
    rounded_weight = QuantizedWeight(codes, scales, 8, size, size, levels=LEVELS)
    if weight.is_meta:  # read later: only shapes matter
        return rounded_weight
    rows = max(1, _AT_ONCE // max(size, 1))
    for part in (slice(start, start + rows) for start in range(0, len(weight), rows)):
        values = weight[part].float()
        largest = values.abs().amax(dim=1, keepdim=True)
        scale = largest.masked_fill(largest < _TINY, _LARGEST) / _LARGEST
        scales[part] = scale
        rounded = (values / scale).clamp_(-_LARGEST, _LARGEST)  # larger values have no code
        codes[part] = rounded.to(CODES).view(torch.uint8)
    return rounded_weight


def has_nan(codes: Tensor) -> bool:
    """Return whether there is a code that stands for no number; e4m3 has two, and no infinity."""
    return bool(codes.numel()) and (int(codes.max()) == 0xFF or int(codes.view(torch.int8).max()) == 0x7F)
