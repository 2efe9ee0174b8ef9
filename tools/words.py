"""Check the words of docstrings and names in src/specinfer; end with 1 where one is not plain.

The first line of a docstring is a noun phrase or begins with an imperative verb: a line that continues the name of
what it describes ("Of the run", "As above") is refused. Retired words have a successor that the field uses.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "specinfer"
FRAGMENT = re.compile(r"(Of|That|As|What|Who|Whom|Whose|Whether|So|How|And|But|Or|It|Its|They|Their|Those|These)\b")
THIRD_PERSON = re.compile(  # verbs that are not nouns as well
    r"(Adds|Asks|Breaks|Chooses|Commits|Compiles|Decides|Does|Escapes|Finds|Gives|Has|Is|Keeps|Makes|Omits|Parses|"
    r"Proposes|Reads|Renders|Returns|Runs|Says|Sends|Serves|Shows|Splits|Stores|Takes|Tells|Writes)\b"
)
RETIRED = {
    "apprentice": "online trainer",
    "law": "distribution",
    "laws": "distributions",
    "lane": "slot",
    "lanes": "slots",
    "lesson": "training example",
    "lessons": "training examples",
    "lodging": "placement",
    "said": "generated",
    "tell": "report",
    "tells": "reports",
    "told": "reported",
}
WORD = re.compile(rf"(?<![\w-])({'|'.join(RETIRED)})(?![\w-])", re.IGNORECASE)


def main() -> None:
    """Print each fault with its place."""
    faults = [fault for path in sorted(SOURCE.rglob("*.py")) for fault in check(path)]
    print("\n".join(faults) or "words: nothing to mend")
    sys.exit(bool(faults))


def check(path: Path) -> Iterator[str]:
    """Yield the faults of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        place = f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 1)}"
        first = text.splitlines()[0]
        if FRAGMENT.match(first):
            yield f"{place}: begin with a noun phrase or an imperative verb: {first}"
        if THIRD_PERSON.match(first):
            yield f"{place}: begin with a noun phrase or an imperative verb: {first}"
        for word in sorted({found.lower() for found in WORD.findall(text)}):
            yield f"{place}: {word} is retired; use a word such as {RETIRED[word]}"


if __name__ == "__main__":
    main()
