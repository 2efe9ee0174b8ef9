"""Evaluation of tuned drafters on held-out data: predicted tokens, and target passes with merged chains.

Hit rates are computed from the predictions. Passes are counted with the engine itself on the held-out prompts, and all
arms generate the same tokens. Nothing here is timed, so machine and load do not matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specinfer.core.config import SpeculativeConfig
from specinfer.core.noise import derive_seed
from specinfer.core.outputs import RequestOutput
from specinfer.core.sampling import SamplingParams
from specinfer.learning.examples import Source, TrainingExample
from specinfer.learning.tune.boosting import Predictions
from specinfer.learning.tune.options import TuneConfig
from specinfer.learning.tune.result import Result, StageCallback
from specinfer.llm import LLM
from specinfer.reporting.environment import Environment

RANKS = 5
EQUAL_NODES = 16  # nodes in the paper's comparison of 1 to 5 drafters
NUM_PROMPTS = 32  # held-out prompts that passes are counted on
_COUNTING = "counting passes"
MODES = {"greedy": Source.GREEDY, "sampled": Source.SAMPLED}


@dataclass(frozen=True, slots=True)
class HitRates:
    """The rate at which a drafter's best k tokens contain the target's token.

    Attributes:
        hit_rates: [RANKS] for k = 1, 2, ...
    """

    drafter: str
    mode: str
    hit_rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """The tokens that a drafter of a set predicts in addition to those before it.

    Attributes:
        alone: The share of the tokens that it predicts.
        added: The share that it predicts and none before it does.
        overlap: The share of its predicted tokens that one before it predicts too.
    """

    drafter: str
    mode: str
    alone: float
    added: float
    overlap: float


@dataclass(frozen=True, slots=True)
class Arm:
    """One drafting setup to measure: the drafters of one set, and the tree that they grow together."""

    kind: str  # "start", "boosted" or "independent"
    drafters: tuple[str, ...]
    tree: str


@dataclass(frozen=True, slots=True)
class Passes:
    """The results of an arm, over all held-out prompts of one mode.

    Attributes:
        nodes: The mean number of drafted nodes in a pass, after merging.
    """

    arm: Arm
    mode: str
    tokens_per_pass: float
    nodes: float


def hit_rates(name: str, predictions: Sequence[Predictions], examples: Sequence[TrainingExample]) -> list[HitRates]:
    """Return a drafter's hit rates by mode."""
    all_rates = []
    for mode, source in MODES.items():
        chosen = [i for i, example in enumerate(examples) if example.source is source]
        if chosen:
            ranks = np.concatenate([predictions[i].ranks for i in chosen])
            rates = tuple(float((ranks < k).mean()) for k in range(1, RANKS + 1))
            all_rates.append(HitRates(name, mode, rates))
    return all_rates


def coverage(
    names: Sequence[str], predictions: Sequence[Sequence[Predictions]], examples: Sequence[TrainingExample]
) -> list[Coverage]:
    """Return what each drafter of a set adds to those before it, by its best tokens."""
    parts = []
    for mode, source in MODES.items():
        chosen = [i for i, example in enumerate(examples) if example.source is source]
        covered = np.zeros(sum(examples[i].num_output for i in chosen), dtype=bool)
        for name, of_drafter in zip(names, predictions, strict=True) if chosen else ():
            hits = np.concatenate([of_drafter[i].hits for i in chosen])
            overlap = float((hits & covered).sum() / max(hits.sum(), 1))
            parts.append(Coverage(name, mode, float(hits.mean()), float((hits & ~covered).mean()), overlap))
            covered |= hits
    return parts


def plan_arms(kind: str, drafters: Sequence[str], depth: int) -> list[Arm]:
    """Return merged chains of the first 1, 2, ... drafters of a set.

    They are of equal depth, and of about equal nodes (before merging).
    """
    arms = []
    for count in range(1, len(drafters) + 1):
        best = f"best-first:{EQUAL_NODES}:{EQUAL_NODES}"
        trees = dict.fromkeys([_chain(depth), _chain(max(EQUAL_NODES // count, 1)), best])
        arms += [Arm(kind, tuple(drafters[:count]), tree) for tree in trees]
    return arms


def _chain(depth: int) -> str:
    return ",".join(["1"] * depth)


def count_passes(
    config: TuneConfig, result: Result, arms: Sequence[Arm], report: StageCallback
) -> tuple[list[Passes], Environment]:
    """Count the target passes of each arm and mode, greedy and at temperature 1; return also where they ran.

    A start that is made from nothing has no folder and would predict little, so its arms are skipped.
    """
    folders = {drafter.name: str(drafter.folder) for drafter in result.all_drafters if drafter.folder is not None}
    usable = [arm for arm in arms if set(arm.drafters) <= folders.keys()]
    report(_COUNTING, 0, len(usable))
    llm = LLM(
        result.target,
        drafters=list(dict.fromkeys(folders[name] for arm in usable for name in arm.drafters)),
        dtype=config.dtype,
        device=config.device,
        tree="best-first:1",
        max_num_seqs=NUM_PROMPTS,
        enable_prefix_caching=False,
    )
    examples = result.held_out[:NUM_PROMPTS]
    prompts = [{"prompt_token_ids": example.tokens[: example.num_prompt].tolist()} for example in examples]
    passes = []
    for number, arm in enumerate(usable, start=1):
        llm.speculate(SpeculativeConfig(tuple(folders[name] for name in arm.drafters), arm.tree))
        for mode, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            seeds = [derive_seed(config.seed + 1, i) for i in range(len(prompts))]
            params = [
                SamplingParams(temperature=temperature, max_tokens=config.max_tokens, seed=seed) for seed in seeds
            ]
            passes.append(_passes(arm, mode, llm.generate(prompts, params, use_tqdm=False)))
        report(_COUNTING, number, len(usable))
    return passes, Environment.from_llm(llm, {drafter.name: drafter.parameters for drafter in result.all_drafters})


def _passes(arm: Arm, mode: str, outputs: Sequence[RequestOutput]) -> Passes:
    counted = [output.metrics.speculative_decoding for output in outputs]
    num_passes, num_drafted, num_steps = (
        sum(float(str(counts[name])) for counts in counted if counts is not None)
        for name in ("num_target_passes", "num_draft_tokens", "num_spec_steps")
    )
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    return Passes(arm, mode, num_output / max(num_passes, 1.0), num_drafted / max(num_steps, 1.0))
