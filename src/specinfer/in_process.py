"""Steps of the engine in the calling process, until the requests of a call have ended.

Several threads may call: each has a turn for as long as it adds requests and runs steps.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from specinfer.core.outputs import OutputCursor, TextChunk
from specinfer.engine.engine import Engine
from specinfer.inputs.jobs import Job
from specinfer.reporting.progress_bar import running_bar


def run(engine: Engine, turn: AbstractContextManager[object], jobs: Sequence[Job], *, show: bool) -> None:
    """Run the requests of all jobs to their ends.

    Args:
        engine: The engine.
        turn: Lock of the thread that adds requests and runs steps.
        show: Whether to show a progress bar on a terminal.
    """
    requests = [request for job in jobs for request in job.requests]
    unfinished = {request.request_id for request in requests}
    with turn, running_bar(engine, len(requests), show=show) as progress:
        for request in requests:
            engine.add(request)
        try:
            while unfinished:
                unfinished -= {request.request_id for request in engine.step() if request.is_finished}
                progress(len(requests) - len(unfinished))
        finally:  # so that an interrupt leaves nothing in the cache
            for request in requests:
                engine.abort(request)


def stream(engine: Engine, turn: AbstractContextManager[object], job: Job) -> Iterator[TextChunk]:
    """Run the only request of a job, and yield a chunk after each step; arguments are those of `run`."""
    request = job.requests[0]
    cursor, num_generated = OutputCursor(request), 0
    with turn:
        engine.add(request)
    try:
        while not request.is_finished:
            with turn:
                # Other calls on this engine may have stepped in the meantime.
                if request.num_output == num_generated:
                    engine.step()
                has_more = request.num_output > num_generated and not request.is_finished
                num_generated = request.num_output
                chunk = cursor.advance() if has_more else None
            if chunk is not None:
                yield chunk
        output = job.output()
        output.warn_of_error(stacklevel=2)
        yield replace(cursor.advance(), output=output)
    finally:
        with turn:
            engine.abort(request)
