"""Assembly of an LLM: the target, whole or in part, its drafters, and caches that fit into the remaining memory."""

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from specinfer.core.config import AUTO
from specinfer.core.lookups import SELF_DRAFTERS
from specinfer.core.parallel_config import ParallelConfig
from specinfer.core.progress import ProgressCallback
from specinfer.drafters.assistant_drafter import AssistantRunner
from specinfer.drafters.dialect_choice import choose_dialect
from specinfer.drafters.feature_drafter import HeadRunner
from specinfer.drafters.loading import load_small, reads_target
from specinfer.drafters.remote.drafter import RankLink, RemoteModel
from specinfer.drafters.remote.placement import DrafterPlacement, place_drafters
from specinfer.drafters.remote.process import start_ranks
from specinfer.drafters.self_drafter import SelfRunner, SplitSelfRunner
from specinfer.engine.scheduler import Scheduler
from specinfer.engine_args import EngineArgs
from specinfer.model.adapters.registry import Adapters
from specinfer.model.capacity import bytes_per_state, bytes_per_token, cache_bytes, num_states, plan_capacity
from specinfer.model.definition import load_config, load_tokenizer
from specinfer.model.device import DTYPES, KV_CACHE_DTYPES, find_device
from specinfer.model.graphs.capture import make_graphs
from specinfer.model.graphs.check import captured_bytes
from specinfer.model.heads.assistant import AssistantHead
from specinfer.model.heads.head import FeatureHead
from specinfer.model.heads.load import taps_of
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.offload.budget import Budget, PassCapacity, usual_budget
from specinfer.model.offload.requirements import check_budget
from specinfer.model.runner import ModelRunner, TargetRunner
from specinfer.model.sharding.runner import DistributedRunner, load_first_shard, min_remote_slots
from specinfer.model.sharding.shard import check_sizes
from specinfer.model.target import TargetConfig, num_sharing, settle_shard
from specinfer.parallel.ranks import Ranks
from specinfer.policy.offload_choice import usual_copy
from specinfer.setup.drafter_setup import Speculator, check_drafters, find_drafters
from specinfer.setup.model_names import find_target, find_tokenizer, usual_drafters

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Assembly:
    """Loaded models, each with its cache, and the scheduler that decides which requests run on them.

    Attributes:
        ranks: The other ranks, if the target is sharded over several, or None if it is whole.
        max_model_len: Longest request, in tokens.
        drafter_choice: The drafters that were chosen because none were named, and why, or None.
        adapters: LoRA adapters of the target, or None if requests may have none.
    """

    target: TargetRunner
    ranks: Ranks | None
    tokenizer: Any
    speculator: Speculator
    scheduler: Scheduler
    max_model_len: int
    drafter_choice: str | None
    adapters: Adapters | None

    def close_with(self, owner: object) -> None:
        """End the other ranks when `owner` is garbage collected, or the process ends."""
        if self.ranks is not None:
            weakref.finalize(owner, self.ranks.close)
        if isinstance(self.target, DistributedRunner):
            weakref.finalize(owner, self.target.close)  # runs before the finalizer above, and lets ranks end in order

    def close(self) -> None:
        """Release the target's threads, files and ranks; it cannot be used any more."""
        self.speculator.close()
        for runner in (self.target, *self.speculator.small_models.values()):
            if runner.loaded.stream is not None:
                runner.loaded.stream.close()
        if isinstance(self.target, DistributedRunner):
            self.target.close()


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
            args.model, folder, small_models=args.nnodes == 1 and args.offload is None,
            copy=usual_copy(folder, args.offload_config, args.quantization, device) if is_whole else None,
            is_whole=is_whole,
        )  # fmt: skip
        names, choice = chosen.names, str(chosen)
    check_drafters(speculative, names, args.drafter_quantization, adapts=args.adapt_drafters)
    settings = TargetConfig(
        str(folder), args.dtype, args.device, args.quantization, args.offload_config, args.engine_config,
        tuple(name for name in names if name in SELF_DRAFTERS),
        args.kv_cache_dtype, args.enforce_eager,
    )  # fmt: skip
    models = find_drafters(names, folder) if finds_drafters else {}
    small = {name: path for name, path in models.items() if not reads_target(name, path)}  # heads stay with the engine
    chooses = speculative.max_asked is not None or speculative.verification == AUTO  # drafters, or the rule, by request
    placement = place_drafters(
        small, parallel, args.drafter_quantization, keeps_prefixes=args.enable_prefix_caching,
        must_be_here=args.adapt_drafters or chooses or args.tokenizer is not None,
    )  # fmt: skip
    return ModelPlan(settings, parallel, {name: models.get(name) for name in names}, placement, choice)


def assemble(args: EngineArgs, progress: ProgressCallback | None) -> Assembly:
    """Load all models, and give each a cache of as many slots as fit into the remaining memory.

    Raises:
        ModelError: A model cannot be used; the message says what to change.
        RanksError: Another rank could not load its part.
        ValueError: A setting cannot be used; the message names it.
    """
    if args.node_rank:
        raise ValueError("node_rank: the engine is on node 0; run specinfer.setup.follower.follow on the others")
    plan = plan_models(args)
    settings, parallel, drafters, placement = plan.settings, plan.parallel, plan.drafters, plan.placement
    folder, limits, place = Path(settings.folder), settings.limits, find_device(settings.device)
    if parallel.world_size == 1:
        settings = _with_budget(settings, list(drafters))
    else:
        check_sizes(load_config(folder), parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    with ExitStack() as undo:
        # None if the target is whole; else this process loads rank 0's part.
        ranks = None if parallel.world_size == 1 else start_ranks(parallel, settings, placement)
        if ranks is None:
            dtype, rounded = DTYPES[settings.dtype], settings.quantization
            kv_dtype = KV_CACHE_DTYPES[settings.kv_cache_dtype]
            target = load_model(
                folder, dtype, place, rounded, offload=settings.offload, progress=progress, kv_dtype=kv_dtype
            )
        else:
            undo.callback(ranks.close)
            target = load_first_shard(ranks, settings, progress)
        if target.stream is not None:
            undo.callback(target.stream.close)
        tokenizer = load_tokenizer(folder) if args.tokenizer is None else find_tokenizer(args.tokenizer, target)
        remote = {} if ranks is None else _remote_models(ranks, placement)
        small = {
            name: load_small(name, path, target, tokenizer, args.drafter_quantization, settings.offload)
            for name, path in drafters.items()
            if path is not None and name not in remote
        }
        loaded = {name: one.loaded for name, one in small.items()}
        target = replace(target, taps=taps_of(target, list(loaded.values())))
        graphs = make_graphs(place, enforce_eager=args.enforce_eager)
        captured = [] if graphs is None else [target, *loaded.values()]
        max_model_len, num_slots, kept, capacity = _plan(settings, target, loaded, ranks, captured)
        make_runner = partial(
            ModelRunner,
            num_slots=num_slots, keeps_prefixes=args.enable_prefix_caching, graphs=graphs,
            max_requests=limits.max_num_seqs, num_states=kept,
        )  # fmt: skip
        runner: TargetRunner = (
            make_runner(target, capacity=capacity)
            if ranks is None
            else DistributedRunner(
                target,
                num_slots,
                ranks,
                keeps_prefixes=args.enable_prefix_caching,
                capacity=capacity,
                num_states=kept,
                copies={name: loaded[name] for name in settings.copies},
                # Its own: the rank's thread runs passes while this one drafts.
                graphs=make_graphs(place, enforce_eager=args.enforce_eager),
                max_requests=limits.max_num_seqs,
                progress=progress,
            )
        )
        here = {name: _drafter_runner(name, one.loaded, runner, args, make_runner) for name, one in small.items()}
        kinds = {name: here.get(name) or remote.get(name) or name for name in drafters}
        # First, because captured passes go on storing what they stored when they were captured.
        _settle_heads([one for one in here.values() if isinstance(one, HeadRunner)], runner, tokenizer)
        for each in (runner, *here.values()):
            if isinstance(each, ModelRunner):
                each.prepare(progress)
        vocabularies = {name: one.vocabulary for name, one in small.items()}
        speculator = Speculator(runner, kinds, vocabularies, args.step_log, progress)
        max_guesses = None if capacity is None else capacity.num_guesses
        scheduler = Scheduler(
            runner.cache, limits.max_num_seqs, limits.max_num_batched_tokens, max_guesses, args.max_loras
        )
        lora = args.lora_config
        others = runner.adapters if isinstance(runner, DistributedRunner) else None
        adapters = None if lora is None else Adapters(target, lora, str(args.model), others)
        if adapters is not None and isinstance(runner, ModelRunner):
            copies = [one for one in here.values() if isinstance(one, SelfRunner) and one.takes_adapters]
            for padded in (each.padded for each in (runner, *copies)):
                if padded is not None:
                    padded.adapter_slots = adapters.slots
        undo.pop_all()
    logger.info(
        "%s: %.1f M parameters in %s on %s, %.1f MiB, KV cache of %d tokens, drafters: %s",
        folder, target.num_parameters / 1e6, target.weights_type, place,
        target.num_bytes / 2**20, num_slots,
        ", ".join(drafters) or "none",
    )  # fmt: skip
    choice = plan.drafter_choice
    return Assembly(runner, ranks, tokenizer, speculator, scheduler, max_model_len, choice, adapters)


def _drafter_runner(
    name: str,
    loaded: LoadedModel,
    target: TargetRunner,
    args: EngineArgs,
    make_runner: Callable[[LoadedModel], ModelRunner],
) -> ModelRunner:
    """Return the runner of a drafter that is a model: a head, a copy of the target, or, by `make_runner`, any other."""
    if isinstance(loaded.model, AssistantHead):
        return AssistantRunner(loaded, target)
    if isinstance(loaded.model, FeatureHead):
        return HeadRunner(loaded, target, target.cache.num_slots, keeps_prefixes=args.enable_prefix_caching)
    if name in SELF_DRAFTERS:
        if isinstance(target, DistributedRunner):
            return SplitSelfRunner(loaded, target, name)
        assert isinstance(target, ModelRunner)
        alike = type(loaded.model) is type(target.loaded.model)  # then they compute the same linear layers together
        takes_adapters, is_sparse = args.enable_lora and alike, SELF_DRAFTERS[name].is_sparse
        return SelfRunner(loaded, target, takes_adapters=takes_adapters, is_sparse=is_sparse)
    return make_runner(loaded)


def _settle_heads(heads: Sequence[HeadRunner], target: TargetRunner, tokenizer: Any) -> None:
    """Choose how the configuration of each head is read, and let the target store only what they read."""
    for head in heads:
        choose_dialect(head, tokenizer)
    if heads:
        target.keep_taps({layer for one in heads for layer in one.head.reads})


def _remote_models(ranks: Ranks, placement: DrafterPlacement) -> dict[str, RemoteModel]:
    links = {one.rank: RankLink(ranks, one.rank) for one in placement.placed}
    return {one.name: RemoteModel(links[one.rank], i) for i, one in enumerate(placement.placed)}


def _with_budget(settings: TargetConfig, drafters: Sequence[str]) -> TargetConfig:
    """Return the settings with the memory budget of a streamed target; check that everything fits into it."""
    offload, limits, place = settings.offload, settings.limits, find_device(settings.device)
    if offload.offload is None:
        return settings
    if offload.memory_budget is None:
        offload = replace(offload, memory_budget=usual_budget(place))
    sizes = limits.max_num_batched_tokens, limits.max_num_seqs, limits.kv_cache_memory_bytes
    check_budget(Budget(offload.budget_bytes, place), Path(settings.folder), drafters, *sizes)
    return replace(settings, offload=offload)


def _plan(
    settings: TargetConfig,
    target: LoadedModel,
    drafters: Mapping[str, LoadedModel],
    ranks: Ranks | None,
    captured: Sequence[LoadedModel],
) -> tuple[int, int, int, PassCapacity | None]:
    """Return the longest request in tokens, the slots and states of each cache, and which layers stay in memory.

    The limits leave room for all that was loaded and for what a pass needs, those of the models `captured` too.
    """
    limits, offload = settings.limits, settings.offload
    models, copies = (target, *drafters.values()), [drafters[name] for name in settings.copies]
    budget = None if target.stream is None else Budget(offload.budget_bytes, target.device)
    max_bytes = None if budget is None else budget.cache_bytes
    sharing = 1 if ranks is None else num_sharing(target.device, ranks.place)
    reserved = sum(captured_bytes(one, limits.max_num_seqs) for one in captured)
    max_model_len, num_slots = plan_capacity(
        limits,
        target,
        models[1:],
        max_bytes,
        num_sharing=sharing,
        max_slots=None if ranks is None else min_remote_slots(ranks, [target, *copies]),
        reserved=reserved,
    )
    memory = cache_bytes(limits, target.device, max_bytes, sharing, reserved)
    kept = num_states(limits, models, memory)
    if budget is None:
        return max_model_len, num_slots, kept, None
    taken = num_slots * bytes_per_token(models) + kept * bytes_per_state(models)
    return max_model_len, num_slots, kept, settle_shard(target, budget, taken, limits)
