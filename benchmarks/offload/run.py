"""Streamed targets: plain decoding and token trees against the disk's bandwidth and peers with the same memory cap.

Our arms run in one process, and each peer in a process of its own. They take turns on the same prompts in rotating
order. Before and after each of our arms, the disk is read directly while nothing else runs. The clock of decoding
starts when the prefill of all prompts is done, and for peers at the first token.
"""

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.disk import DiskBandwidth
from benchmarks.memory_cap import MemoryCap, cap_memory
from benchmarks.offload.engine import OwnSetup
from benchmarks.offload.files import check_room, needs_of, streamed_files, weight_bytes
from benchmarks.offload.own import OwnArms
from benchmarks.offload.plans import OffloadBenchConfig, schedule
from benchmarks.offload.report import OffloadReport
from benchmarks.offload.turns import Turns, compare_resident
from benchmarks.offload.views import plot_offload
from benchmarks.peers.race import Peers
from specinfer.bench.bandwidth import LinkBandwidth
from specinfer.bench.loop import write_files
from specinfer.bench.models import Models, find_models, plan_growth
from specinfer.bench.options import precision_of
from specinfer.bench.prompts import token_prompts
from specinfer.core.options import parse_size
from specinfer.core.tree_shape import parse_tree
from specinfer.model.device import find_device
from specinfer.model.offload.transfer import CudaTransfer
from specinfer.policy.base import budget_of
from specinfer.reporting.files import check_files, options_of
from specinfer.reporting.progress_bar import stage_bar

_BUDGET_SHARE = 3  # the default budget is the target's bytes divided by this
_AUTO_NODES = 256  # assumed size of an "auto" tree: the cache must hold the largest requested tree
_LEAST_TREE_ROOM = 64  # cache slots that each request has in addition to those of its tokens
_MAX_READ = 2048  # prefill tokens in one pass, since activations count against the budget
_MAX_SHARE = 0.8  # share of the machine's memory that a resident target may take


def run_offload(config: OffloadBenchConfig, console: Console | None = None) -> OffloadReport:
    """Measure the arms on a streamed target, and write the requested files.

    Progress is shown if the console is a terminal.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used. The message names it, and nothing was measured.
        RuntimeError: A request failed, or in float32 a tree or streaming changed a greedy output.
    """
    check_files(config.json, config.plot)
    if find_device(config.device).type == "cpu" and config.offload == "cpu":
        raise ValueError('offload: the target runs on the CPU, whose memory "cpu" stands for; leave it at "disk"')
    models = find_models(config.model, config.drafters)
    prompts = token_prompts(
        models.target,
        config.max_tokens,
        count=max(config.num_prompts, config.largest),
        num_chars=config.prompt_chars,
        prompts=config.prompts,
    )
    dtype = "bfloat16" if config.grow and config.dtype == "auto" else config.dtype
    plan = plan_growth(models, config.grow, dtype) if config.grow else None
    needs = needs_of(config, models, plan, dtype)
    check_room(needs)
    with stage_bar(console) as progress, ExitStack() as stack:
        progress.stage("loading")
        if plan is not None:
            written = sum(need.num_bytes for need in needs if need.field == "grow")
            progress.stage(f"growing to {config.grow}" + (f", {written / 1e9:.1f} GB" if written else ""))
            models = plan.make(find_device(config.device))
        target_bytes = weight_bytes(models.target, dtype, config.quantization)
        budget = target_bytes // _BUDGET_SHARE
        if config.memory_budget is not None:
            budget = parse_size("memory_budget", config.memory_budget)
        if config.check_resident:
            _check_fits(target_bytes)
        progress.stage(f"loading {target_bytes / 2**30:.2f} GiB into {budget / 2**30:.2f}, and timing passes")
        cap = cap_memory(budget) if config.cap_own else MemoryCap()
        own = stack.enter_context(OwnArms(_job(config, models, dtype, prompts, budget), cap))
        loaded = own.loaded
        yardstick = yardstick_of(config, models.target, torch.device(loaded.device))
        stack.callback(yardstick.close)
        peers = stack.enter_context(
            Peers(
                config.peers,
                models,
                dtype=getattr(torch, loaded.dtype),
                device=torch.device(loaded.device),
                max_len=max(map(len, prompts)) + config.max_tokens,
                memory=budget,
                is_capped=config.offload == "disk",
            )
        )

        def look() -> float:
            progress.stage("reading the disk" if config.offload == "disk" else "copying to the device")
            return yardstick.measure(config.disk_seconds)

        turns = Turns(config, prompts, own, peers)
        turns.prepare(progress.stage)
        planned = list(schedule(config, len(prompts), peers.names))
        progress.stage("warming up", sum(len(turn.arms) for turn in planned))
        for turn in planned:
            turns.run(turn, look, progress.stage, progress.advance)
        report = OffloadReport(
            results=turns.results(),
            loading=loaded.loading,
            target_bytes=target_bytes,
            memory_budget=budget,
            own_cap=cap.method,
            disk_rates={way: tuple(rates) for way, rates in yardstick.rates.items()},
            disk_is_direct=yardstick.is_direct,
            options=options_of(config),
            environment=loaded.environment,
            peers=turns.peer_results(),
            peers_skipped=peers.report().skipped,
        )
        # The process's own peak is wrong: the system also counts memory from before it executed its program.
        environment = replace(report.environment, peak_memory=report.peak_resident or report.environment.peak_memory)
        report = replace(report, environment=environment)
        if config.check_resident:
            stack.close()  # the two processes may not fit into memory together
            progress.stage("comparing with the target loaded whole")
            whole = _job(config, models, dtype, prompts, None)
            report = replace(report, resident=compare_resident(report.results, config, prompts, whole))
    write_files(report, config.json, config.plot, plot_offload)
    return report


def yardstick_of(config: OffloadBenchConfig, target: Path, device: torch.device) -> DiskBandwidth | LinkBandwidth:
    """Return the bandwidth measurement of the disk or link that layers are read through."""
    if config.offload == "cpu":
        return LinkBandwidth(CudaTransfer(device))
    return DiskBandwidth(streamed_files(config, target))


def _check_fits(target_bytes: int) -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if target_bytes > _MAX_SHARE * whole:
        raise ValueError(
            f"check_resident: the target's {target_bytes / 2**30:.1f} GiB do not fit into this machine's "
            f"{whole / 2**30:.1f}; leave it out, or measure a smaller target"
        )


def _job(
    config: OffloadBenchConfig, models: Models, dtype: str, prompts: Sequence[list[int]], budget: int | None
) -> OwnSetup:
    """Return the setup of our process. With `budget` None, the whole target is loaded into memory."""
    lengths = sorted(map(len, prompts), reverse=True)
    longest = lengths[0] + config.max_tokens
    shapes = [parse_tree(tree) for tree in config.trees]
    nodes = [_AUTO_NODES if one.is_auto else budget_of(one, len(models.drafters)).max_nodes for one in shapes]
    num_slots = sum(lengths[: config.largest]) + config.largest * config.max_tokens + max(nodes)
    options: dict[str, Any] = {
        "drafters": list(models.drafters),
        **precision_of(config, dtype),
        "select": config.select,
        "device": config.device,
        "max_model_len": longest,
        # Each sequence adds cache slots for drafts. If the budget is too small, trees of large batches are cut.
        "max_num_seqs": max(config.largest, math.ceil(num_slots / (longest + _LEAST_TREE_ROOM))),
        "max_num_batched_tokens": min(sum(lengths[: config.largest]), _MAX_READ),
        "enable_prefix_caching": False,  # every arm runs its own prefill
        "seed": config.seed,
    }
    if budget is not None:
        folder = None if config.offload_folder is None else str(config.offload_folder)
        options |= {"offload": config.offload, "memory_budget": budget, "offload_folder": folder}
    situations = [(size, temperature) for size in config.batch_sizes for temperature in config.temperatures]
    return OwnSetup(
        str(models.target), options, list(config.trees), situations, num_slots, dict(models.drafter_parameters)
    )
