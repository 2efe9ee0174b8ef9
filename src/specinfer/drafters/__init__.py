"""Who guesses. `make_drafter` is the only place that knows the kinds of drafters."""

from collections.abc import Callable, Sequence

from specinfer.config import LOOKUP_NAMES
from specinfer.drafters.base import Drafter
from specinfer.drafters.calibration import Calibration
from specinfer.drafters.drawing import CHOSEN
from specinfer.drafters.merged import MergedDrafter
from specinfer.drafters.ngram import NGramDrafter
from specinfer.drafters.prediction import PredictionDrafter
from specinfer.drafters.remote import RemoteDrafter, RemoteModel
from specinfer.drafters.selection import Selection
from specinfer.drafters.small_model import SmallModelDrafter
from specinfer.drafters.suffix import SuffixDrafter
from specinfer.drafters.vocabulary import Vocabulary
from specinfer.model.runner import ModelRunner

__all__ = [
    "Drafter",
    "MergedDrafter",
    "NGramDrafter",
    "PredictionDrafter",
    "RemoteDrafter",
    "SmallModelDrafter",
    "SuffixDrafter",
    "make_drafter",
]

LOOKUPS: dict[str, Callable[[], Drafter]] = dict(zip(LOOKUP_NAMES, (NGramDrafter, SuffixDrafter), strict=True))


def make_drafter(
    kinds: Sequence[str | ModelRunner | RemoteModel],
    vocab_size: int,
    names: Sequence[str] | None = None,
    drawing: str = "shared-noise",
    vocabularies: Sequence[Vocabulary | None] | None = None,
    *,
    max_asked: int | None = None,
    costs: Sequence[float] | None = None,
) -> MergedDrafter | None:
    """The drafter for a list of `"ngram"`, `"suffix"` and small models, here or on other ranks; None for an empty list.

    Always a `MergedDrafter`, which keeps a failing drafter from failing the step, and which always knows
    the predictions that requests may bring.

    Args:
        vocabularies: Of the drafters in this order; None for those that are no small models, or elsewhere.
        max_asked: Small models that are asked for one request in one step, chosen as they prove themselves; None is
            all of them. All are here, then.
        costs: Of the drafters in this order, what a pass of each costs in parts of a target pass; for the choice.
    """
    if not kinds:
        return None
    calibration = Calibration()
    drafters: list[Drafter] = [PredictionDrafter()]
    num_models = sum(not isinstance(kind, str) for kind in kinds)
    is_chosen = max_asked is not None and num_models > 1
    for i, kind in enumerate(kinds):
        if isinstance(kind, str):
            drafters.append(LOOKUPS[kind]())
            continue
        name = _unlike([drafter.name for drafter in drafters], names[i] if names else "draft")
        if isinstance(kind, RemoteModel):
            drafters.append(RemoteDrafter(kind, name, drawing, calibration))
            continue
        vocabulary = vocabularies[i] if vocabularies else None
        drafters.append(
            SmallModelDrafter(kind, vocab_size, name, drawing, calibration, vocabulary, is_scored=is_chosen)
        )
    selection, num_drafters = None, len(kinds)
    if max_asked is not None and is_chosen:
        names = [drafter.name for drafter in drafters[1:]]
        models = [drafter.name for drafter in drafters if isinstance(drafter, SmallModelDrafter)]
        lookups = [name for name in names if name not in models]
        selection = Selection(models, lookups, max_asked, dict(zip(names, costs or (), strict=False)))
        num_drafters = len(lookups) + min(max_asked, num_models)
    return MergedDrafter(
        drafters,
        calibration,
        may_choose=drawing in CHOSEN,
        num_drafters=num_drafters,
        vocab_size=vocab_size,
        selection=selection,
    )


def _unlike(taken: Sequence[str], name: str) -> str:
    """The name, or one with a number: what is learned of a drafter is kept by its name."""
    number, free = 1, name
    while free in (*taken, *LOOKUPS):
        number += 1
        free = f"{name}-{number}"
    return free
