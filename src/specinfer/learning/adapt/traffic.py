"""Examples of recent requests: an observer of the engine with a bounded memory.

One example in eight is never trained on: these show whether training helps. Requests that share with no others
(`cache_salt` None) are not stored. For heads, an example has the hidden states that the target computed while it served
the request.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from specinfer.core.request import FinishReason, Request
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TokenTree
from specinfer.learning.batches import last_part
from specinfer.learning.examples import ExampleRecorder, TrainingExample
from specinfer.verify import Acceptance

HELD_OUT = 8  # one example in this many is held out
MAX_EXAMPLE = 2048  # tokens; of a longer text only the end is stored
TOP = 16  # tokens stored of each of the target's distributions


@dataclass(frozen=True, slots=True, eq=False)
class ServedExample:
    """One example of the traffic.

    Attributes:
        number: The example's number among all since the start.
    """

    number: int
    example: TrainingExample

    @property
    def is_held_out(self) -> bool:
        return self.number % HELD_OUT == HELD_OUT - 1


# Function from a request's id and a range of its tokens to the target's [tokens, width] hidden states, by layer, or to
# None if they are not all in the cache.
TapReader = Callable[[str, int, int], Mapping[int, Tensor] | None]


class Traffic:
    """Examples of the requests that ended last.

    Args:
        max_tokens: The largest number of tokens in all examples; the oldest are dropped first.
        read_taps: The reader of hidden states, or None if no drafter is trained on them.
        max_tap_bytes: The largest number of bytes of hidden states in all examples.
    """

    reads_logits = True

    def __init__(self, max_tokens: int, read_taps: TapReader | None = None, max_tap_bytes: int = 0) -> None:
        self._max_tokens, self._max_tap_bytes = max_tokens, max_tap_bytes
        self._read_taps = read_taps
        self._recorder = ExampleRecorder(TOP)
        self._running: dict[str, Request] = {}
        self._served: deque[ServedExample] = deque()
        self._num_examples = self._num_tokens = self.num_tap_bytes = 0

    def __iter__(self) -> Iterator[ServedExample]:
        """Iterate over the examples, the newest first."""
        return reversed(self._served)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the stored examples, including prompts."""
        return self._num_tokens

    @property
    def num_unfinished(self) -> int:
        """The number of recorded requests that have not ended."""
        return len(self._running)

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        if request.cache_salt is None:
            return
        self._running[request.request_id] = request
        self._recorder.on_tokens(request, tree, acceptance, logits, num_generated)
        if request.is_finished:
            self._take(request)

    def on_step(self, record: StepRecord) -> None:
        if len(self._running) > record.num_requests:
            self.forget_ended()

    def forget_ended(self) -> None:
        """Drop what is recorded of requests that were ended from outside."""
        for request in [request for request in self._running.values() if request.is_finished]:
            self._take(request)

    def _take(self, request: Request) -> None:
        del self._running[request.request_id]
        example = self._recorder.finish(request)
        if example is None or request.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        example = last_part(example, MAX_EXAMPLE)
        if self._read_taps is not None:
            count = len(request.token_ids)
            taps = self._read_taps(request.request_id, count - len(example.tokens), count - 1)
            example = replace(example, taps=taps)
        self._served.append(ServedExample(self._num_examples, example))
        self._num_examples += 1
        self._num_tokens += len(example.tokens)
        self.num_tap_bytes += _tap_bytes(example)
        while self._num_tokens > self._max_tokens or self.num_tap_bytes > self._max_tap_bytes:
            dropped = self._served.popleft().example
            self._num_tokens -= len(dropped.tokens)
            self.num_tap_bytes -= _tap_bytes(dropped)


def _tap_bytes(example: TrainingExample) -> int:
    return sum(tap.nbytes for tap in (example.taps or {}).values())
