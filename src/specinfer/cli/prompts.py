"""Reading of prompts from arguments, a file or standard input."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specinfer.cli.values import parse_json

if TYPE_CHECKING:
    from specinfer.inputs.prompts import Prompt
    from specinfer.llm import LLM


def read_prompts(words: Sequence[str], file: str | None) -> "list[Prompt]":
    """Return prompts from one of the three sources; standard input is not read if it is a terminal."""
    if words and file is not None:
        raise ValueError("file: prompts are given as arguments too; use one of the two")
    if words:
        return list(words)
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise ValueError(
            "prompt: none given; name one after the model (for one word: with --model), a --file, or pipe lines in"
        )
    name = "standard input" if file in (None, "-") else str(file)
    try:
        text = sys.stdin.read() if file in (None, "-") else Path(str(file)).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"file: {name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"file: {name} is not UTF-8 text") from error
    # Split at line feeds only: str.splitlines would also split at characters that JSON strings may have.
    lines = {f"{name}, line {i}": line for i, line in enumerate(text.split("\n"), 1) if line.strip()}
    if name.endswith(".json"):
        entries = parse_json(name, text)
        entries = entries if isinstance(entries, list) else [entries]
        prompts = [_as_prompt(f"{name}, entry {i}", entry) for i, entry in enumerate(entries)]
    elif name.endswith(".jsonl"):
        prompts = [_as_prompt(place, parse_json(place, line)) for place, line in lines.items()]
    else:
        prompts = [line.removesuffix("\r") for line in lines.values()]
    if not prompts:
        raise ValueError(f"prompt: {name} holds none")
    return prompts


def count_tokens(llm: "LLM", prompt: "Prompt") -> int:
    """Return the prompt's length in tokens, or 0 for a prompt that the model will refuse."""
    if isinstance(prompt, Mapping):
        prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
    try:
        return len(llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    except (AttributeError, TypeError, UnicodeError):  # no tokenizer, or neither a list nor valid text
        return 0


def _as_prompt(place: str, entry: Any) -> "Prompt":
    if isinstance(entry, str) or (isinstance(entry, dict) and ("prompt" in entry or "prompt_token_ids" in entry)):
        return entry
    raise ValueError(f'{place}: a prompt is a string, or an object with "prompt" or "prompt_token_ids"')
