"""Time of a pass by its number of rows, compared with the memory bandwidth limit; on a GPU also one layer's attention.

A pass over one row reads every weight and computes little, so memory limits it. More rows are free as long as the
computation overlaps with the reads. How far this goes decides how large a tree pays off. All arms are loaded at once
and take turns on each pass, and the order of passes and arms rotates. Each timed pass follows an untimed run of the
same pass, so that caches hold what they hold in a run of equal steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.attention import AttentionTimes, time_attention
from benchmarks.growth.models import growing
from benchmarks.options import MODEL, SAMPLING, SPECULATION, LabSettings
from benchmarks.process import busy_neighbours
from specinfer import ops
from specinfer.bench.ceilings import Bandwidth, time_second
from specinfer.bench.models import Models, find_models
from specinfer.bench.options import SharedSettings, check_distinct, check_dtype, rotated
from specinfer.cli.measure import Measurement
from specinfer.core.config import QUANTIZATIONS
from specinfer.core.lookups import reserved_names
from specinfer.core.options import check_settings, setting, setting_of
from specinfer.core.tree import TokenTree
from specinfer.core.tree_shape import MAX_TREE_NODES
from specinfer.engine_args import EngineArgs
from specinfer.model.batch import Piece
from specinfer.model.definition import load_config
from specinfer.model.device import DTYPES, find_device
from specinfer.model.graphs.capture import make_graphs
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.pass_work import read_bytes
from specinfer.model.runner import ModelRunner
from specinfer.reporting.environment import Environment
from specinfer.reporting.progress_bar import StageBar
from specinfer.reporting.report import Report, Table, Value, reported
from specinfer.reporting.spread import Spread

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
TREE, PROMPT, LEVEL, CONTEXT = "tree", "prompt", "level", "context"
INVARIANT = "batch-invariant"  # in names of arms
_PROMPT_TOKENS = 512
_LEVEL_NODES = (1, 4, 8)
_CONTEXTS = (256, 4096)


@dataclass(frozen=True, slots=True)
class KernelsConfig:
    """Options of the kernel measurement.

    Raises:
        ValueError: A field is out of range. The message names it.
    """

    model: str = setting_of(LabSettings, "model")
    drafters: str | tuple[str, ...] = setting_of(EngineArgs, "drafters")
    grow: str | None = setting_of(LabSettings, "grow")
    dtypes: tuple[str, ...] = setting(
        ("auto",),
        MODEL,
        "Data type: auto, float32, bfloat16 or float16. May be repeated. (default: auto)",
        name="dtype",
    )
    quantizations: tuple[str, ...] = setting(
        (), MODEL, "Also measure int8, int4 or fp8 weights. May be repeated.", name="quantization"
    )
    batch_invariant: bool = setting(
        False, MODEL, "Also measure passes in which each row is computed with one order of sums."
    )
    device: str = setting_of(EngineArgs, "device")
    rows: tuple[int, ...] = setting(
        ROWS, SPECULATION, "Number of nodes of a tree. May be repeated. (default: ten numbers from 1 to 64)"
    )
    context: int = setting(256, SPECULATION, "Number of tokens before the tree.", low=0, high=2**20)
    repeats: int = setting_of(LabSettings, "repeats", default=11)
    busy: int = setting(0, SAMPLING, "Number of other processes that keep a core busy.", low=0, high=1024)
    seed: int = setting_of(SharedSettings, "seed")
    json: str | Path | None = setting_of(SharedSettings, "json")

    def __post_init__(self) -> None:
        check_settings(self)
        check_distinct("rows", self.rows, MAX_TREE_NODES)
        for dtype in self.dtypes or ("none",):
            check_dtype(dtype)
        if unknown := [name for name in self.quantizations if name not in QUANTIZATIONS]:
            raise ValueError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, not {unknown[0]!r}")

    @property
    def sizes(self) -> list[int]:
        """Numbers of nodes of the trees, ascending. Times are relative to the first."""
        return sorted({1, *self.rows})


class Pass(NamedTuple):
    """Pass to time: a tree or draft level of `size` nodes, a prompt, or one row after a context, of `size` tokens."""

    kind: str
    size: int


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of a pass of one arm in each repeat, and those of its pass over one row.

    Attributes:
        weight_bytes: Bytes of the target's weights that a pass reads.
    """

    arm: str
    timed: Pass
    seconds: tuple[float, ...]
    of_one_row: tuple[float, ...]
    weight_bytes: int

    @property
    def ms(self) -> Spread:
        return Spread.from_values(1000 * each for each in self.seconds)

    @property
    def relative(self) -> Spread:
        """The time divided by that of one row, in each repeat."""
        return Spread.from_values(a / b for a, b in zip(self.seconds, self.of_one_row, strict=True))

    @property
    def bytes_per_second(self) -> float:
        return 1000 * self.weight_bytes / self.ms.median


@reported
def run_kernels(config: KernelsConfig, progress: StageBar) -> Report[None]:
    """Measure the times of passes.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used. The message names it, and nothing was measured.
        RuntimeError: A pass failed, or computed values that are not finite.
    """
    device = find_device(config.device)
    models, prepare = find_models(config.model, config.drafters), growing(config.grow)
    if prepare is not None:  # the grown model has one dtype; loading converts it to the others
        models, _ = prepare(models, config.dtypes[0], device, progress.stage)
    progress.stage("loading")
    subjects = [_Subject(arm, models, device, config) for arm in find_arms(models, config)]
    target, bandwidth = subjects[0].target.loaded, Bandwidth(device)
    passes = list(subjects[0].passes)
    seconds: dict[str, dict[Pass, list[float]]] = {s.name: {timed: [] for timed in passes} for s in subjects}
    progress.stage("measuring", config.repeats * len(passes) * len(subjects))
    with busy_neighbours(config.busy):
        for repeat in range(config.repeats):
            bandwidth.measure()
            for place, timed in enumerate(rotated(passes, repeat)):
                for subject in rotated(subjects, place + repeat):
                    progress.stage(f"{timed.kind} of {timed.size}")
                    seconds[subject.name][timed].append(subject.time(timed))
                    progress.advance()
    attention: tuple[AttentionTimes, ...] = ()
    if device.type == "cuda":
        progress.stage("attention")
        heads = load_config(target.folder).get_text_config().num_attention_heads
        attention = time_attention(target.layer_shapes[0], heads, target.dtype, device, config.repeats, config.seed)
    environment = Environment.from_model(target, models.drafter_parameters)
    times = [
        PassTimes(s.name, timed, tuple(found), tuple(seconds[s.name][Pass(TREE, 1)]), s.weight_bytes)
        for s in subjects
        for timed, found in seconds[s.name].items()
    ]
    return _report(config, times, bandwidth, attention, environment)


def _report(
    config: KernelsConfig,
    times: list[PassTimes],
    bandwidth: Bandwidth,
    attention: tuple[AttentionTimes, ...],
    environment: Environment,
) -> Report[None]:
    best = max(bandwidth.rates, key=lambda way: max(bandwidth.rates[way]))
    limit, rounds = (
        max(bandwidth.rates[best]),
        Spread.from_values(map(max, zip(*bandwidth.rates.values(), strict=True))),
    )
    trees = Table(
        "trees",
        f"A pass over a tree, {config.context} tokens before it; medians of {config.repeats}",
        (
            Value[PassTimes]("arm", lambda row: row.arm),
            Value[PassTimes]("rows", lambda row: row.timed.size),
            Value[PassTimes]("ms", lambda row: row.ms, "{:.2f}"),
            Value[PassTimes]("quartiles", lambda row: row.ms.quartiles),
            Value[PassTimes]("relative", lambda row: row.relative, "{:.2f}", "of 1 row"),
            Value[PassTimes]("gb_per_s", lambda row: row.bytes_per_second / 1e9, "{:.1f}", "GB/s"),
            Value[PassTimes]("of_memory", lambda row: row.bytes_per_second / limit, "{:.0%}"),
        ),
        [row for row in times if row.timed.kind == TREE],
    )
    others = Table(
        "others",
        "Other passes; medians",
        (
            Value[PassTimes]("arm", lambda row: row.arm),
            Value[PassTimes]("pass", lambda row: row.timed.kind),
            Value[PassTimes]("size", lambda row: row.timed.size),
            Value[PassTimes]("ms", lambda row: row.ms, "{:.2f}"),
        ),
        [row for row in times if row.timed.kind != TREE],
        "prompt: of so many tokens; level: draft level of so many nodes; context: one row after so many tokens",
    )
    layers = Table(
        "attention",
        "Attention of one layer, and PyTorch's over the same keys; medians",
        (
            Value[AttentionTimes]("requests", lambda row: row.requests),
            Value[AttentionTimes]("nodes", lambda row: row.nodes),
            Value[AttentionTimes]("context", lambda row: row.context),
            Value[AttentionTimes]("us", lambda row: row.us, "{:.1f}"),
            Value[AttentionTimes]("torch_us", lambda row: row.torch_us, "{:.1f}"),
            Value[AttentionTimes]("speedup_over_torch", lambda row: row.over_torch, "{:.2f}", "over torch"),
            Value[AttentionTimes]("of_memory", lambda row: row.of_floor(limit), "{:.0%}"),
        ),
        attention,
    )
    lines = [
        f"{config.model}: {environment.target_parameters / 1e6:,.1f} M parameters, {environment.num_threads} threads, "
        f"{environment.cpu}; native kernels: {ops.describe()}",
        f"memory is read at {limit / 1e9:.1f} GB/s at best ({best}, of {len(bandwidth.rates)} ways), at "
        f"{rounds.median / 1e9:.1f} in the median repeat and {rounds.min / 1e9:.1f} in the worst"
        + (f"; with {config.busy} other busy processes" if config.busy else ""),
    ]
    numbers = {
        "bandwidth_gb_per_s": limit / 1e9,
        "bandwidth_by_way": {way: max(rates) / 1e9 for way, rates in bandwidth.rates.items()},
        "weight_bytes": {row.arm: row.weight_bytes for row in times},
    }
    return Report(lines, (trees, others, layers), environment=environment, numbers=numbers)


def find_arms(models: Models, config: KernelsConfig) -> list["KernelArm"]:
    """Return the arms: each dtype, then each quantization with the first dtype, then all of them batch-invariant."""
    own = "bfloat16" if config.grow else str(load_config(models.target).dtype or "float32").removeprefix("torch.")
    wanted = [str(DTYPES[own if dtype == "auto" else dtype]).removeprefix("torch.") for dtype in config.dtypes]
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"dtype: {', '.join(config.dtypes)} are {', '.join(wanted)}; name none twice")
    if len(set(config.quantizations)) < len(config.quantizations):
        raise ValueError(f"quantization: {', '.join(config.quantizations)} given; name none twice")
    arms = [KernelArm(dtype) for dtype in wanted] + [KernelArm(wanted[0], name) for name in config.quantizations]
    return arms + [arm._replace(batch_invariant=True) for arm in arms if config.batch_invariant]


class KernelArm(NamedTuple):
    """How the models of an arm are loaded."""

    dtype: str
    quantization: str | None = None
    batch_invariant: bool = False

    @property
    def name(self) -> str:
        words = (self.dtype, self.quantization, INVARIANT if self.batch_invariant else None)
        return " ".join(filter(None, words))


class _Subject:
    """Loaded models of one arm, and the passes that can be timed."""

    def __init__(self, arm: KernelArm, models: Models, device: torch.device, config: KernelsConfig) -> None:
        self.name, dtype, quantization = arm.name, DTYPES[arm.dtype], arm.quantization
        self.passes: dict[Pass, Callable[[], None]] = {}
        self._device, self._seed = device, config.seed
        loaded = load_model(models.target, dtype, device, quantization, batch_invariant=arm.batch_invariant)
        most = config.sizes[-1]
        if config.context + most > loaded.max_position:
            raise ValueError(
                f"context: {config.context} tokens and a tree of {most} do not fit into the model's "
                f"{loaded.max_position} positions; lower context or rows"
            )
        self.weight_bytes = read_bytes(loaded)
        prompt = min(_PROMPT_TOKENS, loaded.max_position)
        contexts = [context for context in _CONTEXTS if context < loaded.max_position]
        self.target = _with_cache(loaded, max(config.context + most, prompt, *(context + 1 for context in contexts)))
        for size in config.sizes:
            self._add(Pass(TREE, size), self.target, config.context)
        self._add(Pass(PROMPT, prompt), self.target, 0)
        for context in contexts:
            self._add(Pass(CONTEXT, context), self.target, context)
        for folder in [Path(name) for name in models.drafters if name not in reserved_names()][:1]:
            drafter = load_model(folder, dtype, device, quantization)
            context = min(config.context, drafter.max_position - max(_LEVEL_NODES))
            runner = _with_cache(drafter, context + max(_LEVEL_NODES))
            for size in _LEVEL_NODES:
                self._add(Pass(LEVEL, size), runner, context)

    def _add(self, timed: Pass, runner: ModelRunner, context: int) -> None:
        """Add a pass, with the same tokens and the same tree for every arm."""
        source = np.random.default_rng(self._seed)
        size = 1 if timed.kind == CONTEXT else timed.size
        tokens = source.integers(runner.loaded.vocab_size, size=size).tolist()
        slots = np.arange(context + size)
        if timed.kind == PROMPT:  # a chain of which only the last token's logits are computed
            chain, tree = tokens, TokenTree.root(tokens[-1])
        else:
            parents = (-1, *(int(source.integers(node)) for node in range(1, size)))
            chain, tree = tokens[:1], TokenTree(tuple(tokens), parents)
        piece = Piece.from_span(chain, tree, slots[:context], slots[context:])

        def run() -> None:
            if not bool(runner.forward([piece])[-1].isfinite().all()):
                raise RuntimeError(f"{self.name}: a {timed.kind} of {timed.size} gave values that are no numbers")

        self.passes[timed] = run

    def time(self, timed: Pass) -> float:
        return time_second(self._device, self.passes[timed])


def _with_cache(loaded: LoadedModel, num_slots: int) -> ModelRunner:
    """Return a runner whose slots hold random keys and values, since uninitialized memory may hold NaN.

    Usual sizes of passes are captured, as engines do at load.
    """
    runner = ModelRunner(loaded, num_slots, graphs=make_graphs(loaded.device))  # with the graphs that engines use
    for pool in (*runner.tensors.keys, *runner.tensors.values):
        pool.normal_()
    runner.prepare()
    return runner


KERNELS = Measurement(
    "kernels",
    KernelsConfig,
    "benchmarks.kernels:run_kernels",
    "Measure the time of a pass by its number of rows, and the memory bandwidth.",
)
