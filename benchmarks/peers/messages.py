"""Messages between a measurement and the process of a peer, and the interface to the peer's library."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """The models that an arm needs. The other arm of the same process, loaded before, has the same target.

    Attributes:
        target: Model folder or GGUF file.
        drafter: Model folder or GGUF file, or None for plain decoding and for tokens that are looked up.
        max_len: Most tokens of a prompt and its output together.
        dtype: Type that our own models compute in.
        offload: Where layers are kept until a pass needs them: "disk", or "cpu" for a model on a GPU. None if they are
            in memory, or wherever the library maps them.
        is_slow: Whether a pass takes seconds at any size, so that only a few settings can be tried.
        looks_up: Whether draft tokens are looked up in the prompt and the output.
    """

    target: str
    drafter: str | None
    max_len: int
    dtype: str
    device: str
    offload: str | None = None
    is_slow: bool = False
    looks_up: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt to continue by exactly `max_tokens` tokens, even past an end-of-text token.

    Attributes:
        settings: Speculation settings, one of those that the arm offered when it was loaded.
    """

    token_ids: list[int]
    max_tokens: int
    temperature: float
    seed: int
    drafts: bool
    settings: Settings


@dataclass(frozen=True, slots=True)
class Generated:
    """The generated tokens and their times.

    Attributes:
        num_first: Number of tokens that arrived first, together. `time` starts at their arrival.
        prompt_time: Seconds until the first tokens arrived.
        time: Seconds from the first tokens to the last token.
    """

    token_ids: list[int]
    num_first: int
    prompt_time: float
    time: float


class Adapter(Protocol):
    """The common interface to a peer's library. An adapter's module has `create(num_threads)`, which makes one.

    A module that serves other messages than a peer's also has its own `answer(adapter, message)`.
    """

    @property
    def version(self) -> str: ...

    def load(self, job: Load) -> list[Settings]:
        """Prepare an arm, and return the settings to try; the only entry is {} if it has no settings."""

    def generate(self, ask: Ask) -> Generated: ...


@dataclass(slots=True)
class Stopwatch:
    """A timer that starts when it is created and notes when the first tokens arrive."""

    start: float = field(default_factory=time.perf_counter)
    first: float | None = None
    num_first: int = 0

    def arrived(self, num_tokens: int) -> None:
        """Note the arrival of tokens. Only the first call has an effect."""
        if self.first is None:
            self.first, self.num_first = time.perf_counter(), num_tokens

    def stop(self, token_ids: list[int]) -> Generated:
        end = time.perf_counter()
        assert self.first is not None
        return Generated(token_ids, self.num_first, self.first - self.start, end - self.first)


def answer(adapter: Adapter, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply to one message."""
    if message["do"] == "load":
        return {"settings": adapter.load(Load(**message["job"])), "version": adapter.version}
    return asdict(adapter.generate(Ask(**message["ask"])))
