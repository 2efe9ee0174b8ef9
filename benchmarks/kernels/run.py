"""Time of a pass by its number of rows, with and without native kernels, compared with the memory bandwidth limit.

A pass over one row reads every weight and computes little, so memory limits it. More rows are free as long as the
computation overlaps with the reads. How far this goes decides how large a tree pays off. All arms are loaded at once
and take turns on each pass, and the order of passes and arms rotates. Each timed pass follows an untimed run of the
same pass, so that caches hold what they hold in a run of equal steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from benchmarks.kernels.attention import AttentionTimes, time_attention
from benchmarks.kernels.report import CONTEXT, LEVEL, PROMPT, TREE, Arm, ArmTimes, KernelsReport, Pass, plot_kernels
from benchmarks.neighbours import busy_neighbours
from specinfer import ops
from specinfer.bench.bandwidth import Bandwidth
from specinfer.bench.clock import now
from specinfer.bench.loop import write_files
from specinfer.bench.models import Models, at_size, find_models
from specinfer.bench.options import check_distinct, check_dtype, check_seed, check_whole, rotated
from specinfer.core.config import check_quantization
from specinfer.core.lookups import reserved_names
from specinfer.core.tree import TokenTree
from specinfer.core.tree_shape import MAX_TREE_NODES
from specinfer.model.batch import Piece
from specinfer.model.definition import known_positions, load_config
from specinfer.model.device import DTYPES, find_device
from specinfer.model.graphs.capture import make_graphs
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.pass_work import read_bytes
from specinfer.model.runner import ModelRunner
from specinfer.reporting.environment import Environment
from specinfer.reporting.files import check_files, options_of
from specinfer.reporting.progress_bar import StageBar, stage_bar

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_MAX_CONTEXT = 2**20
_PROMPT_TOKENS = 512
_LEVEL_NODES = (1, 4, 8)
_CONTEXTS = (256, 4096)
_MAX_BUSY = 1024


@dataclass(frozen=True, slots=True)
class KernelsConfig:
    """Options of the kernel measurement.

    Attributes:
        model: A local folder, a hub name, or "demo".
        drafters: "auto", or folders, hub names and "ngram". Draft levels of the first model drafter are timed.
        grow: Size to grow the target to, such as "1b"; drafters grow to a hundredth of that. Llama models only.
        dtypes: Data types to measure, each with native kernels (where there are any) and without. "auto" is the
            checkpoint's, or bfloat16 for grown models.
        quantizations: Any of "int8", "int4" and "fp8", each one more arm with the first dtype.
        rows: Numbers of nodes of the trees. One node is always measured.
        context: Tokens before the tree.
        repeats: Timed passes of each kind.
        busy: Number of other processes that keep cores busy during the measurement.
        json: File to write the numbers to.
        plot: File to write the plot to; its suffix sets the format.

    Raises:
        ValueError: A field is out of range. The message names it.
    """

    model: str = "demo"
    drafters: str | tuple[str, ...] = "auto"
    grow: str | None = None
    dtypes: tuple[str, ...] = ("auto",)
    quantizations: tuple[str, ...] = ()
    device: str = "auto"
    rows: tuple[int, ...] = ROWS
    context: int = 256
    repeats: int = 11
    busy: int = 0
    seed: int = 0
    json: str | Path | None = None
    plot: str | Path | None = None

    def __post_init__(self) -> None:
        check_distinct("rows", self.rows, MAX_TREE_NODES)
        check_whole("context", self.context, 0, _MAX_CONTEXT)
        check_whole("repeats", self.repeats, 1)
        check_whole("busy", self.busy, 0, _MAX_BUSY)
        check_seed(self.seed)
        for dtype in self.dtypes or ("none",):
            check_dtype(dtype)
        for quantization in self.quantizations:
            check_quantization("quantization", quantization)

    @property
    def sizes(self) -> list[int]:
        """Numbers of nodes of the trees, ascending. Times are relative to the first."""
        return sorted({1, *self.rows})


def run_kernels(config: KernelsConfig, console: Console | None = None) -> KernelsReport:
    """Measure pass times, and write the requested files. Progress is shown if the console is a terminal.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used. The message names it, and nothing was measured.
        RuntimeError: A pass failed, or computed values that are not finite.
    """
    check_files(config.json, config.plot)
    device = find_device(config.device)
    models = find_models(config.model, config.drafters)
    _check_room(config, known_positions(models.target))
    with stage_bar(console) as progress:
        progress.stage(f"growing to {config.grow}" if config.grow else "loading")
        # The grown model has one dtype; loading converts it to the others.
        models, _ = at_size(models, config.grow, config.dtypes[0], device)
        progress.stage("loading")
        subjects = [_Subject(arm, models, device, config) for arm in find_arms(models, config, device)]
        target = subjects[0].target.loaded
        _check_room(config, target.max_position)
        bandwidth = Bandwidth(device)
        passes = list(subjects[0].passes)
        seconds: dict[Arm, dict[Pass, list[float]]] = {s.arm: {timed: [] for timed in passes} for s in subjects}
        progress.stage("measuring", config.repeats * len(passes) * len(subjects))
        with busy_neighbours(config.busy):
            for repeat in range(config.repeats):
                bandwidth.measure()
                for place, timed in enumerate(rotated(passes, repeat)):
                    for subject in rotated(subjects, place + repeat):
                        progress.stage(f"{timed.kind} of {timed.size}")
                        seconds[subject.arm][timed].append(subject.time(timed))
                        progress.advance()
        attention = _time_attention(target, config, progress) if device.type == "cuda" else ()
        environment = Environment.from_model(target, models.drafter_parameters)
    report = KernelsReport(
        arms=tuple(
            ArmTimes(s.arm, s.weight_bytes, {timed: tuple(times) for timed, times in seconds[s.arm].items()})
            for s in subjects
        ),
        bandwidth={name: tuple(rates) for name, rates in bandwidth.rates.items()},
        kernels=ops.describe(),
        options=options_of(config),
        environment=environment,
        attention=attention,
    )
    write_files(report, config.json, config.plot, plot_kernels)
    return report


def _time_attention(target: LoadedModel, config: KernelsConfig, progress: StageBar) -> tuple[AttentionTimes, ...]:
    progress.stage("attention")
    num_heads = load_config(target.folder).get_text_config().num_attention_heads
    shape = target.layer_shapes[0]
    return time_attention(shape, num_heads, target.dtype, target.device, repeats=config.repeats, seed=config.seed)


def find_arms(models: Models, config: KernelsConfig, device: torch.device) -> list[Arm]:
    """Return the arms: for each dtype native kernels (if the device has any) and PyTorch's own, then quantizations."""
    has_native = device.type == "cpu" and ops.describe() != "none"
    own = "bfloat16" if config.grow else str(load_config(models.target).dtype or "float32").removeprefix("torch.")
    if own not in DTYPES:
        raise ValueError(f"dtype: the checkpoint is {own}; choose one of {', '.join(DTYPES)}")
    wanted = [str(DTYPES[own if dtype == "auto" else dtype]).removeprefix("torch.") for dtype in config.dtypes]
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"dtype: {', '.join(config.dtypes)} are {', '.join(wanted)}; name none twice")
    arms = [Arm(dtype, native) for dtype in wanted for native in ((True, False) if has_native else (False,))]
    if len(set(config.quantizations)) < len(config.quantizations):
        raise ValueError(f"quantization: {', '.join(config.quantizations)} given; name none twice")
    return [*arms, *(Arm(wanted[0], has_native, quantization) for quantization in config.quantizations)]


def _check_room(config: KernelsConfig, num_positions: int | None) -> None:
    most = config.sizes[-1]
    if num_positions is not None and config.context + most > num_positions:
        raise ValueError(
            f"context: {config.context} tokens and a tree of {most} do not fit into the model's {num_positions} "
            "positions; lower context or rows"
        )


class _Subject:
    """Loaded models of one arm, and the passes that can be timed."""

    def __init__(self, arm: Arm, models: Models, device: torch.device, config: KernelsConfig) -> None:
        self.arm = arm
        self._device = device
        self._seed = config.seed
        self.passes: dict[Pass, Callable[[], None]] = {}
        loaded = self._load(models.target)
        self.weight_bytes = read_bytes(loaded)
        prompt = min(_PROMPT_TOKENS, loaded.max_position)
        contexts = [context for context in _CONTEXTS if context < loaded.max_position]
        most = max(config.context + config.sizes[-1], prompt, *(context + 1 for context in contexts))
        self.target = _with_cache(loaded, most)
        for size in config.sizes:
            self._add(Pass(TREE, size), self.target, config.context)
        self._add(Pass(PROMPT, prompt), self.target, 0)
        for context in contexts:
            self._add(Pass(CONTEXT, context), self.target, context)
        folders = [Path(name) for name in models.drafters if name not in reserved_names()]
        if folders:
            drafter = self._load(folders[0])
            context = min(config.context, drafter.max_position - max(_LEVEL_NODES))
            runner = _with_cache(drafter, context + max(_LEVEL_NODES))
            for size in _LEVEL_NODES:
                self._add(Pass(LEVEL, size), runner, context)

    def _load(self, folder: Path) -> LoadedModel:
        arm = self.arm
        return load_model(folder, DTYPES[arm.dtype], self._device, arm.quantization, native=arm.native)

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
        piece = Piece.of_span(chain, tree, slots[:context], slots[context:])

        def run() -> None:
            if not bool(runner.forward([piece])[-1].isfinite().all()):
                raise RuntimeError(f"{self.arm.name}: a {timed.kind} of {timed.size} gave values that are no numbers")

        self.passes[timed] = run

    def time(self, timed: Pass) -> float:
        """Run a pass twice, and return the seconds of the second run."""
        run = self.passes[timed]
        run()
        started = now(self._device)
        run()
        return now(self._device) - started


def _with_cache(loaded: LoadedModel, num_slots: int) -> ModelRunner:
    """Return a runner whose slots hold random keys and values, since uninitialized memory may hold NaN.

    Usual sizes of passes are captured, as engines do at load.
    """
    runner = ModelRunner(loaded, num_slots, graphs=make_graphs(loaded.device))  # with the graphs that engines use
    for pool in (*runner.tensors.keys, *runner.tensors.values):
        pool.normal_()
    runner.prepare()
    return runner
