"""Drafters that can learn, and the training copy of one: in float32, next to the weights in use.

The copy is trained towards the target's own distributions, one short micro-step after the other. A pass over few tokens
costs little more than reading the weights, so the number of tokens of a micro-step is measured once, at the start.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specinfer.core.errors import ModelError
from specinfer.drafters.base import Drafter
from specinfer.drafters.feature_drafter import FeatureDrafter
from specinfer.drafters.small_model import SmallModelDrafter
from specinfer.learning.adapt.hits import Hits, hits_in
from specinfer.learning.adapt.settings import HEAD_RATE, MODEL_RATE, AdaptationConfig
from specinfer.learning.adapt.traffic import TOP
from specinfer.learning.batches import Batch, collate
from specinfer.learning.examples import TrainingExample
from specinfer.learning.heads.files import can_train, read_head
from specinfer.learning.loop import Trainer
from specinfer.learning.optimizers import adamw
from specinfer.learning.trainable import TrainableDrafter, TrainableModel
from specinfer.model.heads.head import FeatureHead
from specinfer.model.heads.load import load_head
from specinfer.model.load import LoadedModel, load_model

MIN_WINDOW, MAX_WINDOW = 64, 512  # tokens of a micro-step


@dataclass(frozen=True, slots=True)
class Learner:
    """A drafter that can learn, and how the weights of a folder are loaded.

    Attributes:
        vocab_size: The target's vocabulary size.
        rate: The usual learning rate.
        trainable: Load weights for training.
        served: Load weights in the form in which the drafter serves; raises ModelError.
        reads: The target's layers after which it reads hidden states.
    """

    drafter: SmallModelDrafter
    vocab_size: int
    rate: float
    trainable: Callable[[Path], TrainableDrafter]
    served: Callable[[Path], LoadedModel]
    reads: frozenset[int] = frozenset()

    def can_learn(self, example: TrainingExample) -> bool:
        """Return whether it can be trained and evaluated on an example."""
        # The first pair of a head predicts the third token.
        return not self.reads or (example.taps is not None and len(example.tokens) > 2)

    def load(self, folder: Path) -> LoadedModel:
        """Load weights that take the place of the drafter's.

        Raises:
            ModelError: They cannot be used.
        """
        loaded, before = self.served(folder), self.drafter.runner.loaded
        sizes = [(each.layer_shapes, each.vocab_size, each.num_logits) for each in (loaded, before)]
        if sizes[0] != sizes[1]:
            raise ModelError(f"{loaded.folder} is of another shape than the drafter")
        return loaded


def find_learner(drafter: Drafter, target: LoadedModel) -> Learner | None:
    """Return how a drafter learns, or None if it cannot."""
    if not isinstance(drafter, SmallModelDrafter) or not drafter.shares_vocabulary:
        return None
    if isinstance(drafter, FeatureDrafter):
        is_own = drafter.runner.loaded.folder == target.folder
        return None if is_own or not can_train(drafter.runner.loaded.folder) else _head_learner(drafter, target)
    return None if drafter.kind.reads_target else _model_learner(drafter, target)


def _model_learner(drafter: SmallModelDrafter, target: LoadedModel) -> Learner:
    """Return how a small model with the target's vocabulary learns."""
    original = drafter.runner.loaded

    def served(folder: Path) -> LoadedModel:
        return load_model(
            folder, original.dtype, original.device, original.quantization,
            native=original.native, token_map=original.token_map, kv_dtype=original.kv_dtype,
            max_model_len=original.max_position,
        )  # fmt: skip

    def trainable(folder: Path) -> TrainableDrafter:
        return TrainableModel.load(folder, original.token_map)

    return Learner(drafter, target.vocab_size, MODEL_RATE, trainable, served)


def _head_learner(drafter: FeatureDrafter, target: LoadedModel) -> Learner:
    """Return how a head on the target's hidden states learns."""
    runner = drafter.runner  # its head is another one after a change of the weights
    quantization, dialect = runner.loaded.quantization, getattr(runner.head, "dialect", None)

    def served(folder: Path) -> LoadedModel:
        loaded = load_head(folder, target, quantization)
        assert isinstance(loaded.model, FeatureHead)
        if dialect is not None:
            loaded.model.speak(dialect)
        return loaded

    def trainable(folder: Path) -> TrainableDrafter:
        head = read_head(folder, target.folder, lambda ids: runner.head.embedded(ids))
        if dialect is not None:
            head.model.speak(dialect)
        return head

    return Learner(drafter, target.vocab_size, HEAD_RATE, trainable, served, frozenset(runner.head.reads))


class Student:
    """A drafter's weights in training.

    Args:
        folder: The folder of the initial weights.

    Raises:
        ModelError: The folder cannot be loaded for training.
    """

    def __init__(self, learner: Learner, folder: Path, config: AdaptationConfig) -> None:
        self._learner = learner
        loaded = learner.drafter.runner.loaded
        self._device = loaded.device
        self._rate = learner.rate if config.learning_rate is None else config.learning_rate
        self.begin(folder)
        window = self._measured(config.slice_seconds) if config.window is None else config.window
        least = MIN_WINDOW if learner.reads else 1  # blocks and levels need some tokens
        self.window = max(min(window, MAX_WINDOW, loaded.max_position), least)

    def begin(self, folder: Path) -> None:
        """Restart from the weights in this folder."""
        with torch.inference_mode(mode=False):
            self.drafter = self._learner.trainable(folder).to(self._device)
            weights = [weight for weight in self.drafter.parameters() if weight.requires_grad]
            self.trainer = Trainer(self.drafter, [adamw(weights, self._rate)], self._loss)

    def _loss(self, batch: Batch) -> Tensor:
        self.drafter.train()
        return self.drafter.loss(self.drafter(batch), batch)

    @property
    def vocab_size(self) -> int:
        return self.drafter.vocab_size

    def learn(self, examples: Sequence[TrainingExample]) -> float:
        """Run one micro-step on a batch of examples and return the loss in nats per token.

        If the loss or a gradient is not finite, the weights stay as they were and the result is NaN.
        """
        return self.trainer.step(collate(examples).to(self._device))

    def hits(self, example: TrainingExample) -> Hits:
        """Return the hits on an example, [num_output], see `hits_in`."""
        with torch.no_grad():
            logits = self.drafter.next_logits(collate([example]).to(self._device))
        return hits_in(logits, example, self._learner.vocab_size)

    def save(self, folder: Path, origin: Path) -> None:
        """Write the weights as an ordinary folder, with the tokenizer of `origin`.

        Raises:
            OSError, SafetensorError: The folder cannot be written.
        """
        self.drafter.save(folder, origin)

    def _measured(self, seconds: float) -> int:
        """Return the number of tokens that can be trained on in this time."""
        with torch.inference_mode(mode=False), torch.enable_grad():
            batch = collate([self._blank(MIN_WINDOW)]).to(self._device)
            for _ in range(2):  # the first run includes one-time costs
                start = time.perf_counter()
                self._loss(batch).backward()
                self.drafter.zero_grad(set_to_none=True)
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                taken = time.perf_counter() - start
        return int(min(max(MIN_WINDOW * seconds / taken, MIN_WINDOW), MAX_WINDOW))

    def _blank(self, num_tokens: int) -> TrainingExample:
        """Return an example to measure with."""
        count = num_tokens - 1
        ids, logprobs = np.zeros((count, TOP), dtype=np.int32), np.full((count, TOP), -3.0, dtype=np.float16)
        tap = torch.zeros(count, int(self.drafter.config.hidden_size))
        taps = dict.fromkeys(self._learner.reads, tap) or None
        return TrainingExample(np.zeros(num_tokens, dtype=np.int32), 1, ids, logprobs, logprobs[:, 0], taps=taps)
