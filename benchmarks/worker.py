"""A worker process, which exchanges JSON lines over its standard input and output.

Spinning threads of several runtimes in one process slow each other down. An engine therefore has its own process, which
sleeps while others are measured. It measures its own times, so they do not include any message.

The module that a worker runs has `create(num_threads)`, which makes the adapter of a peer.
"""

import importlib
import json
import os
import sys
from typing import Any

from benchmarks.peers.interface import answer
from benchmarks.process import WorkerError


def main(module: str, num_threads: int) -> None:
    """Reply to messages until the input ends. An error is sent as a reply too."""
    # Output that libraries print is redirected to standard error, so that it does not mix with the replies.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    adapter: Any = None
    for line in sys.stdin:
        try:
            adapter = adapter or importlib.import_module(module).create(num_threads)
            reply = answer(adapter, json.loads(line))
        except WorkerError as error:
            reply = {"error": str(error)}
        except Exception as error:  # libraries raise exceptions of any type
            lines = [text.strip() for text in str(error).splitlines() if text.strip()]
            reply = {"error": f"{type(error).__name__}: {lines[-1] if lines else ''}"}
        print(json.dumps(reply), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
