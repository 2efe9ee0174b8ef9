"""Simulated batches with the policy "auto" and with plain decoding, over machines, sizes and lengths."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.batches.drafting import TextDrafting
from benchmarks.batches.machines import MACHINES, Machine
from benchmarks.batches.server import SimulatedServer
from benchmarks.batches.texts import Text, read_texts
from specinfer.bench.options import check_distinct, check_seed, check_whole
from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TreeBudget
from specinfer.policy.auto_policy import AutoPolicy
from specinfer.policy.base import FixedPolicy, SpeculationPolicy
from specinfer.policy.cost_measurement import SIZES
from specinfer.reporting.files import check_files, write_json
from specinfer.reporting.progress_bar import stage_bar

_FIRST = 128  # tokens of a text within which short outputs begin
_NOISE, _ERROR = 0.02, 0.03  # relative, of the time of steps and of measured costs
_WAVES, _LEAST = 2, 6  # measured batches, and measured requests at least; a batch before them warms up
# Trees of all requests that are tried for the best division of nodes, with one least probability of a node's path.
_LEAST_PROBS, _DEPTHS, _MOST_NODES = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1), (1, 2, 4, 8), 64


@dataclass(frozen=True, slots=True)
class BatchesConfig:
    """What is simulated: every combination of these values.

    Attributes:
        batches: Numbers of requests that run together.
        prompts, outputs: Tokens of each request.
        temperatures: 0 and 1.
        num_texts, num_tokens: Texts of the embedded pair from which outputs are taken, and their length.
        best: Also find the best division of nodes among requests, by trying.
        json: File to write the numbers to.

    Raises:
        ValueError: A field is out of range. The message names it.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    prompts: tuple[int, ...] = (20, 200, 2000)
    outputs: tuple[int, ...] = (8, 64, 512)
    temperatures: tuple[int, ...] = (0, 1)
    num_texts: int = 24
    num_tokens: int = 512
    seed: int = 0
    best: bool = False
    json: str | Path | None = None

    def __post_init__(self) -> None:
        for name, most in (("batches", 1024), ("prompts", 2**16), ("outputs", 2**16)):
            check_distinct(name, getattr(self, name), most)
        if not set(self.temperatures) <= {0, 1}:
            raise ValueError("temperatures: give 0, 1 or both")
        check_whole("num_texts", self.num_texts, 1, 64)
        check_whole("num_tokens", self.num_tokens, 8, 768)
        check_seed(self.seed)


@dataclass(frozen=True, slots=True)
class Cell:
    """Requests of one length on one machine.

    Attributes:
        in_turn: Whether a request comes when another ends, in place of all at once and the next batch after the last.
    """

    machine: Machine
    batch: int
    prompt: int
    output: int
    temperature: int
    in_turn: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """A cell and its speeds over plain decoding.

    Attributes:
        speed: With the reading of prompts.
        decoding: Of steps of the full batch in which the target reads no prompt.
        first_tokens: Mean time to the first token of plain decoding over that of "auto".
        nodes: Draft tokens of a request in a step.
        best: As `decoding`, with the best division of nodes that was found, or None.
        best_speed: As `speed`, with the best division of nodes for that, or None.
    """

    cell: Cell
    speed: float
    decoding: float
    first_tokens: float
    nodes: float
    best: float | None = None
    best_speed: float | None = None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class BatchesReport:
    results: tuple[Result, ...]
    options: dict[str, object] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        return {"results": [one.as_dict() for one in self.results], "options": self.options}


@dataclass(slots=True)
class Served:
    """What a run shows: seconds in all, steps and requests, without those that warmed up."""

    seconds: float
    steps: list[StepRecord]
    requests: list[Request]

    def decoding_rate(self, num_requests: int) -> float:
        """Return the tokens per second of steps of this many requests without prompts, or NaN without any."""
        steps = [
            step
            for step in self.steps
            if step.num_requests == num_requests and step.num_rows == num_requests + step.num_guessed
        ]
        return sum(step.num_generated for step in steps) / sum(step.time for step in steps) if steps else float("nan")

    @property
    def first_token_seconds(self) -> float:
        return float(np.mean([(one.times.first_token or np.nan) - one.times.arrival for one in self.requests]))


def cells(config: BatchesConfig) -> Iterator[Cell]:
    """Yield all combinations of a configuration."""
    lengths = itertools.product(config.prompts, config.outputs, config.temperatures)
    for machine, batch, sizes in itertools.product(MACHINES, config.batches, list(lengths)):
        yield Cell(machine, batch, *sizes)
        if batch > 1:
            yield Cell(machine, batch, *sizes, in_turn=True)


def run_batches(config: BatchesConfig, console: Console | None = None) -> BatchesReport:
    """Simulate all cells, and write the requested file.

    Raises:
        ValueError: The file cannot be written.
    """
    check_files(config.json, None)
    with stage_bar(console) as progress:
        progress.stage("reading texts")
        texts = {one: read_texts(config.num_texts, config.num_tokens, one) for one in config.temperatures}
        found, wanted = list[Result](), list(cells(config))
        progress.stage("simulating", len(wanted))
        for cell in wanted:
            found.append(compare(cell, texts[cell.temperature], config.seed, best=config.best and not cell.in_turn))
            progress.advance()
    report = BatchesReport(tuple(found), asdict(config) | {"json": None})
    if config.json is not None:
        write_json(config.json, report.as_dict())
    return report


def compare(cell: Cell, texts: Sequence[Text], seed: int = 0, *, best: bool = False) -> Result:
    """Return the speeds of "auto" over plain decoding."""
    plain, auto = (serve(cell, texts, make, seed) for make in (lambda _: FixedPolicy(), make_auto))
    alone = plain.decoding_rate(cell.batch)
    num_requests = sum(step.num_requests for step in auto.steps)
    rate, seconds = best_trees(cell, texts, seed) if best else (None, None)
    return Result(
        cell,
        speed=plain.seconds / auto.seconds,
        decoding=auto.decoding_rate(cell.batch) / alone,
        first_tokens=plain.first_token_seconds / auto.first_token_seconds,
        nodes=sum(step.num_guessed for step in auto.steps) / num_requests,
        best=rate and rate / alone,
        best_speed=seconds and plain.seconds / seconds,
    )


def best_trees(cell: Cell, texts: Sequence[Text], seed: int = 0) -> tuple[float, float]:
    """Return the most tokens per second while a full batch decodes, and the least seconds in all, of fixed trees.

    Each holds all nodes that are likely enough. Where easy texts end early, full batches of slower trees have more of
    them, so that the rate of full batches alone compares different texts.
    """
    trees = [
        TreeBudget(_MOST_NODES, depth, min_path_prob=prob) for prob, depth in itertools.product(_LEAST_PROBS, _DEPTHS)
    ]
    served = [serve(cell, texts, lambda _, tree=tree: FixedPolicy(tree), seed) for tree in trees]  # type: ignore[misc]
    return max(one.decoding_rate(cell.batch) for one in served), min(one.seconds for one in served)


def make_auto(cell: Cell, seed: int = 0) -> AutoPolicy:
    """Make the policy "auto" with costs as measured when the engine starts: other load only adds time."""
    errors = np.exp(_ERROR * np.abs(np.random.default_rng(seed).standard_normal(len(SIZES))))
    return AutoPolicy(cell.machine.measured(errors.tolist()))


def serve(cell: Cell, texts: Sequence[Text], make_policy: Callable[[Cell], SpeculationPolicy], seed: int = 0) -> Served:
    """Serve the requests of a cell, after a batch that warms up."""
    num_first, num_measured = max(cell.batch, 2), max(_WAVES * cell.batch, _LEAST)
    requests, places = make_requests(cell, texts, num_first + num_measured, seed)
    policy = make_policy(cell)
    planner = policy.planner if isinstance(policy, AutoPolicy) else None
    server = SimulatedServer(
        cell.machine, TextDrafting(places, texts, seed), policy, planner, max_num_seqs=cell.batch, noise=_NOISE,
        seed=seed,
    )  # fmt: skip
    _serve(server, requests[:num_first], cell)
    start, num_steps = server.now, len(server.steps)
    _serve(server, requests[num_first:], cell)
    return Served(server.now - start, server.steps[num_steps:], requests[num_first:])


def make_requests(
    cell: Cell, texts: Sequence[Text], count: int, seed: int
) -> tuple[list[Request], dict[str, tuple[Text, int]]]:
    """Return requests, and the text of each with the position at which its output begins, by id."""
    random = np.random.default_rng(seed)
    requests, places = list[Request](), dict[str, tuple[Text, int]]()
    params = SamplingParams(temperature=float(cell.temperature), max_tokens=cell.output)
    for i in range(count):
        text = texts[i % len(texts)]
        last = max(min(len(text.right), _FIRST) - cell.output, 0)
        places[str(i)] = text, int(random.integers(last + 1))
        requests.append(Request(str(i), [0] * cell.prompt, params, seed=i, cache_salt=None))
    return requests, places


def _serve(server: SimulatedServer, requests: Sequence[Request], cell: Cell) -> None:
    if cell.in_turn:
        waiting = iter(requests[cell.batch :])
        _arrive(server, requests[: cell.batch])
        server.run(requests[: cell.batch], lambda _: next(waiting, None))
        return
    for first in range(0, len(requests), cell.batch):
        together = requests[first : first + cell.batch]
        _arrive(server, together)
        server.run(together)


def _arrive(server: SimulatedServer, requests: Sequence[Request]) -> None:
    for request in requests:
        request.times.arrival = server.now
