"""The command perplexity: measures the quality loss of quantization."""

from typing import Annotated

import typer

from specinfer.cli.errors import checking
from specinfer.cli.options import DEBUG, DEVICE, DTYPE, JSON, PLOT, flag
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries


def perplexity(
    model: Annotated[str, typer.Argument(metavar="MODEL")] = "demo",
    *,
    quantization: Annotated[
        list[str] | None,
        flag(
            "Model",
            "Quantization: int8, int4 or fp8. May be repeated. (default: all, or none for a GGUF file or with "
            "--kv-cache-dtype)",
            "--quantization",
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        list[str] | None,
        flag("Model", "Data type of keys and values, such as fp8. May be repeated.", "--kv-cache-dtype"),
    ] = None,
    peer: Annotated[
        str | None,
        flag("Model", "Let llama.cpp read the same texts with the same GGUF file: llama.cpp.", "--peer"),
    ] = None,
    grow: Annotated[
        str | None,
        flag("Model", "Grow the model to this number of parameters, such as 1b. Llama models only.", metavar="SIZE"),
    ] = None,
    dtype: DTYPE = "auto",
    device: DEVICE = "auto",
    num_prompts: Annotated[int, flag("Sampling", "Number of held-out texts.")] = 16,
    prompt_chars: Annotated[int, flag("Sampling", "Approximate length of texts, in characters.")] = 1200,
    as_json: JSON = None,
    plot: PLOT = None,
    debug: DEBUG = False,
) -> None:
    """Compare the perplexity of a model with that of its quantized weights."""
    quiet_libraries(debug=debug)
    from benchmarks.perplexity import PerplexityConfig, run_perplexity
    from benchmarks.perplexity_report import print_perplexity

    screen = Screen()
    with checking():
        config = PerplexityConfig(
            model=model,
            quantizations=None if quantization is None else tuple(quantization),
            kv_cache_dtypes=tuple(kv_cache_dtype or ()),
            peer=peer,
            grow=grow,
            dtype=dtype,
            device=device,
            num_prompts=num_prompts,
            prompt_chars=prompt_chars,
            json=as_json,
            plot=plot,
        )
        report = run_perplexity(config, screen.err)
    print_perplexity(report, screen.out)
