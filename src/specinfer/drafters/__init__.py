"""Drafters, which propose token trees. `make_drafter` makes them from the names of lookups and loaded models."""

from collections.abc import Sequence
from typing import Any

from specinfer.core.lookups import AUTOMATIC, LOOKUPS
from specinfer.core.rules import AUTO
from specinfer.drafters.assistant_drafter import AssistantDrafter, AssistantRunner
from specinfer.drafters.base import Drafter
from specinfer.drafters.block_drafter import BlockDrafter
from specinfer.drafters.feature_drafter import FeatureDrafter, HeadRunner
from specinfer.drafters.growth.calibration import Calibration
from specinfer.drafters.growth.draft_sampling import CHOSEN
from specinfer.drafters.kind import draft_kind
from specinfer.drafters.lookup.corpus import Corpus
from specinfer.drafters.lookup.grammar import GrammarDrafter
from specinfer.drafters.lookup.ngram import NGramDrafter
from specinfer.drafters.lookup.prediction import PredictionDrafter
from specinfer.drafters.lookup.suffix import SuffixDrafter
from specinfer.drafters.merge.merged import MergedDrafter
from specinfer.drafters.merge.selection import Selection
from specinfer.drafters.remote.drafter import RemoteDrafter, RemoteModel
from specinfer.drafters.self_drafter import SelfDrafter, SelfRunner, SplitSelfRunner
from specinfer.drafters.small_model import SmallModelDrafter
from specinfer.drafters.vocabulary.token_map import Vocabulary
from specinfer.model.runner import ModelRunner

__all__ = [
    "AssistantDrafter",
    "AssistantRunner",
    "BlockDrafter",
    "Drafter",
    "FeatureDrafter",
    "GrammarDrafter",
    "HeadRunner",
    "MergedDrafter",
    "NGramDrafter",
    "PredictionDrafter",
    "RemoteDrafter",
    "SelfDrafter",
    "SelfRunner",
    "SmallModelDrafter",
    "SplitSelfRunner",
    "SuffixDrafter",
    "make_drafter",
]


def make_drafter(
    kinds: Sequence[str | ModelRunner | RemoteModel],
    vocab_size: int,
    names: Sequence[str] | None = None,
    draft_sampling: str = "shared-noise",
    vocabularies: Sequence[Vocabulary | None] | None = None,
    *,
    max_asked: int | None = None,
    costs: Sequence[float] | None = None,
    ngram_sizes: tuple[int, int] | None = None,
    windows: Sequence[int | None] | None = None,
    corpus: Corpus | None = None,
    rule_draws: bool = False,
) -> MergedDrafter | None:
    """Return the drafter for a list of names of lookups and small models, or None for an empty list.

    The small models may run on this rank or on others. The result is always a `MergedDrafter`: a failing drafter does
    not fail the step, and the predictions and grammars that requests may bring are always used.

    Args:
        vocabularies: The vocabulary of each drafter, in the order of `kinds`. None for lookups and for models on other
            ranks.
        max_asked: The largest number of small models that draft for one request in one step, chosen by how well they
            do. None for all of them. If it is set, all models are on this rank.
        costs: The cost of one pass of each drafter, in the order of `kinds`, as a fraction of a target pass. The choice
            of drafters uses it.
        windows: The window of each drafter, in the order of `kinds`, which only small models with a cache have.
        ngram_sizes: Lengths of the shortest and the longest n-gram of "ngram", or None for its own.
        corpus: Texts of the operator that "suffix" searches, or None.
        rule_draws: Whether requests of the same seed have the same random numbers, and a rule that draws with them.
    """
    if not kinds:
        return None
    calibration = Calibration()
    drafters: list[Drafter] = [PredictionDrafter(), GrammarDrafter()]
    options: dict[str, dict[str, Any]] = {  # of lookups
        NGramDrafter.name: dict(zip(("min_size", "max_size"), ngram_sizes or (), strict=False)),
        SuffixDrafter.name: {"corpus": corpus, "keeps_seeded": not rule_draws},
    }
    num_models = sum(not isinstance(kind, str) for kind in kinds)
    is_chosen = max_asked is not None and num_models > 1
    for i, kind in enumerate(kinds):
        if isinstance(kind, str):
            drafters.append(LOOKUPS[kind].make(**options.get(kind, {})))
            continue
        name = _unlike([drafter.name for drafter in drafters], names[i] if names else "draft")
        if isinstance(kind, RemoteModel):
            drafters.append(RemoteDrafter(kind, name, draft_sampling, calibration))
            continue
        vocabulary = vocabularies[i] if vocabularies else None
        drafter_class = _drafter_class(kind)
        window = windows[i] if windows and drafter_class is SmallModelDrafter else None
        drafters.append(
            drafter_class(
                kind, vocab_size, name, draft_sampling, calibration, vocabulary, is_scored=is_chosen, window=window
            )
        )
    selection = None
    if max_asked is not None and is_chosen:
        names = [drafter.name for drafter in drafters if drafter.name not in AUTOMATIC]
        models = [drafter.name for drafter in drafters if draft_kind(drafter) is not None]
        lookups = [name for name in names if name not in models]
        selection = Selection(models, lookups, max_asked, dict(zip(names, costs or (), strict=False)))
    return MergedDrafter(
        drafters,
        calibration,
        may_choose=draft_sampling in (*CHOSEN, AUTO),
        vocab_size=vocab_size,
        selection=selection,
    )


def _unlike(taken: Sequence[str], name: str) -> str:
    """Return the name, with a number appended if it is taken.

    What is learned about a drafter is stored under its name.
    """
    number, free = 1, name
    while free in (*taken, *LOOKUPS):
        number += 1
        free = f"{name}-{number}"
    return free


# The drafter of each kind of runner, the more special ones first.
_OF_RUNNERS: tuple[tuple[type[ModelRunner], type[SmallModelDrafter]], ...] = (
    (AssistantRunner, AssistantDrafter),
    (HeadRunner, FeatureDrafter),
    (SelfRunner, SelfDrafter),
    (ModelRunner, SmallModelDrafter),
)


def _drafter_class(runner: ModelRunner) -> type[SmallModelDrafter]:
    if isinstance(runner, HeadRunner) and runner.head.block is not None:
        return BlockDrafter
    return next(drafter_class for runner_class, drafter_class in _OF_RUNNERS if isinstance(runner, runner_class))
