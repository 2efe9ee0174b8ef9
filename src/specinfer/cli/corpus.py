"""`specinfer corpus build`: the texts that the suffix drafter searches."""

from pathlib import Path
from typing import Annotated

import typer

from specinfer.cli.errors import checking
from specinfer.cli.options import DEBUG, MODEL_HELP, flag
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries
from specinfer.core.errors import check_path
from specinfer.reporting.files import check_file, naming
from specinfer.reporting.progress_bar import StageProgress

USUAL_TOKENS = 20_000_000


def build(
    path: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help="Files and folders of code or documents; a file that ends in .tokens has a JSON list of the target's "
            "token ids in each line.",
        ),
    ],
    *,
    model: Annotated[str, flag("Corpus", f"The target, for its tokenizer. {MODEL_HELP}", metavar="MODEL")],
    out: Annotated[str, flag("Corpus", "File to write, for --suffix-corpus.", metavar="FILE")],
    max_tokens: Annotated[
        int,
        flag("Corpus", "Most tokens of all texts. A token takes 8 bytes in the file, and 100 of memory to build it."),
    ] = USUAL_TOKENS,
    debug: DEBUG = False,
) -> None:
    """Write texts as a corpus that --suffix-corpus searches for drafts, such as a repository of code."""
    quiet_libraries(debug=debug)
    screen = Screen()
    with checking():
        check_path("out", out)
        check_file("out", Path(out))  # before the long work begins
        from specinfer.setup.corpus import build_corpus

        with StageProgress(screen.err) as progress, naming("out", out):
            report = build_corpus(path, model, Path(out), max_tokens, progress)
    screen.out.print(f"{out}: {report.num_tokens:,} tokens of {report.num_files:,} files", soft_wrap=True)
    if report.num_skipped:
        screen.out.print(f"skipped {report.num_skipped:,} files that are no text, larger than 2 MiB, or copies")
    if report.num_left:
        screen.out.print(f"left out {report.num_left:,} files beyond --max-tokens")
