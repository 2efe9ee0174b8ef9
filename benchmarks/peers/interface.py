"""The interface of a peer: what it is asked to load and to generate, and what it returns."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """The models that a peer needs.

    Attributes:
        target: Model folder or GGUF file.
        drafter: Model folder or GGUF file, or None for plain decoding and for tokens that are looked up.
        max_len: Most tokens of a prompt and its output together.
        dtype: Type that our own models compute in.
        looks_up: Whether draft tokens are looked up in the prompt and the output.
        sweep: Whether each of the settings is measured by itself: few that people use, not all that may be fastest.
        num_outputs: Most outputs of one prompt.
    """

    target: str
    drafter: str | None
    max_len: int
    dtype: str
    device: str
    looks_up: bool = False
    sweep: bool = False
    num_outputs: int = 1


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt to continue by exactly `max_tokens` tokens, even past an end-of-text token.

    Attributes:
        settings: Speculation settings, one of those that the peer offered when it was loaded.
        request: Chat request in the format of OpenAI's API, to answer in place of the prompt until the answer ends.
    """

    token_ids: list[int]
    max_tokens: int
    temperature: float
    seed: int
    settings: Settings
    request: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Generated:
    """The generated tokens and their times.

    Attributes:
        outputs: Tokens of each output of the prompt.
        num_first: Number of tokens that arrived first, together. `time` starts at their arrival.
        prompt_time: Seconds until the first tokens arrived.
        time: Seconds from the first tokens to the last token.
    """

    outputs: list[list[int]]
    num_first: int
    prompt_time: float
    time: float


class Adapter(Protocol):
    """A peer that is driven by this process, or by a worker whose module has `create(num_threads)`."""

    @property
    def version(self) -> str: ...

    def load(self, job: Load) -> list[Settings]:
        """Load the models, and return the settings to try; the only entry is {} if there are none."""

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
        return Generated([token_ids], self.num_first, self.first - self.start, end - self.first)


def answer(adapter: Adapter, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply of a worker to one message."""
    if message["do"] == "load":
        return {"settings": adapter.load(Load(**message["job"])), "version": adapter.version}
    return asdict(adapter.generate(Ask(**message["ask"])))
