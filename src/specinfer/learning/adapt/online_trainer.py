"""Online training of one drafter while it is served.

All work is for idle moments and cut into slices. A copy is trained on examples. Its drafts on held-out examples are
compared with those of the version in use. If it is better, it replaces that version between two steps. If it is worse
than an earlier one on newer traffic, the earlier one comes back. Two versions are stored, and the original drafter.
"""

import logging
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np

from specinfer.core.errors import ModelError
from specinfer.learning.adapt.held_out_evaluation import HeldOutEvaluation, Version
from specinfer.learning.adapt.hits import served_hits
from specinfer.learning.adapt.settings import AdaptationConfig, AdaptationStats
from specinfer.learning.adapt.student import Learner, Student
from specinfer.learning.adapt.traffic import ServedExample, Traffic
from specinfer.learning.adapt.versions import Versions
from specinfer.learning.batches import batches, pieces
from specinfer.learning.examples import TrainingExample
from specinfer.model.load import LoadedModel

logger = logging.getLogger(__name__)


class OnlineTrainer:
    """A drafter, its training copy, and its versions.

    Args:
        traffic: The examples to train on.
        swapped: Called after the weights were replaced.

    Raises:
        ModelError: The drafter cannot be loaded for training.
    """

    def __init__(
        self,
        learner: Learner,
        versions: Versions,
        traffic: Traffic,
        config: AdaptationConfig,
        swapped: Callable[[], None],
    ) -> None:
        drafter = learner.drafter
        self.name = drafter.name
        self.stats = AdaptationStats()
        self._drafter, self._learner = drafter, learner
        self._versions = versions
        self._traffic = traffic
        self._config = config
        self._swapped = swapped
        self._evaluation = HeldOutEvaluation(config.eval_tokens, config.min_eval_tokens, config.margin)
        self._uses: Counter[int] = Counter()  # number of uses of examples, by their numbers
        self._num_seen = 0  # number of examples of the traffic that were seen
        self.original = self.current = self._version(drafter.runner.loaded, versions.origin)
        self.previous: Version | None = None
        self._resume()
        assert self.current.folder is not None
        self._student = Student(learner, self.current.folder, config)
        self._copy = Version(self._student.hits)

    def _resume(self) -> None:
        """Resume from what was learned before the process began."""
        stored = self._versions.stored()
        for folder in stored:
            try:
                version = self._load(folder)
            except ModelError as error:
                logger.warning("adapt_dir: %s cannot be used, and is skipped: %s", folder, error)
                continue
            self._use(version)
            logger.info("drafter %s resumes from its last adapted version, %s", self.name, folder)
            break
        for older in stored:
            self._versions.drop(older)

    # ------------------------------------------------------------------------------------ slices

    def slices(self) -> Generator[None]:
        """Run one round, yielding at the end of each slice; yield nothing if there is nothing to do."""
        yield from self.watch()
        left = self._config.steps_between
        while left > 0 and (examples := self._choose(left * self._student.window)):
            for batch in batches(examples, self._student.window):
                self._learn(batch)
                left -= 1
                yield
        if left < self._config.steps_between:
            yield from self._evaluate_copy()

    def _add_held_out(self) -> None:
        """Add held-out examples that are new since the last call to the evaluation."""
        new = [served for served in self._traffic if served.number >= self._num_seen]
        for served in reversed(new):
            if served.is_held_out and self._can_read(served.example):
                for piece in pieces(served.example, self._student.window):
                    self._evaluation.add(piece)
        self._num_seen = max((served.number + 1 for served in new), default=self._num_seen)
        oldest = min((served.number for served in self._traffic), default=self._num_seen)
        self._uses = Counter({number: uses for number, uses in self._uses.items() if number >= oldest})

    def _choose(self, max_tokens: int) -> list[TrainingExample]:
        """Return about `max_tokens` of examples to train on: the least used ones, and the newest of those."""
        chosen: list[TrainingExample] = []
        num_tokens = 0
        examples = [served for served in self._traffic if self._may_train_on(served)]
        for served in sorted(examples, key=lambda served: self._uses[served.number]):
            self._uses[served.number] += 1
            for piece in pieces(served.example, self._student.window):
                chosen.append(piece)
                num_tokens += len(piece.tokens)
            if num_tokens >= max_tokens:
                break
        return chosen

    def _may_train_on(self, served: ServedExample) -> bool:
        is_fresh = self._uses[served.number] < self._config.num_passes
        return is_fresh and not served.is_held_out and self._can_read(served.example)

    def _can_read(self, example: TrainingExample) -> bool:
        """Return whether the drafter has all tokens of the example: vocabularies may be padded to different sizes."""
        largest = max(int(example.tokens.max()), int(example.top_ids.max()))
        return largest < self._student.vocab_size and self._learner.can_learn(example)

    def _learn(self, batch: list[TrainingExample]) -> None:
        self.stats.loss = self._student.learn(batch)
        self.stats.num_micro_steps += 1
        if np.isnan(self.stats.loss):
            logger.warning("drafter %s: what was learned is not finite, and is discarded", self.name)
            self._restart()

    def _restart(self) -> None:
        """Reset the copy to the weights in use."""
        self.stats.num_restarts += 1
        assert self.current.folder is not None
        self._student.begin(self.current.folder)
        self._copy = Version(self._student.hits)

    # ------------------------------------------------------------------------------ evaluations

    def _evaluate_copy(self) -> Generator[None]:
        """Put the copy in the drafter's place if it is better, both in float32 and as it would serve."""
        copy = self._copy = Version(self._student.hits)
        for version in dict.fromkeys((self.current, self.original, copy)):
            yield from self._evaluation.evaluate(version)
        self.stats.num_evaluations += 1
        self._note_rates()
        if copy is not self._copy:  # `watch` went back to an earlier version meanwhile
            return
        if self._evaluation.is_better(self.current, copy):
            logger.info("drafter %s: what was learned makes it worse, and is discarded", self.name)
            self._restart()
        if not self._evaluation.is_better(copy, self.current):
            return
        written = self._versions.write(lambda folder: self._student.save(folder, self._versions.origin))
        try:
            candidate = self._load(written)
        except ModelError as error:
            logger.warning("drafter %s: what was learned cannot be used, and is discarded: %s", self.name, error)
            self._versions.drop(written)
            self._restart()
            return
        try:
            yield
            yield from self._evaluation.evaluate(candidate)
            if self._evaluation.is_better(candidate, self.current):
                self._swap_in(candidate)
        finally:
            if self.current is not candidate:
                self._drop(candidate)

    def _swap_in(self, candidate: Version) -> None:
        assert candidate.folder is not None
        candidate.folder = self._versions.store(candidate.folder)
        logger.info(
            "drafter %s is replaced by what it has learned: its draft tokens are right for %.1f %% of "
            "held-out tokens, before for %.1f %%", self.name,
            100 * self._evaluation.rate(candidate), 100 * self._evaluation.rate(self.current),
        )  # fmt: skip
        before = self.current
        if self.previous is not None:
            self._drop(self.previous)
        self._use(candidate)
        self.previous = before
        self.stats.num_swaps += 1
        self._note_rates()

    def watch(self) -> Generator[None]:
        """Return to an earlier version if it is better on newer traffic; yield at the end of each slice."""
        self._add_held_out()
        if self.current is self.original:
            return
        earlier = [version for version in (self.previous, self.original) if version is not None]
        versions = dict.fromkeys((self.current, *earlier))
        if all(map(self._evaluation.has_evaluated, versions)):
            return
        for version in versions:
            yield from self._evaluation.evaluate(version)
        self._note_rates()
        for version in earlier:
            # Between two slices another call may already have brought one back.
            is_stored = version is self.previous or version is self.original
            if is_stored and self._evaluation.is_better(version, self.current):
                logger.warning(
                    "drafter %s: what it learned is worse on newer traffic (its draft tokens are right for %.1f %% "
                    "of tokens, those of the version before for %.1f %%), and is undone", self.name,
                    100 * self._evaluation.rate(self.current), 100 * self._evaluation.rate(version),
                )  # fmt: skip
                self._go_back(version)
                return

    def _go_back(self, version: Version) -> None:
        worse, between = self.current, self.previous
        self._use(version)
        self.previous = None
        for gone in (worse, between):
            if gone is not None and gone is not version:
                self._drop(gone)
        self.stats.num_rollbacks += 1
        self._note_rates()
        self._restart()

    def _note_rates(self) -> None:
        self.stats.hit_rate = self._evaluation.rate(self.current)
        self.stats.original_hit_rate = self._evaluation.rate(self.original)

    # ---------------------------------------------------------------------------------- versions

    def _version(self, loaded: LoadedModel, folder: Path) -> Version:
        return Version(lambda example: served_hits(loaded, example, self._learner.vocab_size), loaded, folder)

    def _load(self, folder: Path) -> Version:
        """Load a folder's weights in the form in which the drafter serves."""
        return self._version(self._learner.load(folder), folder)

    def _use(self, version: Version) -> None:
        assert version.loaded is not None
        self._drafter.replace(version.loaded)
        self.current = version
        self._swapped()

    def _drop(self, version: Version) -> None:
        if version is not self.original and version.folder is not None:
            self._versions.drop(version.folder)
