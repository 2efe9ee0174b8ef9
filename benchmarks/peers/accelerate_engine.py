"""transformers' `generate` with accelerate's offloading: each decoder layer is loaded when a pass reaches it.

Layers are kept on the disk, in the checkpoint's own files, or in host memory for a model on a GPU. All other modules
(embeddings, the last norm, the head) stay on the device.
"""

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from torch.nn import ModuleList

from benchmarks.peers.messages import Ask, Generated, Load, Settings
from benchmarks.peers.transformers_engine import TransformersEngine
from benchmarks.process import WorkerError


def create(num_threads: int) -> "AccelerateEngine":
    return AccelerateEngine(num_threads)


class AccelerateEngine:
    """A target that does not fit on the device, run with accelerate's offloading and without a drafter."""

    def __init__(self, num_threads: int) -> None:
        self._rewritten = tempfile.mkdtemp()  # for weights that accelerate must convert
        atexit.register(shutil.rmtree, self._rewritten, ignore_errors=True)
        self._engine = TransformersEngine(num_threads, self._place)
        self.version = f"accelerate {accelerate.__version__}, {self._engine.version}"

    def load(self, job: Load) -> list[Settings]:
        assert job.drafter is None
        return self._engine.load(job)

    def generate(self, ask: Ask) -> Generated:
        return self._engine.generate(ask)

    def _place(self, folder: Path, job: Load) -> dict[str, Any]:
        return {"device_map": layer_map(folder, job.offload, job.device), "offload_folder": self._rewritten}


def layer_map(folder: Path, offload: str | None, device: str) -> dict[str, str]:
    """Return the place of each module by its name: `offload` for each decoder layer, `device` for all others.

    Raises:
        WorkerError: The model has no list of decoder layers.
    """
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert offload is not None
    count = config.get_text_config().num_hidden_layers
    lists = (name for name, module in model.named_modules() if isinstance(module, ModuleList) and len(module) == count)
    layers = next(lists, None)
    if layers is None:
        raise WorkerError(f"no list of {count} layers is found in this {config.model_type} model")
    return dict.fromkeys(_beside(model, layers), device) | {f"{layers}.{i}": offload for i in range(count)}


def _beside(model: Any, name: str) -> list[str]:
    """Return the names of the largest modules, and of direct parameters, that cover all weights outside `name`."""
    found, place = [], ""
    for part in name.split("."):
        holder = model.get_submodule(place) if place else model
        lead = f"{place}." if place else ""
        found += [lead + other for other, _ in holder.named_children() if other != part]
        found += [lead + own for own, _ in holder.named_parameters(recurse=False)]
        place = lead + part
    return found
