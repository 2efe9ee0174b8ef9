"""Native CPU code for what PyTorch does slowly: linear layers, attention, decoder layers; and quantized weights.

Native code is built at installation if a compiler is available. Without it, models run on PyTorch alone.
"""

from specinfer.kernels.adapter_slots import AdapterRows, AdapterSlots
from specinfer.kernels.attention import AttentionCall, FlatPieces, NativePieces, attends, norm
from specinfer.kernels.decoder import LayerCall, LayersCall
from specinfer.kernels.experts import ExpertsCall, Opening, Routing, Scores
from specinfer.kernels.layer_inputs import LayerInputsCall
from specinfer.kernels.layer_part import Attends, Opens, PartCall
from specinfer.kernels.library import compute_alone, computing_alone, describe, each_alone, library
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
    "AdapterRows",
    "AdapterRuns",
    "AdapterSlots",
    "AdapterTable",
    "Attends",
    "AttentionCall",
    "Ending",
    "ExpertsCall",
    "FlatPieces",
    "Float8Linear",
    "LayerCall",
    "LayerInputsCall",
    "LayersCall",
    "LinearCall",
    "LowRank",
    "NativePieces",
    "Opening",
    "Opens",
    "PackedLinear",
    "Panels",
    "PartCall",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "QuantizedWeight",
    "Routing",
    "Scores",
    "attends",
    "choose",
    "compute_alone",
    "computing_alone",
    "describe",
    "each_alone",
    "library",
    "norm",
    "pack_linears",
    "packs",
    "packs_type",
    "quantize",
]
