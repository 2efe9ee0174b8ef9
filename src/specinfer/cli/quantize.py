"""`specinfer quantize`: a quantized checkpoint of a model."""

from typing import Annotated

import typer

from specinfer.cli.errors import checking
from specinfer.cli.options import DEBUG, JSON, check_models, flag
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries
from specinfer.cli.tune import check_sources
from specinfer.reporting.files import naming, write_json
from specinfer.reporting.progress_bar import StageProgress


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder or a Hugging Face model ID.")],
    *,
    to: Annotated[
        str,
        flag(
            "Output",
            "Type of the weights of linear layers: int4 or int8; of a GGUF file: q8_0, q6_k, q5_k, q4_k_m, q4_k, "
            "q5_1, q5_0, q4_1, q4_0.",
        ),
    ] = "int4",
    out: Annotated[str | None, flag("Output", "Folder or GGUF file to write.", metavar="PATH")] = None,
    data: Annotated[
        list[str] | None,
        flag(
            "Calibration",
            "Text files, JSON lines of prompts or chats, or folders of these. Weights are rounded to fit nine tenths "
            "of them (GPTQ), and perplexity is measured on the others. May be repeated. (default: round to nearest)",
            metavar="FILE",
        ),
    ] = None,
    num_texts: Annotated[int, flag("Calibration", "Number of calibration texts.")] = 64,
    text_tokens: Annotated[int, flag("Calibration", "Length of a text in tokens.")] = 512,
    as_json: JSON = None,
    debug: DEBUG = False,
) -> None:
    """Write a quantized copy of a model, in the compressed-tensors format or as a GGUF file."""
    quiet_libraries(debug=debug)
    screen = Screen()
    with checking():
        if out is None:
            raise ValueError("out: name a folder or a GGUF file with --out")
        check_sources("data", data or ())
        check_models(model, ())
        from specinfer.quantize.checkpoint import QuantizeConfig, write_quantized

        config = QuantizeConfig(
            model=model, to=to, out=out, data=tuple(data or ()), num_texts=num_texts, text_tokens=text_tokens,
            json=as_json,
        )  # fmt: skip
        with StageProgress(screen.err) as progress:
            report = write_quantized(config, progress)
    screen.out.print(
        f"{report.folder}: {report.num_layers} layers in {to}, {report.num_bytes_before / 2**20:,.0f} MiB before, "
        f"{report.num_bytes / 2**20:,.0f} MiB now"
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
