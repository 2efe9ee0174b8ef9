"""Native CPU code for what PyTorch does slowly: linear layers, attention, decoder layers; and quantized weights.

Native code is built at installation. Without it, an error says how to get it.
"""

from specinfer.ops.adapter_slots import AdapterRows, AdapterSlots
from specinfer.ops.cpu.attention import AttentionCall, FlatPieces, NativePieces, attends, norm
from specinfer.ops.cpu.decoder import LayerCall, LayersCall
from specinfer.ops.cpu.experts import ExpertsCall, Opening, Routing, Scores
from specinfer.ops.cpu.layer_inputs import LayerInputsCall
from specinfer.ops.cpu.layer_part import Attends, Opens, PartCall
from specinfer.ops.cpu.library import compute_alone, computing_alone, describe, each_alone, library
from specinfer.ops.cpu.linear import PackedLinear, pack_linears, packs_type
from specinfer.ops.cpu.linear_call import GATES, Ending, LinearCall, uses_dots
from specinfer.ops.cpu.low_rank import AdapterRuns, AdapterTable, LowRank
from specinfer.ops.cpu.panels import Panels
from specinfer.ops.quantization import quantize
from specinfer.ops.quantized_linear import QuantizedEmbedding, QuantizedLinear
from specinfer.ops.quantized_weight import QuantizedWeight
from specinfer.ops.scales import WIDTH

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
    "compute_alone",
    "computing_alone",
    "describe",
    "each_alone",
    "library",
    "norm",
    "pack_linears",
    "packs_type",
    "quantize",
    "uses_dots",
]
