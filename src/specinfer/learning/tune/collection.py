"""Collection of examples: the target continues each prompt, and its tokens and their probabilities are stored.

Unsupervised, as in collective boost-tuning: SpecInfer (arXiv 2305.09781), section 3. Examples are stored in numbered
files. Each depends on its prompts and the seed only, so an interrupted run resumes with the next one.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from specinfer.core.noise import derive_seed
from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.learning.examples import ExampleRecorder, Source, TrainingExample, TrainingExamples
from specinfer.llm import LLM
from specinfer.model.batch import Piece

SHARD = 64  # prompts in a file
_PROBE = "example-read"


Process = tuple[int, int]  # its number and the number of processes


def collect(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    *,
    max_tokens: int,
    temperatures: Sequence[float],
    seed: int,
    top: int,
    note: Callable[[int], None],
    process: Process = (0, 1),
) -> None:
    """Write examples of the target's output after each prompt; files that are in the folder are not made again.

    Args:
        max_tokens: The number of tokens generated after each prompt.
        temperatures: The temperatures that prompts take in turn; 0 is greedy.
        note: Called with the number of prompts done.
        process: The number of this process and of all; each makes its share of the files.

    Raises:
        OSError: The folder cannot be written.
    """

    def generate(chosen: range) -> list[TrainingExample]:
        params = [
            SamplingParams(
                temperature=temperatures[i % len(temperatures)], max_tokens=max_tokens, seed=derive_seed(seed, i)
            )
            for i in chosen
        ]
        return _generate(llm, [prompts[i] for i in chosen], params, top)

    _write(folder, "generated", len(prompts), generate, note, process)


def read(
    llm: LLM,
    texts: Sequence[Sequence[int]],
    folder: Path,
    *,
    top: int,
    note: Callable[[int], None],
    process: Process = (0, 1),
) -> None:
    """Write examples of the target's predictions in these texts, of two tokens at least; else like `collect`."""
    _write(folder, "read", len(texts), lambda chosen: _read(llm, [texts[i] for i in chosen], top), note, process)


def load(folder: Path) -> TrainingExamples:
    """Return all examples of a folder, generated ones first.

    Raises:
        DamagedError: A file in it is damaged.
    """
    files = sorted(folder.glob("generated-*.safetensors")) + sorted(folder.glob("read-*.safetensors"))
    return TrainingExamples(example for file in files for example in TrainingExamples.load(file))


def _write(
    folder: Path,
    name: str,
    count: int,
    make: Callable[[range], list[TrainingExample]],
    note: Callable[[int], None],
    process: Process,
) -> None:
    for number, start in enumerate(range(0, count, SHARD)):
        path = folder / f"{name}-{number:05d}.safetensors"
        chosen = range(start, min(start + SHARD, count))
        if number % process[1] == process[0] and not path.exists():
            examples = TrainingExamples(make(chosen))
            if len(examples):
                examples.save(path)
        note(chosen.stop)


def _generate(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], top: int
) -> list[TrainingExample]:
    recorder = ExampleRecorder(top)
    requests: list[Request] = []
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        assert one.seed is not None
        requests += llm.jobs.read(f"example-{i}", {"prompt_token_ids": list(prompt)}, one, one.seed).requests
    llm.engine.observers.append(recorder)
    try:
        for request in requests:
            llm.engine.add(request)
        while llm.engine.has_work:
            llm.engine.step()
    finally:
        llm.engine.observers.remove(recorder)
        for request in requests:
            llm.engine.abort(request)
    examples = [recorder.finish(request) for request in requests if request.error is None]
    return [example for example in examples if example is not None]


def _read(llm: LLM, texts: Sequence[Sequence[int]], top: int) -> list[TrainingExample]:
    cache, found = llm.target.cache, []
    for text in texts:
        try:
            slots = cache.reserve(_PROBE, len(text) - 1)
            piece = Piece.of_span(list(text[:-1]), None, np.zeros(0, dtype=np.int64), slots)
            piece = replace(piece, num_logits=len(text) - 1)
            logprobs = llm.target.forward([piece]).log_softmax(-1)
        finally:
            cache.free(_PROBE)
        best = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
        tokens = torch.tensor(text[1:], device=logprobs.device)
        found.append(
            TrainingExample(
                np.asarray(text, dtype=np.int32),
                1,
                best.indices.int().cpu().numpy(),
                best.values.half().cpu().numpy(),
                logprobs.gather(1, tokens[:, None])[:, 0].half().cpu().numpy(),
                source=Source.READ,
            )
        )
    return found
