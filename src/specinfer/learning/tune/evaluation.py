"""Evaluation of tuned drafters on held-out data: predicted tokens, and target passes with merged chains.

Hit rates are computed from the predictions. Passes are counted with the engine itself on the held-out prompts, and all
arms generate the same tokens. Nothing here is timed, so machine and load do not matter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specinfer.core.config import SpeculativeConfig
from specinfer.core.noise import derive_seed
from specinfer.core.sampling import SamplingParams
from specinfer.learning.examples import Source, TrainingExample
from specinfer.learning.tune.boosting import Predictions
from specinfer.llm import LLM

RANKS = 5
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


def plan_arms(kind: str, drafters: Sequence[str], depth: int, num_nodes: int) -> list[Arm]:
    """Return merged chains of the first 1, 2, ... drafters of a set.

    They are of equal depth, and of about equal nodes (before merging).
    """
    arms = []
    for count in range(1, len(drafters) + 1):
        names = tuple(drafters[:count])
        best = f"best-first:{num_nodes}:{num_nodes}"
        trees = dict.fromkeys([_chain(depth), _chain(max(num_nodes // count, 1)), best])
        arms += [Arm(kind, names, tree) for tree in trees]
    return arms


def _chain(depth: int) -> str:
    return ",".join(["1"] * depth)


def count_passes(
    llm: LLM,
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    folders: dict[str, Path],
    *,
    max_tokens: int,
    seed: int,
    note: Callable[[int], None],
) -> list[Passes]:
    """Count the target passes of each arm and mode: greedy, and sampled at temperature 1.

    Args:
        folders: The folders of the drafters, by the names in the arms; all are loaded with `llm`.
    """
    found = []
    for number, arm in enumerate(arms):
        names = tuple(str(folders[name]) for name in arm.drafters)
        for mode, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            llm.speculate(SpeculativeConfig(names, arm.tree))
            params = [
                SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=derive_seed(seed, i))
                for i in range(len(prompts))
            ]
            outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
            counted = [output.metrics.speculative_decoding for output in outputs]
            passes, drafted, steps = (
                sum(float(str(one[name])) for one in counted)
                for name in ("num_target_passes", "num_draft_tokens", "num_spec_steps")
            )
            num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
            found.append(Passes(arm, mode, num_output / max(passes, 1.0), drafted / max(steps, 1.0)))
        note(number + 1)
    return found
