"""Reading of prompts, each with its own sampling parameters, from arguments, a file or standard input."""

import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specinfer.cli.terminal import read_input
from specinfer.cli.values import parse_json
from specinfer.core.sampling import SamplingParams

if TYPE_CHECKING:
    from specinfer.inputs.arguments import Prompt
    from specinfer.llm import LLM


_SETTINGS = {field.name for field in fields(SamplingParams)}
_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_OTHERS = ("cache_salt",)  # a part of the prompt


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One prompt of a command.

    Attributes:
        prompt: Text, or an object with "prompt", "prompt_token_ids" or "messages".
        settings: Fields of `SamplingParams` that differ from those of the command line.
        place: Where it stands, for messages.
    """

    prompt: "Prompt"
    settings: Mapping[str, Any] = field(default_factory=dict)
    place: str = "prompt"

    def params(self, usual: SamplingParams) -> SamplingParams:
        """Return the parameters of this prompt.

        Raises:
            ValueError: A field cannot be used.
        """
        try:
            return replace(usual, **self.settings)
        except ValueError as error:
            raise ValueError(f"{self.place}: {error}") from error

    def rendered(self, llm: "LLM") -> "Prompt":
        """Return the prompt with a conversation as token ids.

        Raises:
            RequestError: The model has no chat template, or the conversation does not fit it.
        """
        if isinstance(self.prompt, Mapping) and "messages" in self.prompt:
            ids = llm.chat_prompt(self.prompt["messages"])
            return {"prompt_token_ids": ids} | {key: self.prompt[key] for key in _OTHERS if key in self.prompt}
        return self.prompt


def read_prompts(words: Sequence[str], file: str | None) -> list[PromptLine]:
    """Return prompts from one of the three sources; standard input is not read if it is a terminal."""
    if words and file is not None:
        raise ValueError("file: prompts are given as arguments too; use one of the two")
    if words:
        return [PromptLine(word) for word in words]
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise ValueError(
            "prompt: none given; name one after the model (for one word: with --model), a --file, or pipe lines in"
        )
    name = "standard input" if file in (None, "-") else str(file)
    try:
        text = read_input() if file in (None, "-") else Path(str(file)).read_text(encoding="utf-8-sig")
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
        prompts = [PromptLine(line.removesuffix("\r")) for line in lines.values()]
    if not prompts:
        raise ValueError(f"prompt: {name} holds none")
    return prompts


def count_tokens(llm: "LLM", prompt: "Prompt") -> int:
    """Return the prompt's length in tokens, or 0 for a prompt that the model will refuse."""
    if isinstance(prompt, Mapping):
        prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt", ())
    try:
        return len(llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    except (AttributeError, TypeError, UnicodeError):  # no tokenizer, or neither a list nor valid text
        return 0


def _as_prompt(place: str, entry: Any) -> PromptLine:
    if isinstance(entry, str):
        return PromptLine(entry, place=place)
    kinds = [key for key in _PROMPTS if key in entry] if isinstance(entry, dict) else []
    if len(kinds) != 1:
        raise ValueError(
            f'{place}: a prompt is a string, or an object with "prompt", "prompt_token_ids" or "messages" (one of them)'
        )
    allowed = (*_SETTINGS, *_PROMPTS, *_OTHERS)
    if unknown := [key for key in entry if key not in allowed]:
        near = difflib.get_close_matches(unknown[0], allowed, n=1)
        remedy = f"did you mean {near[0]}?" if near else "use fields of SamplingParams, such as temperature"
        raise ValueError(f"{place}: {unknown[0]!r:.60} is not known; {remedy}")
    prompt = {key: entry[key] for key in (*kinds, *_OTHERS) if key in entry}
    line = PromptLine(prompt, {key: value for key, value in entry.items() if key in _SETTINGS}, place)
    line.params(SamplingParams(max_tokens=None))
    return line
