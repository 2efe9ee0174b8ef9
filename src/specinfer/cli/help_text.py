"""Help texts: no flag is shortened, and no name is broken over two lines, however narrow the terminal is."""

import re
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_WIDEST = 100  # columns of text
_COLUMN = 28  # where descriptions begin
_GAP = 2
_TYPE = re.compile(r"<(?:list\[)?(\w+)(?: range|\])>")  # shown as the type of one value


class Command(TyperCommand):
    """A command with this kind of help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write("".join(_lines(self, ctx)))


class Group(TyperGroup):
    """A group of commands with this kind of help, which is printed if no command is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write("".join(_lines(self, ctx)))


def _lines(command: Any, context: Any) -> Iterator[str]:
    width = min(shutil.get_terminal_size().columns, _WIDEST) - 1
    yield f"{_heading('Usage:')} {context.command_path} {' '.join(command.collect_usage_pieces(context))}\n"
    for paragraph in (command.help or "").split("\n\n"):
        yield "\n" + "".join(f"{line}\n" for line in _wrap(paragraph, width))
    for title, rows in _sections(command, context).items():
        yield f"\n{_heading(f'{title}:')}\n"
        for name, text in rows:
            yield from _row(name, text, width)


def _sections(command: Any, context: Any) -> dict[str, list[tuple[str, str]]]:
    """Return the names and descriptions of arguments, flags and commands by section."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
        record = parameter.get_help_record(context)
        if record is not None:
            name, text = record
            name = _TYPE.sub(r"<\1>", name)
            sections.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append((name, text))
    for name, subcommand in getattr(command, "commands", {}).items():
        if not subcommand.hidden:
            sections.setdefault("Commands", []).append((name, subcommand.get_short_help_str(limit=400)))
    others = sections.pop("Options", None)
    return sections if others is None else sections | {"Options": others}


def _row(name: str, text: str, width: int) -> Iterator[str]:
    flags = "  " + typer.style(name, fg="cyan")
    lines = _wrap(text, width - _COLUMN)
    if len(name) + 2 + _GAP > _COLUMN or not lines:
        yield f"{flags}\n"
    else:
        yield f"{flags}{' ' * (_COLUMN - len(name) - 2)}{lines.pop(0)}\n"
    for line in lines:
        yield f"{' ' * _COLUMN}{line}\n"


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)


def _heading(text: str) -> str:
    return typer.style(text, bold=True)
