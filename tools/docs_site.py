"""Pages, tables and code of the documentation site that are written from other files and from the code.

A hook of MkDocs (mkdocs.yml). README, CONTRIBUTING, model cards, examples and commands become pages. A line
`<!-- table: NAME -->` becomes a table: settings of the server from the dataclasses of options, fields of requests from
`server/protocol.py`, names of vLLM from `core.vllm_tables`. A line `<!-- source: NAME -->` becomes the source of a
function. Links between files of the repository become links between pages, so that every file can also be read where
it is.
"""

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING
from importlib import import_module
from inspect import Parameter, formatannotation, getsource
from operator import attrgetter
from pathlib import Path
from textwrap import dedent
from typing import Any, get_args

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from specinfer.cli.app import app
from specinfer.cli.flags import flags_of
from specinfer.cli.options import ServedOptions
from specinfer.cli.replicas import ReplicaOptions
from specinfer.core.limits import QueueLimits
from specinfer.core.options import settings_of
from specinfer.core.vllm_tables import CALLS, ENGINE, SAMPLING, SPECULATIVE, VllmName
from specinfer.engine_args import EngineArgs
from specinfer.server.config import ServerConfig
from specinfer.server.protocol import ChatFields, CompletionFields, SharedFields
from specinfer.server.responses_fields import ResponsesFields

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples": "examples.md",
    "src/specinfer/demo/MODEL_CARD.md": "model-cards/code-models.md",
    "src/specinfer/demo/chat-drafter/MODEL_CARD.md": "model-cards/chat-drafter.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
TABLE = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)
SOURCE = re.compile(r"^<!-- source: ([a-z_.]+)\.((?:\w+\.)?\w+) -->$", re.MULTILINE)
LINK = re.compile(r"\[([^]]+)\]\((?![a-z]+:|#)([\w./-]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are written from other files and from the commands."""
    for source, page in PAGES.items():
        path = ROOT / source
        text = "\n".join(examples(path)) if path.is_dir() else path.read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "reference/cli.md", content="\n".join(commands())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text of a page with links to pages, by their titles, in place of links to files of the repository."""
    name = page.file.src_uri
    folder = posixpath.dirname(SOURCES.get(name, f"docs/{name}"))
    titles = dict(_titles(config.nav))

    def link(found: re.Match[str]) -> str:
        source = posixpath.normpath(posixpath.join(folder, found[2]))
        target = PAGES.get(source, source.removeprefix("docs/"))
        text = titles.get(target, found[1]) if found[1].endswith(".md") else found[1]
        return f"[{text}]({posixpath.relpath(target, posixpath.dirname(name) or '.')}{found[3] or ''})"

    markdown = LINK.sub(link, TABLE.sub(lambda found: "\n".join(TABLES[found[1]]()), markdown))
    return SOURCE.sub(lambda found: _source(found[1], found[2]), markdown)


def _source(module: str, name: str) -> str:
    """Return the source of a function or a method as a block of code."""
    return f"```python\n{dedent(getsource(attrgetter(name)(import_module(module))))}```"


def _titles(nav: Any) -> Iterator[tuple[str, str]]:
    """Yield each page of the navigation with its title."""
    for entry in nav:
        for title, value in entry.items() if isinstance(entry, dict) else ():
            if isinstance(value, str):
                yield value, title
            else:
                yield from _titles(value)


def examples(folder: Path) -> Iterator[str]:
    """Yield the parts of a page with every example."""
    yield "# Examples\n\nEach program runs as it is, with the models that come with the package.\n"
    for path in sorted(folder.glob("*.py")):
        yield f"## {path.name}\n\n```python\n{path.read_text(encoding='utf-8').strip()}\n```\n"


def engine_arguments() -> Iterator[str]:
    """Yield the lines of a table with the fields of `EngineArgs`."""
    yield "| argument | type | default | |\n|---|---|---|---|"
    for field, flag in settings_of(EngineArgs):
        default = "" if field.default is MISSING else f"`{field.default!r}`"
        kind = field.type if isinstance(field.type, str) else formatannotation(field.type)
        kind = re.sub(r"pathlib\.|collections\.abc\.", "", kind).replace("|", "\\|")
        yield f"| `{field.name}` | `{kind}` | {default} | {flag.text} |"


def server_settings() -> Iterator[str]:
    """Yield the lines of a table of settings for each section."""
    sections: dict[str, list[str]] = {}
    for kind in (ServedOptions, ServerConfig, QueueLimits, ReplicaOptions):
        for parameter in flags_of(kind) or ():
            option = get_args(parameter.annotation)[1]
            sections.setdefault(option.rich_help_panel, []).append(_setting(parameter, option.help))
    for name, rows in sections.items():
        yield "\n".join([f"### {name}\n", "| flag | variable | default | |", "|---|---|---|---|", *rows, ""])


def _setting(parameter: Parameter, text: str) -> str:
    flag, default = parameter.name.replace("_", "-"), parameter.default
    shown = "" if default is None or default is False or default == "" else f"`{default}`"
    text = text.replace("|", "\\|")
    return f"| `--{flag}` | `SPECINFER_{parameter.name.upper()}` | {shown} | {text} |"


def vllm_names(table: Mapping[str, VllmName]) -> Iterator[str]:
    """Yield the lines of a table of vLLM's names; names with the same effect are one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, entry in sorted(table.items()):
        accepted = " or ".join(f"`{value!r}`" for value in entry.accepted or ())
        rows.setdefault((f"only {accepted}" if accepted else "no effect", entry.about), []).append(f"`{name}`")
    yield "| name | effect |\n|---|---|"
    yield from (f"| {', '.join(names)} | {effect}: {about} |" for (effect, about), names in rows.items())


def request_fields() -> Iterator[str]:
    """Yield the lines of a table of the fields of requests; a row is a field with a description and those after it."""
    kinds: dict[str, type[SharedFields]] = {"completions": CompletionFields, "chat": ChatFields}
    kinds["responses"] = ResponsesFields
    rows: dict[str, list[str]] = {}  # the names of each row, by the first one
    texts: dict[str, str] = {}
    current = ""
    every: list[type[SharedFields]] = [SharedFields, *kinds.values()]
    for kind in every:
        for name, field in kind.model_fields.items():
            if known := next((first for first, names in rows.items() if name in names), None):
                current = known
            elif field.description is None:
                rows[current].append(name)
            else:
                where = ", ".join(where for where, other in kinds.items() if name in other.model_fields)
                texts[name] = f"{'' if kind is SharedFields else where} | {field.description}"
                rows[name], current = [name], name
    yield "| fields | for | |\n|---|---|---|"
    yield from (f"| {', '.join(f'`{name}`' for name in names)} | {texts[key]} |" for key, names in rows.items())


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "request_fields": request_fields,
    "engine_arguments": engine_arguments,
    "server_settings": server_settings,
    "vllm_engine": lambda: vllm_names(ENGINE),
    "vllm_speculative": lambda: vllm_names(SPECULATIVE),
    "vllm_sampling": lambda: vllm_names(SAMPLING),
    "vllm_calls": lambda: vllm_names(CALLS),
}


def commands() -> Iterator[str]:
    """Yield the lines of a page with every command, its arguments and its options."""
    yield "# Command line\n\n`specinfer COMMAND --help` prints the same. Options may be written with `-` or with `_`.\n"
    yield from _commands("specinfer", typer.main.get_command(app), 2)


def _commands(name: str, group: Any, level: int) -> Iterator[str]:
    for key, command in sorted(group.commands.items()):
        yield f"{'#' * level} {name} {key}\n\n{command.help or ''}\n"
        if hasattr(command, "commands"):
            yield from _commands(f"{name} {key}", command, level + 1)
            continue
        panels: dict[str, list[str]] = {}
        for option in command.params:
            panel = "Arguments" if option.param_type_name == "argument" else option.rich_help_panel or "Options"
            panels.setdefault(panel, []).append(_row(option))
        if key == "serve" and level == 2:  # the settings of the server, a page of their own
            panels = {"Arguments": panels["Arguments"]}
            yield "The options are the settings in [Configuration of the server](../configuration.md).\n"
        for panel, rows in panels.items():
            yield "\n".join([f"| {panel} | default | |", "|---|---|---|", *rows, ""])


def _row(option: Any) -> str:
    if option.param_type_name == "argument":
        names = f"`{option.metavar or option.name.upper()}`"
    else:
        value = "" if option.is_flag else f" {option.metavar or option.type_descriptor.annotation.__name__.upper()}"
        names = ", ".join(f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts))
    default = "" if option.default in (None, False, "") else f"`{option.default}`"
    text = (option.help or "").replace("|", "\\|")
    return f"| {names} | {default} | {text} |"
