"""The command bench serve: measures a server under load."""

from collections.abc import Sequence
from typing import Annotated

import typer

from specinfer.cli.commands import checking
from specinfer.cli.measure import drafter_names
from specinfer.cli.options import (
    DEBUG,
    DEVICE,
    DRAFTER_QUANTIZATION,
    DRAFTERS,
    DTYPE,
    GROW,
    JSON,
    PLOT,
    QUANTIZATION,
    SEED,
    flag,
)
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries
from specinfer.client import KEY_VARIABLE


def serve(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Served for this run; with --base-url what the server calls its model."),
    ] = None,
    *,
    base_url: Annotated[str | None, flag("Server", "Measure the server at this address.", metavar="URL")] = None,
    api_key: Annotated[
        str | None, flag("Server", "The key it wants.", "--api-key", envvar=KEY_VARIABLE, metavar="KEY")
    ] = None,
    endpoint: Annotated[str, flag("Server", "completions or chat.")] = "completions",
    max_num_seqs: Annotated[int, flag("Server", "Requests running at once on a server started here.")] = 32,
    drafter: DRAFTERS = None,
    grow: GROW = None,
    dtype: DTYPE = "auto",
    quantization: QUANTIZATION = None,
    drafter_quantization: DRAFTER_QUANTIZATION = None,
    device: DEVICE = "auto",
    tree: Annotated[
        list[str] | None,
        flag(
            "Speculation",
            "What each request asks for: off, auto, 1,1,3,1, ..., or default: nothing; may be repeated; else default "
            "and off. Only default suits other servers.",
        ),
    ] = None,
    dataset: Annotated[
        str, flag("Load", "heldout, random, or a file: JSON lines, or ShareGPT's JSON.", "--dataset", "--dataset-path")
    ] = "heldout",
    num_prompts: Annotated[int, flag("Load", "Requests of each arm in each round.")] = 32,
    prompt_chars: Annotated[int, flag("Load", "About how long held-out and random prompts are.")] = 600,
    max_tokens: Annotated[int, flag("Load", "Tokens for each.", "--max-tokens", "--output-len")] = 64,
    temperature: Annotated[float, flag("Load", "0 is greedy.")] = 0.0,
    request_rate: Annotated[
        list[float] | None, flag("Load", "Requests a second; may be repeated; else inf: all at once.")
    ] = None,
    burstiness: Annotated[
        float, flag("Load", "1: Poisson; below: in bursts; above: more even; inf: fixed intervals.")
    ] = 1.0,
    max_concurrency: Annotated[int | None, flag("Load", "Requests on their way at once; else no limit.")] = None,
    repeats: Annotated[int, flag("Load", "Rounds; in each all arms take turns.")] = 3,
    num_warmups: Annotated[int, flag("Load", "Requests of each arm that do not count.")] = 1,
    seed: SEED = 0,
    goodput: Annotated[
        list[str] | None,
        flag("Output", "What counts as good, such as ttft:100 or tpot:20, in ms; may be repeated.", metavar="NAME:MS"),
    ] = None,
    percentile_metrics: Annotated[str, flag("Output", "Of ttft, tpot, itl, e2el.")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, flag("Output", "Percentiles of these.")] = "99",
    overhead: Annotated[
        bool, flag("Output", "Also time streams against the same in one process, token by token.", "--overhead")
    ] = False,
    as_json: JSON = None,
    plot: PLOT = None,
    debug: DEBUG = False,
) -> None:
    """Put a server under load, with token trees and without, in turns."""
    quiet_libraries(debug=debug)
    from specinfer.bench.serve import run_serve
    from specinfer.bench.serve_plans import DEFAULT, ServeConfig
    from specinfer.bench.serve_table import print_serve
    from specinfer.cli.values import parse_numbers

    screen = Screen()
    with checking():
        config = ServeConfig(
            model=model,
            base_url=base_url,
            api_key=api_key,
            endpoint=endpoint,
            trees=tuple(tree or (DEFAULT, "off")),
            dataset=dataset,
            num_prompts=num_prompts,
            prompt_chars=prompt_chars,
            max_tokens=max_tokens,
            temperature=temperature,
            request_rates=tuple(request_rate or (float("inf"),)),
            burstiness=burstiness,
            max_concurrency=max_concurrency,
            repeats=repeats,
            warmups=num_warmups,
            seed=seed,
            goodput=_limits(goodput or ()),
            metrics=tuple(percentile_metrics.split(",")),
            percentiles=parse_numbers("metric_percentiles", metric_percentiles),
            measures_overhead=overhead,
            drafters=drafter_names(drafter),
            grow=grow,
            dtype=dtype,
            quantization=quantization,
            drafter_quantization=drafter_quantization,
            device=device,
            max_num_seqs=max_num_seqs,
            json=as_json,
            plot=plot,
        )
        report = run_serve(config, screen.err)
    print_serve(report, screen.out)


def _limits(words: Sequence[str]) -> dict[str, float]:
    """Parse limits in vLLM's format: a name, a colon, milliseconds."""
    limits = {}
    for word in words:
        name, _, number = word.partition(":")
        try:
            limits[name] = float(number)
        except ValueError as error:
            raise ValueError(f"goodput: {word!r:.60} cannot be read; give such as ttft:100") from error
    return limits
