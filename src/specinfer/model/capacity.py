"""The longest request and the number of cache slots that fit into the available memory."""

import logging
from collections.abc import Iterable, Sequence

import torch

from specinfer.core.config import EngineConfig
from specinfer.core.systems import installed_memory
from specinfer.model.definition import load_config
from specinfer.model.kv_tensors import bytes_per_slot
from specinfer.model.load import LoadedModel
from specinfer.model.offload.budget import WIDTHS
from specinfer.model.recurrent.layers import state_bytes
from specinfer.model.recurrent.states import ROWS_PER_REQUEST

logger = logging.getLogger(__name__)

_TREE_SLOTS = 64  # slots for the guesses of each running request
_STREAMED_TREE_SLOTS = 512  # least for all requests: a pass over this many tokens costs hardly more than over one
_GPU_SHARE = 0.8  # of the memory that is free once the weights are loaded
_CPU_SHARE = 0.25  # of the machine's memory; pages never written take none
_MAX_CPU_BYTES = 4 * 2**30


def plan_capacity(
    config: EngineConfig,
    target: LoadedModel,
    drafters: Sequence[LoadedModel],
    max_bytes: int | None = None,
    *,
    num_sharing: int = 1,
    max_slots: int | None = None,
    reserved: int = 0,
) -> tuple[int, int]:
    """Return the longest request in tokens, and the number of slots of every model's cache.

    The target's and the drafters' caches share the memory, because each stores the same tokens.

    Args:
        max_bytes: Bytes that the caches may take, unless the config sets another number.
        num_sharing: Number of processes that share the device's memory.
        max_slots: Smallest number of slots that fit into the memory of another rank of the target.
        reserved: Bytes of the free memory that something else will need, such as captured passes.

    Raises:
        ValueError: `max_model_len` is more than the model or the memory allows.
    """
    max_model_len = config.max_model_len or target.max_position
    if max_model_len > target.max_position:
        raise ValueError(
            f"max_model_len: {max_model_len} is more than the model's {target.max_position} positions; use at most that"
        )
    each = bytes_per_token((target, *drafters))
    memory = cache_bytes(config, target, max_bytes, num_sharing, reserved)
    if max_slots is not None:
        memory = min(memory, max_slots * each)
    if size := bytes_per_state((target, *drafters)):
        num_kept = num_states(config, (target, *drafters), memory)
        memory -= num_kept * size
        if num_kept < config.max_num_seqs:
            logger.warning(
                "memory for states of %d requests: more at once are much slower; lower max_num_seqs to that", num_kept
            )
    fitting = memory // each
    if fitting < max_model_len:
        if config.max_model_len is not None or config.kv_cache_memory_bytes is not None or not fitting:
            lower = f"lower max_model_len to {fitting}, or " if fitting > 1 else ""
            raise ValueError(
                f"max_model_len: one request of {max_model_len} tokens needs {max_model_len * each / 2**20:.2f} MiB of "
                f"KV cache and {memory / 2**20:.2f} are allowed; {lower}raise kv_cache_memory_bytes"
            )
        logger.warning("the KV cache fits %d tokens of the model's %d", fitting, max_model_len)
        max_model_len = fitting
    tree_slots = config.max_num_seqs * _TREE_SLOTS
    if target.stream is not None:
        tree_slots = max(tree_slots, _STREAMED_TREE_SLOTS)
    num_slots = min(config.max_num_seqs * max_model_len + tree_slots, fitting)
    installed = installed_memory() if target.device.type == "cpu" else None
    if installed is not None and num_slots * each > installed:
        raise ValueError(
            f"kv_cache_memory_bytes: {num_slots} tokens of KV cache take {num_slots * each / 2**30:.1f} GiB, and this "
            f"machine has {installed / 2**30:.1f}; lower it, or max_num_seqs, or max_model_len"
        )
    return max_model_len, num_slots


def num_states(config: EngineConfig, models: Sequence[LoadedModel], memory: int) -> int:
    """Return how many states of recurrent layers each model keeps: at most half of the caches' memory is for them.

    Raises:
        ValueError: Not even one fits.
    """
    each = bytes_per_state(models)
    if not each:
        return 0
    num_kept = min(ROWS_PER_REQUEST * config.max_num_seqs, memory // 2 // each)
    if not num_kept:
        raise ValueError(
            f"kv_cache_memory_bytes: a state of the recurrent layers takes {each / 2**20:.2f} MiB, and half of the "
            f"{memory / 2**20:.2f} allowed are for states; raise it"
        )
    return num_kept


def bytes_per_state(models: Iterable[LoadedModel]) -> int:
    """Return the bytes that a state of recurrent layers takes in the caches of all the models."""
    return sum(state_bytes(model.model) for model in models)


def cache_bytes(
    config: EngineConfig, target: LoadedModel, max_bytes: int | None, num_sharing: int, reserved: int = 0
) -> int:
    """Return the bytes that the caches of all models may take; arguments as for `plan_capacity`."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    in_passes = num_sharing * pass_bytes(target, config.max_num_batched_tokens)
    memory = max(_memory(target.device, config.gpu_memory_utilization, in_passes) // num_sharing - reserved, 0)
    return memory if max_bytes is None else min(memory, max_bytes)


def pass_bytes(loaded: LoadedModel, num_tokens: int) -> int:
    """Return the bytes that a pass over prompts takes on a GPU, estimated from above; 0 on a CPU."""
    if loaded.device.type != "cuda" or loaded.stream is not None:  # those of streamed layers are part of a budget
        return 0
    config = load_config(loaded.folder).get_text_config()
    sizes: list[int] = [
        max(module.in_features, module.out_features)
        for name, module in loaded.model.named_modules()
        if isinstance(getattr(module, "out_features", None), int) and not name.endswith("head")
    ]
    num_experts: int = getattr(config, "num_experts_per_tok", None) or 1
    return num_tokens * WIDTHS * num_experts * max(sizes) * loaded.dtype.itemsize


def bytes_per_token(models: Iterable[LoadedModel]) -> int:
    """Return the bytes that a token takes in the caches of all the models."""
    return sum(bytes_per_slot(model.layer_shapes, model.dtype, model.taps, model.kv_dtype) for model in models)


def _memory(device: torch.device, utilization: float | None, in_passes: int) -> int:
    """Return the bytes for caches on a device where passes take some bytes at a time."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that was used while loading counts as taken until then
        free, total = torch.cuda.mem_get_info(device)
        share = int(_GPU_SHARE * free) if utilization is None else int(utilization * total) - (total - free)
        return min(share, free - in_passes)
    return min(int(_CPU_SHARE * (installed_memory() or _MAX_CPU_BYTES)), _MAX_CPU_BYTES)
