"""All measurements of this folder, combined into one program: python -m benchmarks NAME."""

import sys

import typer

from benchmarks.adapters import ADAPTERS
from benchmarks.comparisons import LATENCY, SERVE, THROUGHPUT
from benchmarks.host import HOST
from benchmarks.hybrid import HYBRID
from benchmarks.identity import IDENTITY
from benchmarks.kernels import KERNELS
from benchmarks.loading import LOAD
from benchmarks.offload import OFFLOAD
from benchmarks.paper import PAPER
from benchmarks.perplexity import PERPLEXITY
from benchmarks.schedule import SCHEDULE
from benchmarks.shift import SHIFT
from benchmarks.simulation.page import SIMULATE
from specinfer.cli.commands import Program, add_command
from specinfer.core.systems import load_openmp

MEASUREMENTS = (
    LATENCY, THROUGHPUT, SERVE, KERNELS, HYBRID, OFFLOAD, SCHEDULE, PERPLEXITY, HOST, LOAD, SHIFT, ADAPTERS, SIMULATE,
    PAPER, IDENTITY,
)  # fmt: skip
app = typer.Typer(
    name="benchmarks",
    cls=Program,
    help="Measurements of SpecInfer's parts, and against other engines.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": lambda n: n.replace("_", "-")},
)
for measurement in MEASUREMENTS:
    add_command(app, measurement.command())


def run() -> None:
    """Run the measurement that the command line names."""
    load_openmp()
    app(sys.argv[1:], prog_name="python -m benchmarks")
