"""The commands of bench that time batches of requests, passes, and schedulers."""

from typing import Annotated

import typer

from specinfer.cli.commands import checking
from specinfer.cli.measure import KIND, MEASURED, TEMPERATURE, drafter_names, measured
from specinfer.cli.options import (
    DEBUG,
    DEVICE,
    DRAFTER_QUANTIZATION,
    DRAFTERS,
    DTYPE,
    GROW,
    JSON,
    MODEL,
    PIPELINE_PARALLEL_SIZE,
    PLOT,
    QUANTIZATION,
    SCHEDULER,
    SEED,
    SELECT,
    TENSOR_PARALLEL_SIZE,
    flag,
)
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries
from specinfer.demo.chat_model import CODE, usual_temperature


def throughput(
    argument: MEASURED = None,
    *,
    model: MODEL = None,
    drafter: DRAFTERS = None,
    grow: GROW = None,
    dtype: DTYPE = "auto",
    quantization: QUANTIZATION = None,
    drafter_quantization: DRAFTER_QUANTIZATION = None,
    scheduler: SCHEDULER = None,
    device: DEVICE = "auto",
    tensor_parallel_size: TENSOR_PARALLEL_SIZE = 1,
    pipeline_parallel_size: PIPELINE_PARALLEL_SIZE = 1,
    select: SELECT = None,
    tree: Annotated[
        list[str] | None, flag("Speculation", "Token tree to measure. May be repeated. (default: auto)")
    ] = None,
    batch: Annotated[
        list[int] | None,
        flag("Sampling", "Batch size. May be repeated. (default: 1, 2, 4, 8, 16 and 32)"),
    ] = None,
    kind: KIND = None,
    num_prompts: Annotated[
        int,
        flag("Sampling", "Number of prompts for each batch size; at least the batch size."),
    ] = 8,
    max_tokens: Annotated[int, flag("Sampling", "Maximum number of tokens to generate for each prompt.")] = 64,
    temperature: TEMPERATURE = None,
    repeats: Annotated[int, flag("Sampling", "Number of measured runs of each tree on each batch.")] = 3,
    seed: SEED = 0,
    as_json: JSON = None,
    plot: PLOT = None,
    debug: DEBUG = False,
) -> None:
    """Compare the throughput of token trees with that of plain decoding, by batch size."""
    quiet_libraries(debug=debug)
    from specinfer.bench.throughput import run_throughput
    from specinfer.bench.throughput_plans import BATCH_SIZES, ThroughputConfig
    from specinfer.bench.throughput_table import print_throughput

    screen = Screen()
    with checking():
        name = measured(argument, model)
        config = ThroughputConfig(
            model=name,
            kinds=tuple(kind) if kind else None,
            drafters=drafter_names(drafter),
            trees=tuple(tree or ["auto"]),
            grow=grow,
            dtype=dtype,
            quantization=quantization,
            drafter_quantization=drafter_quantization,
            select=select or "all",
            scheduler=scheduler,
            device=device,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            batch_sizes=tuple(batch or BATCH_SIZES),
            num_prompts=num_prompts,
            max_tokens=max_tokens,
            temperature=usual_temperature(name, 0.0) if temperature is None else temperature,
            repeats=repeats,
            seed=seed,
            json=as_json,
            plot=plot,
        )
        report = run_throughput(config, screen.err)
    print_throughput(report, screen.out)


def kernels(
    model: Annotated[str, typer.Argument(metavar="MODEL")] = "demo",
    *,
    drafter: DRAFTERS = None,
    grow: GROW = None,
    dtype: Annotated[
        list[str] | None,
        flag("Model", "Data type: auto, float32, bfloat16 or float16. May be repeated. (default: auto)", "--dtype"),
    ] = None,
    quantization: Annotated[
        list[str] | None, flag("Model", "Also measure int8, int4 or fp8. May be repeated.", "--quantization")
    ] = None,
    device: DEVICE = "auto",
    rows: Annotated[
        list[int] | None,
        flag("Speculation", "Number of nodes of a tree. May be repeated. (default: ten numbers from 1 to 64)"),
    ] = None,
    context: Annotated[int, flag("Speculation", "Number of tokens before the tree.")] = 256,
    repeats: Annotated[int, flag("Sampling", "Number of timed passes of each kind.")] = 11,
    busy: Annotated[int, flag("Sampling", "Number of other processes that keep a core busy.")] = 0,
    seed: Annotated[int, flag("Sampling", "Random seed of the trees.")] = 0,
    as_json: JSON = None,
    plot: PLOT = None,
    debug: DEBUG = False,
) -> None:
    """Measure the time of a pass by its number of rows, with and without native kernels, and the memory bandwidth."""
    quiet_libraries(debug=debug)
    from specinfer.bench.kernels import ROWS, KernelsConfig, run_kernels
    from specinfer.bench.kernels_table import print_kernels

    screen = Screen()
    with checking():
        config = KernelsConfig(
            model=model,
            drafters=drafter_names(drafter),
            grow=grow,
            dtypes=tuple(dtype or ["auto"]),
            quantizations=tuple(quantization or ()),
            device=device,
            rows=tuple(rows or ROWS),
            context=context,
            repeats=repeats,
            busy=busy,
            seed=seed,
            json=as_json,
            plot=plot,
        )
        report = run_kernels(config, screen.err)
    print_kernels(report, screen.out)


def schedule(
    scheduler: Annotated[
        str, typer.Argument(metavar="FILE", help="Speculation policy made by specinfer tune --policy.")
    ],
    argument: MEASURED = None,
    *,
    model: MODEL = None,
    drafter: DRAFTERS = None,
    grow: GROW = None,
    dtype: DTYPE = "auto",
    quantization: QUANTIZATION = None,
    drafter_quantization: DRAFTER_QUANTIZATION = None,
    device: DEVICE = "auto",
    fixed: Annotated[
        list[str] | None,
        flag(
            "Speculation",
            "Fixed configuration to compare with: a tree, optionally with @models or @lookups for these drafters only. "
            "May be repeated. (default: twelve configurations)",
            metavar="TREE",
        ),
    ] = None,
    kind: KIND = None,
    num_prompts: Annotated[
        int,
        flag("Sampling", "Number of prompts of each part: code, prose and repetition, or each kind of chat prompt."),
    ] = 6,
    prompt_tokens: Annotated[int, flag("Sampling", "Maximum length of each prompt.")] = 128,
    max_tokens: Annotated[int, flag("Sampling", "Number of tokens to generate for each prompt.")] = 96,
    repeats: Annotated[int, flag("Sampling", "Number of measured runs of each arm on each prompt.")] = 1,
    seed: SEED = 0,
    as_json: JSON = None,
    plot: PLOT = None,
    debug: DEBUG = False,
) -> None:
    """Compare a learned speculation policy with fixed configurations and auto, on code, prose and repetition."""
    quiet_libraries(debug=debug)
    from specinfer.bench.schedule import run_schedule
    from specinfer.bench.schedule_plans import FIXED, ScheduleConfig
    from specinfer.bench.schedule_table import print_schedule
    from specinfer.setup.model_names import usual_drafters

    screen = Screen()
    with checking():
        names, name = drafter_names(drafter), measured(argument, model)
        usual = (CODE, "suffix") if name == CODE else usual_drafters(name)
        config = ScheduleConfig(
            scheduler=scheduler,
            model=name,
            kinds=tuple(kind) if kind else None,
            drafters=usual if isinstance(names, str) else names,
            fixed=tuple(fixed or FIXED),
            grow=grow,
            dtype=dtype,
            quantization=quantization,
            drafter_quantization=drafter_quantization,
            device=device,
            num_prompts=num_prompts,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            repeats=repeats,
            seed=seed,
            json=as_json,
            plot=plot,
        )
        report = run_schedule(config, screen.err)
    print_schedule(report, screen.out)
