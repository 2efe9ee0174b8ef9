"""What the embedded drafter would propose at each token of texts by the embedded target, and which of it is right."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.bench.prompts import token_prompts
from specinfer.demo.pair import demo_folders
from specinfer.drafters.growth.tree_batch import BEST_FIRST_WIDTH
from specinfer.model.definition import load_plain, quietly

_PROMPT = 64  # tokens that each text continues
WRONG = -1


@dataclass(frozen=True, slots=True)
class Text:
    """One output of the target, with the best draft tokens at each of its positions.

    Attributes:
        confidence: [positions, width] of the draft tokens, descending.
        right: [positions] rank of the one that is the output's token, or `WRONG`.
    """

    confidence: npt.NDArray[np.float32]
    right: npt.NDArray[np.int64]


@torch.inference_mode()
def read_texts(num_texts: int, num_tokens: int, temperature: float) -> list[Text]:
    """Let the target continue held-out texts, and the drafter read them; sampled tokens have the noise of both.

    Args:
        temperature: 0 or 1.
    """
    pair = demo_folders()
    with quietly():
        target, drafter = (load_plain(folder, torch.float32).eval() for folder in (pair.target, pair.drafter))
    prompts = token_prompts(pair.target, num_tokens, count=num_texts)
    source, noise = torch.Generator().manual_seed(0), list[Tensor]()
    ids = torch.tensor([prompt[:_PROMPT] for prompt in prompts])
    known, cache = ids, None
    for _ in range(num_tokens):
        out = target(input_ids=ids, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[:, -1]
        uniform = torch.rand(logits.shape, generator=source).clamp_min(1e-20)
        noise.append(temperature * -torch.log(-torch.log(uniform)))
        ids = (logits + noise[-1]).argmax(dim=-1, keepdim=True)
        known = torch.cat([known, ids], dim=1)
    drafted = drafter(input_ids=known[:, :-1]).logits[:, _PROMPT - 1 :] + torch.stack(noise, dim=1)
    probs, tokens = drafted.softmax(dim=-1).topk(BEST_FIRST_WIDTH, dim=-1)
    return [_text(*columns) for columns in zip(probs, tokens, known[:, _PROMPT:], strict=True)]


def _text(probs: Tensor, tokens: Tensor, output: Tensor) -> Text:
    is_right = tokens == output[:, None]
    right = torch.where(is_right.any(dim=-1), is_right.int().argmax(dim=-1), WRONG)
    return Text(probs.numpy().astype(np.float32), right.numpy().astype(np.int64))
