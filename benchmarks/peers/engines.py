"""The table of all engines of a run: speed over another engine's plain decoding and over an engine's own.

Texts are compared with those of the same engine's plain decoding. Engines round differently, and part at near ties.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.peers.report import PeerRuns, ratio_over
from specinfer.bench.comparisons import Compared
from specinfer.bench.results import Arm
from specinfer.reporting.report import Table, Value
from specinfer.reporting.spread import Spread, partings

_OURS = "SpecInfer"


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One engine with one of its settings.

    Attributes:
        plain: The same engine's plain decoding of the same weights, or None if it was not measured.
        other: Plain decoding of the peer that all are compared with.
    """

    engine: str
    settings: str
    arm: Arm
    plain: Arm | None
    other: Arm

    @property
    def is_plain(self) -> bool:
        return self.arm is self.plain

    @property
    def over_own(self) -> Spread | None:
        return None if self.plain is None or self.is_plain else ratio_over(self.arm, self.plain)

    @property
    def same_texts(self) -> str | None:
        """Number of outputs that are those of the engine's plain decoding."""
        if self.plain is None or self.is_plain:
            return None
        runs = zip(self.plain.runs, self.arm.runs, strict=True)
        pairs = [pair for plain, run in runs for pair in zip(plain.outputs, run.outputs, strict=True)]
        parted = partings((plain[: len(output)], output) for plain, output in pairs)
        return f"{len(pairs) - len(parted)} of {len(pairs)}"

    def of(self, prompts: set[int]) -> "EngineRow":
        """Return the row with only the runs on these prompts."""
        arm, other = self.arm.of(prompts), self.other.of(prompts)
        plain = arm if self.is_plain else self.plain and self.plain.of(prompts)
        return EngineRow(self.engine, self.settings, arm, plain, other)


def engine_tables(ours: Compared, peers: PeerRuns) -> list[Table[EngineRow]]:
    """Return the table of all engines, and their speeds by kind of prompt; none without a peer's plain decoding."""
    rows = list(_rows(ours, peers))
    if not rows:
        return []
    other = f"over {rows[0].engine} plain"
    values = (*_NAMES, *_values(other, is_sampled=ours.config.temperature > 0))
    ceilings = f"This machine reads and multiplies {ours.environment.dtype} numbers at up to {ours.ceilings}."
    tables = [Table("engines", _title(ours), values, rows, ceilings)]
    if ours.kinds:
        tables.append(Table("", f"By kind of prompt, {other}", (*_NAMES, *_kinds(ours)), rows))
    return tables


def _title(ours: Compared) -> str:
    config = ours.config
    drawn = f"temperature {config.temperature:g}" if config.temperature else "greedy"
    return (
        f"{ours.num_prompts} prompts, {drawn}, at most {config.max_tokens} tokens, engines in turns on "
        f"{ours.environment.num_threads} threads of {ours.environment.cpu}; medians"
    )


_NAMES = (
    Value[EngineRow]("engine", lambda row: row.engine, label=True),
    Value[EngineRow]("settings", lambda row: row.settings, label=True),
)


def _values(other: str, *, is_sampled: bool) -> Sequence[Value[EngineRow]]:
    found = (
        Value[EngineRow]("tokens_per_second", lambda row: row.arm.tokens_per_second, "{:.1f}", "tokens/s"),
        Value[EngineRow]("over_other", lambda row: ratio_over(row.arm, row.other), "{:.2f}", other),
        Value[EngineRow]("over_own", lambda row: row.over_own, "{:.2f}", "over own plain"),
        Value[EngineRow]("", lambda row: row.over_own and row.over_own.quartiles, heading="quartiles"),
    )
    # Other engines draw other tokens with the same seed when they draft.
    texts = Value[EngineRow]("same_texts", lambda row: row.same_texts, heading="texts of own plain")
    return found if is_sampled else (*found, texts)


def _kinds(ours: Compared) -> Iterator[Value[EngineRow]]:
    for kind, part in ours.by_kind().items():
        numbers = {number for run in part.result.plain.runs for number in run.prompts}
        yield _kind(kind, numbers)


def _kind(kind: str, numbers: set[int]) -> Value[EngineRow]:
    def over_other(row: EngineRow) -> float:
        part = row.of(numbers)
        return ratio_over(part.arm, part.other).median

    return Value("", over_other, "{:.2f}", kind)


def _rows(ours: Compared, peers: PeerRuns) -> Iterator[EngineRow]:
    """Yield the peers, then our arms, all compared with the first peer that does not draft."""
    plains = {(arm.details["library"], arm.details["weights"]): arm for arm in peers.arms if not arm.details["drafts"]}
    if (other := next(iter(plains.values()), None)) is None:
        return
    for arm in peers.arms:
        settings = ", ".join(f"{name} {value}" for name, value in arm.details["settings"].items()) or "plain"
        plain = plains.get((arm.details["library"], arm.details["weights"]))
        yield EngineRow(arm.details["library"], settings, arm, plain, other)
    plain = ours.result.plain
    for arm in ours.result.arms:
        yield EngineRow(_OURS, "plain" if arm is plain else arm.name, arm, plain, other)
