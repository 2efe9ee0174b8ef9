"""Reading of a trace file, and statistics of its steps. The format is described in docs/trace.md.

Each line is checked once, and only its offset is stored, so a file may be large.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

NEWEST_VERSION = 1
MAX_LINE = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Node:
    """One proposed token. Its index among the step's nodes counts from 1; index 0 is the root."""

    token: int
    text: str
    parent: int
    drafters: tuple[str, ...]
    q: float | None
    p: float | None
    accepted: bool
    depth: int
    rank: int  # among the children of its parent, from 1

    @classmethod
    def from_records(cls, records: list[dict[str, Any]]) -> tuple[Self, ...]:
        depths, num_children = [0], [0] * (len(records) + 1)
        nodes = []
        for place, record in enumerate(records, start=1):
            parent = _int(record, "parent")
            if not 0 <= parent < place:
                raise ValueError(f"node {place} has the parent {parent}, which does not stand before it")
            num_children[parent] += 1
            depths.append(depths[parent] + 1)
            node = cls(
                token=_int(record, "token"),
                text=_text(record, "text"),
                parent=parent,
                drafters=tuple(map(str, _typed(record, "drafters", list))),
                q=_probability(record, "q"),
                p=_probability(record, "p"),
                accepted=_typed(record, "accepted", bool),
                depth=depths[place],
                rank=num_children[parent],
            )
            nodes.append(node)
        return tuple(nodes)


@dataclass(frozen=True, slots=True)
class EmittedToken:
    """A token that the target generated itself, or the root."""

    token: int
    text: str
    p: float | None


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of the target for one request."""

    time: float
    root: EmittedToken
    nodes: tuple[Node, ...]
    path: tuple[int, ...]
    next: EmittedToken | None

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        nodes = Node.from_records(_typed(record, "nodes", list))
        path = tuple(_typed(record, "path", list))
        parents = (0, *path)
        for parent, place in zip(parents, path, strict=False):
            if type(place) is not int or not 1 <= place <= len(nodes) or nodes[place - 1].parent != parent:
                raise ValueError(f"path holds {place!r}, which is not a node that follows {parent}")
        root, last = _typed(record, "root", dict), record.get("next")
        return cls(
            time=float(_typed(record, "time", (int, float))),
            root=EmittedToken(_int(root, "token"), _text(root, "text"), None),
            nodes=nodes,
            path=path,
            next=None
            if last is None
            else EmittedToken(_int(last, "token"), _text(last, "text"), _probability(last, "p")),
        )

    @property
    def num_generated(self) -> int:
        return len(self.path) + (self.next is not None)

    def tokens(self) -> Iterator[tuple[str, str | None]]:
        """Yield each added token's text, with the drafter that proposed it, or None for the target."""
        for place in self.path:
            node = self.nodes[place - 1]
            yield node.text or f"#{node.token} ", next(iter(node.drafters), "?")
        if self.next is not None:
            yield self.next.text or f"#{self.next.token} ", None


@dataclass(slots=True)
class Recorded:
    """One request of a trace: its prompt and parameters, the offsets of its steps, and its end."""

    name: str
    prompt: str
    params: dict[str, Any]
    offsets: list[int] = field(default_factory=list)
    end: dict[str, Any] | None = None


class Recording:
    """A trace file.

    Raises:
        ValueError: The file cannot be read, or a line is not part of a trace; the message names the line.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.model = ""
        self.requests: list[Recorded] = []
        self.num_skipped = 0
        self.is_cut = False  # the last line is incomplete: the server was killed, the disk is full, or it still writes
        self._open: dict[str, Recorded] = {}
        try:
            self._file: BinaryIO = Path(path).open("rb")  # noqa: SIM115  # `close` closes it
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        try:
            self._index()
        except BaseException:
            self.close()
            raise

    def steps(self, request: Recorded) -> Iterator[Step]:
        for place in range(len(request.offsets)):
            yield self.step(request, place)

    def step(self, request: Recorded, place: int) -> Step:
        self._file.seek(request.offsets[place])
        return Step.from_record(json.loads(self._file.readline()))

    def close(self) -> None:
        self._file.close()

    def _index(self) -> None:
        offset, number = 0, 0
        while line := self._file.readline(MAX_LINE + 1):
            number += 1
            try:
                if len(line) > MAX_LINE:
                    raise ValueError(f"longer than {MAX_LINE >> 20} MiB; no trace has such lines")
                if number > 1 and _is_cut(line):
                    self.is_cut = True
                elif line.strip():
                    self._take(_parsed(line), offset, is_first=number == 1)
            except ValueError as error:
                raise ValueError(f"{self.path}, line {number}: {error}") from error
            offset += len(line)
        if not number:
            raise ValueError(f"{self.path} is empty; a trace begins with a line of type trace")

    def _take(self, record: dict[str, Any], offset: int, *, is_first: bool) -> None:
        kind = record.get("type")
        if is_first or kind == "trace":
            self._begin(record)
        elif kind == "request":
            self._take_request(record)
        elif kind == "step":
            Step.from_record(record)
            self._request(record).offsets.append(offset)
        elif kind == "end":
            self._request(record).end = record
            del self._open[record["request"]]
        elif kind == "left_out":
            self.num_skipped = _int(record, "lines")
        else:
            raise ValueError(f"type {kind!r:.40} is not known; is this a trace?")

    def _begin(self, record: dict[str, Any]) -> None:
        version = record.get("version")
        if record.get("type") != "trace" or type(version) is not int:
            raise ValueError("a trace begins with a line of type trace and its version; is this one?")
        if version > NEWEST_VERSION:
            raise ValueError(
                f"version {version} is newer than {NEWEST_VERSION}, the newest that is known here; update specinfer"
            )
        self.model = _text(record, "model")

    def _take_request(self, record: dict[str, Any]) -> None:
        name, prompt = _text(record, "request"), record.get("prompt")
        if prompt is None:
            prompt = " ".join(f"#{token}" for token in _typed(record, "prompt_token_ids", list))
        elif not isinstance(prompt, str):
            raise ValueError("prompt is not text")
        self._open[name] = Recorded(name, prompt, _typed(record, "params", dict))
        self.requests.append(self._open[name])

    def _request(self, record: dict[str, Any]) -> Recorded:
        name = _text(record, "request")
        if name not in self._open:
            raise ValueError(f"request {name!r:.60} has no line of type request before this, or has ended")
        return self._open[name]


def _is_cut(line: bytes) -> bool:
    if line.endswith(b"\n"):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError("not valid JSON") from error
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def _typed(record: Any, name: str, kind: Any) -> Any:
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} is missing, or of the wrong type")
    return value


def _int(record: Any, name: str) -> int:
    value: int = _typed(record, name, int)
    return value


def _text(record: Any, name: str) -> str:
    value: str = _typed(record, name, str)
    return value


def _probability(record: Any, name: str) -> float | None:
    if isinstance(record, dict) and record.get(name) is None:
        return None
    return float(_typed(record, name, (int, float)))


@dataclass(slots=True)
class AcceptanceCounts:
    """Counts of the proposed tokens that were verified, which are those whose parent was accepted.

    Attributes:
        q: Sum of the drafters' probabilities.
        p: Sum of the target's probabilities. With sampling from the plain distribution, it is the expected `accepted`.
    """

    verified: int = 0
    accepted: int = 0
    q: float = 0.0
    p: float = 0.0

    def add(self, q: float | None, p: float | None, *, is_accepted: bool) -> None:
        self.verified += 1
        self.accepted += is_accepted
        self.q += q or 0.0
        self.p += p or 0.0


@dataclass(slots=True)
class Tally:
    """Counts over any number of steps."""

    num_passes: int = 0
    num_generated: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    by_depth: dict[int, AcceptanceCounts] = field(default_factory=dict)
    by_rank: dict[int, AcceptanceCounts] = field(default_factory=dict)
    by_drafter: dict[str, AcceptanceCounts] = field(default_factory=dict)
    passes_by_generated: dict[int, int] = field(default_factory=dict)

    def add(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self._add(step)

    def _add(self, step: Step) -> None:
        self.num_passes += 1
        self.num_generated += step.num_generated
        self.num_drafted += len(step.nodes)
        self.num_accepted += len(step.path)
        self.passes_by_generated[step.num_generated] = self.passes_by_generated.get(step.num_generated, 0) + 1
        tested = {0, *step.path}
        if step.next is None and step.path:
            tested.remove(step.path[-1])  # the output ended at this node, so its children were not verified
        for place, node in enumerate(step.nodes, start=1):
            if node.parent in tested:
                is_accepted = place in step.path
                self.by_depth.setdefault(node.depth, AcceptanceCounts()).add(node.q, node.p, is_accepted=is_accepted)
                self.by_rank.setdefault(node.rank, AcceptanceCounts()).add(node.q, node.p, is_accepted=is_accepted)
                for name in node.drafters:
                    self.by_drafter.setdefault(name, AcceptanceCounts()).add(node.q, node.p, is_accepted=is_accepted)

    @property
    def tokens_per_pass(self) -> float:
        return self.num_generated / self.num_passes if self.num_passes else 0.0
