"""Plan of an engine: which models it has, and which ranks load them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specinfer.core.config import EngineConfig
from specinfer.core.lookups import SELF_DRAFTERS
from specinfer.core.parallel_config import ParallelConfig
from specinfer.core.rules import AUTO
from specinfer.drafters.loading import reads_target
from specinfer.drafters.remote.placement import DrafterPlacement, place_drafters
from specinfer.engine_args import EngineArgs
from specinfer.model.definition import import_models, load_config
from specinfer.model.device import DTYPES, find_device, prompt_tokens
from specinfer.model.load_config import LoadConfig
from specinfer.model.offload.budget import Budget, check_budget, usual_budget
from specinfer.model.recurrent.layers import has_recurrent_layers
from specinfer.model.shard_definition import open_checkpoint
from specinfer.model.sharding.shard import check_sizes
from specinfer.model.target import TargetConfig
from specinfer.policy.offload_choice import usual_copy
from specinfer.setup.drafter_setup import check_drafters, find_drafters
from specinfer.setup.model_names import find_target, usual_drafters


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The models of an engine, found on this machine.

    Attributes:
        drafters: Folders by the names that the drafters were requested with, or None for a lookup drafter.
        placement: Ranks that load drafters.
        drafter_choice: The drafters that were chosen because none were named, and why, or None.
    """

    settings: TargetConfig
    parallel: ParallelConfig
    drafters: Mapping[str, Path | None]
    placement: DrafterPlacement
    drafter_choice: str | None


def plan_models(args: EngineArgs, *, finds_drafters: bool = True) -> ModelPlan:
    """Find the models of an engine, and place its drafters on ranks.

    Args:
        finds_drafters: Whether drafters must be on this machine.

    Raises:
        ModelError: There is no such model.
        ValueError: The drafters do not support a setting.
    """
    device = find_device(args.device)  # checked before a folder is fetched
    speculative, parallel = args.speculative_config, args.parallel_config
    folder = find_target(args.model)
    names, choice = () if speculative.shape.is_off else speculative.drafters, None
    is_whole = parallel.world_size == 1
    if names is None:
        # Machines may have different models in their caches; what is chosen must be the same on all.
        chosen = usual_drafters(
            args.model, folder, device, small_models=args.nnodes == 1 and args.offload is None,
            copy=usual_copy(folder, args.offload_config, args.quantization, device) if is_whole else None,
            is_whole=is_whole,
        )  # fmt: skip
        names, choice = chosen.names, str(chosen)
    check_drafters(
        speculative, names, args.drafter_quantization, args.drafter_token_map,
        adapts=args.adapt_drafters, has_corpus=args.suffix_corpus is not None,
    )  # fmt: skip
    settings = TargetConfig(
        str(folder), args.dtype, args.device, args.quantization, args.offload_config, _limits(args, folder, device),
        tuple(name for name in names if name in SELF_DRAFTERS),
        args.kv_cache_dtype, args.enforce_eager, args.batch_invariant,
    )  # fmt: skip
    if is_whole:
        settings = _with_budget(settings, names)
    else:
        check_sizes(load_config(folder), parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    models = find_drafters(names, folder) if finds_drafters else {}
    small = {name: path for name, path in models.items() if not reads_target(name, path)}  # heads stay with the engine
    chooses = speculative.max_asked is not None or speculative.verification == AUTO  # drafters, or the rule, by request
    placement = place_drafters(
        small, parallel, args.drafter_quantization, str(args.drafter_token_map),
        keeps_prefixes=args.enable_prefix_caching,
        must_be_here=args.adapt_drafters or chooses or args.tokenizer is not None,
    )  # fmt: skip
    return ModelPlan(settings, parallel, {name: models.get(name) for name in names}, placement, choice)


def _limits(args: EngineArgs, folder: Path, device: torch.device) -> EngineConfig:
    """Return the limits of the engine, with as many prompt tokens in a step as suit the device unless they are given.

    Layers without attention take one token after the other, and a prefix is reused up to the end of a chunk: larger
    chunks are no faster there, and fewer prefixes are found.
    """
    limits = args.engine_config
    if args.max_num_batched_tokens is not None or args.offload is not None or has_recurrent_layers(load_config(folder)):
        return limits
    return replace(limits, max_num_batched_tokens=prompt_tokens(device))


def _with_budget(settings: TargetConfig, drafters: Sequence[str]) -> TargetConfig:
    """Return the settings with the memory budget of a streamed target; check that everything fits into it."""
    offload, limits, place = settings.offload, settings.limits, find_device(settings.device)
    if offload.offload is None:
        return settings
    if offload.memory_budget is None:
        offload = replace(offload, memory_budget=usual_budget(place))
    sizes = limits.max_num_batched_tokens, limits.max_num_seqs, limits.kv_cache_memory_bytes
    import_models()
    folder, dtype = Path(settings.folder), DTYPES[settings.dtype]
    job = LoadConfig(folder, load_config(folder), dtype, place, settings.quantization, offload=offload)
    with open_checkpoint(job) as checkpoint:
        check_budget(Budget(offload.budget_bytes, place), checkpoint, drafters, *sizes)
    return replace(settings, offload=offload)
