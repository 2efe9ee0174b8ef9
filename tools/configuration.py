"""Write the tables of settings in docs/configuration.md and of vLLM's names in docs/vllm.md; --check only compares.

Flags, environment variables and keys of configuration files have one source: EngineArgs and the dataclasses of options.
vLLM's names are in `core.vllm_tables`.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter
from pathlib import Path
from typing import Any, get_args

from specinfer.cli.commands import flags_of
from specinfer.cli.options import ServedOptions
from specinfer.cli.replica_options import ReplicaOptions
from specinfer.cli.serve_options import ServerOptions
from specinfer.core.vllm_tables import CALLS, ENGINE, SAMPLING, SPECULATIVE, VllmName

DOCS = Path(__file__).resolve().parent.parent / "docs"
BEGIN, END = "<!-- {}: written by tools/configuration.py -->\n", "<!-- end of {} -->\n"


def settings() -> str:
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


def names(table: Mapping[str, VllmName]) -> str:
    """Return vLLM's names as a Markdown table; names with the same fate are one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, entry in sorted(table.items()):
        accepted = " or ".join(f"`{value!r}`" for value in entry.accepted or ())
        rows.setdefault((f"only {accepted}" if accepted else "no effect", entry.about), []).append(f"`{name}`")
    lines = [f"| {', '.join(same)} | {fate}: {about} |" for (fate, about), same in rows.items()]
    return "\n".join(["| name | what becomes of it |", "|---|---|", *lines, ""])


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "configuration.md": {"settings": settings},
    "vllm.md": {
        "arguments": lambda: names(ENGINE),
        "keys": lambda: names(SPECULATIVE),
        "fields": lambda: names(SAMPLING),
        "calls": lambda: names(CALLS),
    },
}


def renewed(name: str, document: str) -> str:
    """Return a document with its current tables."""
    for section, table in TABLES[name].items():
        begin, end = BEGIN.format(section), END.format(section)
        head, _, rest = document.partition(begin)
        document = f"{head}{begin}\n{table()}\n{end}{rest.partition(end)[2]}"
    return document


def main() -> None:
    """Renew the documents, or with --check fail if one would change."""
    for name in TABLES:
        before = (DOCS / name).read_text(encoding="utf-8")
        after = renewed(name, before)
        if "--check" in sys.argv and before != after:
            sys.exit(f"{name} is not up to date; run tools/configuration.py")
        if "--check" not in sys.argv:
            (DOCS / name).write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
