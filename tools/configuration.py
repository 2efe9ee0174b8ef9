"""Write the table of settings in docs/configuration.md from the options themselves; with --check only compare.

Flags, environment variables and keys of configuration files have one source: EngineArgs and the dataclasses of options.
"""

import sys
from collections.abc import Iterator
from inspect import Parameter
from pathlib import Path
from typing import Any, get_args

from specinfer.cli.commands import flags_of
from specinfer.cli.options import ServedOptions
from specinfer.cli.replica_options import ReplicaOptions
from specinfer.cli.serve_options import ServerOptions

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
BEGIN, END = "<!-- settings: written by tools/configuration.py -->\n", "<!-- end of settings -->\n"


def table() -> str:
    """Return all settings as Markdown, a table for each section."""
    sections: dict[str, list[str]] = {}
    for kind in (ServedOptions, ServerOptions, ReplicaOptions):
        for parameter in flags_of(kind) or ():
            option = get_args(parameter.annotation)[1]
            sections.setdefault(option.rich_help_panel, []).append(_row(parameter, option))
    return "\n".join(_sections(sections))


def _row(parameter: Parameter, option: Any) -> str:
    key, default = parameter.name.replace("_", "-"), parameter.default
    shown = "" if default is None or default is False or default == "" else f"`{default}`"
    text = option.help.replace("|", "\\|")
    return f"| `--{key}` | `SPECINFER_{parameter.name.upper()}` | {shown} | {text} |"


def _sections(sections: dict[str, list[str]]) -> Iterator[str]:
    for name, rows in sections.items():
        yield f"### {name}\n"
        yield "| flag | variable | default | |"
        yield "|---|---|---|---|"
        yield from rows
        yield ""


def renewed(document: str) -> str:
    """Return the document with the current table."""
    head, _, rest = document.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def main() -> None:
    """Renew the document, or with --check fail if it would change."""
    before = DOCUMENT.read_text(encoding="utf-8")
    after = renewed(before)
    if "--check" in sys.argv:
        sys.exit(None if before == after else f"{DOCUMENT.name} is not up to date; run tools/configuration.py")
    DOCUMENT.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
