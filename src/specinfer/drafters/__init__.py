"""Who guesses. `make_drafter` is the only place that knows the kinds of drafters."""

from collections.abc import Sequence

from specinfer.drafters.base import Drafter
from specinfer.drafters.merged import MergedDrafter
from specinfer.drafters.ngram import NGramDrafter
from specinfer.drafters.small_model import SmallModelDrafter
from specinfer.model.runner import ModelRunner

__all__ = ["Drafter", "MergedDrafter", "NGramDrafter", "SmallModelDrafter", "make_drafter"]


def make_drafter(
    kinds: Sequence[str | ModelRunner], vocab_size: int, names: Sequence[str] | None = None
) -> Drafter | None:
    """The drafter for a list of `"ngram"` and loaded small models; None for an empty list.

    Always a `MergedDrafter`, which keeps a failing drafter from failing the step.
    """
    drafters: list[Drafter] = []
    for i, kind in enumerate(kinds):
        if isinstance(kind, ModelRunner):
            drafters.append(SmallModelDrafter(kind, vocab_size, names[i] if names else "draft"))
        else:
            assert kind == "ngram"
            drafters.append(NGramDrafter())
    return MergedDrafter(drafters) if drafters else None
