"""Write the table of settings in docs/configuration.md from the options themselves; with --check only compare.

Flags, environment variables and keys of configuration files have one source, the dataclasses of options.
"""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from specinfer.cli.options import EngineOptions
from specinfer.cli.replica_options import ReplicaOptions
from specinfer.cli.serve_options import ServerOptions

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
BEGIN, END = "<!-- settings: written by tools/configuration.py -->\n", "<!-- end of settings -->\n"


def table() -> str:
    """All settings as Markdown, a table for each section."""
    sections: dict[str, list[str]] = {}
    for kind in (EngineOptions, ServerOptions, ReplicaOptions):
        hints = get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            option = get_args(hints[field.name])[1]
            sections.setdefault(option.rich_help_panel, []).append(_row(field, option))
    return "\n".join(_sections(sections))


def _row(field: "dataclasses.Field[Any]", option: Any) -> str:
    key = field.name.replace("_", "-")
    default = "" if field.default is None or field.default is False or field.default == "" else f"`{field.default}`"
    text = option.help.replace("|", "\\|")
    return f"| `--{key}` | `SPECINFER_{field.name.upper()}` | {default} | {text} |"


def _sections(sections: dict[str, list[str]]) -> Iterator[str]:
    for name, rows in sections.items():
        yield f"### {name}\n"
        yield "| flag | variable | default | |"
        yield "|---|---|---|---|"
        yield from rows
        yield ""


def renewed(document: str) -> str:
    """The document with the table of today."""
    head, _, rest = document.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def main() -> None:
    """Renew the document, or with --check say whether it would change."""
    before = DOCUMENT.read_text(encoding="utf-8")
    after = renewed(before)
    if "--check" in sys.argv:
        sys.exit(None if before == after else f"{DOCUMENT.name} is not up to date; run tools/configuration.py")
    DOCUMENT.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
