"""docs/architecture.md quotes the step as it is."""

import ast
import re
import textwrap
from pathlib import Path

from specinfer.engine import engine

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_the_step_is_quoted_as_it_is() -> None:
    source = Path(engine.__file__).read_text(encoding="utf-8")
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    (step,) = [function for function in functions if function.name == "step"]
    start, end = step.body[1].lineno, step.end_lineno  # after the docstring
    body = textwrap.dedent("\n".join(source.splitlines()[start - 1 : end]))
    page = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"The step is `Engine\.step`:\n\n```python\n(.*?)\n```", page, re.DOTALL) == [body]
