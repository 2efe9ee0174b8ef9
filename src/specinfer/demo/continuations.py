"""Text that the target writes itself, many rows at a time, from prompts of one length.

The drafter trains on it and is measured on it, since it is what the drafter meets at work.
"""

from typing import Any

import torch
from torch import Tensor

from specinfer.demo.loop import precision


def prompt_rows(tokens: Tensor, num_rows: int, num_prompt: int, seed: int) -> Tensor:
    """Random spans of a token stream, [num_rows, num_prompt]."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - num_prompt, (num_rows,), generator=generator)
    return torch.stack([tokens[int(s) : int(s) + num_prompt] for s in starts]).long()


@torch.inference_mode()
def continue_rows(model: Any, prompts: Tensor, num_new: int, *, greedy_rows: int) -> Tensor:
    """Each prompt with `num_new` tokens after it, [num_rows, num_prompt + num_new].

    The first `greedy_rows` rows take the best token, the others draw one at temperature 1.
    """
    model.eval()
    rows, last, cache = [prompts], prompts, None
    for _ in range(num_new):
        with precision(prompts.device):
            output = model(last, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        logits = output.logits[:, -1].float()
        last = torch.cat(
            [
                logits[:greedy_rows].argmax(-1, keepdim=True),
                torch.multinomial(logits[greedy_rows:].softmax(-1), 1)
                if greedy_rows < len(logits)
                else logits.new_zeros((0, 1), dtype=torch.long),
            ]
        )
        rows.append(last)
    return torch.cat(rows, dim=1)


def mixed_batches(corpus_windows: Any, own_windows: Any, own_part: float) -> Any:
    """A `batch_at` in which each step has corpus windows and windows of the target's own text."""

    def batch_at(step: int, num_rows: int, seq_len: int) -> Tensor:
        num_own = round(own_part * num_rows)
        return torch.cat(
            [
                corpus_windows.batch(step, num_rows - num_own, seq_len),
                own_windows.batch(step, num_own, seq_len),
            ]
        )

    return batch_at
