"""Hidden states and token distributions of transformers' models."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specinfer import LLM, SamplingParams


def hidden_states(model: Any, tokens: Sequence[int], layers: Sequence[int]) -> list[Tensor]:
    """Return [tokens, width] hidden states before the last norm after each of these layers of a Llama-like model."""
    found: dict[int, Tensor] = {}
    handles = [
        layer.register_forward_hook(lambda _, args, output, i=i: found.update({i: args[0][0], i + 1: output[0]}))
        for i, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    for handle in handles:
        handle.remove()
    return [found[layer] for layer in layers]


def assert_first_tokens_are_distributed_as_the_models(
    llm: LLM, model: Any, prompt: Sequence[int], count: int = 250
) -> None:
    """Compare the first two tokens of many sampled answers to one prompt with their exact distribution."""
    with torch.no_grad():
        first = _top(model(torch.tensor([list(prompt)])).logits[0, -1])
        pairs = {
            (a, b): p * q
            for a, p in first.items()
            for b, q in _top(model(torch.tensor([[*prompt, a]])).logits[0, -1]).items()
        }
    params = SamplingParams(temperature=0.5, top_k=4, max_tokens=3)
    outputs = llm.generate([{"prompt_token_ids": list(prompt)}] * count, params, use_tqdm=False)
    found = Counter(tuple(one.outputs[0].token_ids[:2]) for one in outputs)
    assert set(found) <= set(pairs)
    statistic = sum((found[pair] - count * p) ** 2 / (count * p) for pair, p in pairs.items())
    assert statistic < len(pairs) + 5 * (2 * len(pairs)) ** 0.5  # five standard deviations above the mean


def _top(logits: Tensor) -> dict[int, float]:
    """Return the distribution at temperature 0.5 over the best 4 tokens."""
    values, ids = logits.topk(4)
    return dict(zip(ids.tolist(), (values / 0.5).softmax(-1).tolist(), strict=True))
