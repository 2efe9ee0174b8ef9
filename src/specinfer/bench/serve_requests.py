"""The requests of a serving run: texts that come with the package, random words, or a file of prompts or of a trace.

A line of a trace is a JSON object: `timestamp` in ms, `input_length` or a prompt, and `output_length` (these names are
those of Mooncake's traces), and `class` and `slo`, the class of the request and its latency targets. All are optional.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specinfer.bench.serve_options import DATASETS, TRACE, ServeConfig
from specinfer.core.limits import SLO
from specinfer.demo.corpus import heldout_prompts

_TRACE_FILE = Path(__file__).with_name("serve_trace.jsonl")
_MAX_CHARS = 200_000  # most characters of a prompt from a file
_CHARS_PER_TOKEN = 4  # of a prompt of which only the length is given


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request of the load.

    Attributes:
        time: Seconds from the first request of a trace, or None for a request without a time.
        max_tokens: Tokens to generate, or None for the number of all requests.
        kind: Class of the request; empty for none.
        slo: Latency targets of the request, or None.
    """

    prompt: str
    time: float | None = None
    max_tokens: int | None = None
    kind: str = ""
    slo: SLO | None = None


def load_requests(config: ServeConfig) -> list[LoadRequest]:
    """Return the requested number of requests.

    Raises:
        ValueError: There are not enough, the file cannot be read, or a time is missing that is to be kept.
    """
    if config.dataset == "heldout":
        found = [LoadRequest(prompt) for prompt in heldout_prompts(config.num_prompts, num_chars=config.prompt_chars)]
    elif config.dataset == "random":
        chance = random.Random(config.seed)
        found = [LoadRequest(_random_words(chance, config.prompt_chars)) for _ in range(config.num_prompts)]
    else:
        path = _TRACE_FILE if config.dataset == TRACE else Path(config.dataset)
        found = _file_requests(path)
        if len(found) < config.num_prompts:
            raise ValueError(f"num_prompts: {config.dataset} has {len(found)}; ask for no more")
        found = found[: config.num_prompts]
    if config.self_timed and any(request.time is None for request in found):
        raise ValueError(f"self_timed: a request of {config.dataset} has no timestamp; give a request rate")
    return found


def _random_words(chance: random.Random, num_chars: int) -> str:
    """Return random words, which no cache contains and no drafter can predict."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ""
    while len(words) < num_chars:
        words += "".join(chance.choices(letters, k=chance.randint(1, 9))) + " "
    return words[:num_chars].strip() or "a"


def _file_requests(path: Path) -> list[LoadRequest]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"dataset: {path} is none of {', '.join(DATASETS)} and no text that can be read") from error
    try:
        entries = json.loads(text) if text.lstrip().startswith("[") else _json_lines(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"dataset: {path} is neither JSON nor JSON lines: {error}") from error
    found = [(entry, prompt) for entry, prompt in _with_prompts(entries) if prompt and len(prompt) <= _MAX_CHARS]
    if not found:
        raise ValueError(f"dataset: {path} has no prompts; an entry is text, or an object with prompt or conversations")
    try:
        return [_request_of(entry, prompt) for entry, prompt in found]
    except (TypeError, ValueError) as error:
        raise ValueError(f"dataset: {path}: {error}") from error


def _json_lines(text: str) -> Sequence[Any]:
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _with_prompts(entries: Sequence[Any]) -> list[tuple[Any, str | None]]:
    """Return each entry and its prompt; those that give only a length get held-out text."""
    lengths = [entry.get("input_length") if isinstance(entry, Mapping) else None for entry in entries]
    numbers = [length for length in lengths if isinstance(length, int) and length > 0]
    texts = iter(heldout_prompts(len(numbers), num_chars=_CHARS_PER_TOKEN * max(numbers)) if numbers else ())
    found = []
    for entry, length in zip(entries, lengths, strict=True):
        prompt = _prompt_of(entry)
        if isinstance(length, int) and length > 0:
            text = next(texts, "")
            prompt = prompt or text[-_CHARS_PER_TOKEN * length :].lstrip()
        found.append((entry, prompt))
    return found


def _request_of(entry: Any, prompt: str) -> LoadRequest:
    if not isinstance(entry, Mapping):
        return LoadRequest(prompt)
    time, max_tokens = entry.get("timestamp"), entry.get("output_length")
    if time is not None and not (isinstance(time, int | float) and time >= 0):
        raise ValueError(f"timestamp must be milliseconds of at least 0, not {time!r:.60}")
    if max_tokens is not None and not (isinstance(max_tokens, int) and max_tokens >= 1):
        raise ValueError(f"output_length must be a whole number of at least 1, not {max_tokens!r:.60}")
    seconds = None if time is None else time / 1000
    return LoadRequest(prompt, seconds, max_tokens, str(entry.get("class", "")), SLO.parse(entry.get("slo")))


def _prompt_of(entry: Any) -> str | None:
    """Return the text of an entry, or of the first turn of its conversation (ShareGPT's format, or messages)."""
    if isinstance(entry, Mapping):
        turns = entry.get("conversations") or entry.get("messages")
        if isinstance(turns, Sequence) and turns and isinstance(turns[0], Mapping):
            entry = turns[0].get("value", turns[0].get("content"))
        else:
            entry = entry.get("prompt", entry.get("text"))
    return entry if isinstance(entry, str) and entry.strip() else None
