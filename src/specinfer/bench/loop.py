"""The loop of every comparison: load, warm up, let all arms take turns, and check that their outputs are equal.

The arms run each batch of prompts one after the other, on the same loaded weights and in a rotating order, repeat by
repeat, so that a machine that slows down slows all of them.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from specinfer.bench.ceilings import measure_ceilings
from specinfer.bench.comparisons import Compared, Comparison
from specinfer.bench.models import Models, dtype_of, find_models
from specinfer.bench.options import PLAIN, REPLAY, CompareConfig, load_options_of, rotated
from specinfer.bench.prompts import Asked, PromptSet, find_prompts, kinds_for
from specinfer.bench.results import Arm, Run
from specinfer.bench.stages import Roofline
from specinfer.core.config import OffloadConfig
from specinfer.core.lookups import PREDICTION
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TreeBudget
from specinfer.core.tree_shape import MAX_TREE_NODES, parse_tree
from specinfer.engine.device.executor import DeviceExecutor
from specinfer.llm import LLM
from specinfer.model.device import find_device
from specinfer.model.load import LoadedModel
from specinfer.policy.base import FixedPolicy, SpeculationPolicy, budget_of, usual_budgets
from specinfer.policy.rank_choice import TreeSizes
from specinfer.reporting.environment import Environment
from specinfer.reporting.progress_bar import StageBar
from specinfer.reporting.spread import first_difference

SLOTS_OF_DRAFTS = 64  # slots that the cache adds for each sequence
_MAX_READ = 8192  # prompt tokens in one pass; the prompts of most batches fit, so that their requests start together
# Changes models before they are loaded: the folders, the dtype, and the device that computes; the new ones.
Prepare = Callable[[Models, str, torch.device, Callable[[str], None]], tuple[Models, str]]
ReadPrompts = Callable[[Path], PromptSet]  # for the model in a folder
Key = tuple[int, str]  # batch size, arm


class Turn(NamedTuple):
    """One batch, which all arms run one after the other in this order."""

    repeat: int  # negative for warm-up
    prompts: tuple[int, ...]
    arms: tuple[str, ...]


def batches(num_prompts: int, size: int, num_available: int) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of the prompts of each batch. There are at least `size` prompts, so none has one twice."""
    for batch in range(math.ceil(num_prompts / size)):
        yield tuple((batch * size + i) % num_available for i in range(size))


def schedule(config: CompareConfig, num_available: int, names: Sequence[str] | None = None) -> Iterator[Turn]:
    """Yield all batches of all sizes, repeat by repeat, so that a slower machine affects all sizes alike.

    Args:
        num_available: Number of prompts that there are.
        names: All arms, if there are more than those of the options.
    """
    arms = (PLAIN, *config.arms) if names is None else tuple(names)
    count = config.num_prompts if config.prompts is None else num_available
    for repeat in range(-config.warmup, config.repeats):
        for size in config.sizes:
            for number, prompts in enumerate(batches(count, size, num_available)):
                if repeat >= 0:
                    # Adding the repeat changes the order from repeat to repeat for any number of batches.
                    yield Turn(repeat, prompts, rotated(arms, number + repeat))
                elif number == 0:
                    yield Turn(repeat, prompts, arms)


@dataclass(frozen=True, slots=True)
class Session:
    """Models, prompts and policies that are loaded for one comparison.

    Attributes:
        params: Sampling parameters of each prompt.
        replayed: The same with plain decoding's tokens as the prediction; none if no arm replays them.
        policies: Policy of each arm at each batch size, used for the whole measurement so that it keeps learning.
    """

    config: CompareConfig
    llm: LLM
    models: Models
    prompts: PromptSet
    params: list[SamplingParams]
    replayed: list[SamplingParams]
    policies: dict[Key, SpeculationPolicy]
    roofline: Roofline
    progress: StageBar

    def batch(self, turn: Turn) -> list[Asked]:
        """Return a turn's prompts."""
        requests = self.prompts.requests
        return [
            Asked(self.prompts.token_ids[i], self.params[i], requests[i] if requests else None) for i in turn.prompts
        ]

    def of_arm(self, name: str) -> "Session":
        """Return the session with the sampling parameters of an arm."""
        return replace(self, params=self.replayed) if name.startswith(f"{REPLAY}:") else self

    def turns(self, names: Sequence[str]) -> list[Turn]:
        return list(schedule(self.config, len(self.prompts.token_ids), names))

    def compare(
        self, measure: Callable[[Turn, str], Run | None], names: Sequence[str] = (), others: Sequence[str] = ()
    ) -> Compared:
        """Let all arms take turns, and compare ours with plain decoding.

        Args:
            measure: Run one turn with one arm; None if the arm is given up.
            names: Our arms in addition to those of the options.
            others: Arms of other engines, which are not compared.

        Raises:
            RuntimeError: An arm changed a greedy output of a float32 target without quantization.
        """
        ours = (PLAIN, *self.config.arms, *names)
        exact = is_exact(self.llm.target.loaded, max(params.temperature for params in self.params))

        def check(turn: Turn, made: Mapping[str, Run]) -> None:
            if exact:
                check_equal(turn, {name: run for name, run in made.items() if name in ours})

        runs = take_turns(self.turns((*ours, *others)), self.progress, measure, check)
        results = []
        for size in self.config.sizes:
            plain, *trees = (Arm(name, tuple(runs[size, name])) for name in ours)
            results.append(Comparison(plain, tuple(trees)))
        environment = Environment.from_llm(self.llm, self.models.drafter_parameters)
        speedups = {
            name: policy.speedup
            for (size, name), policy in self.policies.items()
            if size == 1 and policy.speedup is not None
        }
        return Compared(tuple(results), self.config, environment, self.roofline.ceilings, self.prompts.kinds, speedups)


@contextmanager
def open_session(
    config: CompareConfig, progress: StageBar, prepare: Prepare | None = None, read: ReadPrompts | None = None
) -> Iterator[Session]:
    """Load the models of a comparison, and measure what its arms need.

    Args:
        prepare: Function that changes the models before they are loaded, such as one that grows them.
        read: Function that reads the prompts, in place of texts and chat prompts.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used. The message names it, and nothing was measured.
    """
    device = find_device(config.device)  # preparing is slow, so a missing device is reported before
    offload = OffloadConfig(config.offload, config.memory_budget, config.offload_folder)
    models = find_models(config.model, config.drafters, offload, config.quantization, config.device)
    if config.enable_prefix_caching and "suffix" in models.drafters:
        raise ValueError(
            "enable_prefix_caching: all runs then share what they generate, and suffix would find another's output; "
            "name other drafters"
        )
    prompts = usual_prompts(models.target, config) if read is None else read(models.target)
    dtype: str = config.dtype
    if prepare is not None:
        models, dtype = prepare(models, dtype, device, progress.stage)
    progress.stage("loading")
    ceilings = measure_ceilings(device, dtype_of(models.target, dtype))  # while there is free memory
    with load(config, models, dtype, prompts) as llm:
        progress.stage("timing passes")
        policies = make_policies(config, llm)
        params = prompts.params(llm, config)
        replayed = prompts.replayed(llm, params) if config.replays else []
        yield Session(config, llm, models, prompts, params, replayed, policies, Roofline(llm, ceilings), progress)


def usual_prompts(folder: Path, config: CompareConfig) -> PromptSet:
    """Return the prompts of a comparison for the model in `folder`, as `find_prompts` does."""
    return find_prompts(
        folder,
        config.max_tokens,
        kinds_for(folder, config.kinds, config.prompts),
        count=max(config.num_prompts, config.largest),
        num_chars=config.prompt_chars,
        prompts=config.prompts,
    )


def load(config: CompareConfig, models: Models, dtype: str, prompts: PromptSet) -> LLM:
    """Load the models with a cache that holds the largest batch with the largest tree of each request."""
    lengths, largest = sorted(map(len, prompts.token_ids), reverse=True), config.largest * prompts.most_outputs
    longest = lengths[0] + config.max_tokens
    shapes = [parse_tree(tree) for tree in config.trees]
    nodes = [budget_of(shape, len(models.drafters)).max_nodes for shape in shapes if not shape.is_auto]
    nodes += config.replays
    most = TreeSizes.SIZES[-1] if largest > 1 else MAX_TREE_NODES  # of "auto": a request by itself may have any
    num_slots = largest * (longest + max([*nodes, most]))
    llm = LLM(
        models.target,
        drafters=models.drafters,
        tree="1",  # only until each arm sets its own policy
        **load_options_of(config, dtype),
        select=config.select,
        verification=config.verification,
        speculation_policy=config.speculation_policy,
        batch_invariant=config.batch_invariant,
        device=config.device,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        offload=config.offload,
        memory_budget=config.memory_budget,
        offload_folder=config.offload_folder,
        max_model_len=longest,
        max_num_seqs=math.ceil(num_slots / (longest + SLOTS_OF_DRAFTS)) + largest,
        max_num_batched_tokens=min(sum(lengths[: config.largest]), _MAX_READ) if config.largest > 1 else None,
        enable_prefix_caching=config.enable_prefix_caching,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        seed=config.seed,
    )
    if llm.target.cache.num_slots < num_slots:
        raise ValueError(
            f"batch_sizes: {largest} requests of {longest} tokens and their trees need {num_slots} slots of the "
            f"KV cache, and memory allows {llm.target.cache.num_slots}; lower batch_sizes, max_tokens or prompt_chars, "
            "or raise kv_cache_memory_bytes"
        )
    for executor in llm.engine.executors:
        if isinstance(executor, DeviceExecutor):  # as at the start of an engine with these trees
            usual = [budget for shape in shapes for budget in usual_budgets(shape)]
            executor.prepare([*usual, *map(_replay_budget, config.replays)])
    return llm


def make_policies(config: CompareConfig, llm: LLM) -> dict[Key, SpeculationPolicy]:
    """Return the policy of each arm at each batch size. Policies that learn do so separately for each size."""
    named = {
        # Costs are measured for this run, since its results must not depend on an old file.
        name: FixedPolicy() if name == PLAIN else llm.make_policy(parse_tree(name), fresh=True)
        for name in (PLAIN, *config.trees)
    } | {f"{REPLAY}:{count}": FixedPolicy(_replay_budget(count)) for count in config.replays}
    return {(size, name): copied(policy, llm) for name, policy in named.items() for size in config.sizes}


def _replay_budget(count: int) -> TreeBudget:
    return TreeBudget(count, count, drafters=frozenset({PREDICTION}))


def copied(policy: SpeculationPolicy, llm: LLM) -> SpeculationPolicy:
    """Return a copy of a policy that learns by itself, and shares the drafters."""
    assert llm.drafter is not None
    return copy.deepcopy(policy, {id(drafter): drafter for drafter in llm.drafter.drafters})


def take_turns(
    turns: Sequence[Turn],
    progress: StageBar,
    measure: Callable[[Turn, str], Run | None],
    check: Callable[[Turn, Mapping[str, Run]], None] = lambda turn, made: None,
) -> dict[Key, list[Run]]:
    """Run all turns, and return the runs of each arm at each batch size. Warm-up runs are not kept.

    Args:
        measure: Run one turn with one arm; None if the arm is given up, and its runs are not of use.
        check: Compare the runs of all arms of a turn.
    """
    progress.stage("warming up", sum(len(turn.arms) for turn in turns))
    runs: dict[Key, list[Run]] = {}
    for turn in turns:
        if turn.repeat >= 0:
            progress.stage(_described(turn))
        made = {}
        for name in turn.arms:
            if (run := measure(turn, name)) is not None:
                made[name] = run
            progress.advance()
        check(turn, made)
        for name, run in made.items() if turn.repeat >= 0 else ():
            runs.setdefault((len(turn.prompts), name), []).append(run)
    return runs


def is_exact(loaded: LoadedModel, temperature: float = 0.0) -> bool:
    """Return whether all arms must generate the same tokens.

    In lower precision, passes of different sizes round differently, and outputs that differ are counted instead.
    """
    is_full = loaded.dtype == torch.float32 and loaded.kv_dtype is None and not loaded.is_quantized
    return temperature == 0 and is_full


def check_equal(turn: Turn, made: Mapping[str, Run]) -> None:
    """Check that the outputs of all arms of a turn equal plain decoding's.

    Raises:
        RuntimeError: An output differs. The message names its prompt and its arm.
    """
    plain, size = made[PLAIN], len(turn.prompts)
    prompts = [number for number in plain.prompts for _ in range(len(plain.outputs) // size)]
    together = f"{size} requests together, " if size > 1 else ""
    for name, run in made.items():
        for number, tokens, expected in zip(prompts, run.outputs, plain.outputs, strict=True):
            if tokens != expected:
                place = first_difference(tokens, expected)
                raise RuntimeError(
                    f"{together}prompt {number}: with tree {name}, output token {place} is another than without"
                )


def _described(turn: Turn) -> str:
    return f"prompt {turn.prompts[0] + 1}" if len(turn.prompts) == 1 else f"{len(turn.prompts)} requests together"
