"""The training copy, the loading and the evaluation of each kind of drafter that learns online."""

from pathlib import Path
from typing import Any, Protocol

from specinfer.core.errors import ModelError
from specinfer.drafters.base import Drafter
from specinfer.drafters.feature_drafter import FeatureDrafter
from specinfer.drafters.small_model import SmallModelDrafter
from specinfer.learning.adapt.head_evaluation import hits_of_head
from specinfer.learning.adapt.head_student import HeadStudent
from specinfer.learning.adapt.held_out_evaluation import Hits, hits_of
from specinfer.learning.adapt.settings import HEAD_RATE, MODEL_RATE, AdaptationConfig
from specinfer.learning.adapt.student import MAX_WINDOW, Student
from specinfer.learning.examples import TrainingExample
from specinfer.learning.heads.files import can_train
from specinfer.model.heads.head import FeatureHead
from specinfer.model.heads.load import load_head
from specinfer.model.load import LoadedModel, load_model


class Learnable(Protocol):
    """A drafter that can learn."""

    @property
    def drafter(self) -> SmallModelDrafter: ...

    @property
    def reads(self) -> frozenset[int]:
        """The target's layers after which it reads hidden states."""
        ...

    def student(self, folder: Path, config: AdaptationConfig) -> Student:
        """Return a training copy of the weights in a folder."""
        ...

    def load(self, folder: Path) -> LoadedModel:
        """Load the weights of a folder in the form in which the drafter serves.

        Raises:
            ModelError: They cannot be used.
        """
        ...

    def can_learn(self, example: TrainingExample) -> bool:
        """Return whether it can be trained and evaluated on an example."""
        ...

    def hits(self, loaded: LoadedModel, example: TrainingExample) -> Hits:
        """Return the hits of weights in the form in which they serve, [num_output]."""
        ...


def learnable(drafter: Drafter, target: LoadedModel) -> Learnable | None:
    """Return what is needed to train a drafter, or None if it cannot learn."""
    if not isinstance(drafter, SmallModelDrafter) or not drafter.shares_vocabulary:
        return None
    if isinstance(drafter, FeatureDrafter):
        is_own = drafter.runner.loaded.folder == target.folder
        return None if is_own or not can_train(drafter.runner.loaded.folder) else LearnableHead(drafter, target)
    return None if drafter.kind.reads_target else LearnableModel(drafter, target)


def _settings(config: AdaptationConfig, loaded: LoadedModel, usual_rate: float) -> dict[str, Any]:
    """Return the settings of a training copy that are the same for all kinds."""
    return {
        "learning_rate": usual_rate if config.learning_rate is None else config.learning_rate,
        "seconds": config.slice_seconds,
        "window": config.window,
        "max_window": min(MAX_WINDOW, loaded.max_position),
        "token_map": loaded.token_map,
    }


def _checked(loaded: LoadedModel, was: LoadedModel) -> LoadedModel:
    """Return new weights; raise a `ModelError` if they cannot take the place of the old ones."""
    sizes = [(one.layer_shapes, one.vocab_size, one.num_logits) for one in (loaded, was)]
    if sizes[0] != sizes[1]:
        raise ModelError(f"{loaded.folder} is of another shape than the drafter")
    return loaded


class LearnableModel:
    """A small model with the target's vocabulary."""

    reads: frozenset[int] = frozenset()

    def __init__(self, drafter: SmallModelDrafter, target: LoadedModel) -> None:
        self.drafter, self._was = drafter, drafter.runner.loaded
        self._vocab_size = target.vocab_size

    def student(self, folder: Path, config: AdaptationConfig) -> Student:
        return Student(folder, self._was.device, self._vocab_size, **_settings(config, self._was, MODEL_RATE))

    def load(self, folder: Path) -> LoadedModel:
        was = self._was
        loaded = load_model(
            folder, was.dtype, was.device, was.quantization,
            native=was.native, token_map=was.token_map, kv_dtype=was.kv_dtype, max_model_len=was.max_position,
        )  # fmt: skip
        return _checked(loaded, was)

    def can_learn(self, example: TrainingExample) -> bool:
        return True

    def hits(self, loaded: LoadedModel, example: TrainingExample) -> Hits:
        return hits_of(loaded, example, self._vocab_size)


class LearnableHead:
    """A head on the target's hidden states."""

    def __init__(self, drafter: FeatureDrafter, target: LoadedModel) -> None:
        self.drafter, self._was, self._target = drafter, drafter.runner.loaded, target
        self.reads = frozenset(drafter.runner.head.reads)
        self._dialect = getattr(drafter.runner.head, "dialect", None)

    def student(self, folder: Path, config: AdaptationConfig) -> Student:
        runner = self.drafter.runner  # its head is another one after a change of the weights
        settings = _settings(config, self._was, HEAD_RATE)
        return HeadStudent(folder, self._target, self._dialect, lambda ids: runner.head.embedded(ids), **settings)

    def load(self, folder: Path) -> LoadedModel:
        loaded = load_head(folder, self._target, self._was.quantization)
        assert isinstance(loaded.model, FeatureHead)
        if self._dialect is not None:
            loaded.model.speak(self._dialect)
        return _checked(loaded, self._was)

    def can_learn(self, example: TrainingExample) -> bool:
        return example.taps is not None and len(example.tokens) > 2  # the first pair predicts the third token

    def hits(self, loaded: LoadedModel, example: TrainingExample) -> Hits:
        return hits_of_head(loaded, example, self._target.vocab_size)
