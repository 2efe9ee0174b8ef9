"""The command batches."""

from typing import Annotated

from specinfer.cli.errors import checking
from specinfer.cli.options import DEBUG, JSON, flag
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries


def batches(
    *,
    batch: Annotated[
        list[int] | None, flag("Speculation", "Batch size. May be repeated. (default: 1, 2, 4, ... 64)", metavar="N")
    ] = None,
    prompt_tokens: Annotated[
        list[int] | None,
        flag("Sampling", "Length of prompts. May be repeated. (default: 20, 200 and 2000)", metavar="N"),
    ] = None,
    max_tokens: Annotated[
        list[int] | None, flag("Sampling", "Length of outputs. May be repeated. (default: 8, 64 and 512)", metavar="N")
    ] = None,
    temperature: Annotated[
        list[int] | None, flag("Sampling", "Temperature. May be repeated. (default: 0 and 1)", metavar="0|1")
    ] = None,
    best: Annotated[
        bool, flag("Speculation", "Also find the best division of draft tokens among the requests, by trying.")
    ] = False,
    num_texts: Annotated[int, flag("Sampling", "Number of texts of the embedded pair.")] = 24,
    seed: Annotated[int, flag("Sampling", "Random seed of the requests and of the times.")] = 0,
    as_json: JSON = None,
    debug: DEBUG = False,
) -> None:
    """Compare the policy auto with plain decoding on simulated machines, by batch size and by lengths."""
    quiet_libraries(debug=debug)
    from benchmarks.batches.report import print_batches
    from benchmarks.batches.run import BatchesConfig, run_batches

    usual, screen = BatchesConfig(), Screen()
    with checking():
        config = BatchesConfig(
            tuple(batch or usual.batches),
            tuple(prompt_tokens or usual.prompts),
            tuple(max_tokens or usual.outputs),
            tuple(temperature or usual.temperatures),
            num_texts=num_texts,
            seed=seed,
            best=best,
            json=as_json,
        )
        report = run_batches(config, screen.err)
    print_batches(report, screen.out)
