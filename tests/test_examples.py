"""Every example runs as it stands, writes what it promises, and is short enough to read at a glance."""

import ast
import asyncio
import io
import json
import re
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
SPEED = re.compile(r"\b(\d\.\d\d) tokens (per target|a) pass")


class Written(io.StringIO):
    """Standard output that keeps the time of each flush with the text up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.flushes: list[tuple[float, str]] = []

    def flush(self) -> None:
        self.flushes.append((time.monotonic(), self.getvalue()))


def check_generate(out: Written) -> None:
    text = out.getvalue()
    for prompt in ("def read_lines(path):\n", "class Stack:\n    def push(self, item):\n"):
        answer = text.partition(prompt)[2].partition("\n---")[0]
        assert len(answer.strip()) > 20
    assert len(SPEED.findall(text)) == 2


def check_stream(out: Written) -> None:
    assert out.getvalue().startswith("def main(")
    shown = {text: when for when, text in reversed(out.flushes)}  # when each longer text was first shown
    assert len(shown) > 8
    assert len(set(shown.values())) == len(shown)
    assert "\033[32m" in out.getvalue()


def check_many_callers(out: Written) -> None:
    text = out.getvalue()
    assert len({shown for _, shown in out.flushes}) > 5
    assert text.index("tokens a pass") < text.index("import os\n") < text.index("class Queue:\n")
    assert text.count("\n---\n") == 2


def check_merged_drafters(out: Written) -> None:
    lines = out.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["coupled", "multi-step", "traversal", "target-only"]
    assert all(float(SPEED.findall(line)[0][0]) > 1 for line in lines)


def check_same_output(out: Written) -> None:
    off, chain, tree, *text = out.getvalue().splitlines()
    assert (off.split()[:2], chain.split()[0], tree.split()[0]) == (["off:", "1.00"], "1,1,1,1:", "3,2,1,1:")
    assert len("\n".join(text)) > 40


def check_structured_output(out: Written) -> None:
    lines = out.getvalue().splitlines()
    answers = [json.loads(line.partition("}")[0].replace("'", '"') + "}") for line in lines]
    assert len(answers) == 3
    assert all(answer["name"] in ("push", "pop") and 0 <= answer["arguments"] <= 9 for answer in answers)


CHECKS: dict[str, Callable[[Written], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


def test_every_example_has_a_check() -> None:
    assert sorted(CHECKS) == [path.stem for path in EXAMPLES]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_writes_what_it_promises(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(path.read_text().splitlines()) < 40
    out = Written()
    monkeypatch.setattr("sys.stdout", out)
    runpy.run_path(str(path), run_name="__main__")
    CHECKS[path.stem](out)
    assert SPEED.search(out.getvalue())


def test_the_cells_of_the_notebook_run_in_a_running_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = json.loads((EXAMPLES[0].parent / "notebook.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells if cell["cell_type"] == "code")  # each run would change them
    out = Written()
    monkeypatch.setattr("sys.stdout", out)
    asyncio.run(_run_cells(code))
    assert SPEED.search(out.getvalue())
    assert "'target'" not in out.getvalue()
    assert re.search(r"^'.+' +(demo|target)$", out.getvalue(), re.MULTILINE)
    assert out.getvalue().count("\n---\n") == 2


async def _run_cells(code: list[str]) -> None:
    """Run cells as IPython does: names are shared, and a cell may await."""
    names: dict[str, Any] = {}
    for cell in code:
        compiled = compile(cell, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if (result := FunctionType(compiled, names)()) is not None:
            await result
