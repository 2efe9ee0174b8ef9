"""transformers' own `generate`, plain, with an assistant model, and with prompt lookup."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.peers.interface import Ask, Generated, Load, Settings, Stopwatch

_COUNTS = (2, 3, 4, 5, 6, 8, 12)  # draft tokens in a chain
# The drafter stops at a token with a lower probability than this; 0.4 is transformers' default.
_THRESHOLDS = (0.0, 0.4)
_NGRAMS = (2, 3, 4)  # tokens that are looked up; transformers' default is 2
_DEFAULT = {"num_assistant_tokens": 20, "schedule": "constant", "threshold": 0.4}


def create(num_threads: int) -> "TransformersWorker":
    return TransformersWorker(num_threads)


class TransformersWorker:
    """Models loaded by `from_pretrained`, with PyTorch's attention."""

    def __init__(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        transformers.logging.set_verbosity_error()
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self._models: dict[str, Any] = {}
        self._target = self._drafter = ""

    def load(self, job: Load) -> list[Settings]:
        self._target = self._load(job.target, job)
        if job.looks_up:
            pairs = [(count, size) for count in (*_COUNTS, 16) for size in _NGRAMS]
            return [{"prompt_lookup_num_tokens": count, "max_matching_ngram_size": size} for count, size in pairs]
        if job.drafter is None:
            return [{}]
        self._drafter = self._load(job.drafter, job)
        counts = [
            {"num_assistant_tokens": count, "schedule": "constant", "threshold": threshold}
            for count in _COUNTS
            for threshold in _THRESHOLDS
        ]
        adapting = [{"num_assistant_tokens": 5, "schedule": "heuristic", "threshold": t} for t in _THRESHOLDS]
        return [*counts, *adapting, _DEFAULT]

    def generate(self, ask: Ask) -> Generated:
        target = self._models[self._target]
        options: dict[str, Any] = {"do_sample": ask.temperature > 0}
        if ask.temperature > 0:
            torch.manual_seed(ask.seed)
            options |= {"temperature": ask.temperature, "top_k": 0, "top_p": 1.0}
        if "prompt_lookup_num_tokens" in ask.settings:
            options |= ask.settings
        elif ask.settings:
            options["assistant_model"] = self._assistant(ask.settings)
        prompt = torch.tensor([ask.token_ids], device=target.device)
        streamer = _Streamer(prompt.device)
        made = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=ask.max_tokens,
            eos_token_id=None,
            pad_token_id=0,
            streamer=streamer,
            **options,
        )
        streamer.wait()
        return streamer.stopwatch.stop(made[0, len(ask.token_ids) :].tolist())

    def _load(self, folder: str, job: Load) -> str:
        if folder not in self._models:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                Path(folder), dtype=getattr(torch, job.dtype), use_safetensors=True, trust_remote_code=False
            )
            # The checkpoint's own sampling defaults must not affect the measurement.
            model.generation_config = transformers.GenerationConfig()
            self._models[folder] = model.eval().to(job.device)
        return folder

    def _assistant(self, settings: Settings) -> Any:
        drafter = self._models[self._drafter]
        drafter.generation_config = transformers.GenerationConfig(
            num_assistant_tokens=settings["num_assistant_tokens"],
            num_assistant_tokens_schedule=settings["schedule"],
            assistant_confidence_threshold=settings["threshold"],
        )
        return drafter


class _Streamer:
    """A receiver of the prompt and then of tokens as they are generated, which notes the time of the first ones."""

    def __init__(self, device: torch.device) -> None:
        self.stopwatch = Stopwatch()
        self._device = device
        self._has_prompt = False

    def put(self, token_ids: Tensor) -> None:  # [1, tokens], or [tokens]
        if self._has_prompt:
            self.wait()
            self.stopwatch.arrived(token_ids.numel())
        self._has_prompt = True

    def end(self) -> None:
        pass

    def wait(self) -> None:
        if self._device.type == "cuda" and self.stopwatch.first is None:
            torch.cuda.synchronize(self._device)
