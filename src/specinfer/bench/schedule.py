"""Benchmark of schedulers on a mixed workload: fixed configurations, "auto" by cost alone, and the learned one.

All arms run on each prompt in turn, in one run and on the same loaded weights, in a rotating order. Time is measured
from the first token on. Arms that learn keep learning from prompt to prompt. No arm can look up the output of another.
"""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console

from specinfer.bench.chat_prompts import find_prompts, kinds_for
from specinfer.bench.clock import now
from specinfer.bench.environment import Environment
from specinfer.bench.inputs import check_files, known_positions, showing_progress, write_json
from specinfer.bench.models import Models, at_size, find_models
from specinfer.bench.report import Pass, Run, first_difference
from specinfer.bench.schedule_plans import AUTO, LEARNED, OFF_NAME, ScheduleConfig, schedule, split_arm
from specinfer.bench.schedule_plot import plot_schedule
from specinfer.bench.schedule_report import ScheduleArm, ScheduleReport
from specinfer.bench.schedule_work import PARTS, Work, answered, make_work, most_tokens
from specinfer.core.config import MAX_TREE_NODES, parse_tree
from specinfer.core.lookups import LOOKUPS
from specinfer.llm import LLM
from specinfer.model.device import find_device
from specinfer.policy.auto_policy import AutoPolicy
from specinfer.policy.base import FixedPolicy, SpeculationPolicy, budget_of
from specinfer.policy.cost_cache import cached_costs
from specinfer.policy.features import find_slots
from specinfer.policy.learned_policy import LearnedPolicy, load_policy_network
from specinfer.policy.network import PolicyNetwork


def run_schedule(config: ScheduleConfig, console: Console | None = None) -> ScheduleReport:
    """Run the benchmark and write the requested files. Progress is shown if the console is a terminal.

    Raises:
        ModelError: A model, or the scheduler's file, cannot be used.
        ValueError: An option cannot be used; the message names it. Nothing was measured.
        RuntimeError: A request failed, or the output of an arm in unquantized float32 differs from plain decoding.
    """
    check_files(config.json, config.plot)
    device = find_device(config.device)
    PolicyNetwork.load(config.scheduler)  # growing takes long, so check the file before
    models = find_models(config.model, config.drafters)
    kinds, chats = kinds_for(config.model, config.kinds), None
    if kinds:
        chats = find_prompts(models.target, config.max_tokens, kinds, count=len(kinds) * config.num_prompts)
    room = known_positions(models.target)
    longest = (most_tokens(config.prompt_tokens) if chats is None else chats.longest) + config.max_tokens
    if chats is None and room is not None and longest > room:
        raise ValueError(
            f"max_tokens: prompts of {most_tokens(config.prompt_tokens)} tokens and {config.max_tokens} more do not "
            f"fit into the context of {room}; lower max_tokens or prompt_tokens"
        )
    with showing_progress(console) as progress:
        task = progress.add_task(f"growing to {config.grow}" if config.grow else "loading", total=None)
        models, dtype = at_size(models, config.grow, config.dtype, device)
        progress.update(task, description="loading")
        with _load(config, models, dtype, longest) as llm:
            policies = _policies(config, llm)
            llm.engine.policy = copy.deepcopy(policies[AUTO])  # faster preparation; the arm does not learn from it
            progress.update(task, description="preparing", total=config.num_prompts)
            if chats is not None:
                work = answered(llm, chats, config.sampling_params)
            else:
                advance = partial(_completed, progress, task)
                work = make_work(llm, config.num_prompts, config.prompt_tokens, advance)
            turns = list(schedule(config, len(work)))
            progress.update(task, description="warming up", total=len(turns), completed=0)
            runs: dict[str, list[Run]] = {name: [] for name in policies}
            for count, (number, repeat, name) in enumerate(turns):
                run = _measure(llm, policies[name], work[number], config, number, repeat, f"turn-{count}")
                if repeat >= 0:
                    runs[name].append(run)
                    progress.update(task, description=f"prompt {number + 1}/{len(work)}")
                progress.advance(task)
            environment = Environment.of(llm, models.drafter_parameters)
            _check_lossless(runs, llm)
    learned = policies[LEARNED]
    assert isinstance(learned, LearnedPolicy)
    parts = tuple(work[run.prompt].part for run in runs[OFF_NAME])
    report = ScheduleReport(
        tuple(ScheduleArm(name, tuple(made), parts) for name, made in runs.items()),
        kinds or PARTS,
        {"decided": learned.num_decided, **learned.num_fallen_back},
        config.as_dict(),
        environment,
    )
    if config.json is not None:
        write_json(config.json, report.as_dict())
    if config.plot is not None:
        plot_schedule(report, config.plot)
    return report


def _completed(progress: Any, task: Any, done: int) -> None:
    progress.update(task, completed=done)


def _load(config: ScheduleConfig, models: Models, dtype: str, longest: int) -> LLM:
    return LLM(
        models.target,
        drafters=models.drafters,
        tree="1",  # applies only until a policy is set
        dtype=dtype,
        quantization=config.quantization,
        drafter_quantization=config.drafter_quantization,
        device=config.device,
        max_model_len=longest,
        # One request runs at a time. The cache has 64 extra slots for each, and the largest tree must fit.
        max_num_seqs=1 + MAX_TREE_NODES // 64,
        enable_prefix_caching=False,  # every arm computes the prefill itself
        seed=config.seed,
    )


def _policies(config: ScheduleConfig, llm: LLM) -> dict[str, SpeculationPolicy]:
    """Create the policy of each arm, which it keeps for the whole run."""
    assert llm.drafter is not None
    predictor = load_policy_network(str(config.scheduler), llm.drafter)
    # Costs are measured for this run, and both policies that learn start with the same ones.
    costs = cached_costs(llm.target, llm.drafter, fresh=True)
    slots = find_slots(llm.drafter)
    made: dict[str, SpeculationPolicy] = {OFF_NAME: FixedPolicy()}
    for name in config.fixed:
        tree, who = split_arm(name)
        asked = [part.name for slot, part in slots.items() if who == "all" or (slot in LOOKUPS) == (who == "lookups")]
        budget = budget_of(parse_tree(tree), len(asked))
        made[name] = FixedPolicy(budget if who == "all" else replace(budget, drafters=frozenset(asked)))
    made[AUTO] = AutoPolicy(copy.deepcopy(costs))
    made[LEARNED] = LearnedPolicy(predictor, copy.deepcopy(costs), llm.drafter)
    return made


def _measure(
    llm: LLM, policy: SpeculationPolicy, work: Work, config: ScheduleConfig, number: int, repeat: int, salt: str
) -> Run:
    engine, device = llm.engine, llm.target.loaded.device
    engine.policy = FixedPolicy()
    start = now(device)
    prompt = {"prompt_token_ids": list(work.prompt_ids), "cache_salt": salt}
    params = config.sampling_params(number, work.temperature)
    stream = llm.stream(prompt, replace(params, max_tokens=work.max_tokens or params.max_tokens))
    chunk = next(stream)
    token_ids, passes = list(chunk.token_ids), []
    first = now(device)
    engine.policy = policy
    for chunk in stream:
        token_ids += chunk.token_ids
        step = engine.metrics.recent[-1]
        passes.append(
            Pass(step.num_levels, step.num_guessed, step.num_generated - 1, step.draft_time, step.target_time)
        )
    last = now(device)
    assert chunk.output is not None
    if chunk.output.error is not None:
        raise RuntimeError(f"prompt {number}: {chunk.output.error}")
    return Run(number, repeat, first - start, last - first, tuple(token_ids), tuple(passes))


def _check_lossless(runs: dict[str, list[Run]], llm: LLM) -> None:
    """Check that all outputs equal plain decoding in unquantized float32.

    In lower precision, passes of different sizes round differently, so the report counts differing outputs instead.
    """
    loaded = llm.target.loaded
    if loaded.dtype != torch.float32 or loaded.quantization is not None:
        return
    for name, made in runs.items():
        for plain, run in zip(runs[OFF_NAME], made, strict=True):
            if run.token_ids != plain.token_ids:
                place = first_difference(plain.token_ids, run.token_ids)
                raise RuntimeError(f"prompt {run.prompt}: with {name}, output token {place} is another than without")
