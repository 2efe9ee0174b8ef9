"""The command run-batch: serves a file of requests through the server's application, without a socket."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from specinfer.cli.errors import UsageError, checking
from specinfer.cli.options import ARGUMENT, DEBUG, EngineOptions, flag, load
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries
from specinfer.hub.locate import without_revision
from specinfer.reporting.progress_bar import stage_bar

if TYPE_CHECKING:  # importing these imports torch and FastAPI
    from specinfer.llm import LLM
    from specinfer.server.batch import BatchCounts

_STANDARD = "-"
_UNLIMITED = 2**31  # this command limits the concurrency itself


def run_batch(
    argument: ARGUMENT = None,
    *,
    input_file: Annotated[
        str, flag("Batch", "Requests in the batch format of OpenAI; - is standard input.", "--input-file", "-i",
                  metavar="FILE", show_default=False)
    ],
    output_file: Annotated[
        str, flag("Batch", "Responses, in the order of the requests; - is standard output.", "--output-file", "-o",
                  metavar="FILE", show_default=False)
    ],
    resume: Annotated[bool, flag("Batch", "Resume an output file: skip the requests it has.", "--resume")] = False,
    max_concurrency: Annotated[
        int | None, flag("Batch", "Maximum number of concurrent requests. (default: twice --max-num-seqs)", min=1)
    ] = None,
    served_model_name: Annotated[
        list[str] | None, flag("Batch", "Name of the model in requests. May be repeated. (default: MODEL)")
    ] = None,
    engine: EngineOptions,
    debug: DEBUG = False,
) -> None:  # fmt: skip
    """Run a batch file of requests (custom_id, method, url and body in each line) and write a file of responses."""
    import asyncio  # some MB, which the parent of a server would keep

    screen = Screen()
    with checking(), contextlib.ExitStack() as files:
        args = engine.args(argument)
        lines, total = _open_input(input_file, files)
        if (
            _STANDARD not in (input_file, output_file)
            and Path(output_file).exists()
            and Path(output_file).samefile(input_file)
        ):
            raise UsageError(f"output_file: {output_file} is the input file; name another")
        output, skipped_ids = _open_output(output_file, files, resume=resume)
        quiet_libraries(debug=debug)
        llm = load(args, screen)
        opened_files = files.pop_all()
    with _naming(output_file), opened_files, stage_bar(screen.err) as bar:
        bar.stage("requests", total)
        names = tuple(served_model_name or [without_revision(args.model)])
        concurrency = max_concurrency or 2 * llm.max_num_seqs
        try:
            counts = asyncio.run(_serve(llm, names, lines, output, concurrency, skipped_ids, bar.advance))
        except KeyboardInterrupt:
            screen.note("interrupted: answers that were not written can be had with --resume")
            raise
    screen.note(
        f"{counts.num_served} served, {counts.num_failed} refused or failed"
        + (f", {counts.num_skipped} there already" if resume else "")
    )
    if counts.num_failed:
        raise typer.Exit(1)


async def _serve(
    llm: "LLM",
    names: tuple[str, ...],
    lines: Iterator[bytes],
    output: IO[bytes],
    concurrency: int,
    skipped_ids: set[str],
    advance: Callable[[], None],
) -> "BatchCounts":
    import httpx

    from specinfer.async_llm import AsyncLLM
    from specinfer.core.errors import EngineDeadError
    from specinfer.core.limits import QueueLimits
    from specinfer.server.app import create_app
    from specinfer.server.batch import BatchResponse, Body, ServerGoneError, run_lines
    from specinfer.server.config import ServerConfig
    from specinfer.server.state import ServerState

    async with AsyncLLM(llm, QueueLimits(max_num_queued_reqs=_UNLIMITED)) as engine:
        config = ServerConfig(max_connections=concurrency + 1)
        app = create_app(ServerState(engine, config, names))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None) as client:

            async def post(url: str, body: Body) -> BatchResponse:
                content = json.dumps(body).encode()  # also lone surrogates and NaN, which the server refuses by field
                response = await client.post(url, content=content, headers={"content-type": "application/json"})
                if response.status_code >= 500:
                    try:
                        await engine.check_health()
                    except EngineDeadError as error:
                        raise ServerGoneError(str(error)) from error
                try:
                    result = response.json()
                except ValueError:
                    result = response.text
                return BatchResponse(response.status_code, response.headers.get("x-request-id", ""), result)

            try:
                return await run_lines(
                    lines, output, post, concurrency=concurrency, skipped_ids=skipped_ids, advance=advance
                )
            except ServerGoneError as error:
                raise RuntimeError(f"{error}; what is missing can be served with --resume") from error


def _open_input(name: str, files: contextlib.ExitStack) -> tuple[Iterator[bytes], int | None]:
    """Return the lines, and their number if it is known."""
    from specinfer.server.batch import count_lines

    if name == _STANDARD:
        return iter(sys.stdin.buffer), None
    try:
        file = Path(name).open("rb")  # noqa: SIM115  # the stack closes it
        files.enter_context(file)
        return iter(file), count_lines(file)
    except OSError as error:
        raise UsageError(f"input_file: {name} cannot be read: {error.strerror}") from error


def _open_output(name: str, files: contextlib.ExitStack, *, resume: bool) -> tuple[IO[bytes], set[str]]:
    """Return the output, and the custom_ids that it already has."""
    from specinfer.server.batch import written_ids

    if name == _STANDARD:
        if resume:
            raise UsageError("resume: there is nothing to go on with on standard output; name a file")
        return sys.stdout.buffer, set()
    path = Path(name)
    try:
        if not resume and path.is_file() and path.stat().st_size:
            raise UsageError(f"output_file: {name} has lines already; add --resume to go on with it, or remove it")
        skipped_ids = written_ids(path) if resume else set()
        return files.enter_context(path.open("ab")), skipped_ids
    except OSError as error:
        raise UsageError(f"output_file: {name} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def _naming(output_file: str) -> Iterator[None]:
    """Turn a full disk, and other errors of writing, into a UsageError that names the output file."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(
            f"output_file: {output_file} cannot be written: {error.strerror}; free some space, and go on with --resume"
        ) from error
