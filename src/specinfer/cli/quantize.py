"""`specinfer quantize`: a quantized checkpoint of a model."""

from dataclasses import replace
from typing import Annotated

import typer

from specinfer.cli.errors import checking
from specinfer.cli.options import DEBUG, JSON, check_models
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries
from specinfer.cli.tune import check_sources
from specinfer.quantize.options import QuantizeConfig
from specinfer.reporting.files import naming, write_json
from specinfer.reporting.progress_bar import StageProgress


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder or a Hugging Face model ID.")],
    options: QuantizeConfig,
    *,
    as_json: JSON = None,
    debug: DEBUG = False,
) -> None:
    """Write a quantized copy of a model, in the compressed-tensors format or as a GGUF file."""
    quiet_libraries(debug=debug)
    screen = Screen()
    with checking():
        config = replace(options, model=model, json=as_json)
        if config.out is None:
            raise ValueError("out: name a folder or a GGUF file with --out")
        check_sources("data", config.data)
        check_models(model, ())
        from specinfer.quantize.checkpoint import write_quantized

        with StageProgress(screen.err) as progress:
            report = write_quantized(config, progress)
    screen.out.print(
        f"{report.folder}: {report.num_layers} layers in {config.to}, "
        f"{report.num_bytes_before / 2**20:,.0f} MiB before, {report.num_bytes / 2**20:,.0f} MiB now"
    )
    if report.perplexity is not None and report.perplexity_before is not None:
        before, after = report.perplexity_before, report.perplexity
        screen.out.print(
            f"perplexity of held-out texts: {before:.3f} before, {after:.3f} now ({after / before - 1:+.1%})"
        )
        if report.num_uncalibrated:
            screen.out.print(
                f"rounded to nearest, because no calibration text reached them: {report.num_uncalibrated} matrices of "
                "experts; more --num-texts may reach them"
            )
    if as_json is not None:
        with checking(), naming("json", as_json):
            write_json(as_json, report.as_dict())
