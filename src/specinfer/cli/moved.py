"""Commands of bench that have moved to the folder benchmarks/ of the repository."""

import typer

from specinfer.cli.commands import UsageError

MOVED = ("offload", "parallel", "schedule", "kernels", "perplexity", "host")
_TAKES_ALL = {"ignore_unknown_options": True, "allow_extra_args": True}


def add_moved(group: typer.Typer) -> None:
    """Add a hidden command for each old name, which says where it went."""
    for name in MOVED:
        group.command(name, hidden=True, add_help_option=False, context_settings=_TAKES_ALL)(_refuse)


def _refuse(context: typer.Context) -> None:
    name = context.info_name
    raise UsageError(f"bench {name}: run python -m benchmarks.{name} in a checkout of the repository")
