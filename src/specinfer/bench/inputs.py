"""Checks of a measurement's inputs before the long work begins, its prompts, and its progress bar."""

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specinfer.bench.plot import check_plot
from specinfer.bench.report import PLAIN
from specinfer.core.config import parse_tree
from specinfer.core.progress import ProgressCallback
from specinfer.core.sampling import MAX_SEED
from specinfer.demo.corpus import heldout_prompts
from specinfer.model.definition import load_config, load_tokenizer
from specinfer.model.device import DTYPES

AnyPrompt = str | tuple[int, ...]
_TURNS = itertools.count()


def fresh_salt() -> str:
    """Return a new cache salt, so that no arm can look up what another arm generated for the same prompt."""
    return f"turn-{next(_TURNS)}"


def check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise a ValueError that names the field if the value is no whole number within the limits."""
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):  # type: ignore[operator]
        raise ValueError(f"{name} must be a whole number {limits}, not {value!r}")


def check_seed(seed: object) -> None:
    check_whole("seed", seed, 0, MAX_SEED)


def check_distinct(name: str, values: Sequence[object], most: int) -> None:
    """Raise a ValueError that names the field unless the values are distinct whole numbers from 1 to `most`."""
    for value in values:
        check_whole(name, value, 1, most)
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name}: {', '.join(map(str, values)) or 'none'} given; give at least one, and none twice")


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")


def check_trees(trees: Sequence[str]) -> None:
    """Raise a ValueError unless the trees can be the arms that are compared with plain decoding."""
    if not trees or len(set(trees)) < len(trees):
        raise ValueError(f"trees: {', '.join(trees) or 'none'} given; give at least one, and none twice")
    if any(parse_tree(tree).is_off for tree in trees):
        raise ValueError(f'trees: plain decoding is always measured; leave "{PLAIN}" out')


def check_prompts(prompts: Sequence[AnyPrompt] | None) -> None:
    if prompts is not None and not all(prompts or [()]):
        raise ValueError("prompts: one is empty, or there are none; give at least one, each with a token")


def options_of(config: Any) -> dict[str, object]:
    """Return the fields of a config as values that JSON can hold."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}


def check_files(json: str | Path | None, plot: str | Path | None) -> None:
    """Check that the requested files can be written.

    Raises:
        ValueError: A file cannot be written. The message names it.
    """
    if plot is not None:
        check_plot(plot)
    for name, file in (("json", json), ("plot", plot)):
        if file is None:
            continue
        path = Path(file)
        place = path if path.exists() else path.parent
        if path.is_dir() or not place.exists() or not os.access(place, os.W_OK):
            raise ValueError(f"{name}: {path} cannot be written; name a file in a folder that exists and is writable")


def write_json(path: str | Path, numbers: dict[str, object]) -> None:
    Path(path).write_text(json.dumps(numbers, indent=2) + "\n")


def token_prompts(
    folder: Path,
    max_tokens: int,
    *,
    count: int = 0,
    num_chars: int = 600,
    prompts: Sequence[AnyPrompt] | None = None,
) -> list[list[int]]:
    """Return prompts as token ids for the model in `folder`. Each leaves room for `max_tokens`.

    Args:
        count: Number of held-out texts to use if no prompts are given.
        num_chars: Approximate length of those texts in characters.

    Raises:
        ValueError: An option cannot be used. The message names it.
    """
    if prompts is None:
        try:
            prompts = heldout_prompts(count, num_chars=num_chars)
        except ValueError as error:
            raise ValueError(f"num_prompts: {error}") from error
    tokenizer = load_tokenizer(folder)
    if tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(f"prompts: {folder} has no tokenizer; give token ids")
    encoded = [tokenizer.encode(p) if isinstance(p, str) else list(p) for p in prompts]
    text_config = load_config(folder).get_text_config()
    wrong = [token for ids in encoded for token in ids if not 0 <= token < text_config.vocab_size]
    if wrong:
        raise ValueError(f"prompts: token id {wrong[0]} is not in the vocabulary of {text_config.vocab_size} tokens")
    longest = max(map(len, encoded))
    room = known_positions(folder)
    if room is not None and not max_tokens and longest > room:
        raise ValueError(f"prompts: {longest} tokens do not fit into the context of {room}; give shorter ones")
    if room is not None and longest + max_tokens > room:
        raise ValueError(
            f"max_tokens: {max_tokens} after a prompt of {longest} tokens do not fit into the context of "
            f"{room}; lower max_tokens or prompt_chars"
        )
    return encoded


def known_positions(folder: Path) -> int | None:
    """Return the model's number of positions, or None if its config uses another name (known only after loading)."""
    return getattr(load_config(folder).get_text_config(), "max_position_embeddings", None)


def telling(progress: Any, task: Any) -> ProgressCallback:
    """Return a callback that shows how much of a streamed target is read."""

    def tell(name: str, done: int, total: int) -> None:
        progress.update(task, description=f"{name}: {done / 1e9:.1f} of {total / 1e9:.1f} GB")

    return tell


@contextmanager
def showing_progress(console: Console | None) -> Iterator[Any]:
    """Yield a progress bar, which is shown only if the console is a terminal."""
    console = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield progress
