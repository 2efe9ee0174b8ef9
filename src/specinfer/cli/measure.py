"""The commands bench latency, host and acceptance, and options that the bench commands share."""

from typing import Annotated, Any

import typer

from specinfer.cli.commands import checking
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
    one_name,
)
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries
from specinfer.cli.values import parse_drafters
from specinfer.demo.chat_model import CHAT, CHAT_TEMPERATURE, CODE, usual_temperature

MEASURED = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Target model, as in generate. (default: demo)", show_default=False),
]
KIND = Annotated[
    list[str] | None,
    flag(
        "Sampling",
        "Kind of chat prompts: questions, rewriting, code, lists or stories. May be repeated. (default: all kinds for "
        "demo-chat, and held-out texts for other models)",
        metavar="KIND",
    ),
]
TEMPERATURE = Annotated[float | None, flag("Sampling", "Temperature; 0 is greedy. (default: 0, or 0.7 for demo-chat)")]


def drafter_names(names: list[str] | None) -> str | tuple[str, ...]:
    """Return the drafters in the form that the bench configurations take."""
    drafters = parse_drafters(names or ["auto"])
    return drafters if isinstance(drafters, str) else tuple(drafters)


def measured(argument: str | None, option: str | None) -> str:
    """Return the model to measure, named as MODEL or with --model, or the code model."""
    name = one_name(argument, option)
    return CODE if name is None else name


def latency(
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
    peer: Annotated[
        list[str] | None,
        flag(
            "Speculation",
            "Another engine to measure in the same run: transformers, transformers-compiled, llama.cpp or openvino; "
            "with a drafter, transformers-assisted, llama.cpp-draft or openvino-draft. May end in a type of weights, "
            "such as :q8_0. May be repeated.",
            metavar="NAME",
        ),
    ] = None,
    kind: KIND = None,
    num_prompts: Annotated[
        int, flag("Sampling", "Number of held-out texts, or of chat prompts of all kinds in turn.")
    ] = 8,
    prompt_chars: Annotated[int, flag("Sampling", "Approximate length of held-out texts, in characters.")] = 600,
    max_tokens: Annotated[int, flag("Sampling", "Maximum number of tokens to generate for each prompt.")] = 128,
    temperature: TEMPERATURE = None,
    repeats: Annotated[int, flag("Sampling", "Number of measured runs of each tree on each prompt.")] = 3,
    seed: SEED = 0,
    as_json: JSON = None,
    plot: PLOT = None,
    debug: DEBUG = False,
) -> None:
    """Compare the latency of token trees with that of plain decoding, one request at a time."""
    quiet_libraries(debug=debug)
    from specinfer.bench.latency import LatencyConfig, run_latency
    from specinfer.bench.peers.table import print_peers
    from specinfer.bench.table import print_report

    screen = Screen()
    with checking():
        name = measured(argument, model)
        config = LatencyConfig(
            model=name,
            kinds=tuple(kind) if kind else None,
            drafters=drafter_names(drafter),
            trees=tuple(tree or ["auto"]),
            peers=tuple(peer or []),
            grow=grow,
            dtype=dtype,
            quantization=quantization,
            drafter_quantization=drafter_quantization,
            select=select or "all",
            scheduler=scheduler,
            device=device,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            num_prompts=num_prompts,
            prompt_chars=prompt_chars,
            max_tokens=max_tokens,
            temperature=usual_temperature(name, 0.0) if temperature is None else temperature,
            repeats=repeats,
            seed=seed,
            json=as_json,
            plot=plot,
        )
        report = run_latency(config, screen.err)
    print_report(report, screen.out)
    print_peers(report, screen.out)


def host(
    *,
    num_requests: Annotated[int, flag("Speculation", "Number of requests in the batch.")] = 8,
    nodes: Annotated[int, flag("Speculation", "Number of nodes of each tree.")] = 64,
    depth: Annotated[int, flag("Speculation", "Maximum depth of each tree.")] = 8,
    vocab_size: Annotated[int, flag("Model", "Vocabulary size of the simulated model.")] = 4096,
    repeats: Annotated[int, flag("Sampling", "Number of measured steps of each verification rule.")] = 200,
    seed: Annotated[int, flag("Sampling", "Random seed of the simulated trees.")] = 0,
    as_json: JSON = None,
    debug: DEBUG = False,
) -> None:
    """Measure the host time of a step: growing, merging, packing and verifying trees, without a model."""
    quiet_libraries(debug=debug)
    from specinfer.bench.host import HostConfig, print_host, run_host

    screen = Screen()
    with checking():
        config = HostConfig(
            num_requests=num_requests,
            nodes=nodes,
            depth=depth,
            vocab_size=vocab_size,
            repeats=repeats,
            seed=seed,
            json=as_json,
        )
        report = run_host(config, screen.err)
    print_host(report, screen.out)


# The settings of --quick; options that are given take precedence.
_QUICK: dict[str, Any] = {"num_prompts": 3, "max_tokens": 24, "temperatures": (0.0, 1.0), "nodes": (16,)}


def acceptance(
    argument: MEASURED = None,
    *,
    model: MODEL = None,
    drafter: DRAFTERS = None,
    dtype: DTYPE = "auto",
    quantization: QUANTIZATION = None,
    drafter_quantization: DRAFTER_QUANTIZATION = None,
    device: DEVICE = "auto",
    part: Annotated[
        list[str] | None,
        flag(
            "Speculation",
            "Part to measure: table1, table2, table3, rules, drafters or shift. May be repeated. (default: all but "
            "shift)",
        ),
    ] = None,
    nodes: Annotated[
        list[int] | None, flag("Speculation", "Number of nodes of the trees to compare. May be repeated. (default: 32)")
    ] = None,
    verification: Annotated[
        str | None, flag("Speculation", "Verification rule. (default: multi-step for table2, coupled for drafters)")
    ] = None,
    select: Annotated[
        str | None,
        flag("Speculation", "Selection of drafters that shift compares with all. (default: hedge:1)", "--select"),
    ] = None,
    shift_to: Annotated[
        str | None,
        flag(
            "Sampling",
            "Text of the second domain of shift, after held-out code. (default: the documentation of Python)",
            metavar="FILE",
        ),
    ] = None,
    kind: KIND = None,
    num_prompts: Annotated[
        int | None, flag("Sampling", "Number of held-out texts or chat prompts. (default: 8)")
    ] = None,
    max_tokens: Annotated[
        int | None, flag("Sampling", "Maximum number of tokens to generate for each prompt. (default: 64)")
    ] = None,
    temperature: Annotated[
        list[float] | None,
        flag(
            "Sampling",
            "Temperature for rules and drafters; 0 is greedy. May be repeated. (default: 0, 0.6 and 1; 0 and 0.7 for "
            "demo-chat)",
        ),
    ] = None,
    seed: SEED = 0,
    quick: Annotated[bool, flag("Sampling", "Use few short texts and few trees.", "--quick")] = False,
    as_json: JSON = None,
    plot: PLOT = None,
    debug: DEBUG = False,
) -> None:
    """Measure tokens per pass: the tables of the paper, and a comparison of rules, trees and drafters."""
    quiet_libraries(debug=debug)
    from specinfer.bench.acceptance import run_acceptance
    from specinfer.bench.acceptance_plans import AcceptanceConfig
    from specinfer.bench.acceptance_table import print_acceptance

    screen = Screen()
    with checking():
        name = measured(argument, model)
        usual = {"temperatures": (0.0, CHAT_TEMPERATURE)} if name == CHAT else {}
        asked = {
            "parts": tuple(part) if part else None,
            "nodes": tuple(nodes) if nodes else None,
            "temperatures": tuple(temperature) if temperature else None,
            "select": select,
            "shift_to": shift_to,
            "num_prompts": num_prompts,
            "max_tokens": max_tokens,
        }
        given = {field: value for field, value in asked.items() if value is not None}
        config = AcceptanceConfig(
            model=name,
            kinds=tuple(kind) if kind else None,
            drafters=drafter_names(drafter),
            verification=verification,
            dtype=dtype,
            quantization=quantization,
            drafter_quantization=drafter_quantization,
            device=device,
            seed=seed,
            json=as_json,
            plot=plot,
            **(_QUICK if quick else {}) | usual | given,
        )
        report = run_acceptance(config, screen.err)
    print_acceptance(report, screen.out)
