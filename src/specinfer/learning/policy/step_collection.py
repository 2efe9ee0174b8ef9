"""The collection run of the learned scheduler: it shows what trees of all configurations would yield on the prompts.

A large tree shows what every smaller one would have given, but the step after it always begins where even the large one
failed. So steps alternate at random between the large tree and one of the menu, and the log contains requests in states
that any policy could reach.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specinfer.core.noise import derive_seed
from specinfer.core.request import Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TreeBudget
from specinfer.llm import LLM
from specinfer.policy.base import SpeculationPolicy
from specinfer.policy.features import find_slots
from specinfer.policy.network import Configuration, make_configurations
from specinfer.policy.step_log import LoggedPolicy, StepEntry, StepLog

LARGE = Configuration((), 96, 48, 0.01)  # limits of the large trees, which all drafters make
_LARGE_SHARE = 0.5  # share of the steps
_REPEATED = 0.6  # share of a prompt's tokens that are repeated after it
_LONG = 3  # factor of the output length, for texts that start to repeat themselves


@dataclass(frozen=True, slots=True)
class Task:
    """One output to collect steps from."""

    prompt_ids: tuple[int, ...]
    temperature: float
    max_tokens: int


def make_tasks(
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    separator: Sequence[int],
    max_tokens: int,
    max_model_len: int,
) -> list[Task]:
    """Return a task for each prompt, with the temperatures in turn, and extra tasks for every third prompt.

    The two extra tasks, where they fit, are greedy: a long output, since text starts to repeat itself; and the prompt
    followed by its own beginning again.
    """
    tasks = []
    for i, prompt in enumerate(prompts):
        tasks.append(Task(tuple(prompt), temperatures[i % len(temperatures)], max_tokens))
        if i % 3:
            continue
        again = (*prompt, *separator, *prompt[: round(_REPEATED * len(prompt))])
        extra = (Task(tuple(prompt), 0.0, _LONG * max_tokens), Task(again, 0.0, max_tokens))
        tasks += [task for task in extra if len(task.prompt_ids) + task.max_tokens <= max_model_len]
    return tasks


class _AlternatingPolicy(SpeculationPolicy):
    """A policy that alternates between the large tree and those of the menu, in a seeded random order."""

    def __init__(self, large: TreeBudget, menu: Sequence[TreeBudget], seed: int) -> None:
        self._large, self._menu = large, menu
        self._random = random.Random(seed)

    def budgets(self, spans: Sequence[Span], reading: Sequence[Span] = ()) -> list[TreeBudget]:
        return [self._large if self._random.random() < _LARGE_SHARE else self._random.choice(self._menu) for _ in spans]


def collect_steps(llm: LLM, tasks: Sequence[Task], *, seed: int, note: Callable[[int], None]) -> StepLog:
    """Run all tasks and return the log of their steps.

    Args:
        note: Called with the number of tasks done.

    Raises:
        RuntimeError: A request failed.
    """
    assert llm.drafter is not None
    slots = find_slots(llm.drafter)
    names = {slot: drafter.name for slot, drafter in slots.items()}
    menu = [configuration.budget(names) for configuration in make_configurations(tuple(slots))]
    entries: list[StepEntry] = []
    policy = LoggedPolicy(_AlternatingPolicy(LARGE.budget(names), menu, seed), llm.drafter, entries.append)
    before, llm.engine.policy = llm.engine.policy, policy
    try:
        for i, task in enumerate(tasks):
            params = SamplingParams(
                temperature=task.temperature, max_tokens=task.max_tokens, seed=derive_seed(seed, i), ignore_eos=True
            )
            # A separate salt: the output of one task must not be looked up by another one with the same beginning.
            prompt = {"prompt_token_ids": list(task.prompt_ids), "cache_salt": f"collect-{seed}-{i}"}
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            if output.error is not None:
                raise RuntimeError(f"prompt {i}: {output.error}")
            note(i + 1)
    finally:
        llm.engine.policy = before
    return StepLog(policy.tracker.slots, policy.tracker.names, tuple(entries))
