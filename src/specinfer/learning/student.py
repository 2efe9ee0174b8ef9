"""The copy of a drafter that learns: in float32, beside the one that guesses, one short micro-step after the other.

It is drawn to the target's own distributions (`distillation`). A pass over few tokens costs little more than reading
the weights, so how many tokens a micro-step takes is measured once, at the start.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from specinfer.drafters.vocabulary import TokenMap
from specinfer.learning.distillation import distillation_loss, generated_logits
from specinfer.learning.held_out_evaluation import Hits, hits_in
from specinfer.learning.training_examples import TrainingExample, collate
from specinfer.model.trainable import load_trainable, save_trainable

MIN_WINDOW, MAX_WINDOW = 64, 512  # tokens of a micro-step
_MAX_NORM = 1.0  # of a gradient


class Student:
    """A drafter's weights as they are being changed.

    Args:
        folder: What it begins with.
        vocab_size: The target's; tokens beyond it are never said.
        seconds: How long a micro-step may take, about; it takes at least `MIN_WINDOW` tokens.
        window: Tokens of a micro-step; None: what can be learned in that time.
        max_window: It is not more than this.
        token_map: [map] the only tokens that the drafter guesses; None: all.

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
        """Begins anew with these weights."""
        with torch.inference_mode(mode=False):
            self._model = load_trainable(folder, self._device)
            # No decay: weights that no example speaks of stay as they are.
            self._optimizer = torch.optim.AdamW(
                self._model.parameters(), lr=self._learning_rate, betas=(0.9, 0.95), weight_decay=0.0
            )

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.get_text_config().vocab_size)

    def learn(self, examples: Sequence[TrainingExample]) -> float:
        """One micro-step on examples side by side; the loss in nats a token.

        If that, or a gradient, is no finite number, the weights stay as they were, and it is NaN.
        """
        with torch.inference_mode(mode=False), torch.enable_grad():
            batch = collate(examples).to(self._device)
            loss = distillation_loss(generated_logits(self._model, batch), batch.top_ids, batch.top_logprobs)
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), _MAX_NORM)
            if not bool(torch.isfinite(loss)) or not bool(torch.isfinite(norm)):
                return float("nan")
            self._optimizer.step()
        return float(loss.detach())

    def hits(self, example: TrainingExample) -> Hits:
        """[num_output] see `hits_in`."""
        with torch.no_grad():
            logits = generated_logits(self._model, collate([example]).to(self._device))
        if self._token_map is not None:
            logits = TokenMap(self._token_map, self._vocab_size).expand(logits[:, self._token_map])
        return hits_in(logits, example, self._vocab_size)

    def save(self, origin: Path, folder: Path) -> None:
        """Writes it as an ordinary Hugging Face folder, with the tokenizer of `origin`.

        Raises:
            OSError, SafetensorError: It cannot be written.
        """
        save_trainable(self._model, origin, folder)

    def _measured(self, seconds: float) -> int:
        """Tokens that are read and learned from in so much time."""
        with torch.inference_mode(mode=False), torch.enable_grad():
            tokens = torch.zeros((1, MIN_WINDOW), dtype=torch.long, device=self._device)
            for _ in range(2):  # the first pays for what is made once
                start = time.perf_counter()
                logits = self._model(input_ids=tokens).logits
                logits.logsumexp(-1).mean().backward()
                self._model.zero_grad(set_to_none=True)
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                taken = time.perf_counter() - start
        return int(min(max(MIN_WINDOW * seconds / taken, MIN_WINDOW), MAX_WINDOW))
