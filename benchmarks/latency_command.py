"""The command latency: `specinfer bench latency` with other engines."""

from typing import Annotated

from specinfer.cli.bench_options import (
    MAX_TOKENS,
    MEASURED,
    PROMPT_CHARS,
    CompareOptions,
    GrowableOptions,
    ReportOptions,
)
from specinfer.cli.errors import checking
from specinfer.cli.options import flag


def latency(
    argument: MEASURED = None,
    *,
    options: CompareOptions,
    models: GrowableOptions,
    report: ReportOptions,
    peer: Annotated[
        list[str] | None,
        flag(
            "Speculation",
            "Another engine to measure in the same run: transformers, transformers-compiled, llama.cpp or openvino; "
            "with a drafter, transformers-assisted, llama.cpp-draft or openvino-draft; with draft tokens looked up in "
            "their text, transformers-lookup or llama.cpp-lookup. May end in a type of weights, such as :q8_0, or in "
            ":file, the model's own GGUF file. May be repeated.",
            metavar="NAME",
        ),
    ] = None,
    prompt_chars: PROMPT_CHARS = 600,
    max_tokens: MAX_TOKENS = 128,
) -> None:
    """Compare the latency of token trees with that of plain decoding and of other engines."""
    screen = report.screen()
    from benchmarks.latency import PeerLatencyConfig, run_peer_latency
    from benchmarks.peers.table import print_peers
    from specinfer.bench.latency_report import print_latency

    with checking():
        settings = options.settings(argument) | models.settings() | report.settings()
        config = PeerLatencyConfig(
            **settings, peers=tuple(peer or ()), prompt_chars=prompt_chars, max_tokens=max_tokens
        )
        result = run_peer_latency(config, screen.err)
    print_latency(result.ours, screen.out)
    if result.peers is not None:
        print_peers(result.ours, result.peers, screen.out)
