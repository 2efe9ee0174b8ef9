"""The command host."""

from typing import Annotated

from specinfer.cli.errors import checking
from specinfer.cli.options import DEBUG, JSON, flag
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries


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
    from benchmarks.host import HostConfig, print_host, run_host

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
