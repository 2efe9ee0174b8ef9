"""Collection of examples: the target continues each prompt, and its tokens and their probabilities are stored.

Unsupervised, as in collective boost-tuning: SpecInfer (arXiv 2305.09781), section 3. Examples are stored in numbered
files. Each depends on its prompts and the seed only, so an interrupted run resumes with the next one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class Collection:
    """Collection of examples in a folder; files that are in it are not made again.

    Attributes:
        top: The number of tokens stored of each distribution.
        note: Called with the number of prompts or texts done.
        process: The number of this process and of all; each makes its share of the files.

    Raises:
        OSError: The folder cannot be written.
    """

    llm: LLM
    top: int
    note: Callable[[int], None]
    process: tuple[int, int] = (0, 1)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        folder: Path,
        *,
        max_tokens: int,
        temperatures: Sequence[float],
        seed: int,
    ) -> None:
        """Write examples of the target's output after each prompt.

        Args:
            max_tokens: The number of tokens generated after each prompt.
            temperatures: The temperatures that prompts take in turn; 0 is greedy.
        """

        def generated(chosen: range) -> list[TrainingExample]:
            requests: list[Request] = []
            for place, i in enumerate(chosen):
                prompt, its_seed = {"prompt_token_ids": list(prompts[i])}, derive_seed(seed, i)
                temperature = temperatures[i % len(temperatures)]
                params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=its_seed)
                requests += self.llm.jobs.read(f"example-{place}", prompt, params, its_seed).requests
            return _recorded(self.llm, requests, self.top)

        self._write(folder, "generated", len(prompts), generated)

    def read(self, texts: Sequence[Sequence[int]], folder: Path) -> None:
        """Write examples of the target's predictions in these texts, of two tokens at least."""
        self._write(folder, "read", len(texts), lambda chosen: [_read(self.llm, texts[i], self.top) for i in chosen])

    def _write(self, folder: Path, name: str, count: int, make: Callable[[range], list[TrainingExample]]) -> None:
        for number, start in enumerate(range(0, count, SHARD)):
            path = folder / f"{name}-{number:05d}.safetensors"
            chosen = range(start, min(start + SHARD, count))
            if number % self.process[1] == self.process[0] and not path.exists():
                examples = TrainingExamples(make(chosen))
                if len(examples):
                    examples.save(path)
            self.note(chosen.stop)


def load(folder: Path) -> TrainingExamples:
    """Return all examples of a folder, generated ones first.

    Raises:
        DamagedError: A file in it is damaged.
    """
    files = sorted(folder.glob("generated-*.safetensors")) + sorted(folder.glob("read-*.safetensors"))
    return TrainingExamples(example for file in files for example in TrainingExamples.load(file))


def _recorded(llm: LLM, requests: Sequence[Request], top: int) -> list[TrainingExample]:
    """Serve the requests and return the examples of those that succeed."""
    recorder = ExampleRecorder(top)
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


def _read(llm: LLM, text: Sequence[int], top: int) -> TrainingExample:
    cache = llm.target.cache
    try:
        slots = cache.reserve(_PROBE, len(text) - 1)
        piece = Piece.from_span(list(text[:-1]), None, np.zeros(0, dtype=np.int64), slots)
        logprobs = llm.target.forward([replace(piece, num_logits=len(text) - 1)]).log_softmax(-1)
    finally:
        cache.free(_PROBE)
    best = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
    tokens = torch.tensor(text[1:], device=logprobs.device)
    return TrainingExample(
        np.asarray(text, dtype=np.int32),
        1,
        best.indices.int().cpu().numpy(),
        best.values.half().cpu().numpy(),
        logprobs.gather(1, tokens[:, None])[:, 0].half().cpu().numpy(),
        source=Source.READ,
    )
