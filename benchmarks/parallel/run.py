"""Benchmark of split targets: plain decoding and token trees over a slow link, and the whole target in one process.

All targets are loaded at once and run the same batches one after the other: each setting, and each arm within it, in
rotating orders. Decoding time starts after the prefill of all prompts. The ranks of a split are spread over two hosts,
and the link between them is configured again for each setting.
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from rich.console import Console

from benchmarks.parallel.engine import EngineJob
from benchmarks.parallel.namespaces import Namespaces
from benchmarks.parallel.plans import WHOLE, ParallelBenchConfig, Setting, parse_split, schedule
from benchmarks.parallel.prediction import HereCosts
from benchmarks.parallel.processes import Engine, Where, message_seconds
from benchmarks.parallel.report import ParallelReport, plot_parallel
from benchmarks.parallel.turns import ParallelTurns
from specinfer.bench.loop import write_files
from specinfer.bench.models import Models, at_size, find_models
from specinfer.bench.options import precision_of
from specinfer.bench.prompts import token_prompts
from specinfer.core.systems import usable_cpus
from specinfer.core.tree_shape import parse_tree
from specinfer.planning.cluster import TargetShape
from specinfer.planning.network import Link
from specinfer.planning.weight_bytes import mean_bytes
from specinfer.policy.base import budget_of
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.reporting.files import check_files, options_of
from specinfer.reporting.progress_bar import stage_bar

_AUTO_NODES = 256  # most nodes of a tree of "auto"
_TREE_ROOM = 64  # cache slots of each request in addition to those of its tokens
_MAX_READ = 512  # prompt tokens in one pass
_NO_DELAY = Link(0.0, 1.25e9)


def run_parallel(config: ParallelBenchConfig, console: Console | None = None) -> ParallelReport:
    """Run the benchmark and write the requested files. Progress is shown if the console is a terminal.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used; the message names it. Nothing was measured.
        RuntimeError: A request or a process failed.
    """
    check_files(config.json, config.plot)
    models = find_models(config.model, config.drafters)
    prompts = token_prompts(
        models.target,
        config.max_tokens,
        count=max(config.num_prompts, config.largest),
        num_chars=config.prompt_chars,
        prompts=config.prompts,
    )
    threads = threads_of(config)
    with stage_bar(console) as progress, ExitStack() as stack:
        progress.stage(f"growing to {config.grow}" if config.grow else "loading")
        namespaces = stack.enter_context(Namespaces()) if config.namespaces else None
        models, dtype = at_size(models, config.grow, config.dtype)
        job = _job(config, models, dtype, [len(prompt) for prompt in prompts])
        progress.stage("loading the whole target")
        whole = stack.enter_context(Engine(job, WHOLE, Where(namespaces, 0, threads)))
        environment = whole.environment
        width = mean_bytes(models.target, environment.dtype, environment.quantization, torch.device("cpu"))
        shape = TargetShape.of(models.target, width)
        progress.stage("timing passes")
        here = _measure_here(config, whole, job, namespaces, threads)
        engines = {WHOLE.split: whole}
        for number, split in enumerate(config.splits):
            progress.stage(f"loading {split}")
            _join(namespaces, _NO_DELAY)
            where = Where(namespaces, number, threads)
            engines[split] = stack.enter_context(Engine(job, Setting(*parse_split(split)), where))
        turns = ParallelTurns(config, prompts, engines, shape, here)
        for setting in config.settings:
            progress.stage(f"timing passes: {setting.name}")
            _set_link(config, namespaces, setting)
            engines[setting.split].prepare(setting)
        for engine in engines.values():
            engine.forget_peaks()
        planned = list(schedule(config, len(prompts)))
        progress.stage("warming up", sum(len(turn.settings) * len(turn.trees) for turn in planned))
        for turn in planned:
            for setting in turn.settings:
                _set_link(config, namespaces, setting)
                turns.run(turn, setting, progress.stage, progress.advance)
        report = ParallelReport(
            results=turns.results(),
            cable="none" if namespaces is None else namespaces.cable.method,
            memory={split: engine.memory() for split, engine in engines.items()},
            costs=_as_numbers(here),
            options=options_of(config) | {"threads": threads},
            environment=environment,
        )
    write_files(report, config.json, config.plot, plot_parallel)
    return report


def threads_of(config: ParallelBenchConfig) -> int:
    """Return the number of threads of each process."""
    if config.threads is not None:
        return config.threads
    return max(usable_cpus() // math.prod(parse_split(config.splits[0])), 1)


def _join(namespaces: Namespaces | None, link: Link) -> None:
    if namespaces is not None:
        namespaces.cable.set(link)


def _set_link(config: ParallelBenchConfig, namespaces: Namespaces | None, setting: Setting) -> None:
    _join(namespaces, config.link(setting) or _NO_DELAY)


def _job(config: ParallelBenchConfig, models: Models, dtype: str, lengths: list[int]) -> EngineJob:
    longest = max(lengths) + config.max_tokens
    shapes = [parse_tree(tree) for tree in config.trees]
    nodes = [_AUTO_NODES if one.is_auto else budget_of(one, len(models.drafters)).max_nodes for one in shapes]
    num_slots = config.largest * (longest + max(nodes))
    options: dict[str, Any] = {
        "drafters": list(models.drafters),
        **precision_of(config, dtype),
        "select": config.select,
        "device": "cpu",
        "max_model_len": longest,
        "max_num_seqs": max(config.largest, math.ceil(num_slots / (longest + _TREE_ROOM))),
        "max_num_batched_tokens": _MAX_READ,
        "enable_prefix_caching": False,  # every arm computes the prefill itself
        "seed": config.seed,
    }
    situations = [(size, temperature) for size in config.batch_sizes for temperature in config.temperatures]
    return EngineJob(str(models.target), options, list(config.trees), situations, dict(models.drafter_parameters))


def _measure_here(
    config: ParallelBenchConfig, whole: Engine, job: EngineJob, namespaces: Namespaces | None, threads: int
) -> HereCosts:
    """Time passes of the whole target and of a tensor rank's part, alone and while other processes compute."""
    splits = [parse_split(split) for split in config.splits]
    most = min(max(tensor * min(pipeline, config.largest) for tensor, pipeline in splits), usable_cpus() // threads)
    busy = {1: CostModel.from_dict(whole.costs())}
    parts: dict[int, Curve] = {}
    with ExitStack() as stack:
        others = [
            stack.enter_context(Engine(job, WHOLE, Where(namespaces, 0, threads))) for _ in range(1, max(most, 1))
        ]
        for number in range(2, most + 1):
            busy[number] = CostModel.from_dict(_beside(others[: number - 1], whole.costs))
        for tensor in sorted({tensor for tensor, _ in splits if tensor > 1}):
            sizes, seconds = _beside(others[: tensor - 1], partial(whole.part, tensor))
            parts[tensor] = Curve(sizes, seconds)
    _join(namespaces, _NO_DELAY)
    return HereCosts(busy, parts, message_seconds(namespaces))


def _beside(others: list[Engine], measure: Callable[[], Any]) -> Any:
    """Return the result of `measure`, called while the other engines compute continuously."""
    with ThreadPoolExecutor(max(len(others), 1)) as pool:
        ended: list[bool] = []

        def compute(other: Engine) -> None:
            while not ended:
                other.be_busy(0.5)

        working = [pool.submit(compute, other) for other in others]
        try:
            time.sleep(0.2 if others else 0.0)  # until they have started to compute
            return measure()
        finally:
            ended.append(True)
            for one in working:
                one.result()


def _as_numbers(here: HereCosts) -> dict[str, object]:
    return {
        "whole": {str(number): costs.as_dict() for number, costs in here.busy.items()},
        "parts": {str(number): [part.sizes.tolist(), part.seconds.tolist()] for number, part in here.parts.items()},
        "message": here.message,
    }
