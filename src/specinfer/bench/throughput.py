"""Benchmark of the throughput of batches: plain decoding and token trees, on the same loaded weights.

For each batch size the arms run the same prompts in turn, in a rotating order. All prompts of a batch are submitted at
once, and their prefill runs without speculation in every arm. Decoding time starts after the prefill of the last
prompt. Each request then runs to its end. An output that is easy to predict ends early, so the last passes serve fewer
requests.
"""

import copy
import math
from collections.abc import Sequence

import torch
from rich.console import Console

from specinfer.bench.batch_measurement import measure_batch
from specinfer.bench.ceilings import measure_ceilings
from specinfer.bench.chat_prompts import find_prompts, kinds_for
from specinfer.bench.environment import Environment
from specinfer.bench.inputs import check_files, options_of, showing_progress, write_json
from specinfer.bench.models import Models, at_size, dtype_of, find_models
from specinfer.bench.report import PLAIN, first_difference
from specinfer.bench.roofline import Roofline
from specinfer.bench.throughput_plans import ThroughputConfig, Turn, schedule
from specinfer.bench.throughput_plot import plot_throughput
from specinfer.bench.throughput_report import BatchArm, BatchResult, BatchRun, ThroughputReport
from specinfer.core.config import parse_tree
from specinfer.core.sampling import SamplingParams
from specinfer.llm import LLM
from specinfer.model.device import find_device
from specinfer.policy.base import FixedPolicy, SpeculationPolicy, budget_of
from specinfer.policy.optimizer import TreeSizes

_MAX_READ = 8192  # prompt tokens in one pass; the prompts of most batches fit, so that their requests start together


def run_throughput(config: ThroughputConfig, console: Console | None = None) -> ThroughputReport:
    """Run the benchmark and write the requested files. Progress is shown if the console is a terminal.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used; the message names it. Nothing was measured.
        RuntimeError: A request failed, or in float32 a tree changed a greedy output.
    """
    check_files(config.json, config.plot)
    device = find_device(config.device)
    models = find_models(config.model, config.drafters)
    prompts = find_prompts(
        models.target,
        config.max_tokens,
        kinds_for(config.model, config.kinds, config.prompts),
        count=max(config.num_prompts, config.largest),
        num_chars=config.prompt_chars,
        prompts=config.prompts,
    )
    with showing_progress(console) as progress:
        task = progress.add_task(f"growing to {config.grow}" if config.grow else "loading", total=None)
        models, dtype = at_size(models, config.grow, config.dtype, device)
        progress.update(task, description="loading")
        ceilings = measure_ceilings(device, dtype_of(models.target, dtype))  # before models fill the memory
        texts = prompts.token_ids
        with _load(config, models, dtype, texts) as llm:
            progress.update(task, description="timing passes")
            policies = _policies(config, llm)
            sampling = prompts.end_answers(llm, [config.sampling_params(i) for i in range(len(texts))])
            turns = list(schedule(config, len(texts)))
            roofline = Roofline(llm, ceilings)
            progress.update(task, description="warming up", total=sum(len(turn.arms) for turn in turns))
            runs: dict[tuple[int, str], list[BatchRun]] = {key: [] for key in policies}
            for turn in turns:
                size, made = len(turn.prompts), {}
                if turn.repeat >= 0:
                    progress.update(task, description=f"{size} requests together")
                for name in turn.arms:
                    made[name] = _measure(llm, policies[size, name], roofline, texts, turn, sampling)
                    progress.advance(task)
                _check_lossless(made, config, llm)
                if turn.repeat >= 0:
                    for name, run in made.items():
                        runs[size, name].append(run)
            environment = Environment.of(llm, models.drafter_parameters)
    results = []
    for size in config.batch_sizes:
        plain, *trees = (BatchArm(name, tuple(runs[size, name])) for name in (PLAIN, *config.trees))
        results.append(BatchResult(size, plain, tuple(trees)))
    report = ThroughputReport(tuple(results), options_of(config), environment, ceilings, prompts.kinds)
    if config.json is not None:
        write_json(config.json, report.as_dict())
    if config.plot is not None:
        plot_throughput(report, config.plot)
    return report


def _load(config: ThroughputConfig, models: Models, dtype: str, prompts: Sequence[list[int]]) -> LLM:
    lengths = sorted(map(len, prompts), reverse=True)
    longest = lengths[0] + config.max_tokens
    num_slots = config.largest * (longest + _most_nodes(config, models))
    llm = LLM(
        models.target,
        drafters=models.drafters,
        tree="1",  # applies only until a policy is set
        dtype=dtype,
        quantization=config.quantization,
        drafter_quantization=config.drafter_quantization,
        select=config.select,
        speculation_policy=config.scheduler,
        device=config.device,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        max_model_len=longest,
        # The cache has 64 extra slots for each request, and the largest trees of all requests must fit.
        max_num_seqs=math.ceil(num_slots / (longest + 64)) + config.largest,
        max_num_batched_tokens=min(sum(lengths[: config.largest]), _MAX_READ),
        enable_prefix_caching=False,  # every arm computes the prefill itself
        seed=config.seed,
    )
    if llm.target.cache.num_slots < num_slots:
        raise ValueError(
            f"batch_sizes: {config.largest} requests of {longest} tokens and their trees need {num_slots} slots of the "
            f"KV cache, and memory allows {llm.target.cache.num_slots}; lower batch_sizes, max_tokens or prompt_chars"
        )
    return llm


def _most_nodes(config: ThroughputConfig, models: Models) -> int:
    shapes = [parse_tree(tree) for tree in config.trees]
    sizes = [budget_of(shape, len(models.drafters)).max_nodes for shape in shapes if not shape.is_auto]
    return max([*sizes, TreeSizes.SIZES[-1]])


def _policies(config: ThroughputConfig, llm: LLM) -> dict[tuple[int, str], SpeculationPolicy]:
    """Return the policy of each (batch size, arm), which learns over the whole run, separately for each size."""
    assert llm.drafter is not None
    made: dict[tuple[int, str], SpeculationPolicy] = {}
    shared = {id(drafter): drafter for drafter in llm.drafter.drafters}  # drafters are not copied
    for name in (PLAIN, *config.trees):
        # Costs are measured for this run, since its results must not depend on cached ones.
        policy = FixedPolicy() if name == PLAIN else llm.make_policy(parse_tree(name), fresh=True)
        made |= {(size, name): copy.deepcopy(policy, dict(shared)) for size in config.batch_sizes}
    return made


def _measure(
    llm: LLM,
    policy: SpeculationPolicy,
    roofline: Roofline,
    prompts: Sequence[list[int]],
    turn: Turn,
    sampling: Sequence[SamplingParams],
) -> BatchRun:
    params, texts = [sampling[i] for i in turn.prompts], [prompts[i] for i in turn.prompts]
    return measure_batch(llm, policy, turn.prompts, texts, params, turn.repeat, roofline=roofline)


def _check_lossless(made: dict[str, BatchRun], config: ThroughputConfig, llm: LLM) -> None:
    """Check that greedy outputs in unquantized float32 equal plain decoding.

    In lower precision, passes of different sizes round differently, so the report counts differing outputs instead.
    """
    loaded = llm.target.loaded
    if config.temperature != 0 or loaded.dtype != torch.float32 or loaded.quantization is not None:
        return
    plain = made[PLAIN]
    for name, run in made.items():
        for number, tokens, expected in zip(plain.prompts, run.outputs, plain.outputs, strict=True):
            if tokens != expected:
                place = first_difference(tokens, expected)
                raise RuntimeError(
                    f"{len(plain.prompts)} requests together, prompt {number}: with tree {name}, output token {place} "
                    "is another than without"
                )
