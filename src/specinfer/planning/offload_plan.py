"""Comparison of drafters for a streamed target, from one load of it, and the command line of the best."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from specinfer.bench.models import Models
from specinfer.core.lookups import SELF_DRAFTERS
from specinfer.llm import LLM
from specinfer.model.load import LoadedModel
from specinfer.planning.options import PlanConfig
from specinfer.policy.acceptance import AcceptanceModel
from specinfer.policy.cost_model import CostModel
from specinfer.policy.offload_choice import Candidate, LayerMemory, OffloadChoice, compare, copies_of, layer_weights
from specinfer.policy.streamed_costs import Pass, StreamedCurve


def offload_choices(
    llm: LLM, models: Models, costs: CostModel, acceptance: AcceptanceModel
) -> tuple[OffloadChoice, ...]:
    """Return what no drafter, the loaded drafters and copies of a streamed target give; nothing if it all fits.

    Args:
        costs, acceptance: Costs and acceptance with the loaded drafters.
    """
    target = llm.target.loaded
    stream = target.stream
    if stream is None or not stream.bytes_per_pass:
        return ()
    if isinstance(costs.target, StreamedCurve):
        computing, layer_seconds = costs.target, costs.target.reading / (stream.num_layers - stream.num_resident)
    else:  # passes too fast to tell reading from computing
        points = zip(costs.target.sizes.tolist(), costs.target.seconds.tolist(), strict=True)
        computing = StreamedCurve([Pass(size, seconds, 0.0) for size, seconds in points])
        layer_seconds = stream.seconds_reading * stream.buffer_bytes / stream.bytes_read
    rounded, kept, _ = layer_weights(models.target, target.device)
    taken = sum(_memory_of(runner.loaded) for runner in llm.small_models.values())
    memory = LayerMemory(
        stream.num_layers, stream.buffer_bytes, rounded * stream.num_layers, stream.settled_bytes + taken,
        kept * stream.num_layers * target.dtype.itemsize,
    )  # fmt: skip
    given = Candidate(
        models.drafters, taken, tuple(acceptance.by_rank().tolist()), costs, acceptance.share, is_measured=True
    )
    copies = copies_of(memory, computing, target.quantization, known=models.drafters)
    return compare(memory, computing, layer_seconds, [given, *copies])


def _memory_of(loaded: LoadedModel) -> int:
    """Return the bytes of a drafter; those of a copy of a streamed target are in its stream."""
    stream = loaded.stream
    return loaded.num_bytes if stream is None else stream.num_layers * stream.buffer_bytes


def command_of(config: PlanConfig, choice: OffloadChoice) -> str:
    """Return the command line that serves a model with this choice."""
    drafters = choice.candidate.drafters
    if drafters and choice.candidate.is_measured:  # as they were named, if they were
        drafters = () if isinstance(config.drafters, str) else config.drafters
    folder = config.offload_folder
    if folder is None and not SELF_DRAFTERS.keys().isdisjoint(drafters):
        folder = "packed"  # any new folder
    options = {
        "dtype": None if config.dtype == "auto" else config.dtype,
        "quantization": config.quantization,
        "drafter-quantization": config.drafter_quantization,
        "kv-cache-dtype": None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        "device": None if config.device == "auto" else config.device,
        "offload": config.offload,
        "memory-budget": config.memory_budget,
        "offload-folder": folder,
        "tree": None if choice.candidate.drafters else "off",
    }
    words = ["specinfer", "serve", config.model]
    words += [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    return shlex.join(words + [word for name in drafters for word in ("--drafter", name)])


def label_of(drafters: Sequence[str]) -> str:
    """Return short names of drafters."""
    return ", ".join(Path(name).name for name in drafters) or "none"
