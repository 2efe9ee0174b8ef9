"""Assembly of an LLM: the target, whole or in part, its drafters, and caches that fit into the remaining memory."""

import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from specinfer.core.lookups import SELF_DRAFTERS
from specinfer.core.progress import ProgressCallback, begin
from specinfer.drafters.assistant_drafter import AssistantRunner
from specinfer.drafters.dialect_choice import choose_dialect
from specinfer.drafters.feature_drafter import HeadRunner
from specinfer.drafters.loading import load_draft_model
from specinfer.drafters.remote.drafter import RankLink, RemoteModel
from specinfer.drafters.remote.placement import DrafterPlacement
from specinfer.drafters.remote.process import start_ranks
from specinfer.drafters.self_drafter import SelfRunner, SplitSelfRunner
from specinfer.engine.scheduler import Scheduler
from specinfer.engine_args import EngineArgs
from specinfer.model.adapters.registry import Adapters
from specinfer.model.capacity import bytes_per_state, bytes_per_token, cache_bytes, num_states, plan_capacity
from specinfer.model.definition import load_tokenizer
from specinfer.model.device import DTYPES, find_device, find_kv_dtype
from specinfer.model.graphs.capture import Graphs, make_graphs
from specinfer.model.graphs.check import captured_bytes
from specinfer.model.heads.assistant import AssistantHead
from specinfer.model.heads.head import FeatureHead
from specinfer.model.heads.load import taps_of
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.offload.budget import Budget, PassCapacity
from specinfer.model.prefix_folder import PrefixFolder
from specinfer.model.runner import ModelRunner, TargetRunner
from specinfer.model.sharding.runner import DistributedRunner, load_first_shard, min_remote_slots
from specinfer.model.target import TargetConfig, num_sharing, settle_shard, with_rank_budget
from specinfer.parallel.ranks import Ranks
from specinfer.setup.acceptance_profile import ProfileSource
from specinfer.setup.corpus import open_corpus
from specinfer.setup.drafter_setup import Speculator
from specinfer.setup.model_names import find_tokenizer
from specinfer.setup.model_plan import ModelPlan, plan_models
from specinfer.setup.prefixes import keep_prefixes, open_prefixes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Assembly:
    """Loaded models, each with its cache, and the scheduler that decides which requests run on them.

    Attributes:
        ranks: The other ranks, if the target is sharded over several, or None if it is whole.
        max_model_len: Longest request, in tokens.
        drafter_choice: The drafters that were chosen because none were named, and why, or None.
        adapters: LoRA adapters of the target, or None if requests may have none.
        prefixes: Folder of cached prefixes that outlast the process, or None.
    """

    target: TargetRunner
    ranks: Ranks | None
    tokenizer: Any
    speculator: Speculator
    scheduler: Scheduler
    max_model_len: int
    drafter_choice: str | None
    adapters: Adapters | None
    prefixes: PrefixFolder | None

    def close_with(self, owner: object) -> None:
        """End the other ranks when `owner` is garbage collected, or the process ends."""
        if self.prefixes is not None:
            weakref.finalize(owner, self.prefixes.close)
        if self.ranks is not None:
            weakref.finalize(owner, self.ranks.close)
        if isinstance(self.target, DistributedRunner):
            weakref.finalize(owner, self.target.close)  # runs before the finalizer above, and lets ranks end in order

    def keep_prefixes(self, max_model_len: int | None) -> None:
        """Let cached prefixes of the models outlast the process from now on, if they have a folder.

        Heads read a prompt again, from the target's hidden states that are kept; copies of the target share its cache.

        Args:
            max_model_len: As the setting.
        """
        if self.prefixes is None:
            return
        for runner in (self.target, *self.speculator.small_models.values()):
            if type(runner) is ModelRunner:
                keep_prefixes(self.prefixes, runner, max_model_len)

    def close(self) -> None:
        """Release the target's threads, files and ranks; it cannot be used any more."""
        self.speculator.close()
        if self.prefixes is not None:
            self.prefixes.close()
        for runner in (self.target, *self.speculator.small_models.values()):
            if runner.loaded.stream is not None:
                runner.loaded.stream.close()
        if isinstance(self.target, DistributedRunner):
            self.target.close()


class _Sizes(NamedTuple):
    """Sizes of the caches that fit into the remaining memory.

    Attributes:
        max_model_len: Longest request, in tokens.
        capacity: Memory limit of a pass, or None if only the slots limit it.
    """

    max_model_len: int
    num_slots: int
    num_states: int
    capacity: PassCapacity | None


def assemble(args: EngineArgs, progress: ProgressCallback | None) -> Assembly:
    """Load all models, and give each a cache of as many slots as fit into the remaining memory.

    Raises:
        ModelError: A model cannot be used; the message says what to change.
        RanksError: Another rank could not load its part.
        ValueError: A setting cannot be used; the message names it.
    """
    if args.node_rank:
        raise ValueError("node_rank: the engine is on node 0; run specinfer.setup.follower.follow on the others")
    prefixes = open_prefixes(args)
    plan = plan_models(args)
    drafters, limits = plan.drafters, plan.settings.limits
    with ExitStack() as undo:
        begin(progress, "reading the target")
        ranks, settings, target = _load_target(plan, progress, undo)
        tokenizer = load_tokenizer(target.folder) if args.tokenizer is None else find_tokenizer(args.tokenizer, target)
        corpus = open_corpus(args.suffix_corpus, tokenizer, target.vocab_size)
        remote = {} if ranks is None else _remote_models(ranks, plan.placement)
        begin(progress, "reading the drafters")
        small = {
            name: load_draft_model(
                name, path, target, tokenizer, args.drafter_quantization, settings.offload, args.drafter_token_map
            )
            for name, path in drafters.items()
            if path is not None and name not in remote
        }
        loaded = {name: drafter.loaded for name, drafter in small.items()}
        target = replace(target, taps=taps_of(target, list(loaded.values())))
        graphs = make_graphs(target.device, enforce_eager=args.enforce_eager)
        captured = [] if graphs is None else [target, *loaded.values()]
        sizes = _plan(settings, target, loaded, ranks, captured)
        runner, here = _make_runners(args, sizes, target, loaded, ranks, graphs, progress)
        # First, because captured passes go on storing what they stored when they were captured.
        _settle_heads([each for each in here.values() if isinstance(each, HeadRunner)], runner, tokenizer)
        for each in (runner, *here.values()):
            if isinstance(each, ModelRunner):
                each.prepare(progress)
        kinds = {name: here.get(name) or remote.get(name) or name for name in drafters}
        vocabularies = {name: drafter.vocabulary for name, drafter in small.items()}
        max_guesses = None if runner.capacity is None else runner.capacity.num_guesses
        scheduler = Scheduler(
            runner.cache, limits.max_num_seqs, limits.max_num_batched_tokens, max_guesses, args.max_loras
        )
        profiles = ProfileSource(runner, scheduler, tokenizer, progress) if ranks is None else None
        speculator = Speculator(runner, kinds, vocabularies, args.step_log, progress, profiles, corpus)
        adapters = _make_adapters(args, runner, here)
        undo.pop_all()
    logger.info(
        "%s: %.1f M parameters in %s on %s, %.1f MiB, KV cache of %d tokens, drafters: %s",
        target.folder, target.num_parameters / 1e6, target.weights_type, target.device,
        target.num_bytes / 2**20, runner.cache.num_slots,
        ", ".join(drafters) or "none",
    )  # fmt: skip
    choice = plan.drafter_choice
    return Assembly(runner, ranks, tokenizer, speculator, scheduler, sizes.max_model_len, choice, adapters, prefixes)


def _load_target(
    plan: ModelPlan, progress: ProgressCallback | None, undo: ExitStack
) -> tuple[Ranks | None, TargetConfig, LoadedModel]:
    """Return the other ranks, or None if the target is whole, its settings here, and the target or rank 0's part of it.

    Args:
        undo: What ends both is added to it.
    """
    settings = plan.settings
    if plan.parallel.world_size > 1:
        ranks = start_ranks(plan.parallel, settings, plan.placement)
        undo.callback(ranks.close)
        settings = with_rank_budget(settings, ranks.place)
        target = load_first_shard(ranks, settings, progress)
    else:
        ranks = None
        target = load_model(
            Path(settings.folder), DTYPES[settings.dtype], find_device(settings.device), settings.quantization,
            offload=settings.offload, progress=progress, kv_dtype=find_kv_dtype(settings.kv_cache_dtype),
            max_model_len=settings.limits.max_model_len, batch_invariant=settings.batch_invariant,
        )  # fmt: skip
    if target.stream is not None:
        undo.callback(target.stream.close)
    return ranks, settings, target


def _make_runners(
    args: EngineArgs,
    sizes: _Sizes,
    target: LoadedModel,
    drafters: Mapping[str, LoadedModel],
    ranks: Ranks | None,
    graphs: Graphs | None,
    progress: ProgressCallback | None,
) -> tuple[TargetRunner, dict[str, ModelRunner]]:
    """Return the runner of the target, and those of the drafters of this process by name."""
    options: dict[str, Any] = {
        "num_slots": sizes.num_slots, "num_states": sizes.num_states, "max_requests": args.max_num_seqs,
        "keeps_prefixes": args.enable_prefix_caching,
    }  # fmt: skip
    runner: TargetRunner
    if ranks is None:
        runner = ModelRunner(target, capacity=sizes.capacity, graphs=graphs, **options)
    else:
        # Graphs of its own: the rank's thread runs passes while this one drafts.
        own_graphs = make_graphs(target.device, enforce_eager=args.enforce_eager)
        runner = DistributedRunner(
            target, ranks=ranks, copies={name: loaded for name, loaded in drafters.items() if name in SELF_DRAFTERS},
            capacity=sizes.capacity, graphs=own_graphs, progress=progress, **options,
        )  # fmt: skip
    runners = {name: _drafter_runner(name, loaded, runner, args, graphs, options) for name, loaded in drafters.items()}
    return runner, runners


def _make_adapters(args: EngineArgs, runner: TargetRunner, drafters: Mapping[str, ModelRunner]) -> Adapters | None:
    """Return the adapters that requests may have, or None, and let captured passes take them."""
    if args.lora_config is None:
        return None
    others = runner.adapters if isinstance(runner, DistributedRunner) else None
    adapters = Adapters(runner.loaded, args.lora_config, str(args.model), others)
    copies = [each for each in drafters.values() if isinstance(each, SelfRunner) and each.takes_adapters]
    for padded in (each.padded for each in (runner, *copies) if isinstance(each, ModelRunner)):
        if padded is not None:
            padded.adapter_slots = adapters.slots
    return adapters


def _drafter_runner(
    name: str,
    loaded: LoadedModel,
    target: TargetRunner,
    args: EngineArgs,
    graphs: Graphs | None,
    options: Mapping[str, Any],
) -> ModelRunner:
    """Return the runner of a drafter that is a model: a head, a copy of the target, or any other."""
    if isinstance(loaded.model, AssistantHead):
        return AssistantRunner(loaded, target, graphs=graphs, max_requests=args.max_num_seqs)
    if isinstance(loaded.model, FeatureHead):
        return HeadRunner(
            loaded, target, target.cache.num_slots, keeps_prefixes=args.enable_prefix_caching, graphs=graphs,
            max_requests=args.max_num_seqs,
        )  # fmt: skip
    if name in SELF_DRAFTERS:
        if isinstance(target, DistributedRunner):
            return SplitSelfRunner(loaded, target, name)
        assert isinstance(target, ModelRunner)
        alike = type(loaded.model) is type(target.loaded.model)  # then they compute the same linear layers together
        takes_adapters, is_sparse = args.enable_lora and alike, SELF_DRAFTERS[name].is_sparse
        return SelfRunner(loaded, target, takes_adapters=takes_adapters, is_sparse=is_sparse)
    return ModelRunner(loaded, graphs=graphs, **options)


def _settle_heads(heads: Sequence[HeadRunner], target: TargetRunner, tokenizer: Any) -> None:
    """Choose how the configuration of each head is read, and let the target store only what they read."""
    for head in heads:
        choose_dialect(head, tokenizer)
    if heads:
        target.keep_taps({layer for each in heads for layer in each.head.reads})


def _remote_models(ranks: Ranks, placement: DrafterPlacement) -> dict[str, RemoteModel]:
    links = {placed.rank: RankLink(ranks, placed.rank) for placed in placement.placed}
    return {placed.name: RemoteModel(links[placed.rank], i) for i, placed in enumerate(placement.placed)}


def _plan(
    settings: TargetConfig,
    target: LoadedModel,
    drafters: Mapping[str, LoadedModel],
    ranks: Ranks | None,
    captured: Sequence[LoadedModel],
) -> _Sizes:
    """Return sizes that leave room for what was loaded and for passes, those of the models `captured` too.

    Which layers of a streamed target stay in memory is settled as well.
    """
    limits, offload = settings.limits, settings.offload
    models, copies = (target, *drafters.values()), [drafters[name] for name in settings.copies]
    budget = None if target.stream is None else Budget(offload.budget_bytes, target.device)
    max_bytes = None if budget is None else budget.cache_bytes
    sharing = 1 if ranks is None else num_sharing(target.device, ranks.place)
    reserved = sum(captured_bytes(model, limits.max_num_seqs) for model in captured)
    max_model_len, num_slots = plan_capacity(
        limits,
        target,
        models[1:],
        max_bytes,
        num_sharing=sharing,
        max_slots=None if ranks is None else min_remote_slots(ranks, [target, *copies]),
        reserved=reserved,
    )
    memory = cache_bytes(limits, target, max_bytes, sharing, reserved)
    kept = num_states(limits, models, memory)
    if budget is None:
        return _Sizes(max_model_len, num_slots, kept, None)
    taken = num_slots * bytes_per_token(models) + kept * bytes_per_state(models)
    return _Sizes(max_model_len, num_slots, kept, settle_shard(target, budget, taken, limits))
