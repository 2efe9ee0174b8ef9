"""Host time of a step: growing, merging, packing and verifying trees, without any model pass.

On a GPU this time is added to every step, however fast the passes are. It is spent in Python and small operations. The
draft tokens come from random logits, and the target's logits agree with some of them, so that paths are accepted as
with a drafter of medium quality.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.options import MODEL, SAMPLING, SPECULATION
from specinfer.bench.options import SharedSettings
from specinfer.cli.measure import Measurement
from specinfer.core.options import check_settings, setting, setting_of
from specinfer.core.request import Request, Span
from specinfer.core.rules import RULES
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.core.tree_shape import MAX_TREE_NODES
from specinfer.drafters.growth.calibration import Calibration
from specinfer.drafters.growth.draft_sampling import CHOSEN, Candidates, draw
from specinfer.drafters.growth.frontier import Frontier, Level
from specinfer.drafters.growth.tree_batch import BEST_FIRST_WIDTH, GrowingTree, TreeBatch
from specinfer.drafters.merge.merged import MergedDrafter
from specinfer.model.batch import Piece, pack
from specinfer.model.kv_tensors import KVTensors
from specinfer.reporting.progress_bar import StageBar
from specinfer.reporting.report import Report, Table, Value, reported
from specinfer.verify import Acceptance, verify

STAGES = ("grow", "merge", "pack", "verify", "learn")
_TOTAL = "total"
GREEDY = "greedy"  # listed with the rules, which differ for sampled text only
_MODEL, _LOOKUP = "model", "lookup"  # the drafters whose trees are merged
_AGREEMENT = 0.7  # target probability of a node's first child; if greedy, how often that child is the best token
_WARMUP = 20  # untimed steps before the measured ones, in which drafters learn acceptance probabilities


@dataclass(frozen=True, slots=True)
class HostConfig:
    """Size of a step, and how often it is repeated.

    Each tree is merged from a small model's best-first tree and a chain of a lookup drafter.

    Raises:
        ValueError: A field is out of range. The message names it.
    """

    num_requests: int = setting(8, SPECULATION, "Number of requests in the batch.", low=1, high=1024)
    nodes: int = setting(64, SPECULATION, "Number of nodes of each tree.", low=1, high=MAX_TREE_NODES)
    depth: int = setting(8, SPECULATION, "Maximum depth of each tree.", low=1, high=MAX_TREE_NODES)
    prompt_tokens: int = 256
    vocab_size: int = setting(
        4096, MODEL, "Vocabulary size of the simulated model.", low=2 * BEST_FIRST_WIDTH, high=2**20
    )
    repeats: int = setting(200, SAMPLING, "Number of measured steps of each verification rule.", low=1)
    seed: int = setting_of(SharedSettings, "seed")
    json: str | Path | None = setting_of(SharedSettings, "json")

    def __post_init__(self) -> None:
        check_settings(self)


@reported
def run_host(config: HostConfig, progress: StageBar) -> Report[None]:
    """Measure the host times."""
    rules = (GREEDY, *RULES)
    ms: dict[str, dict[str, list[float]]] = {}
    progress.stage("measuring", len(rules) * (_WARMUP + config.repeats))
    for rule in rules:
        step, times = _Step(config, rule), ms.setdefault(rule, {stage: [] for stage in (*STAGES, _TOTAL)})
        for number in range(_WARMUP + config.repeats):
            parts = step.run()
            if number >= _WARMUP:
                for stage, spent in (parts | {_TOTAL: sum(parts.values())}).items():
                    times[stage].append(spent)
            progress.advance()

    def column(stage: str, share: float) -> Value[str]:
        return Value(stage, lambda rule: float(np.quantile(ms[rule][stage], share)), "{:.2f}")

    tables = [
        Table(name, title, (Value[str]("rule", str), *(column(stage, share) for stage in (*STAGES, _TOTAL))), rules)
        for name, title, share in (("medians", "Host time of a step, ms: median", 0.5), ("p90", "90th percentile", 0.9))
    ]
    about = f"{config.num_requests} requests, trees of {config.nodes} nodes, each merged of a model's and a chain"
    return Report([f"{about}; {config.repeats} steps"], tables)


class _Scripted:
    """Drafter without a model, which times its calls of `draft`."""

    def __init__(self, name: str, make: Callable[[Sequence[Span], Sequence[TreeBudget]], list[TokenTree]]) -> None:
        self.name = name
        self.ms = 0.0  # milliseconds of the last call
        self._make = make

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        started = time.perf_counter()
        trees = self._make(spans, budgets)
        self.ms = 1000 * (time.perf_counter() - started)
        return trees

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


class _Step:
    """Inputs of one step, which can be run repeatedly."""

    def __init__(self, config: HostConfig, rule: str) -> None:
        self._rule = "coupled" if rule == GREEDY else rule
        drawing = RULES[self._rule].draft_samplings[0]
        chosen = drawing in CHOSEN
        source = torch.Generator().manual_seed(config.seed)
        params = SamplingParams(temperature=0.0 if rule == GREEDY else 1.0)
        prompts = torch.randint(config.vocab_size, (config.num_requests, config.prompt_tokens), generator=source)
        self._requests = [Request(str(i), ids, params, seed=config.seed + i) for i, ids in enumerate(prompts.tolist())]
        self._spans = [Span(request, config.prompt_tokens - 1, config.prompt_tokens) for request in self._requests]
        self._budget = TreeBudget(config.nodes, min(config.depth, config.nodes))
        self._source = source
        self._share_agreed = _AGREEMENT if rule == GREEDY else 1.0
        self._pool = self._candidates(config, drawing, source)
        looked_up = torch.randint(config.vocab_size, (config.num_requests, self._budget.max_depth), generator=source)
        self._looked_up: list[list[int]] = looked_up.tolist()
        self._target = torch.randn((config.num_requests, config.nodes + 1, config.vocab_size), generator=source)
        self._likely = self._target.logsumexp(dim=-1) + float(np.log(_AGREEMENT / (1 - _AGREEMENT)))
        self._calibration = Calibration()
        self._drafters = [_Scripted(_MODEL, self._grow), _Scripted(_LOOKUP, self._look_up)]
        self._merged = MergedDrafter(self._drafters, self._calibration, may_choose=chosen)
        self._prefix = np.arange(config.prompt_tokens - 1)
        self._store = KVTensors((), 1, torch.float32, torch.device("cpu"))

    def _candidates(self, config: HostConfig, drawing: str, source: torch.Generator) -> Candidates:
        """Return candidates for the largest number of nodes that a level can have, for each request."""
        logits = 4 * torch.randn((config.num_requests * config.nodes, config.vocab_size), generator=source)
        owners = [request for request in self._requests for _ in range(config.nodes)]
        level = Level([Frontier(request, [0], lambda _: (), BEST_FIRST_WIDTH) for request in owners])
        return draw(drawing, logits, level)

    def run(self) -> dict[str, float]:
        """Run the step once, and return the milliseconds of each stage."""
        for drafter in self._drafters:
            drafter.ms = 0.0  # it may not be asked
        clock = _Clock()
        trees = self._merged.draft(self._spans, [self._budget] * len(self._spans))
        clock.lap("merge")
        clock.ms["grow"] = sum(drafter.ms for drafter in self._drafters)
        clock.ms["merge"] -= clock.ms["grow"]
        self._pack(trees)
        clock.lap("pack")
        logits = self._agreeing(trees)
        clock.lap("")
        kept = verify(self._rule, logits, self._requests, trees)
        clock.lap("verify")
        for request, tree, acceptance in zip(self._requests, trees, kept, strict=True):
            self._merged.observe(request, tree, acceptance)
        clock.lap("learn")
        return {stage: clock.ms[stage] for stage in STAGES}

    def _look_up(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        return [
            TokenTree.chain(span.request.token_ids[-1], guesses[: budget.max_nodes], _LOOKUP, 0.3)
            for span, guesses, budget in zip(spans, self._looked_up, budgets, strict=True)
        ]

    def _grow(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        growing_trees = [GrowingTree(span.request, budget, _MODEL) for span, budget in zip(spans, budgets, strict=True)]
        tree_batch = TreeBatch(growing_trees, self._calibration)
        while level := tree_batch.level():
            tree_batch.extend(_first(self._pool, len(level)))
        return [growing_tree.tree() for growing_tree in growing_trees]

    def _pack(self, trees: Sequence[TokenTree]) -> None:
        pieces = [
            Piece.from_span(span.tokens, tree, self._prefix, np.arange(len(tree)))
            for span, tree in zip(self._spans, trees, strict=True)
        ]
        pack(pieces, self._store, torch.device("cpu"))

    def _agreeing(self, trees: Sequence[TokenTree]) -> list[Tensor]:
        """Return target logits of each tree, [nodes, vocab]: random, but often in favor of a node's first child."""
        logits = [rows[: len(tree)] for rows, tree in zip(self._target.clone(), trees, strict=True)]
        for rows, tree, likely in zip(logits, trees, self._likely, strict=True):
            agrees = (torch.rand(len(tree), generator=self._source) < self._share_agreed).tolist()
            for node, children in enumerate(tree.children):
                if children and agrees[node]:
                    rows[node, next(iter(children))] = likely[node]
        return logits


def _first(pool: Candidates, count: int) -> Candidates:
    drawn = pool.drawn_from
    if drawn is not None:
        drawn = replace(
            drawn, token_ids=drawn.token_ids[:count], probs=drawn.probs[:count], places=drawn.places[:count]
        )
    return Candidates(pool.tokens[:count], pool.confidence[:count], drawn)


class _Clock:
    """Stopwatch that records the milliseconds since the last lap, by stage."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.ms[stage] = 1000 * (now - self._last)
        self._last = now


HOST = Measurement(
    "host",
    HostConfig,
    "benchmarks.host:run_host",
    "Measure the host time of a step: growing, merging, packing and verifying trees, without a model.",
    model=None,
)
