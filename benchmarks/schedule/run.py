"""Benchmark of schedulers on a mixed workload: fixed configurations, "auto" by cost alone, and the learned one.

All arms run on each prompt in turn, in one run and on the same loaded weights, in a rotating order. Time is measured
from the first token on. Arms that learn keep learning from prompt to prompt. No arm can look up the output of another.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace

from rich.console import Console

from benchmarks.schedule.plans import AUTO, LEARNED, ScheduleConfig, schedule, split_arm
from benchmarks.schedule.report import ScheduleReport, plot_schedule
from benchmarks.schedule.work import PARTS, answered, make_work, most_tokens
from specinfer.bench.chat_prompts import find_prompts
from specinfer.bench.comparisons import Comparison
from specinfer.bench.loop import Turn, check_equal, is_exact, take_turns, write_files
from specinfer.bench.measurement import measure_request
from specinfer.bench.models import Models, at_size, find_models
from specinfer.bench.options import PLAIN, kinds_for, precision_of
from specinfer.bench.results import Arm, Run
from specinfer.core.lookups import LOOKUPS
from specinfer.core.tree_shape import MAX_TREE_NODES, parse_tree
from specinfer.llm import LLM
from specinfer.model.definition import known_positions
from specinfer.model.device import find_device
from specinfer.policy.auto_policy import AutoPolicy
from specinfer.policy.base import FixedPolicy, SpeculationPolicy, budget_of
from specinfer.policy.cost_cache import cached_costs
from specinfer.policy.features import find_slots
from specinfer.policy.network import PolicyNetwork
from specinfer.policy.network_choice import NetworkChoice, load_policy_network
from specinfer.reporting.environment import Environment
from specinfer.reporting.files import check_files, options_of
from specinfer.reporting.progress_bar import stage_bar


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
    context = known_positions(models.target)
    longest = (most_tokens(config.prompt_tokens) if chats is None else chats.longest) + config.max_tokens
    if chats is None and context is not None and longest > context:
        raise ValueError(
            f"max_tokens: prompts of {most_tokens(config.prompt_tokens)} tokens and {config.max_tokens} more do not "
            f"fit into the context of {context}; lower max_tokens or prompt_tokens"
        )
    with stage_bar(console) as progress:
        progress.stage(f"growing to {config.grow}" if config.grow else "loading")
        models, dtype = at_size(models, config.grow, config.dtype, device)
        progress.stage("loading")
        with _load(config, models, dtype, longest) as llm:
            policies = _policies(config, llm)
            llm.engine.policy = copy.deepcopy(policies[AUTO])  # faster preparation; the arm does not learn from it
            progress.stage("preparing", config.num_prompts)
            if chats is not None:
                work = answered(llm, chats, config.sampling_params)
            else:
                work = make_work(llm, config.num_prompts, config.prompt_tokens, progress.advance)
            turns = list(schedule(config, len(work)))

            def measure(turn: Turn, name: str) -> Run:
                (number,) = turn.prompts
                params = config.sampling_params(number, work[number].temperature)
                params = replace(params, max_tokens=work[number].max_tokens or params.max_tokens)
                return measure_request(llm, policies[name], work[number].prompt_ids, params, number, turn.repeat)

            def check(turn: Turn, made: Mapping[str, Run]) -> None:
                if is_exact(llm.target.loaded):
                    check_equal(turn, made)

            runs = take_turns(turns, progress, measure, check)
            environment = Environment.from_llm(llm, models.drafter_parameters)
    learned = policies[LEARNED]
    assert isinstance(learned, AutoPolicy)
    assert learned.network is not None
    arms = [Arm(name, tuple(runs[1, name])) for name in policies]
    report = ScheduleReport(
        Comparison(arms[0], tuple(arms[1:])),
        tuple(one.part for one in work),
        kinds or PARTS,
        {"decided": learned.network.num_decided, **learned.network.num_fallen_back},
        options_of(config),
        environment,
    )
    write_files(report, config.json, config.plot, plot_schedule)
    return report


def _load(config: ScheduleConfig, models: Models, dtype: str, longest: int) -> LLM:
    return LLM(
        models.target,
        drafters=models.drafters,
        tree="1",  # applies only until a policy is set
        **precision_of(config, dtype),
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
    made: dict[str, SpeculationPolicy] = {PLAIN: FixedPolicy()}
    for name in config.fixed:
        tree, which = split_arm(name)
        asked = [
            part.name for slot, part in slots.items() if which == "all" or (slot in LOOKUPS) == (which == "lookups")
        ]
        budget = budget_of(parse_tree(tree), len(asked))
        made[name] = FixedPolicy(budget if which == "all" else replace(budget, drafters=frozenset(asked)))
    made[AUTO] = AutoPolicy(copy.deepcopy(costs))
    own_costs = copy.deepcopy(costs)
    made[LEARNED] = AutoPolicy(own_costs, network=NetworkChoice(predictor, own_costs, llm.drafter))
    return made
