"""Check the words of docstrings and names in src/specinfer; end with 1 where one is not plain.

The first line of a docstring is a noun phrase or begins with an imperative verb: a line that continues the name of
what it describes ("Of the run", "As above") is refused. Retired words have a successor that the field uses. A reference
such as `module.name` or `Class.name` names what is there.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
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
REFERENCE = re.compile(r"(?<!`)`(\w+)\.(\w+)(?:\(\))?`(?!`)")
ENDINGS = {"bin", "cpp", "cu", "gguf", "h", "html", "js", "json", "md", "py", "toml", "txt"}
FOREIGN = {"bytes", "ctypes", "functions", "nn", "time"}  # modules and namespaces that are not the package's


def main() -> None:
    """Print each fault with its place."""
    paths = sorted(SOURCE.rglob("*.py"))
    known = scopes(paths)
    faults = [fault for path in paths for fault in check(path, known)]
    print("\n".join(faults) or "words: nothing to mend")
    sys.exit(bool(faults))


def scopes(paths: Iterable[Path]) -> dict[str, set[str]]:
    """Return the names within each module, folder and class of the package, by its last name."""
    known: dict[str, set[str]] = {}
    for path in paths:
        module = path.parent.name if path.stem == "__init__" else path.stem
        known.setdefault(path.parent.name, set()).add(path.stem)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        known.setdefault(module, set()).update(names_in(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                known.setdefault(node.name, set()).update(names_in(node))
    return known


def names_in(tree: ast.AST) -> set[str]:
    """Return the names that a tree defines, assigns or imports."""
    nodes = (node for node in ast.walk(tree) if not isinstance(getattr(node, "ctx", None), ast.Load))
    fields = ((node, field) for node in nodes for field in ("asname", "name", "id", "attr", "arg"))
    return {name for node, field in fields if isinstance(name := getattr(node, field, None), str)}


def check(path: Path, known: Mapping[str, Set[str]]) -> Iterator[str]:
    """Yield the faults of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    local = names_in(tree) - known.keys()
    for node in ast.walk(tree):
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
        for scope, name in REFERENCE.findall(text):
            is_other = name in ENDINGS or scope in FOREIGN or scope in local
            if not is_other and name not in known.get(scope, ()):
                yield f"{place}: there is no `{scope}.{name}`"


if __name__ == "__main__":
    main()
