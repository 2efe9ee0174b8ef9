"""Whether a model may be run at padded sizes: it is tried, and held against passes that are not padded."""

import logging

import numpy as np
import torch
from torch import Tensor

from specinfer.errors import first_line
from specinfer.kernels.triton import runs_on
from specinfer.model.batch import Piece, pack
from specinfer.model.forward import forward
from specinfer.model.graphs.capture import Graphs
from specinfer.model.graphs.graph_runner import MAX_ROWS, GraphRunner
from specinfer.model.graphs.sizes import REQUESTS, at_least, loaded_sizes
from specinfer.model.kv_cache import NO_SLOTS, KVTensors
from specinfer.model.load import LoadedModel
from specinfer.tree import TokenTree

logger = logging.getLogger(__name__)

#   0 ─ 1 ─ 0
#     └ 0
_TREE = TokenTree((0, 1, 0, 0), (-1, 0, 0, 1))
_PREFIX = (1, 0, 1)
_GRAPH_BYTES = 4 * 2**20  # of a captured pass: its launches, and its part of the pool
_SLOTS = np.arange(8)  # of the prefix, the tree, and another request's only token


def make_graph_runner(loaded: LoadedModel, tensors: KVTensors, graphs: Graphs, max_requests: int) -> GraphRunner | None:
    """None: its passes are run as they come, and the log says why.

    Args:
        tensors: In which no request holds anything yet.
    """
    if (why := _refused(loaded, tensors)) is not None:
        logger.info("passes of %s are not captured: %s", loaded.folder, why)
        return None
    runner = GraphRunner(
        loaded.model,
        loaded.folder.name,
        loaded.num_logits,
        tensors,
        graphs,
        loaded.device,
        min(loaded.max_position, tensors.num_slots),
        max_requests,
    )
    try:
        if _agrees(runner, loaded, tensors):
            return runner
        why = "padded ones compute something else"
    except Exception as error:  # whatever a definition meets in a pass of another kind than it was made for
        logger.debug("a padded pass failed", exc_info=True)
        why = first_line(error)
    logger.warning("passes of %s are not captured: %s", loaded.folder, why)
    return None


def captured_bytes(loaded: LoadedModel, max_requests: int) -> int:
    """Device memory that padded passes of a model will take, about: its buffers, and what captures keep."""
    table = (at_least(REQUESTS, max_requests) or REQUESTS[-1]) * loaded.max_position * torch.int32.itemsize
    table *= 2  # for passes, and for steps that are the device's own
    # Logits are there twice: as the head leaves them, and as they are read.
    logits = (
        MAX_ROWS * loaded.num_logits * (torch.float32.itemsize + max(loaded.dtype.itemsize, torch.float32.itemsize))
    )
    return table + logits + len(loaded_sizes(max_requests)) * _GRAPH_BYTES


def _refused(loaded: LoadedModel, tensors: KVTensors) -> str | None:
    if loaded.stream is not None:
        return "its layers are streamed"
    if not loaded.share.is_whole:
        return "it is a part of a model"
    if tensors.num_slots < len(_SLOTS):
        return f"its cache has {tensors.num_slots} slots"
    if loaded.device.type == "cuda" and not runs_on(tensors.keys[0]):
        return "Triton's kernels do not run here"
    return None


@torch.inference_mode()
def _agrees(runner: GraphRunner, loaded: LoadedModel, tensors: KVTensors) -> bool:
    """Whether a tree beside a lone token gets the logits that it gets without padding, but for rounding."""
    num_prefix = len(_PREFIX)
    prefix, tree, alone = np.split(_SLOTS, [num_prefix, num_prefix + len(_TREE)])
    passes = [
        [Piece.of_span(_PREFIX, None, NO_SLOTS, prefix)],
        [
            Piece.of_span(_TREE.tokens[:1], _TREE, prefix, tree),
            Piece.of_span(_TREE.tokens[:1], TokenTree.root(0), NO_SLOTS, alone),
        ],
    ]

    def plain(pieces: list[Piece]) -> Tensor:
        return forward(loaded.model, pack(pieces, tensors, loaded.device, native=loaded.native))

    wanted = [plain(pieces) for pieces in passes][-1]
    found = [runner.forward(pieces) for pieces in passes][-1]
    spread = (wanted - wanted.mean(dim=-1, keepdim=True)).norm()
    # Errors of half precision add up from layer to layer.
    tolerance = 1e-3 if loaded.dtype == torch.float32 else 0.1
    return bool((found - wanted).norm() <= tolerance * spread + 1e-5)
