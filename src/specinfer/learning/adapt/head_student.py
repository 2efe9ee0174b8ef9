"""The training copy of a head, which reads the hidden states that the target computed while it served."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specinfer.learning.adapt.student import MIN_WINDOW, Student
from specinfer.learning.distillation import restrict, training_loss
from specinfer.learning.examples import Batch, TrainingExample
from specinfer.learning.heads.files import read_head, write_head
from specinfer.model.load import LoadedModel
from specinfer.model.trainable import copy_beside


class HeadStudent(Student):
    """A head's weights in training; the loss is that of `specinfer tune`, over several levels of drafts.

    Args:
        target: The target as it is served.
        dialect: How the configuration of the head is read, or None if there is only one way.
        embed: The target's embedding.
        other_settings: Those of `Student`.
    """

    def __init__(
        self,
        folder: Path,
        target: LoadedModel,
        dialect: Any,
        embed: Callable[[Tensor], Tensor],
        **other_settings: Any,
    ) -> None:
        self._target, self._dialect, self._embed = target, dialect, embed
        super().__init__(folder, target.device, target.vocab_size, **other_settings)
        self.window = max(self.window, MIN_WINDOW)  # blocks and levels need some tokens

    def _load(self, folder: Path) -> Any:
        trained = read_head(folder, self._target.folder, self._embed)
        if self._dialect is not None:
            trained.model.speak(self._dialect)
        return trained.to(self._device)

    def _loss(self, batch: Batch) -> Tensor:
        weights = None
        if self._token_map is not None:
            batch, weights = restrict(batch, self._token_map, self._vocab_size)
        return training_loss(self._model.train()(batch), batch, weights)

    def _logits(self, batch: Batch) -> Tensor:
        logits: Tensor = self._model.expand(self._model.eval()(batch))
        return logits

    def save(self, origin: Path, folder: Path) -> None:
        write_head(self._model, folder)
        copy_beside(origin, folder)

    def _blank(self, num_tokens: int) -> TrainingExample:
        taps = torch.zeros(num_tokens - 1, int(self._model.config.get_text_config().hidden_size))
        return replace(super()._blank(num_tokens), taps=dict.fromkeys(self._model.model.reads, taps))
