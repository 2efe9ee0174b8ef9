"""The command bench serve: measures a server under load."""

from collections.abc import Sequence
from typing import Annotated

import typer

from specinfer.cli.bench_options import GrowableOptions, ReportOptions, check_inputs
from specinfer.cli.errors import checking
from specinfer.cli.options import (
    DEVICE,
    flag,
)
from specinfer.client import KEY_VARIABLE
from specinfer.reporting.files import show


def serve(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Model to serve; with --base-url, the name of the model on the server."),
    ] = None,
    *,
    base_url: Annotated[str | None, flag("Server", "Benchmark the server at this URL.", metavar="URL")] = None,
    api_key: Annotated[
        str | None, flag("Server", "API key of the server.", "--api-key", envvar=KEY_VARIABLE, metavar="KEY")
    ] = None,
    endpoint: Annotated[str, flag("Server", "Endpoint: completions or chat.")] = "completions",
    max_num_seqs: Annotated[
        int, flag("Server", "Maximum number of requests in a batch of a server started here.")
    ] = 32,
    models: GrowableOptions,
    device: DEVICE = "auto",
    tree: Annotated[
        list[str] | None,
        flag(
            "Speculation",
            "Token tree to request: off, auto, 1,1,3,1, ..., or default (none requested; the only choice for other "
            "servers). May be repeated. (default: default and off)",
        ),
    ] = None,
    dataset: Annotated[
        str,
        flag(
            "Load",
            "Prompts: heldout, random, trace (two classes of requests with targets), or a file (JSON lines, also of a "
            "trace, or JSON of ShareGPT).",
            "--dataset",
            "--dataset-path",
        ),
    ] = "heldout",
    num_prompts: Annotated[int, flag("Load", "Number of requests of each arm in each round.")] = 32,
    prompt_chars: Annotated[
        int, flag("Load", "Approximate length of held-out and random prompts, in characters.")
    ] = 600,
    max_tokens: Annotated[
        int, flag("Load", "Number of tokens to generate for each request.", "--max-tokens", "--output-len")
    ] = 64,
    temperature: Annotated[float, flag("Load", "Temperature; 0 is greedy.")] = 0.0,
    request_rate: Annotated[
        list[float] | None, flag("Load", "Requests per second. May be repeated. (default: inf, all at once)")
    ] = None,
    find_rate: Annotated[
        float | None,
        flag(
            "Load",
            "Search for the highest rate at which this percentage of requests meets its targets, for each tree; begins "
            "with --request-rate.",
            metavar="PERCENT",
        ),
    ] = None,
    burstiness: Annotated[
        float,
        flag(
            "Load",
            "Burstiness of arrivals: 1 is a Poisson process, less is burstier, more is more even, inf is fixed "
            "intervals.",
        ),
    ] = 1.0,
    self_timed: Annotated[
        bool,
        flag(
            "Load",
            "Send requests at the times of the dataset, which is a trace; scaled if --request-rate is given.",
            "--self-timed",
        ),
    ] = False,
    send_slo: Annotated[
        bool, flag("Load", "Send the latency targets of a trace to the server.", "--send-slo/--no-send-slo")
    ] = True,
    max_concurrency: Annotated[
        int | None, flag("Load", "Maximum number of concurrent requests. (default: unlimited)")
    ] = None,
    repeats: Annotated[int, flag("Load", "Number of rounds; in each round all arms take turns.")] = 3,
    num_warmups: Annotated[int, flag("Load", "Number of warm-up requests of each arm.")] = 1,
    goodput: Annotated[
        list[str] | None,
        flag(
            "Output",
            "Service level objective for goodput, such as ttft:100 or tpot:20, in ms. May be repeated.",
            metavar="NAME:MS",
        ),
    ] = None,
    percentile_metrics: Annotated[str, flag("Output", "Metrics to report percentiles of.")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, flag("Output", "Percentiles to report.")] = "99",
    overhead: Annotated[
        bool, flag("Output", "Also compare the time of each streamed token with the same in one process.", "--overhead")
    ] = False,
    report: ReportOptions,
) -> None:
    """Benchmark a server under load, with and without token trees in turns."""
    screen = report.screen()
    from specinfer.bench.serve_plans import DEFAULT, ServeConfig  # imports numpy
    from specinfer.cli.values import parse_numbers

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
            find_rate=find_rate,
            burstiness=burstiness,
            self_timed=self_timed,
            sends_slo=send_slo,
            max_concurrency=max_concurrency,
            repeats=repeats,
            warmups=num_warmups,
            goodput=_limits(goodput or ()),
            metrics=tuple(percentile_metrics.split(",")),
            percentiles=parse_numbers("metric_percentiles", metric_percentiles),
            measures_overhead=overhead,
            **models.settings(),
            device=device,
            max_num_seqs=max_num_seqs,
            **report.settings(),
        )
        if base_url is None:
            check_inputs(config)
        from specinfer.bench.serve import run_serve
        from specinfer.bench.serve_table import print_serve

        show(lambda: run_serve(config, screen.err), lambda report: print_serve(report, screen.out))


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
