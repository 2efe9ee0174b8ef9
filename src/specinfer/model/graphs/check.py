"""Check that a model may run at padded sizes, by comparing a padded pass with one without padding."""

import logging
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from specinfer.core.errors import first_line
from specinfer.core.progress import ProgressCallback
from specinfer.core.tree import TokenTree
from specinfer.model.batch import Piece, pack
from specinfer.model.forward import attends_by_itself, forward
from specinfer.model.graphs.capture import Graphs
from specinfer.model.graphs.graph_runner import GraphRunner
from specinfer.model.graphs.sizes import MAX_ROWS, MAX_STATES, REQUESTS, at_least, loaded_sizes
from specinfer.model.heads.head import FeatureHead
from specinfer.model.kv_cache import NO_SLOTS
from specinfer.model.kv_tensors import KVTensors
from specinfer.model.layers.check import Verdict, Widened, judge_pass
from specinfer.model.layers.device import Decoder
from specinfer.model.load import LoadedModel
from specinfer.model.probe import common_tokens
from specinfer.model.recurrent.layers import largest_state_bytes
from specinfer.model.sharding.stage import random_hidden
from specinfer.ops.triton import runs_on
from specinfer.parallel.rank_sums import instead_of_sums

logger = logging.getLogger(__name__)

_NUM_PREFIX, _NUM_OTHER = 3, 3
#   a ─ b ─ a
#     └ a
_PARENTS = (-1, 0, 0, 1)
_GRAPH_BYTES = 4 * 2**20  # of a captured pass: its launches, and its part of the pool
_SLOTS = np.arange(_NUM_PREFIX + len(_PARENTS) + _NUM_OTHER)  # of the prefix, the tree, and another request


def make_graph_runner(loaded: LoadedModel, tensors: KVTensors, graphs: Graphs, max_requests: int) -> GraphRunner | str:
    """Return a runner of padded passes, or why the model must run unpadded; the reason is logged too.

    Args:
        tensors: Keys and values, in which no request has stored anything yet.
    """
    if (why := _refused(loaded, tensors)) is not None:
        logger.info("passes of %s are not captured: %s", loaded.folder, why)
        return why
    try:
        runner = GraphRunner(loaded, tensors, graphs, max_requests)
        with instead_of_sums(runner.sums):
            verdict = _judged(runner, loaded, tensors)
        if verdict.is_right:
            return runner
        why = f"they are launched kernel by kernel, which takes longer: {verdict}"
    except Exception as error:  # no memory for the buffers, or any type that a definition raises in an unexpected pass
        logger.debug("a padded pass failed", exc_info=True)
        why = first_line(error)
    logger.warning("passes of %s are not captured: %s", loaded.folder, why)
    return why


def capture_usual_sizes(runner: GraphRunner, progress: ProgressCallback | None = None) -> str | None:
    """Capture the usual sizes, so that requests wait for few captures; return why passes cannot be padded, or None."""
    try:
        runner.prepare(progress)
    except Exception as error:  # such as a kernel that needs more shared memory than the GPU has
        logger.debug("a padded pass failed", exc_info=True)
        why = first_line(error)
        logger.warning("passes of %s are not captured: %s", runner.folder, why)
        return why
    return None


def captured_bytes(loaded: LoadedModel, max_requests: int) -> int:
    """Return the approximate device bytes of a model's padded passes: their buffers, and what captures keep."""
    if _why_never_captured(loaded) is not None:
        return 0
    table = (at_least(REQUESTS, max_requests) or REQUESTS[-1]) * loaded.max_position * torch.int32.itemsize
    table *= 3  # for passes, for steps that run on the device alone, and for draft loops of host steps
    # Logits are stored twice: in the head's type, and as float32 results. Hidden states of a stage are few bytes.
    each = torch.float32.itemsize + max(loaded.dtype.itemsize, torch.float32.itemsize)
    logits = MAX_ROWS * loaded.num_logits * each if loaded.shard.has_head else 0
    states = MAX_STATES * largest_state_bytes(loaded.model)
    return table + logits + states + len(loaded_sizes(max_requests)) * _GRAPH_BYTES


def _why_never_captured(loaded: LoadedModel) -> str | None:
    if loaded.stream is not None:
        return "its layers are streamed"
    if not isinstance(loaded.model, Decoder | FeatureHead) and attends_by_itself(loaded.model):
        return "its definition attends by itself"
    return None


def _refused(loaded: LoadedModel, tensors: KVTensors) -> str | None:
    if (why := _why_never_captured(loaded)) is not None:
        return why
    if tensors.num_slots < len(_SLOTS):
        return f"its cache has {tensors.num_slots} slots"
    if loaded.device.type == "cuda" and not runs_on(tensors.keys[0]):
        return "Triton's kernels do not run here"
    return None


@torch.inference_mode()
def _judged(runner: GraphRunner, loaded: LoadedModel, tensors: KVTensors) -> Verdict:
    """Compare the logits of a tree next to another request with those of a pass without padding.

    They may differ only by rounding. The logits of a text's first token are not compared: its hidden states are often
    huge in trained models, and so are the errors of its logits in half precision, in any implementation.
    """
    prefix, tree_slots, chain_slots = np.split(_SLOTS, [_NUM_PREFIX, _NUM_PREFIX + len(_PARENTS)])
    ids = common_tokens(loaded.vocab_size, _NUM_PREFIX + 2 + _NUM_OTHER)
    first, (root, guess), chain = ids[:_NUM_PREFIX], ids[_NUM_PREFIX : _NUM_PREFIX + 2], ids[_NUM_PREFIX + 2 :]
    tree = TokenTree((root, guess, root, root), _PARENTS)
    passes = [
        [Piece.from_span(first, None, NO_SLOTS, prefix)],
        [
            Piece.from_span([root], tree, prefix, tree_slots),
            Piece.from_span(chain, TokenTree.root(chain[-1]), NO_SLOTS, chain_slots),
        ],
    ]

    hidden: list[Tensor | None] = [None] * len(passes)
    if not loaded.shard.is_first:
        counts = [sum(len(piece.tokens) for piece in pieces) for pieces in passes]
        hidden = [random_hidden(loaded.model, count, loaded.dtype, loaded.device) for count in counts]

    def plain(store: KVTensors, dtype: torch.dtype | None = None) -> Tensor:
        batches = [pack(pieces, store, loaded.device, native=loaded.native) for pieces in passes]
        given = [None if x is None else x.to(dtype or x.dtype, copy=True) for x in hidden]  # a pass adds to it
        return [forward(loaded.model, *inputs) for inputs in zip(batches, given, strict=True)][-1]

    wanted = plain(tensors)
    padded = [runner.forward(*inputs) for inputs in zip(passes, hidden, strict=True)][-1]
    return judge_pass("a padded pass", padded, wanted, _exact(plain, wanted, loaded, tensors), loaded.dtype)


def _exact(plain: Callable[..., Tensor], wanted: Tensor, loaded: LoadedModel, tensors: KVTensors) -> Tensor:
    """Return the logits of the plain pass in float32, its cache too, or `wanted` where they cannot be computed."""
    if loaded.dtype == torch.float32 and loaded.kv_dtype is None:
        return wanted
    try:
        with Widened():
            return plain(KVTensors(tensors.shapes, len(_SLOTS), torch.float32, loaded.device), torch.float32)
    except RuntimeError:  # for example with experts, whose weights are one stack
        logger.debug("a pass cannot be computed in float32", exc_info=True)
        return wanted
