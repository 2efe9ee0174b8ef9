"""Native CPU code for what PyTorch does slowly: linear layers, attention, decoder layers; and quantized weights.

Native code is built at installation if a compiler is available. Without it, models run on PyTorch alone.
"""

from specinfer.kernels.adapter_lanes import AdapterLanes, AdapterRows
from specinfer.kernels.attention import AttentionCall, FlatPieces, NativePieces, attends, norm
from specinfer.kernels.decoder import LayerCall, LayersCall
from specinfer.kernels.library import compute_alone, describe, each_alone, library
from specinfer.kernels.linear import PackedLinear, choose, pack_linears, packs, packs_type
from specinfer.kernels.linear_call import GATES, Ending, LinearCall
from specinfer.kernels.low_rank import AdapterRuns, AdapterTable, LowRank
from specinfer.kernels.panels import Panels
from specinfer.kernels.quantization import quantize
from specinfer.kernels.quantized_linear import Float8Linear, QuantizedEmbedding, QuantizedLinear
from specinfer.kernels.quantized_weight import QuantizedWeight
from specinfer.kernels.scales import WIDTH

__all__ = [
    "GATES",
    "WIDTH",
    "AdapterLanes",
    "AdapterRows",
    "AdapterRuns",
    "AdapterTable",
    "AttentionCall",
    "Ending",
    "FlatPieces",
    "Float8Linear",
    "LayerCall",
    "LayersCall",
    "LinearCall",
    "LowRank",
    "NativePieces",
    "PackedLinear",
    "Panels",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "QuantizedWeight",
    "attends",
    "choose",
    "compute_alone",
    "describe",
    "each_alone",
    "library",
    "norm",
    "pack_linears",
    "packs",
    "packs_type",
    "quantize",
]
