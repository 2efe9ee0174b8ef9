"""All commands, combined into one program."""

from collections.abc import Callable
from typing import Annotated

import typer

from specinfer.cli.batch import run_batch
from specinfer.cli.chat import chat, complete, run
from specinfer.cli.commands import Program, add_command
from specinfer.cli.corpus import build
from specinfer.cli.demo import demo
from specinfer.cli.environment import collect_env, show_version, version
from specinfer.cli.generate import generate
from specinfer.cli.help_text import Group
from specinfer.cli.measure import ACCEPTANCE, LATENCY, SERVE, THROUGHPUT, add_moved
from specinfer.cli.models import list_models, pull, rm
from specinfer.cli.plan import PLAN
from specinfer.cli.quantize import quantize
from specinfer.cli.serve import serve
from specinfer.cli.trace import trace
from specinfer.cli.tune import tune
from specinfer.core.systems import load_openmp

app = typer.Typer(
    name="specinfer",
    cls=Program,
    help="Tree-based speculative LLM inference: drafters propose token trees, the target verifies them.",
    pretty_exceptions_enable=False,
    # Users of vLLM write flags with - or with _.
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": lambda n: n.replace("_", "-")},
)
COMMANDS: dict[str, Callable[..., None]] = {
    "run": run, "chat": chat, "complete": complete, "generate": generate, "run-batch": run_batch, "serve": serve,
    "pull": pull, "list": list_models, "rm": rm, "demo": demo, "plan": PLAN.command(), "tune": tune,
    "quantize": quantize, "trace": trace, "collect-env": collect_env, "version": version,
}  # fmt: skip


for name, command in COMMANDS.items():
    add_command(app, command, called=name, environment=command is serve)
bench = typer.Typer(cls=Group, help="Benchmark latency, throughput, a server, or acceptance.")
for measurement in (LATENCY, THROUGHPUT, SERVE, ACCEPTANCE):
    add_command(bench, measurement.command())
add_moved(bench)
app.add_typer(bench, name="bench")
corpus = typer.Typer(cls=Group, help="Make texts that the suffix drafter searches.")
add_command(corpus, build)
app.add_typer(corpus, name="corpus")


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", "-v", help="Print the version.", is_eager=True, callback=show_version)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the `specinfer` program."""
    load_openmp()
    app(prog_name="specinfer")
