"""OpenVINO GenAI, plain and with a draft model."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.messages import Ask, Generated, Load, Settings, Stopwatch

_COUNTS = (2, 3, 4, 5, 6, 8, 10, 12, 16)  # draft tokens in a chain


def create(num_threads: int) -> "OpenvinoEngine":
    return OpenvinoEngine(num_threads)


class OpenvinoEngine:
    """One pipeline for plain decoding and one with the drafter, since a pipeline cannot switch its drafter off."""

    def __init__(self, num_threads: int) -> None:
        self.version = f"openvino_genai {openvino_genai.get_version()}"
        self._properties: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": num_threads}
        self._pipelines: dict[bool, Any] = {}

    def load(self, job: Load) -> list[Settings]:
        properties = self._properties | {"scheduler_config": _scheduling()}
        if job.dtype == "float32":
            properties["INFERENCE_PRECISION_HINT"] = "f32"
        target = converted(Path(job.target))
        if job.drafter is None:
            self._pipelines[False] = openvino_genai.LLMPipeline(target, "CPU", **properties)
            return [{}]
        drafter = openvino_genai.draft_model(converted(Path(job.drafter)), "CPU", **properties)
        self._pipelines[True] = openvino_genai.LLMPipeline(target, "CPU", draft_model=drafter, **properties)
        return [{"num_assistant_tokens": count} for count in _COUNTS]

    def generate(self, ask: Ask) -> Generated:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=ask.max_tokens, ignore_eos=True, do_sample=ask.temperature > 0, apply_chat_template=False
        )
        if ask.temperature > 0:
            config.temperature, config.rng_seed = ask.temperature, ask.seed % 2**31
        for name, value in ask.settings.items():
            setattr(config, name, value)
        prompt = np.array([ask.token_ids])
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(prompt), openvino.Tensor(np.ones_like(prompt)))
        streamer = _Streamer()
        made = self._pipelines[ask.drafts].generate(inputs, config, streamer)
        return streamer.stopwatch.stop(list(made.tokens[0]))


def _scheduling() -> Any:
    """Return the scheduler's defaults without prefix caching, since the other engines read every prompt again."""
    config = openvino_genai.SchedulerConfig()
    config.max_num_batched_tokens = sys.maxsize
    config.enable_prefix_caching = False
    return config


def converted(file: Path) -> Path:
    """Return the OpenVINO folder converted from a GGUF file, and write it on the first call.

    OpenVINO reads drafters only from such folders.
    """
    folder = file.with_name(f"{file.stem}-openvino")
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".openvino-") as name:
        fresh = Path(name) / "fresh"
        fresh.mkdir()
        os.link(file, fresh / "model.gguf")
        openvino_genai.LLMPipeline(fresh / "model.gguf", "CPU", enable_save_ov_model=True)
        (fresh / "model.gguf").unlink()
        try:
            fresh.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process may have finished the same work first
                raise
    return folder


class _Streamer(openvino_genai.StreamerBase):  # type: ignore[misc]  # a library without types
    """A receiver of tokens as they are generated, which notes the time of the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stopwatch = Stopwatch()

    def write(self, token_ids: int | list[int]) -> Any:
        self.stopwatch.arrived(1 if isinstance(token_ids, int) else len(token_ids))
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass
