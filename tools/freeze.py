"""Record what must not change while names and layout do, and compare with what was recorded.

    python tools/freeze.py record FILE
    python tools/freeze.py compare FILE

Outputs are the tokens of every verification rule, tree and kind of drafter, greedily and with a seed, by the embedded
code pair; help is that of every command, 80 columns wide.
"""

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from typer.core import TyperGroup
from typer.testing import CliRunner

from specinfer import LLM, SamplingParams
from specinfer.cli.app import app
from specinfer.core.config import DRAFT_SAMPLINGS

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = (
    "def read_lines(path):\n",
    "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop",
)
TREES = ("off", "1,1,1", "2,2,1", "best-first:12")
DRAFTERS = (("demo",), ("ngram",), ("suffix",), ("demo", "demo-2"), ("demo", "suffix"))
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 7},
}
MAX_TOKENS = 24


def outputs() -> Iterator[tuple[str, list[list[int]]]]:
    """(name of the case, token ids of each prompt)."""
    for rule, drafters in itertools.product(DRAFT_SAMPLINGS, DRAFTERS):
        with LLM("demo", drafters=drafters, tree="1", verification=rule, dtype="float32") as llm:
            for tree, (kind, sampling) in itertools.product(TREES, SAMPLINGS.items()):
                params = SamplingParams(max_tokens=MAX_TOKENS, tree=tree, **sampling)
                answers = llm.generate(list(PROMPTS), params, use_tqdm=False)
                name = f"{rule}, {'+'.join(drafters)}, {tree}, {kind}"
                yield name, [list(answer.outputs[0].token_ids) for answer in answers]


def helps() -> Iterator[tuple[str, str]]:
    """(command, its help)."""
    os.environ["COLUMNS"] = "80"
    for words in _commands(typer.main.get_command(app), ()):
        yield " ".join(words), CliRunner().invoke(app, [*words, "--help"], prog_name="specinfer").output


def _commands(command: object, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield words
    if isinstance(command, TyperGroup):
        for name, inner in command.commands.items():
            yield from _commands(inner, (*words, name))


def record() -> dict[str, object]:
    """Everything that is compared."""
    return {
        "outputs": dict(outputs()),
        "help": dict(helps()),
        "settings": (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8"),
    }


def differences(before: object, after: object, where: str = "") -> Iterator[str]:
    """Where two records differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            yield from differences(before.get(key), after.get(key), f"{where}/{key}")
    elif before != after:
        yield where


def main() -> None:
    """Record into a file, or compare with it and end with 1 where something differs."""
    doing, file = sys.argv[1:]
    if doing == "record":
        Path(file).write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
        return
    found = sorted(differences(json.loads(Path(file).read_text(encoding="utf-8")), record()))
    print("\n".join(found) or "nothing differs")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
