"""Messages of several kinds to a chat model, written for measurements; no drafter is trained on them."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
KINDS = ("questions", "rewriting", "code", "lists", "stories")
FUNCTIONS = "functions"  # to complete from their heads and descriptions; asked twice as often as another kind
ALL = "all"  # stands for all kinds and functions
_FILE = Path(__file__).with_name("samples.jsonl")


@cache
def chat_prompts() -> dict[str, tuple[str, ...]]:
    """Return all messages by kind."""
    texts: dict[str, list[str]] = {kind: [] for kind in (*KINDS, FUNCTIONS)}
    for line in _FILE.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        texts[record["kind"]].append(record["prompt"])
    return {kind: tuple(prompts) for kind, prompts in texts.items()}


def named_kinds(kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds of messages that are asked for, all of them for `ALL`."""
    return (*KINDS, FUNCTIONS) if ALL in kinds else tuple(kinds)


def in_turn(kinds: Sequence[str], count: int) -> list[tuple[str, str]]:
    """Return the kinds and texts of this many messages, from each kind in turn, functions twice.

    Raises:
        ValueError: There are too few.
    """
    return taken_in_turn(chat_prompts(), kinds, count, twice=FUNCTIONS)


def taken_in_turn(
    written: Mapping[str, Sequence[T]], kinds: Sequence[str], count: int, twice: str | None = None
) -> list[tuple[str, T]]:
    """Return this many prompts, from each kind in turn as long as it has some, with their kinds.

    Args:
        twice: Kind that comes twice in each turn.

    Raises:
        ValueError: There are too few.
    """
    available = sum(len(written[kind]) for kind in kinds)
    if count > available:
        raise ValueError(
            f"num_prompts: {count} are needed, and there are {available} chat prompts of {', '.join(kinds)}; ask for "
            "fewer at once, or for more kinds"
        )
    left = {kind: iter(written[kind]) for kind in kinds}
    turn = [kind for kind in kinds for _ in range(1 + (kind == twice and len(kinds) > 1))]
    taken = ((kind, prompt) for kind in itertools.cycle(turn) for prompt in itertools.islice(left[kind], 1))
    return list(itertools.islice(taken, count))


def rendered(read: Callable[[list[Mapping[str, str]]], list[int]], texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of conversations with one message each, by the function that renders a conversation."""
    return [read([{"role": "user", "content": text}]) for text in texts]
