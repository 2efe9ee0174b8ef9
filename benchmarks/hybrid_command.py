"""The command hybrid."""

from typing import Annotated

from specinfer.cli.errors import checking
from specinfer.cli.options import DEBUG, JSON, flag
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries


def hybrid(
    *,
    family: Annotated[str, flag("Model", "Family: qwen3_5_text, bamba, lfm2 or mamba.")] = "qwen3_5_text",
    layers: Annotated[int, flag("Model", "Number of layers; 20 make about a billion parameters.")] = 20,
    drafter: Annotated[
        str | None,
        flag(
            "Model",
            "Initial weights of a drafter for the embedded target, as of tune: new:hybrid:4x512.",
            metavar="START",
        ),
    ] = None,
    rows: Annotated[
        list[int] | None, flag("Speculation", "Number of nodes of a tree. May be repeated. (default: 8 and 16)")
    ] = None,
    prompt: Annotated[int, flag("Speculation", "Number of tokens of the prompt.")] = 450,
    context: Annotated[int, flag("Speculation", "Number of tokens before a tree.")] = 256,
    repeats: Annotated[int, flag("Sampling", "Number of timed passes of each kind.")] = 7,
    compare: Annotated[bool, flag("Sampling", "Compute the prompt with transformers, too.")] = True,
    as_json: JSON = None,
    debug: DEBUG = False,
) -> None:
    """Measure passes of a random model with layers without attention: trees, prompts, and the memory of states."""
    quiet_libraries(debug=debug)
    from benchmarks.hybrid import HybridConfig, print_hybrid, run_hybrid

    screen = Screen()
    with checking():
        config = HybridConfig(
            family=family,
            layers=layers,
            drafter=drafter,
            rows=tuple(rows or (8, 16)),
            prompt=prompt,
            context=context,
            repeats=repeats,
            compares=compare,
            json=as_json,
        )
        report = run_hybrid(config, screen.err)
    print_hybrid(report, screen.out)
