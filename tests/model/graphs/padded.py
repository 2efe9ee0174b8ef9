"""Runners whose passes are padded, without captures, and requests for them."""

from collections.abc import Callable
from typing import Any

import torch

from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.model.graphs.capture import Graphs
from specinfer.model.load import LoadedModel
from specinfer.model.runner import ModelRunner
from tiny import make_request, random_prompts

CPU = torch.device("cpu")
NUM_SLOTS = 220
Loaded = Callable[..., LoadedModel]
PROMPTS = random_prompts([3, 26, 12, 30])
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=8),
    SamplingParams(temperature=1.0, max_tokens=8),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, max_tokens=8, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=(3, 4)),
]


def requests() -> list[Request]:
    return [make_request(str(i), p, q, seed=i) for i, (p, q) in enumerate(zip(PROMPTS, PARAMS, strict=True))]


def padded_runner(loaded: LoadedModel, graphs: Graphs | None = None, **options: Any) -> ModelRunner:
    """One whose passes are padded; what nobody wrote in its cache is not a number."""
    runner = ModelRunner(loaded, NUM_SLOTS, graphs=graphs or Graphs(CPU), **options)
    assert runner.padded is not None
    for pool in (*runner.tensors.keys, *runner.tensors.values):
        pool.fill_(torch.nan)
    return runner
