"""The process that one peer runs in: JSON lines on its standard input and output.

Threads of several runtimes that spin in one process slow each other. So a peer has a process of its own, which
sleeps while others are measured, and takes its own times: no message is within them.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from specinfer.bench.peers.names import PeerError

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """What an arm needs. The other arm of its process, loaded before, has the same target.

    Attributes:
        target: A model folder, or a GGUF file; `drafter` alike, or None for plain decoding.
        max_len: Tokens of the longest prompt and output together.
        dtype: The type our own models compute in.
        offload: Where layers wait until they are computed with: "disk", or "cpu" for a model on a GPU; None: in memory,
            or wherever the library maps them.
        is_slow: A pass takes seconds, whatever its size: few settings can be tried.
    """

    target: str
    drafter: str | None
    max_len: int
    dtype: str
    device: str
    offload: str | None = None
    is_slow: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt to be continued by exactly `max_tokens`, whatever they are.

    Attributes:
        settings: Of speculation, one of those the arm offered when it was loaded.
    """

    token_ids: list[int]
    max_tokens: int
    temperature: float
    seed: int
    drafts: bool
    settings: Settings


@dataclass(frozen=True, slots=True)
class Said:
    """What was said, and when.

    Attributes:
        num_first: Tokens that came first, together; the clock of `time` starts when they are there.
        prompt_time: Seconds until then.
        time: Seconds from then to the last token.
    """

    token_ids: list[int]
    num_first: int
    prompt_time: float
    time: float


class Adapter(Protocol):
    """A peer's library in our terms. An adapter's module has `create(num_threads)`, which makes one.

    What is asked by other messages than a peer's has an `answer(adapter, message)` beside it.
    """

    @property
    def version(self) -> str: ...

    def load(self, job: Load) -> list[Settings]:
        """Makes an arm ready; the settings worth trying, of which {} is one that has none."""

    def generate(self, ask: Ask) -> Said: ...


@dataclass(slots=True)
class Stopwatch:
    """Starts when it is made, and notes when the first tokens came."""

    start: float = field(default_factory=time.perf_counter)
    first: float | None = None
    num_first: int = 0

    def said(self, num_tokens: int) -> None:
        """Only the first call counts."""
        if self.first is None:
            self.first, self.num_first = time.perf_counter(), num_tokens

    def stop(self, token_ids: list[int]) -> Said:
        end = time.perf_counter()
        assert self.first is not None
        return Said(token_ids, self.num_first, self.first - self.start, end - self.first)


def answer(adapter: Adapter, message: Mapping[str, Any]) -> dict[str, Any]:
    """What comes back for one message."""
    if message["do"] == "load":
        return {"settings": adapter.load(Load(**message["job"])), "version": adapter.version}
    return asdict(adapter.generate(Ask(**message["ask"])))


def main(module: str, num_threads: int) -> None:
    """Answers until the input ends. An error is an answer too."""
    # What libraries print goes where errors go: it must not come between the answers.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    adapter: Any = None
    for line in sys.stdin:
        try:
            library = importlib.import_module(module)
            adapter = adapter or library.create(num_threads)
            reply = getattr(library, "answer", answer)(adapter, json.loads(line))
        except PeerError as error:
            reply = {"error": str(error)}
        except Exception as error:  # libraries raise what they like
            lines = [text.strip() for text in str(error).splitlines() if text.strip()]
            reply = {"error": f"{type(error).__name__}: {lines[-1] if lines else ''}"}
        print(json.dumps(reply), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
