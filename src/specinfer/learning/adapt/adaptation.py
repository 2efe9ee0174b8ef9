"""Adaptation: drafters that are models learn from the traffic while the engine is idle.

Drafted tokens never change the target's output, so adaptation does not either. But learned weights mix all traffic:
what is drafted for one caller, and so how fast an answer comes, depends on the requests of others. Hence it is off
unless requested.
"""

import time
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from specinfer.core.errors import check_float
from specinfer.drafters.base import Drafter
from specinfer.drafters.small_model import SmallModelDrafter
from specinfer.engine.engine import Engine
from specinfer.learning.adapt.online_trainer import OnlineTrainer
from specinfer.learning.adapt.settings import AdaptationConfig, AdaptationStats
from specinfer.learning.adapt.student import find_learner
from specinfer.learning.adapt.traffic import Traffic
from specinfer.learning.adapt.versions import AdaptationFolder, Versions
from specinfer.learning.heads.files import TRAINED
from specinfer.model.runner import TargetRunner

_DONE = object()


def _none() -> Generator[None]:
    yield from ()


def _taps_of(
    target: TargetRunner, layers: Sequence[int], request_id: str, start: int, end: int
) -> dict[int, Tensor] | None:
    """Return the hidden states of a request's tokens, on the host, by layer; None if they are not all in the cache."""
    if len(target.cache.slots(request_id)) < end:
        return None
    taps = target.read_taps(layers, request_id, start, end)
    return {layer: tap.to("cpu", copy=True) for layer, tap in zip(layers, taps, strict=True)}


class Adaptation:
    """The drafters of an engine that learn, each in turn.

    Args:
        drafters: The drafters of the engine; small models with the target's vocabulary, and heads that can be trained,
            learn.
        folder: The folder for the adapted versions, or None for a temporary one.

    Raises:
        ValueError: None of the drafters can learn, or the folder cannot be used; the message says why.
        ModelError: A drafter cannot be loaded for training.
    """

    def __init__(
        self,
        engine: Engine,
        drafters: Sequence[Drafter],
        folder: str | Path | None = None,
        config: AdaptationConfig | None = None,
    ) -> None:
        target = engine.target
        learning = [learner for drafter in drafters if (learner := find_learner(drafter, target.loaded)) is not None]
        if not learning:
            why = (
                f"is a language model that has the target's tokenizer, or a head of the kinds {', '.join(TRAINED)}; "
                "others cannot learn"
                if any(isinstance(drafter, SmallModelDrafter) for drafter in drafters)
                else "is a model"
            )
            raise ValueError(f"adapt_drafters: no drafter {why}; name another in drafters, or leave adapt_drafters out")
        config = config or AdaptationConfig()
        self._engine = engine
        folders = [learner.drafter.runner.loaded.folder for learner in learning]
        self._folder = AdaptationFolder(folder, folders)
        layers = sorted({layer for learner in learning for layer in learner.reads})
        self._traffic = Traffic(
            config.max_tokens,
            partial(_taps_of, target, layers) if layers else None,
            config.max_tap_bytes,
        )
        self._trainers = [
            OnlineTrainer(learner, Versions(self._folder.path, origin), self._traffic, config, self._note_swap)
            for learner, origin in zip(learning, folders, strict=True)
        ]
        self._turn = 0
        self._slices = self._watching = _none()
        engine.observers.append(self._traffic)

    @property
    def stats(self) -> dict[str, AdaptationStats]:
        """Statistics so far, by drafter."""
        return {trainer.name: trainer.stats for trainer in self._trainers}

    def work(self) -> bool:
        """Run one slice; return False if there is nothing to do until more is served. Call only between two steps."""
        self._watching.close()
        self._traffic.forget_ended()
        if not self._trainers:
            return False
        for _ in range(len(self._trainers) + 1):
            if next(self._slices, _DONE) is not _DONE:
                return True
            self._turn = (self._turn + 1) % len(self._trainers)
            self._slices = self._trainers[self._turn].slices()
        return False

    def watch(self) -> None:
        """Check whether earlier versions are better on recent traffic; this evaluates one example between two steps."""
        if next(self._watching, _DONE) is _DONE:
            self._watching = self._watch_all()

    def _watch_all(self) -> Generator[None]:
        for trainer in self._trainers:
            yield from trainer.watch()

    def run(self, seconds: float) -> None:
        """Run slices for the given time, or until there is nothing to do.

        Raises:
            ValueError: `seconds` is out of range.
        """
        check_float("seconds", seconds, 0.0, 1e9)
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.work():
            pass

    def close(self) -> None:
        """Stop learning; what was learned stays in use."""
        self._slices.close()
        self._watching.close()
        if self._traffic in self._engine.observers:
            self._engine.observers.remove(self._traffic)
        self._trainers = []
        self._folder.close()

    def _note_swap(self) -> None:
        for request in self._engine.scheduler.requests():
            request.drafting.is_read = False
