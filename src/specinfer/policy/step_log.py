"""The step log: features of a request before each step, its tree, and what was accepted of it.

A logged tree shows what every smaller one would have yielded, so a log of large trees has full information on all of
them. Each line is one JSON object: a header, then a line for each step of a request. Tokens are not written.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt
from torch import Tensor

from specinfer.core.lookups import drafter_of
from specinfer.core.request import Request, Span
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.base import Drafter
from specinfer.drafters.lookup.grammar import has_forced
from specinfer.policy.base import SpeculationPolicy
from specinfer.policy.features import FeatureTracker, find_slots
from specinfer.policy.slo_planner import SLOPlanner
from specinfer.policy.speedup import Speedup
from specinfer.verify import Acceptance

VERSION = 1
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepEntry:
    """One step of one request.

    Attributes:
        features: Features before the step, in the order of the log's names; NaN for unknown ones.
        used: Indices of the slots that were used.
        max_nodes, max_depth, min_path_prob: The tree's budget.
        parents: Parents of the nodes 1, 2, ...
        draws: (node, index of the slot, confidence) in draw order.
        path: The accepted nodes.
    """

    features: tuple[float, ...]
    used: tuple[int, ...]
    max_nodes: int
    max_depth: int
    min_path_prob: float
    parents: tuple[int, ...]
    draws: tuple[tuple[int, int, float], ...]
    path: tuple[int, ...]

    def as_dict(self) -> dict[str, object]:
        """Return the entry as plain values for JSON."""
        return {
            "features": [None if math.isnan(value) else round(value, 5) for value in self.features],
            "budget": [list(self.used), self.max_nodes, self.max_depth, self.min_path_prob],
            "parents": list(self.parents),
            "draws": [[node, slot, round(confidence, 4)] for node, slot, confidence in self.draws],
            "path": list(self.path),
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "StepEntry":
        """Make an entry from a parsed line. Raises KeyError, TypeError or ValueError if it is not one."""
        used, max_nodes, max_depth, min_path_prob = record["budget"]
        return cls(
            tuple(math.nan if value is None else float(value) for value in record["features"]),
            tuple(map(int, used)),
            int(max_nodes),
            int(max_depth),
            float(min_path_prob),
            tuple(map(int, record["parents"])),
            tuple((int(node), int(slot), float(confidence)) for node, slot, confidence in record["draws"]),
            tuple(map(int, record["path"])),
        )

    def check(self, num_features: int, num_slots: int) -> None:
        """Check that the entry is consistent. Raises ValueError if it is not."""
        nodes = range(1, len(self.parents) + 1)
        sound = (
            len(self.features) == num_features
            and all(0 <= parent < node for node, parent in zip(nodes, self.parents, strict=True))
            and all(node in nodes and 0 <= slot < num_slots for node, slot, _ in self.draws)
            and all(0 <= slot < num_slots for slot in self.used)
            and all(
                node in nodes and self.parents[node - 1] == above
                for above, node in zip((0, *self.path), self.path, strict=False)
            )
        )
        if not sound:
            raise ValueError("a step that contradicts itself")


@dataclass(frozen=True, slots=True)
class StepLog:
    """All steps of a log.

    Attributes:
        slots: Drafters, named by `features.find_slots`.
        names: Names of the features.
    """

    slots: tuple[str, ...]
    names: tuple[str, ...]
    entries: tuple[StepEntry, ...]

    @property
    def features(self) -> npt.NDArray[np.float64]:
        """Features of all steps: [steps, features]."""
        return np.asarray([entry.features for entry in self.entries]).reshape(len(self.entries), len(self.names))


class LoggedPolicy(SpeculationPolicy):
    """A wrapper that logs the steps of a policy and decides nothing itself.

    Args:
        policy: The policy that decides.
        drafter: The drafter whose proposals are logged.
        note: Function called with each entry, in the engine's thread.
    """

    reads_logits = True

    def __init__(self, policy: SpeculationPolicy, drafter: Drafter, note: Callable[[StepEntry], None]) -> None:
        self.policy = policy
        self.tracker = FeatureTracker(drafter)
        self._note = note
        self._names = {part.name: i for i, part in enumerate(find_slots(drafter).values())}
        self._pending: dict[str, tuple[Request, tuple[float, ...], TreeBudget, int]] = {}

    @property
    def planner(self) -> SLOPlanner | None:
        return self.policy.planner

    def prepare(self) -> None:
        self.policy.prepare()

    def budgets(self, spans: Sequence[Span], reading: Sequence[Span] = ()) -> list[TreeBudget]:
        budgets = self.policy.budgets(spans, reading)
        rows = self.tracker.features(spans).tolist()
        # Other requests may be in a pass in flight.
        self._pending = {name: one for name, one in self._pending.items() if not one[0].is_finished} | {
            span.request.request_id: (span.request, tuple(row), budget, span.request.max_new_tokens)
            for span, row, budget in zip(spans, rows, budgets, strict=True)
        }
        return budgets

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        pending = self._pending.pop(request.request_id, None)
        if pending is not None:
            _, row, budget, max_new_tokens = pending
            # The end of the output cuts trees and accepted paths: near it a tree shows only what shallower ones yield.
            budget = budget.cut(max_new_tokens - 1, budget.max_nodes)
            # Nothing is learned if the request could not use its budget, or drafted from its own prediction or grammar.
            is_free = request.drafting.is_allowed and not request.is_finished
            is_free = is_free and not request.prediction_ids and not has_forced(request)
            if budget.max_nodes and not budget.widths and is_free:
                self._note(self._entry(row, budget, tree, acceptance))
        self.tracker.on_tokens(request, tree, acceptance, logits, num_generated)
        self.policy.on_tokens(request, tree, acceptance, logits, num_generated)

    def _entry(self, row: tuple[float, ...], budget: TreeBudget, tree: TokenTree, acceptance: Acceptance) -> StepEntry:
        return StepEntry(
            features=row,
            used=tuple(i for name, i in self._names.items() if budget.asks(name)),
            max_nodes=budget.max_nodes,
            max_depth=budget.max_depth,
            min_path_prob=budget.min_path_prob,
            parents=tree.parents[1:],
            draws=tuple(
                (node, self._names[name], confidence)
                for node, drafter, _, confidence in tree.draws
                if (name := drafter_of(drafter)) in self._names
            ),
            path=acceptance.path,
        )

    def observe(self, step: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        self.policy.observe(step, outcomes)

    def reason(self, request: Request) -> str | None:
        return self.policy.reason(request)

    @property
    def speedup(self) -> Speedup | None:
        return self.policy.speedup

    def summary(self) -> str | None:
        return self.policy.summary()


class StepLogFile:
    """A log file that grows while an engine runs.

    Raises:
        ValueError: The file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self._file: TextIO | None = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - open as long as the engine runs
        except OSError as error:
            raise ValueError(f"step_log: {path} cannot be written: {error.strerror}") from error
        self._path = path
        self._has_header = False

    def start(self, tracker: FeatureTracker) -> None:
        """Write the header, once."""
        if not self._has_header:
            self._write(_header(tracker.slots, tracker.names))
            self._has_header = True

    def note(self, entry: StepEntry) -> None:
        self._write(entry.as_dict())

    def _write(self, record: Mapping[str, object]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
        except OSError as error:  # a full disk ends the log, not the engine
            logger.error("step log %s ends here: %s", self._path, error.strerror)
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:  # a full disk may show only when the buffer is written
                logger.error("step log %s ends here: %s", self._path, error.strerror)
            self._file = None


def _header(slots: Sequence[str], names: Sequence[str]) -> dict[str, object]:
    return {"type": "step-log", "version": VERSION, "drafters": list(slots), "features": list(names)}


def write_log(path: str | Path, log: StepLog) -> None:
    """Write a whole log to a file."""
    records: Iterable[Mapping[str, object]] = (
        _header(log.slots, log.names),
        *(entry.as_dict() for entry in log.entries),
    )
    Path(path).write_text(
        "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records), encoding="utf-8"
    )


def read_log(path: str | Path) -> StepLog:
    """Read a log; an incomplete last line is left out.

    Raises:
        ValueError: The file cannot be read, or is not a step log; the message names it and the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"log: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"log: {path} is not text; give a file written with --step-log") from error
    entries: list[StepEntry] = []
    slots: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if number == 1:
                if record["type"] != "step-log" or record["version"] != VERSION:
                    raise ValueError("no step log of this version")
                slots, names = tuple(map(str, record["drafters"])), tuple(map(str, record["features"]))
                continue
            entry = StepEntry.from_dict(record)
            entry.check(len(names), len(slots))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            if number == len(lines) > 1:  # the server is still writing
                break
            raise ValueError(f"log: {path}, line {number}: {error}; give a file written with --step-log") from error
        entries.append(entry)
    if not names:
        raise ValueError(f"log: {path} is empty; give a file written with --step-log")
    return StepLog(slots, names, tuple(entries))
