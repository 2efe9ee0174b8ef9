"""All measurements of this folder, combined into one program."""

import sys

import typer

from benchmarks.batches.command import batches
from benchmarks.host_command import host
from benchmarks.hybrid_command import hybrid
from benchmarks.kernels.command import kernels
from benchmarks.latency_command import latency
from benchmarks.loading_command import load
from benchmarks.offload.command import offload
from benchmarks.paper.command import paper
from benchmarks.parallel.command import parallel
from benchmarks.perplexity_command import perplexity
from benchmarks.schedule.command import schedule
from specinfer.cli.commands import Program, add_command
from specinfer.core.systems import load_openmp

app = typer.Typer(
    name="benchmarks",
    cls=Program,
    help="Measurements of SpecInfer's parts, and against other engines.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": lambda n: n.replace("_", "-")},
)
for command in (latency, kernels, offload, parallel, schedule, batches, perplexity, host, hybrid, load, paper):
    add_command(app, command)


def run(name: str | None = None) -> None:
    """Run the measurement of this name, or the one that the command line names."""
    load_openmp()
    words = sys.argv[1:] if name is None else [name, *sys.argv[1:]]
    app(words, prog_name="python -m benchmarks")
