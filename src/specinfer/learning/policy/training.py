"""Training of a speculation policy: steps are collected or read, networks compared, and the best one is written.

Source: the learning-based speculative scheduler of SpecInfer's first version (arXiv 2305.09781v1), whose open question
was how large the network should be.
"""

from collections.abc import Sequence
from pathlib import Path

from specinfer.core.files import write_atomically
from specinfer.core.tree_shape import MAX_TREE_NODES
from specinfer.learning.policy.network_training import (
    NetworkQuality,
    evaluate_network,
    fixed_rates,
    train_network,
)
from specinfer.learning.policy.options import ARCHITECTURES, PolicyConfig
from specinfer.learning.policy.report import PolicyReport
from specinfer.learning.policy.step_collection import LARGE, collect_steps, make_tasks
from specinfer.learning.policy.tree_outcomes import TreeOutcomes, outcomes_of
from specinfer.learning.tune.corpus import read_prompts
from specinfer.learning.tune.options import data_files
from specinfer.learning.tune.result import StageCallback
from specinfer.llm import LLM
from specinfer.policy.cost_cache import cached_costs
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.policy.network import PolicyNetwork, make_configurations
from specinfer.policy.step_log import StepLog, read_log, write_log

LEAST_STEPS = 200  # steps that show all configurations; fewer are not enough to learn from
_PROMPT_TOKENS = 160  # of a prompt that is cut from plain text
_TABLE = "2x32"  # the architecture that is also trained without each group of features
_HELD_OUT_ONE_IN = 5  # one step in this many, for logs


def train_policy(config: PolicyConfig, progress: StageCallback = lambda *_, **__: None) -> PolicyReport:
    """Collect or read steps, train and evaluate networks, and write the best one.

    Args:
        progress: Receives the progress.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option or a file cannot be used, or there are too few steps; the message names it.
        OSError: The file cannot be written.
    """
    training, held_out, costs = _read_steps(config) if config.logs else _collect(config, progress)
    configurations = make_configurations(training.slots)
    learning, evaluation = (outcomes_of(log, configurations) for log in (training, held_out))
    _check_enough(learning, evaluation)
    groups = list(dict.fromkeys(name.split(".")[0] for name in training.names))
    about = {"target": Path(config.target).name, "steps": len(training.entries), "seed": config.seed}
    networks: dict[str, PolicyNetwork] = {}
    total = len(config.architectures) + len(groups)

    def train(name: str, architecture: str, left_out: Sequence[str] = ()) -> NetworkQuality:
        progress("training", len(networks), total)
        networks[name] = train_network(
            learning, configurations, ARCHITECTURES[architecture], seed=config.seed, num_steps=config.num_steps,
            left_out=left_out, about=about | {"architecture": name},
        )  # fmt: skip
        return evaluate_network(networks[name], evaluation, costs)

    rows = [train(name, name) for name in config.architectures]
    table = _TABLE if _TABLE in config.architectures else config.architectures[-1]
    without = [train(f"{table} without {group}", table, (group,)) for group in groups]
    progress("training", total, total)
    best = max(rows, key=lambda row: row.rate).name
    _save(networks[best], Path(config.out))
    return PolicyReport(
        architectures=tuple(rows),
        left_out=tuple(without),
        fixed=dict(zip(map(str, configurations), fixed_rates(evaluation, costs), strict=True)),
        chosen=best,
        num_steps=len(training.entries),
        num_held_out=len(held_out.entries),
        out=str(config.out),
    )


def _costs(config: PolicyConfig, llm: LLM | None = None) -> CostModel:
    """Return the given costs, or those that are measured with the loaded models."""
    if config.pass_costs is not None:
        sizes, seconds = zip(*config.pass_costs, strict=True)
        return CostModel(Curve(sizes, seconds), Curve([1], [config.level_seconds]))
    if llm is None:
        with _load(config) as llm:
            return _costs(config, llm)
    assert llm.drafter is not None
    return cached_costs(llm.target, llm.drafter)


def _load(config: PolicyConfig) -> LLM:
    llm = LLM(
        config.target,
        drafters=config.drafters,
        tree=f"best-first:{LARGE.max_nodes}:{LARGE.max_depth}",
        dtype=config.dtype,
        device=config.device,
        max_num_seqs=1 + MAX_TREE_NODES // 64,
        enable_prefix_caching=False,
        seed=config.seed,
    )
    if llm.drafter is None:
        raise ValueError("drafters: none given; a speculation policy chooses among at least one")
    return llm


def _collect(config: PolicyConfig, progress: StageCallback) -> tuple[StepLog, StepLog, CostModel]:
    """Return steps to train on, steps to evaluate on, and the costs of a step."""
    training_files, held_out_files = data_files(config.data)
    with _load(config) as llm:
        prompts = read_prompts(
            training_files,
            llm.tokenizer,
            count=config.num_prompts,
            num_held_out=config.num_held_out,
            length=_PROMPT_TOKENS,
            held_out_paths=held_out_files,
            most=max(llm.max_model_len - config.max_tokens, 1),
            vocab_size=llm.target.loaded.vocab_size,
        )
        separator = () if llm.tokenizer is None else llm.tokenizer.encode("\n\n\n", add_special_tokens=False)
        training, held_out = (
            make_tasks(part, config.temperatures, separator, config.max_tokens, llm.max_model_len)
            for part in (prompts.training, prompts.held_out)
        )
        total = len(training) + len(held_out)
        progress("collecting", 0, total)
        first, last = (
            collect_steps(
                llm, tasks, seed=config.seed + number,
                note=lambda done, before=before: progress("collecting", before + done, total),  # type: ignore[misc]
            )
            for number, (tasks, before) in enumerate(((training, 0), (held_out, len(training))))
        )  # fmt: skip
        costs = _costs(config, llm)
    if config.keep_log is not None:
        write_log(config.keep_log, StepLog(first.slots, first.names, (*first.entries, *last.entries)))
    return first, last, costs


def _read_steps(config: PolicyConfig) -> tuple[StepLog, StepLog, CostModel]:
    logs = [read_log(path) for path in config.logs]
    slots, names = logs[0].slots, logs[0].names
    for path, log in zip(config.logs, logs, strict=True):
        if (log.slots, log.names) != (slots, names):
            raise ValueError(f"logs: {path} was written with other drafters than {config.logs[0]}; give one of them")
    entries = tuple(entry for log in logs for entry in log.entries)
    # Entries do not name their request; only requests running at the cut are on both sides.
    place = len(entries) - len(entries) // _HELD_OUT_ONE_IN
    return StepLog(slots, names, entries[:place]), StepLog(slots, names, entries[place:]), _costs(config)


def _check_enough(learning: TreeOutcomes, evaluation: TreeOutcomes) -> None:
    full = int(learning.known.all(axis=1).sum()), int(evaluation.known.all(axis=1).sum())
    if full[0] < LEAST_STEPS or not full[1]:
        raise ValueError(
            f"data: {full[0]} steps to train on and {full[1]} to evaluate on had trees large enough to show what every "
            f"configuration yields, and {LEAST_STEPS} are needed; give more prompts or tokens, or log a server that "
            "runs with --tree best-first:64:48"
        )


def _save(predictor: PolicyNetwork, path: Path) -> None:
    def write(partial: Path) -> None:
        predictor.save(partial)
        partial.chmod(0o644)  # safetensors lets only the owner read

    write_atomically(path, write, is_shared=True)
