"""Choice of the way in which a definition runs: the first that computes with token trees what its own pass does.

Positions that a definition counts itself, masks of its own, tokens that see later ones or mix with their neighbours in
another way would all be silently wrong with trees.
"""

import logging
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specinfer.core.errors import ModelError, WeightsError, first_line
from specinfer.model.batch import Piece, pack
from specinfer.model.context_length import max_position_of
from specinfer.model.definition import has_known_layers
from specinfer.model.families import REPLACED
from specinfer.model.forward import forward
from specinfer.model.kv_cache import NO_SLOTS, Slots
from specinfer.model.kv_tensors import KVTensors, LayerShape
from specinfer.model.layers.check import Widened
from specinfer.model.layers.families import FAMILIES
from specinfer.model.load_config import LoadConfig
from specinfer.model.past import OWN, PACKED, WAYS, set_way, way_of
from specinfer.model.probe import BYPASSED, common_tokens, probe
from specinfer.model.quantized_experts import QuantizedExperts
from specinfer.model.recurrent.layers import is_hybrid
from specinfer.model.sharding.placeholder import StageEnd
from specinfer.ops import QuantizedLinear

logger = logging.getLogger(__name__)
REMEDY = "; run it with transformers itself, or choose a model of another family"
_LENGTH, _BRANCH, _READ = 11, 5, 3  # tokens of a text, of them those of a branch, and those that an earlier pass reads
_EXACT, _ROUGH = 1e-3, 0.15  # allowed error of a path's median token, with activations in float32 or in another type


def choose_way(model: nn.Module, job: LoadConfig) -> None:
    """Let a definition run in the first of `WAYS` that is right, unless it is one that this package describes.

    Raises:
        ModelError: None is.
    """
    config, device, layers = job.config, job.device, job.layers
    if config.model_type in FAMILIES or isinstance(model, tuple(REPLACED.values())) or is_hybrid(model):
        return
    if layers.start:  # the first stage compares for all
        _check_stages(model, config, layers)
        return
    reasons: list[str] = []
    ways = [way for way in WAYS[WAYS.index(way_of(model)) :] if way != PACKED or has_known_layers(config)]
    # The heads of some shards, and a text that is longer than the model's positions, are only for tree attention.
    may_lack_pass = job.shard.tensor.size > 1 or max_position_of(config) < _LENGTH
    for way in ways:
        set_way(model, way)
        try:
            _check_stages(model, config, layers)
            shapes = probe(model, config, device, layers).layer_shapes
            _check(model, device, shapes, may_lack_pass=may_lack_pass and way == PACKED)
        except WeightsError:  # of weights that are read during the pass
            raise
        except Exception as error:  # families check what they are asked for in ways of their own
            logger.debug("%s does not run in the way %s: %s", config.model_type, way, error)
            reasons.append(_reason(error, config))
        else:
            return
    reason = reasons[-1 if BYPASSED in reasons[0] else 0]
    raise ModelError(reason + REMEDY)


def _check_stages(model: nn.Module, config: Any, layers: range) -> None:
    """Refuse stages of a definition that is not run in the first way."""
    is_first = way_of(model) == PACKED and has_known_layers(config)
    if not is_first and len(layers) < config.get_text_config().num_hidden_layers:
        raise ModelError(
            f"pipeline_parallel_size: family {config.model_type!r} chooses masks itself and is not split into stages; "
            "use 1, or tensor_parallel_size"
        )


def _reason(error: Exception, config: Any) -> str:
    if isinstance(error, ModelError):
        return str(error)
    return f"model: family {config.model_type!r} is not supported: {first_line(error)}"


def _check(model: Any, device: torch.device, shapes: tuple[LayerShape, ...], *, may_lack_pass: bool) -> None:
    """Compare the logits of token trees with those of the definition's own pass over each path.

    Args:
        may_lack_pass: Whether nothing is compared if the definition does not run by itself.
    """
    dtype, allowed = next(model.parameters()).dtype, _EXACT
    tokens = common_tokens(model.config.get_text_config().vocab_size, 2 * _LENGTH + _BRANCH)
    first, second, branch = tokens[:_LENGTH], tokens[_LENGTH : 2 * _LENGTH], tokens[2 * _LENGTH :]

    def largest_error(kind: torch.dtype) -> float:
        try:
            wanted = _by_itself(model, [first, [*first[:-_BRANCH], *branch], second], device)
        except WeightsError:
            raise
        except Exception as error:
            if not may_lack_pass:
                raise
            logger.debug("%s does not run by itself: %s", model.config.model_type, error)
            return 0.0
        return _error(_with_trees(model, first, branch, second, KVTensors(shapes, 3 * _LENGTH, kind, device)), wanted)

    with torch.inference_mode():
        if any(isinstance(module, QuantizedLinear | QuantizedExperts) for module in model.modules()):
            allowed = _ROUGH
            error = largest_error(dtype)
        else:
            try:
                with Widened() if dtype != torch.float32 else nullcontext():
                    error = largest_error(torch.float32)
            except RuntimeError:  # such as of experts whose weights are one stack
                allowed = _ROUGH
                error = largest_error(dtype)
    if not error <= allowed:
        raise ModelError(
            f"model: family {model.config.model_type!r} is not supported: with token trees it computes something else "
            f"than by itself (an error of {error:.1%}), such as positions that it counts, or tokens that it mixes"
        )


def _with_trees(model: Any, first: list[int], branch: list[int], second: list[int], store: KVTensors) -> Tensor:
    """Return [tokens, vocab] logits of a pass over a tree with two branches, and the rest of another text.

    The first tokens of both texts are read by an earlier pass.
    """
    length, device = len(first), store.keys[0].device
    slots = np.arange(3 * length)
    starts = {0: first, length + len(branch): second}
    read = [
        Piece(text[:_READ], range(_READ), NO_SLOTS, slots[at : at + _READ], np.tri(_READ, dtype=np.bool_), 0)
        for at, text in starts.items()
    ]
    nodes, fork = [*first[_READ:], *branch], length - len(branch)
    positions = [*range(_READ, length), *range(fork, length)]
    visible = np.tri(len(nodes), dtype=np.bool_)
    visible[length - _READ :, fork - _READ : length - _READ] = False
    pieces = [
        Piece(nodes, positions, slots[:_READ], slots[_READ : _READ + len(nodes)], visible, len(nodes)),
        _rest_of(second, slots[length + len(branch) :][: len(second)]),
    ]
    forward(model, pack(read, store, device, native=False))
    return forward(model, pack(pieces, store, device, native=False))


def _rest_of(text: list[int], slots: Slots) -> Piece:
    count = len(text) - _READ
    visible = np.tri(count, dtype=np.bool_)
    return Piece(text[_READ:], range(_READ, len(text)), slots[:_READ], slots[_READ:], visible, count)


def _by_itself(model: Any, texts: list[list[int]], device: torch.device) -> Tensor:
    """Return the logits that transformers' own pass has, of the tokens in the order of `_with_trees`."""
    way = way_of(model)
    set_way(model, OWN)
    try:
        found = model(input_ids=torch.tensor(texts, device=device), use_cache=False).logits
    except StageEnd as end:
        found = end.hidden
    finally:
        set_way(model, way)
    path, other, second = found.float()[:, _READ:]
    return torch.cat([path, other[-_BRANCH:], second])


def _error(found: Tensor, wanted: Tensor) -> float:
    """Return the relative error of the median token of the branch, or text, where it is largest."""
    size = (wanted - wanted.mean(dim=-1, keepdim=True)).norm(dim=-1).clamp(min=1e-9)
    errors = (found - wanted).norm(dim=-1) / size
    parts = errors.split([_LENGTH - _READ - _BRANCH, _BRANCH, _BRANCH, _LENGTH - _READ])
    return max(float(part.nan_to_num(torch.inf).median()) for part in parts)
