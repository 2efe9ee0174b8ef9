"""The training copy of a drafter: in float32, next to the one that drafts, one short micro-step after the other.

It is trained towards the target's own distributions (`distillation`). A pass over few tokens costs little more than
reading the weights, so the number of tokens of a micro-step is measured once, at the start.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specinfer.drafters.vocabulary.token_map import TokenMap
from specinfer.learning.adapt.held_out_evaluation import Hits, hits_in
from specinfer.learning.adapt.traffic import TOP
from specinfer.learning.distillation import distillation_loss, generated_logits
from specinfer.learning.examples import Batch, TrainingExample, collate
from specinfer.model.trainable import load_trainable, save_trainable

MIN_WINDOW, MAX_WINDOW = 64, 512  # tokens of a micro-step
_MAX_NORM = 1.0  # largest norm of a gradient


class Student:
    """A drafter's weights in training.

    Args:
        folder: The folder of the initial weights.
        vocab_size: The target's vocabulary size; tokens beyond it are never emitted.
        seconds: The approximate time of a micro-step; it has at least `MIN_WINDOW` tokens.
        window: The number of tokens in a micro-step, or None for what fits into that time.
        max_window: The largest number of tokens in a micro-step.
        token_map: [map] the only tokens that the drafter proposes, or None for all.

    Raises:
        ModelError: The folder cannot be loaded for training.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        vocab_size: int,
        learning_rate: float,
        seconds: float,
        window: int | None = None,
        max_window: int = MAX_WINDOW,
        token_map: Tensor | None = None,
    ) -> None:
        self._device = device
        self._vocab_size, self._token_map = vocab_size, token_map
        self._learning_rate = learning_rate
        self.begin(folder)
        self.window = min(self._measured(seconds) if window is None else window, max_window)

    def begin(self, folder: Path) -> None:
        """Restart from the weights in this folder."""
        with torch.inference_mode(mode=False):
            self._model = self._load(folder)
            self._weights = [weight for weight in self._model.parameters() if weight.requires_grad]
            # No decay: weights that no example involves stay as they are.
            self._optimizer = torch.optim.AdamW(
                self._weights, lr=self._learning_rate, betas=(0.9, 0.95), weight_decay=0.0
            )

    def _load(self, folder: Path) -> Any:
        return load_trainable(folder, self._device)

    def _loss(self, batch: Batch) -> Tensor:
        return distillation_loss(generated_logits(self._model, batch), batch.top_ids, batch.top_logprobs)

    def _logits(self, batch: Batch) -> Tensor:
        """Return [outputs, vocab] logits, -inf for tokens that it never proposes."""
        logits = generated_logits(self._model, batch)
        if self._token_map is not None:
            logits = TokenMap(self._token_map, self._vocab_size).expand(logits[:, self._token_map])
        return logits

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.get_text_config().vocab_size)

    def learn(self, examples: Sequence[TrainingExample]) -> float:
        """Run one micro-step on a batch of examples and return the loss in nats per token.

        If the loss or a gradient is not finite, the weights stay as they were and the result is NaN.
        """
        with torch.inference_mode(mode=False), torch.enable_grad():
            batch = collate(examples).to(self._device)
            loss = self._loss(batch)
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self._weights, _MAX_NORM)
            if not bool(torch.isfinite(loss)) or not bool(torch.isfinite(norm)):
                return float("nan")
            self._optimizer.step()
        return float(loss.detach())

    def hits(self, example: TrainingExample) -> Hits:
        """Return the hits on an example, [num_output], see `hits_in`."""
        with torch.no_grad():
            logits = self._logits(collate([example]).to(self._device))
        return hits_in(logits, example, self._vocab_size)

    def save(self, origin: Path, folder: Path) -> None:
        """Write the weights as an ordinary Hugging Face folder, with the tokenizer of `origin`.

        Raises:
            OSError, SafetensorError: The folder cannot be written.
        """
        save_trainable(self._model, origin, folder)

    def _measured(self, seconds: float) -> int:
        """Return the number of tokens that can be trained on in this time."""
        with torch.inference_mode(mode=False), torch.enable_grad():
            batch = collate([self._blank(MIN_WINDOW)]).to(self._device)
            for _ in range(2):  # the first run includes one-time costs
                start = time.perf_counter()
                self._loss(batch).backward()
                self._model.zero_grad(set_to_none=True)
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                taken = time.perf_counter() - start
        return int(min(max(MIN_WINDOW * seconds / taken, MIN_WINDOW), MAX_WINDOW))

    def _blank(self, num_tokens: int) -> TrainingExample:
        """Return an example to measure with."""
        count = num_tokens - 1
        ids, logprobs = np.zeros((count, TOP), dtype=np.int32), np.full((count, TOP), -3.0, dtype=np.float16)
        return TrainingExample(np.zeros(num_tokens, dtype=np.int32), 1, ids, logprobs, logprobs[:, 0])
