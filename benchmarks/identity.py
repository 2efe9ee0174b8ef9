"""Tokens that are not those of plain decoding alone, with trees, in batches, greedily and sampled.

Each prompt is decoded by itself first, without speculation. Then each arm decodes the same prompts with the same seeds
in batches. With native layers on CPUs, and with `batch_invariant`, no token may differ. Elsewhere near ties are decided
otherwise in passes of other sizes. All tokens after the first that differs count as different.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.growth.models import growing
from benchmarks.options import SAMPLING, LabSettings
from specinfer.bench.loop import Session, Turn, batches, open_session
from specinfer.bench.measurement import measure_batch
from specinfer.bench.options import PLAIN, ThroughputConfig
from specinfer.bench.prompts import PromptSet, chat_token_ids, token_prompts
from specinfer.cli.measure import Measurement
from specinfer.core.options import setting, setting_of
from specinfer.inputs.chat.samples import ALL, chat_prompts, named_kinds
from specinfer.model.definition import load_tokenizer
from specinfer.policy.base import FixedPolicy
from specinfer.reporting.progress_bar import StageBar
from specinfer.reporting.report import Report, Table, Value, reported
from specinfer.reporting.spread import partings


@dataclass(frozen=True, slots=True)
class IdentityConfig(ThroughputConfig):
    """Options of the comparison of tokens."""

    grow: str | None = setting_of(LabSettings, "grow")
    temperatures: tuple[float, ...] = setting(
        (0.0, 1.0), SAMPLING, "Temperature. May be repeated. (default: 0 and 1)", name="temperature"
    )
    temperature: float = 0.0  # neither of the two is an option here
    replays: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = setting_of(ThroughputConfig, "batch_sizes", default=(8,))

    def __post_init__(self) -> None:
        ThroughputConfig.__post_init__(self)
        if not self.temperatures:
            raise ValueError("temperature: none given; give at least one")
        for temperature in self.temperatures:
            replace(self.sampling_params(0), temperature=temperature)


@dataclass(frozen=True, slots=True)
class Differing:
    """Outputs of an arm beside those of plain decoding alone.

    Attributes:
        num_tokens: Tokens of all outputs; `num_differing` are, or come after, another than expected.
        earliest: Tokens before the earliest that differs, or None.
    """

    temperature: float
    batch_size: int
    arm: str
    num_outputs: int
    num_parted: int
    num_tokens: int
    num_differing: int
    earliest: int | None

    @classmethod
    def from_outputs(
        cls, temperature: float, batch_size: int, arm: str, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> "Differing":
        """Count in pairs of the expected tokens of an output and its tokens."""
        places = partings(pairs)
        ends = [max(map(len, pair)) for pair in pairs if pair[0] != pair[1]]
        return cls(
            temperature, batch_size, arm, len(pairs), len(places), sum(len(output) for _, output in pairs),
            sum(ends) - sum(places), min(places, default=None),
        )  # fmt: skip


@reported
def run_identity(config: IdentityConfig, progress: StageBar) -> Report[tuple[Differing, ...]]:
    """Count the tokens that differ.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used. The message names it, and nothing was measured.
        RuntimeError: A request failed.
    """
    rows = list[Differing]()
    with open_session(config, progress, growing(config.grow), partial(mixed_prompts, config=config)) as session:
        for temperature in config.temperatures:
            of_heat = replace(session, params=[replace(each, temperature=temperature) for each in session.params])
            rows += _compare(of_heat, temperature)
        loaded = session.llm.target.loaded
    num_differing = sum(row.num_differing for row in rows)
    table = Table(
        "arms",
        "Tokens that differ from those of plain decoding, one request at a time",
        (
            Value[Differing]("temperature", lambda row: row.temperature, "{:g}", label=True, once=True),
            Value[Differing]("batch_size", lambda row: row.batch_size, heading="batch", label=True),
            Value[Differing]("arm", lambda row: row.arm, heading="tree", label=True),
            Value[Differing]("num_outputs", lambda row: row.num_outputs, heading="outputs"),
            Value[Differing]("num_parted", lambda row: row.num_parted, heading="differ"),
            Value[Differing]("num_tokens", lambda row: row.num_tokens, heading="tokens"),
            Value[Differing]("num_differing", lambda row: row.num_differing, heading="differ"),
            Value[Differing]("earliest", lambda row: row.earliest, heading="earliest", optional=True),
        ),
        rows,
    )
    how = "batch_invariant" if loaded.batch_invariant else "without batch_invariant"
    lines = [f"{config.model} on {loaded.device}, {how}: {num_differing} tokens differ"]
    numbers: dict[str, Any] = {"num_differing": num_differing, "batch_invariant": loaded.batch_invariant}
    return Report(lines, (table,), tuple(rows), numbers=numbers)


def mixed_prompts(folder: Path, config: IdentityConfig) -> PromptSet:
    """Return texts to continue, and at most as many chat prompts of all kinds if the model has a chat format.

    Answers do not end with the end-of-text token, so all outputs have the same length.
    """
    count = max(config.num_prompts, config.largest)
    chat, num_messages = list[list[int]](), sum(map(len, chat_prompts().values()))
    if config.prompts is None and getattr(load_tokenizer(folder), "chat_template", None):
        chat = chat_token_ids(folder, min(count // 2, num_messages), named_kinds((ALL,))).token_ids
    texts = token_prompts(
        folder, config.max_tokens, count=count - len(chat), num_chars=config.prompt_chars, prompts=config.prompts
    )
    return PromptSet([*texts, *chat])


def _compare(session: Session, temperature: float) -> list[Differing]:
    """Return the counts of all arms at one temperature."""
    config, progress, count = session.config, session.progress, len(session.prompts.token_ids)
    progress.stage(f"plain decoding at {temperature:g}", count)
    expected = list[Sequence[int]]()
    for number in range(count):
        expected += measure_batch(session, Turn(0, (number,), ()), FixedPolicy(), samples=False).outputs
        progress.advance()
    rows = []
    for size in config.sizes:
        for name in (PLAIN, *config.trees):
            pairs = dict[int, tuple[Sequence[int], Sequence[int]]]()
            progress.stage(f"{name}, {size} together")
            for numbers in batches(count, size, count):
                turn, policy = Turn(0, numbers, ()), session.policies[size, name]
                run = measure_batch(session, turn, policy, samples=False)
                pairs |= {i: (expected[i], output) for i, output in zip(numbers, run.outputs, strict=True)}
            rows.append(Differing.from_outputs(temperature, size, name, list(pairs.values())))
    return rows


IDENTITY = Measurement(
    "identity",
    IdentityConfig,
    "benchmarks.identity:run_identity",
    "Count the tokens of trees and batches that are not those of plain decoding alone.",
)
