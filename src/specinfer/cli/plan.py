"""The command that shows how "auto" chooses trees."""

from typing import Annotated

import typer

from specinfer.cli.bench_options import GrowableOptions, check_inputs
from specinfer.cli.errors import checking
from specinfer.cli.options import (
    DEBUG,
    JSON,
    MEMORY_BUDGET,
    OFFLOAD,
    OFFLOAD_FOLDER,
    PLOT,
    SEED,
    flag,
)
from specinfer.cli.screen import Screen
from specinfer.cli.simulation import SimulationOptions
from specinfer.cli.terminal import quiet_libraries
from specinfer.cli.values import parse_numbers
from specinfer.planning.options import ACCELERATORS, PlanConfig
from specinfer.reporting.files import show


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Target model, as in generate.")],
    *,
    machines: SimulationOptions,
    models: GrowableOptions,
    device: Annotated[
        str,
        flag(
            "Model",
            "Device of the models: auto, cpu, cuda, cuda:1, ...; or a GPU that need not be here, for which the plan is "
            f"computed from its published rates: {', '.join(ACCELERATORS)}.",
        ),
    ] = "auto",
    context: Annotated[
        int, flag("Model", "Tokens in the KV cache of each request, for a GPU that need not be here.")
    ] = 1024,
    offload: OFFLOAD = None,
    memory_budget: MEMORY_BUDGET = None,
    offload_folder: OFFLOAD_FOLDER = None,
    acceptance: Annotated[
        str | None,
        flag(
            "Speculation",
            "Acceptance rates of the first, second, ... child of a node, such as 0.7,0.1,0.05. (default: measured)",
            metavar="P,P",
        ),
    ] = None,
    remeasure: Annotated[
        bool,
        flag("Speculation", "Measure costs again instead of using those of the last 30 days.", "--remeasure"),
    ] = False,
    num_prompts: Annotated[int, flag("Sampling", "Number of held-out texts for measuring acceptance.")] = 4,
    max_tokens: Annotated[int, flag("Sampling", "Number of tokens to generate for each prompt.")] = 48,
    temperature: Annotated[float, flag("Sampling", "Temperature; 0 is greedy.")] = 0.0,
    seed: SEED = 0,
    as_json: JSON = None,
    plot: PLOT = None,
    debug: DEBUG = False,
) -> None:
    """Show the cost of a step on this machine, and the trees that auto chooses by batch size."""
    quiet_libraries(debug=debug)
    screen = Screen()
    with checking():
        config = PlanConfig(
            model=model,
            **models.settings(),
            acceptance=None if acceptance is None else parse_numbers("acceptance", acceptance),
            remeasure=remeasure,
            num_prompts=num_prompts,
            max_tokens=max_tokens,
            temperature=temperature,
            device=device,
            context=context,
            offload=offload,
            memory_budget=memory_budget,
            offload_folder=offload_folder,
            seed=seed,
            json=as_json,
            plot=plot,
        )
        check_inputs(config)
        simulation = machines.config()
        if device in ACCELERATORS:
            if simulation is not None:
                raise ValueError(
                    f"simulate: it starts from costs measured here, and {device} is predicted; leave one out"
                )
            from specinfer.planning.device_plan import print_device_plan, run_device_plan

            show(lambda: run_device_plan(config, screen.err), lambda report: print_device_plan(report, screen.out))
            return
        from specinfer.planning.plan import run_plan
        from specinfer.planning.plan_table import print_plan
        from specinfer.planning.simulate import run_simulation
        from specinfer.planning.simulation_report import SimulationReport
        from specinfer.planning.simulation_table import print_simulation

        if simulation is None:
            show(lambda: run_plan(config, screen.err), lambda report: print_plan(report, screen.out))
            return

        def print_both(report: SimulationReport) -> None:
            print_plan(report.plan, screen.out)
            print_simulation(report, screen.out)

        show(lambda: run_simulation(config, simulation, screen.err), print_both)
