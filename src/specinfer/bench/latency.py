"""Latency of one request at a time: plain decoding and token trees, on the same loaded weights.

The arms take turns on each prompt in rotating order, so that a machine that slows down slows all of them. Other
engines, if requested, take turns too. Each arm of ours generates the same tokens. The clock starts at the first of
them: the prefill runs without speculation in every arm, and the drafter's own prefill counts as drafting time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from specinfer.bench.ceilings import measure_ceilings
from specinfer.bench.chat_prompts import check_kinds, find_prompts, kinds_for
from specinfer.bench.clock import now
from specinfer.bench.environment import Environment
from specinfer.bench.inputs import (
    AnyPrompt,
    check_dtype,
    check_files,
    check_prompts,
    check_seed,
    check_trees,
    check_whole,
    fresh_salt,
    options_of,
    showing_progress,
    write_json,
)
from specinfer.bench.models import Models, at_size, dtype_of, find_models
from specinfer.bench.peers.names import parse_peer
from specinfer.bench.peers.race import Peers
from specinfer.bench.plot import plot_report
from specinfer.bench.report import PLAIN, Arm, LatencyReport, Pass, Run, first_difference
from specinfer.bench.roofline import Roofline
from specinfer.bench.stages import StageSample
from specinfer.core.config import MAX_TREE_NODES, check_quantization, parse_select, parse_tree
from specinfer.core.parallel_config import ParallelConfig
from specinfer.core.sampling import MAX_SEED, SamplingParams
from specinfer.engine.timer import DeviceTimer
from specinfer.llm import LLM
from specinfer.model.device import find_device
from specinfer.policy.base import FixedPolicy, SpeculationPolicy


@dataclass(frozen=True, slots=True)
class LatencyConfig:
    """Options of the latency measurement. Plain decoding is always one of the arms.

    Attributes:
        model: A local folder, a hub name, or "demo".
        drafters: "auto", or folders, hub names and "ngram".
        trees: One arm each: "auto" or children per level such as "1,1,3,1". The first gives the headline numbers.
        peers: Other engines to measure in the same run, such as "llama.cpp-draft:q8_0".
        grow: Size to grow the target to, such as "1b"; drafters grow to a hundredth of that. Llama models only.
        dtype: Data type of the models; "auto" is the checkpoint's, or bfloat16 for grown models.
        quantization: Quantization of the target ("int8", "int4" or "fp8"), or None for none.
        drafter_quantization: Quantization of the model drafters.
        select: Selection of the model drafters that draft, as for the option of this name.
        scheduler: A policy file made by `specinfer tune --policy`, which chooses trees for the tree "auto".
        tensor_parallel_size, pipeline_parallel_size: Numbers of ranks that hold the target, all on this machine.
        num_prompts: Number of held-out texts to continue, or of chat prompts.
        max_tokens: Tokens generated for each prompt. The end-of-text token does not end them, but answers to chat
            prompts are no longer than plain decoding's.
        kinds: Kinds of chat prompts to answer. None means all kinds if the model is "demo-chat", and texts to continue
            otherwise.
        temperature: Sampling temperature; 0 is greedy.
        repeats: Measured runs of each arm on each prompt.
        warmup: Unmeasured runs of each arm before them.
        prompt_chars: Approximate length of the prompts in characters.
        prompts: Texts or token ids to continue in place of the held-out texts.
        json: File to write the numbers to.
        plot: File to write the plot to; its suffix sets the format.

    Raises:
        ValueError: A field is out of range. The message names it.
    """

    model: str = "demo"
    drafters: str | tuple[str, ...] = "auto"
    trees: tuple[str, ...] = ("auto",)
    peers: tuple[str, ...] = ()
    grow: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    drafter_quantization: str | None = None
    select: str = "all"
    scheduler: str | Path | None = None
    device: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    num_prompts: int = 8
    max_tokens: int = 128
    temperature: float = 0.0
    repeats: int = 3
    warmup: int = 1
    seed: int = 0
    prompt_chars: int = 600
    prompts: tuple[AnyPrompt, ...] | None = None
    kinds: tuple[str, ...] | None = None
    json: str | Path | None = None
    plot: str | Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 1), ("max_tokens", 2), ("repeats", 1), ("warmup", 0), ("prompt_chars", 1)):
            check_whole(name, getattr(self, name), least)
        check_seed(self.seed)
        check_dtype(self.dtype)
        ParallelConfig(self.tensor_parallel_size, self.pipeline_parallel_size)
        check_quantization("quantization", self.quantization)
        check_quantization("drafter_quantization", self.drafter_quantization)
        check_trees(self.trees)
        parse_select(self.select)
        check_prompts(self.prompts)
        check_kinds(self.kinds, self.prompts)
        for peer in self.peers:
            parse_peer(peer, "float32")
        self.sampling_params(0)

    def sampling_params(self, prompt: int) -> SamplingParams:
        """Return the sampling parameters of a prompt, which are the same for every arm and repeat."""
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seed=(self.seed + prompt) & MAX_SEED,
            ignore_eos=True,
        )

    def as_dict(self) -> dict[str, object]:
        return options_of(self)


def run_latency(config: LatencyConfig, console: Console | None = None) -> LatencyReport:
    """Measure latency, and write the requested files. Progress is shown if the console is a terminal.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used. The message names it, and nothing was measured.
        RuntimeError: A request failed, or a tree changed a greedy output of a float32 target without quantization.
    """
    check_files(config.json, config.plot)
    device = find_device(config.device)  # growing is slow, so a missing device is reported before
    models = find_models(config.model, config.drafters)
    prompts = find_prompts(
        models.target,
        config.max_tokens,
        kinds_for(config.model, config.kinds, config.prompts),
        count=config.num_prompts,
        num_chars=config.prompt_chars,
        prompts=config.prompts,
    )
    with showing_progress(console) as progress:
        task = progress.add_task(f"growing to {config.grow}" if config.grow else "loading", total=None)
        models, dtype = at_size(models, config.grow, config.dtype, device)
        progress.update(task, description="loading")
        ceilings = measure_ceilings(device, dtype_of(models.target, dtype))  # while there is free memory
        texts, longest = prompts.token_ids, prompts.longest
        with _load(config, models, dtype, longest) as llm, _peers(config, models, llm, longest) as peers:
            policies = {PLAIN: FixedPolicy()} | _tree_policies(config, llm)
            tell = partial(_describe, progress, task)
            peers.start(config.sampling_params(0), tell)
            peers.tune(texts, config.sampling_params(0), tell)
            sampling = prompts.end_answers(llm, [config.sampling_params(i) for i in range(len(texts))])
            turns = list(_schedule([*policies, *peers.names], len(texts), config))
            roofline = Roofline(llm, ceilings)
            progress.update(task, description="warming up", total=len(turns))
            runs: dict[str, list[Run]] = {name: [] for name in policies}
            for number, repeat, name in turns:
                prompt, params = texts[number], sampling[number]
                if name not in policies:
                    peers.measure(name, prompt, params, number, repeat)
                else:
                    run = _measure(llm, policies[name], roofline, prompt, params, number, repeat)
                    if repeat >= 0:
                        runs[name].append(run)
                        _check_lossless(runs, config, llm)
                if repeat >= 0:
                    progress.update(task, description=f"prompt {number + 1}/{len(texts)}")
                progress.advance(task)
            environment = Environment.of(llm, models.drafter_parameters)
    plain, *trees = (Arm(name, tuple(runs[name])) for name in policies)
    beside = peers.report() if config.peers else None
    report = LatencyReport(plain, tuple(trees), config.as_dict(), environment, beside, ceilings, prompts.kinds)
    if config.json is not None:
        write_json(config.json, report.as_dict())
    if config.plot is not None:
        plot_report(report, config.plot)
    return report


def _describe(progress: Any, task: Any, doing: str) -> None:
    progress.update(task, description=doing)


def _load(config: LatencyConfig, models: Models, dtype: str, longest: int) -> LLM:
    return LLM(
        models.target,
        drafters=models.drafters,
        tree="1",  # only until each arm sets its own policy
        dtype=dtype,
        quantization=config.quantization,
        drafter_quantization=config.drafter_quantization,
        select=config.select,
        speculation_policy=config.scheduler,
        device=config.device,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        max_model_len=longest + config.max_tokens,
        # One request runs at a time. The cache adds 64 slots per sequence, and the largest tree must fit.
        max_num_seqs=1 + MAX_TREE_NODES // 64,
        enable_prefix_caching=False,  # every arm runs its own prefill
        seed=config.seed,
    )


def _peers(config: LatencyConfig, models: Models, llm: LLM, longest: int) -> Peers:
    loaded, max_len = llm.target.loaded, longest + config.max_tokens
    return Peers(config.peers, models, dtype=loaded.dtype, device=loaded.device, max_len=max_len)


def _tree_policies(config: LatencyConfig, llm: LLM) -> dict[str, SpeculationPolicy]:
    """Return one policy for each tree, used for the whole measurement so that a policy that learns keeps learning."""
    assert llm.engine.drafter is not None
    # Costs are measured anew, so that results do not depend on an old file.
    return {tree: llm.make_policy(parse_tree(tree), fresh=True) for tree in config.trees}


def _schedule(names: Sequence[str], num_prompts: int, config: LatencyConfig) -> Iterator[tuple[int, int, str]]:
    """Yield (prompt, repeat, arm) in the order to run. Warm-up runs have negative repeats."""
    for repeat in range(-config.warmup, 0):
        yield from ((0, repeat, name) for name in names)
    for turn in range(config.repeats * num_prompts):
        repeat, prompt = divmod(turn, num_prompts)
        # Adding the repeat makes an arm's place change between repeats for any number of prompts.
        shift = (prompt + repeat) % len(names)
        yield from ((prompt, repeat, name) for name in (*names[shift:], *names[:shift]))


def _measure(
    llm: LLM,
    policy: SpeculationPolicy,
    roofline: Roofline,
    prompt: list[int],
    params: SamplingParams,
    number: int,
    repeat: int,
) -> Run:
    engine, device = llm.engine, llm.target.loaded.device
    engine.policy = FixedPolicy()
    start = now(device)
    stream = llm.stream({"prompt_token_ids": prompt, "cache_salt": fresh_salt()}, params)
    chunk = next(stream)
    token_ids, passes = chunk.token_ids, []
    first = now(device)
    engine.policy, engine.timer = policy, DeviceTimer(device)
    for chunk in stream:  # one chunk for each step
        token_ids += chunk.token_ids
        step = engine.metrics.recent[-1]
        passes.append(
            Pass(step.num_levels, step.num_guessed, step.num_generated - 1, step.draft_time, step.target_time)
        )
    last = now(device)
    timed, engine.timer = engine.timer.take(), None
    assert chunk.output is not None
    if chunk.output.error is not None:
        raise RuntimeError(f"prompt {number}: {chunk.output.error}")
    samples = tuple(StageSample.of(step, roofline.floors(step.record)) for step in timed)
    return Run(number, repeat, first - start, last - first, tuple(token_ids), tuple(passes), samples=samples)


def _check_lossless(runs: dict[str, list[Run]], config: LatencyConfig, llm: LLM) -> None:
    """Check that all arms generated the same tokens for a prompt, once all have run it.

    In lower precision, passes of different sizes may give different tokens. The report counts those.
    """
    loaded = llm.target.loaded
    exact = config.temperature == 0 and loaded.dtype == torch.float32 and loaded.quantization is None
    if not exact or len({len(made) for made in runs.values()}) > 1:
        return
    plain = runs[PLAIN][-1]
    for name, made in runs.items():
        if made[-1].token_ids != plain.token_ids:
            place = first_difference(plain.token_ids, made[-1].token_ids)
            raise RuntimeError(f"prompt {plain.prompt}: with tree {name}, output token {place} is another than without")
