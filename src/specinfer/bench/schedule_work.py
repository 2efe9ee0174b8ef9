"""A mixed workload: code, prose and repetition, made of held-out files of Python's standard library."""

import ast
import textwrap
from dataclasses import dataclass
from typing import Any

from specinfer.demo.corpus import heldout_files, heldout_prompts, read_text

PARTS = ("code", "prose", "repetition")
_CHARS_PER_TOKEN = 6  # at most, on average: so much text is cut before it is encoded
_LEAST_PROSE = 120  # characters of a text worth continuing
_REPEATED_CHARS = (200, 900)  # of a function that is given whole
_AGAIN = 0.25  # of it, given a second time


@dataclass(frozen=True, slots=True)
class Work:
    """One prompt of the workload."""

    part: str
    prompt_ids: tuple[int, ...]
    temperature: float


def make_work(tokenizer: Any, num_prompts: int, prompt_tokens: int) -> list[Work]:
    """So many prompts of each part, the parts in turn.

    Code goes on from the middle of held-out files, greedily. Prose goes on from their comments and docstrings, at
    temperature 1. Repetition is a held-out function and its beginning again, greedily: the rest stands in the prompt.

    Args:
        prompt_tokens: Of code and prose at most.

    Raises:
        ValueError: The held-out files do not give so many.
    """
    texts = {
        "code": heldout_prompts(num_prompts, num_chars=prompt_tokens * _CHARS_PER_TOKEN // 2),
        "prose": _prose(num_prompts, prompt_tokens * _CHARS_PER_TOKEN),
        "repetition": _repetitions(num_prompts),
    }
    work = []
    for i in range(num_prompts):
        for part in PARTS:
            ids = tokenizer.encode(texts[part][i], add_special_tokens=False)
            kept = ids if part == "repetition" else ids[-prompt_tokens:]
            work.append(Work(part, tuple(kept), 1.0 if part == "prose" else 0.0))
    return work


def _prose(count: int, num_chars: int) -> list[str]:
    """Docstrings of held-out files, each within its quotes and cut in its last third."""
    found = []
    for tree in _parsed():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= _LEAST_PROSE:
                    found.append('"""' + text[: min(2 * len(text) // 3, num_chars)].rstrip())
    return _spread("prose", found, count)


def _repetitions(count: int) -> list[str]:
    """Functions of held-out files, each followed by its beginning."""
    found = []
    least, most = _REPEATED_CHARS
    for text, tree in zip(_texts(), _parsed(), strict=True):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                source = textwrap.dedent(ast.get_source_segment(text, node, padded=True) or "")
                if least <= len(source) <= most:
                    found.append(f"{source}\n\n\n{source[: int(_AGAIN * len(source))].rstrip()}")
    return _spread("repetition", found, count)


def _texts() -> list[str]:
    return [read_text(path) for path in heldout_files()]


def _parsed() -> list[ast.Module]:
    return [ast.parse(text) for text in _texts()]


def _spread(part: str, found: list[str], count: int) -> list[str]:
    """So many of them, evenly spread over the files."""
    found = list(dict.fromkeys(found))
    if len(found) < count:
        raise ValueError(f"num_prompts: the held-out files give {len(found)} prompts of {part}; ask for fewer")
    return [found[i * len(found) // count] for i in range(count)]
