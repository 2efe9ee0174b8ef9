"""Tokens per target pass: the tables of the SpecInfer paper (arXiv 2305.09781, section 6) with the available models,
and further comparisons.

Everything is counted and nothing is timed, so the machine and its load do not matter. Only the comparison of drafters
in one time measures the costs of their steps first. All arms use the same loaded models, and no arm starts with what
another has learned. As in the paper, generation stops after a fixed number of tokens, which can cut the last pass
short.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from specinfer.bench.acceptance_drafters import describe, disturbed_copies
from specinfer.bench.acceptance_options import AcceptanceConfig
from specinfer.bench.acceptance_page import acceptance_page
from specinfer.bench.acceptance_plans import MODES, PLANS, paper_widths
from specinfer.bench.acceptance_report import SAME_TIME, TOP, Counted, Counts, HitRates, Row, Setup
from specinfer.bench.acceptance_time import most_nodes, same_time_rows
from specinfer.bench.models import Models, find_models
from specinfer.bench.options import load_options_of
from specinfer.bench.prompts import find_prompts
from specinfer.core.config import SpeculativeConfig
from specinfer.core.lookups import LOOKUPS
from specinfer.core.tree import expansion_nodes
from specinfer.core.tree_shape import BEST_FIRST, parse_tree
from specinfer.demo.chat_model import CHAT, CODE
from specinfer.demo.pair import chat_drafter_folder, demo_folders
from specinfer.drafters.feature_drafter import HeadRunner
from specinfer.drafters.vocabulary.token_map import TokenMap
from specinfer.llm import LLM
from specinfer.model.batch import Piece
from specinfer.model.device import find_device
from specinfer.model.runner import ModelRunner
from specinfer.reporting.environment import Environment
from specinfer.reporting.progress_bar import StageBar
from specinfer.reporting.report import Report, reported

_NUM_WARMUP = 4  # prompts from which best-first trees first learn acceptance probabilities
_PROBE = "acceptance-probe"
_EMBEDDED = CODE  # shown in place of the folder's name, which is less clear


@reported
def run_acceptance(config: AcceptanceConfig, progress: StageBar) -> Report[Counted]:
    """Count tokens per pass.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used. The message names it, and nothing was counted.
        RuntimeError: A request failed.
    """
    find_device(config.device)
    models = find_models(config.model, config.drafters)
    num_more = _NUM_WARMUP if config.prompts is None else 0
    asked = find_prompts(
        models.target,
        config.max_tokens,
        config.asked_kinds,
        count=config.num_prompts + num_more,
        num_chars=config.prompt_chars,
        prompts=config.prompts,
    )
    prompts = asked.token_ids
    progress.stage("loading")
    with _all_drafters(config, models) as drafters, _load(config, models, drafters, asked.longest) as llm:
        plans = {part: PLANS[part](config, tuple(drafters)) for part in PLANS if part in config.parts}
        bench = _Bench(llm, config, prompts[num_more:], prompts[:num_more])
        setups = {setup for rows in plans.values() for _, _, cells in rows for setup in cells.values()}
        progress.stage("counting", len(setups))
        hit_rates = bench.hit_rates() if "table1" in config.parts else ()
        parts = {}
        for part, rows in plans.items():
            progress.stage(part)
            parts[part] = tuple(
                Row(group, label, {name: bench.count(setup, progress.advance) for name, setup in cells.items()})
                for group, label, cells in rows
            )
        if "drafters" in plans:
            progress.stage("drafters in the same time")
            parts[SAME_TIME] = same_time_rows(llm, config, plans["drafters"], bench.count)
        small = {Path(name).name: runner.loaded.num_parameters for name, runner in llm.small_models.items()}
        environment = Environment.from_llm(llm, small)
    shown = {Path(name).name: meaning for name, meaning in drafters.items()}
    return acceptance_page(Counted(hit_rates, parts, shown, config, environment, asked.kinds[num_more:]))


@contextmanager
def _all_drafters(config: AcceptanceConfig, models: Models) -> Iterator[dict[str, str]]:
    """Yield a description of each drafter by its name.

    With drafters "auto", the drafters part gets more drafters than `LLM` would choose.
    """
    own = {str(demo_folders().drafter): _EMBEDDED, str(chat_drafter_folder()): CHAT}
    names = [own.get(name, name) for name in models.drafters]
    drafters = {name: describe(name) for name in names}
    with TemporaryDirectory(prefix="specinfer-") as place:
        if config.drafters == "auto" and "drafters" in config.parts:
            if names == [_EMBEDDED]:
                drafters |= disturbed_copies(Path(models.drafters[0]), Path(place))
            drafters |= {name: describe(name) for name in reversed(LOOKUPS)}
        yield drafters


def _load(config: AcceptanceConfig, models: Models, drafters: dict[str, str], longest: int) -> LLM:
    given = (parse_tree(tree).max_nodes for tree in config.trees)
    most = max(most_nodes(config), expansion_nodes(paper_widths(TOP)), *given)
    return LLM(
        models.target,
        drafters=tuple(drafters),
        tree="1",  # a placeholder: every arm sets its own tree
        **load_options_of(config, config.dtype),
        device=config.device,
        max_model_len=longest + config.max_tokens,
        # All prompts run together. The cache adds 64 slots per sequence: with more sequences it holds every tree.
        max_num_seqs=config.num_prompts * (1 + most // 64),
        enable_prefix_caching=False,  # every arm runs its own prefill
        seed=config.seed,
    )


class _Bench:
    """Counters of setups on the same prompts; each setup runs once."""

    def __init__(self, llm: LLM, config: AcceptanceConfig, prompts: list[list[int]], warmup: list[list[int]]) -> None:
        self._llm = llm
        self._config = config
        self._prompts = prompts
        self._warmup = warmup
        self._known: dict[Setup, Counts] = {}

    def count(self, setup: Setup, advance: Callable[[], None] = lambda: None) -> Counts:
        if setup not in self._known:
            self._llm.speculate(SpeculativeConfig(setup.drafters, setup.tree, setup.verification, setup.drawing))
            if setup.tree.startswith(BEST_FIRST):
                self._generate(self._warmup, setup.temperature, len(self._prompts))
            before = time.perf_counter()
            requests = self._generate(self._prompts, setup.temperature)
            seconds = time.perf_counter() - before
            counters: list[dict[str, Any]] = [dict(output.metrics.speculative_decoding) for output in requests]
            self._known[setup] = Counts(
                replace(setup, drafters=tuple(Path(name).name for name in setup.drafters)),
                tuple(len(output.outputs[0].token_ids) for output in requests),
                tuple(counter["num_target_passes"] for counter in counters),
                tuple(counter["num_draft_tokens"] for counter in counters),
                seconds,
            )
            advance()
        return self._known[setup]

    def _generate(self, prompts: Sequence[list[int]], temperature: float, first: int = 0) -> list[Any]:
        """Generate for all prompts at once. Seeds are numbered from `first`, so that warm-up has its own seeds."""
        if not prompts:
            return []
        params = [self._config.sampling_params(first + i, temperature) for i in range(len(prompts))]
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        for number, output in enumerate(outputs):
            if output.error is not None:
                raise RuntimeError(f"prompt {number}: {output.error}")
        return outputs

    def hit_rates(self) -> tuple[HitRates, ...]:
        """Return Table 1 for every model drafter, along texts that the target generated without speculation."""
        found = []
        for temperature in MODES.values():
            self._llm.speculate(SpeculativeConfig(tree="off"))
            generated = [output.outputs[0].token_ids for output in self._generate(self._prompts, temperature)]
            for name, runner in self._llm.small_models.items():
                if isinstance(runner, HeadRunner):
                    continue  # it reads what the target computes, not whole texts
                ranks = tuple(
                    tuple(next_token_ranks(runner, prompt, output))
                    for prompt, output in zip(self._prompts, generated, strict=True)
                )
                found.append(HitRates(Path(name).name, temperature, ranks))
        return tuple(found)


def next_token_ranks(runner: ModelRunner, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """Return, for each output token, the number of tokens that the model considers more likely at its position."""
    known = [*prompt, *output[:-1]]
    cache = runner.cache
    try:
        slots = cache.reserve(_PROBE, len(known))
        piece = replace(Piece.from_span(known, None, cache.slots(_PROBE), slots), num_logits=len(output))
        logits = runner.forward([piece])  # [output, the tokens that the drafter knows]
    finally:
        cache.free(_PROBE)
    if runner.loaded.token_map is not None:  # it never drafts another token
        logits = TokenMap(runner.loaded.token_map, runner.loaded.vocab_size).expand(logits)
    wanted = torch.tensor(output, device=logits.device).unsqueeze(1)
    ranks: list[int] = (logits > logits.gather(1, wanted)).sum(dim=1).tolist()
    return ranks
