"""What was served lately, as lessons: an observer of the engine with a bounded memory.

One lesson in eight is never learned from: on those it shows whether what was learned helps. Of requests that share with
nobody (`cache_salt` None) nothing is kept.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from specinfer.engine.metrics import StepRecord
from specinfer.learning.lessons import Lesson, LessonRecorder
from specinfer.request import FinishReason, Request
from specinfer.tree import TokenTree
from specinfer.verify import Acceptance

HELD_OUT = 8  # one lesson in so many
MAX_LESSON = 2048  # tokens; of a longer text the end is kept
TOP = 16  # tokens kept of each of the target's distributions


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """One lesson of the traffic.

    Attributes:
        number: Counts all lessons since the start.
    """

    number: int
    lesson: Lesson

    @property
    def is_held_out(self) -> bool:
        return self.number % HELD_OUT == HELD_OUT - 1


class Traffic:
    """Lessons of the requests that ended last.

    Args:
        max_tokens: Of all lessons together; the oldest go first.
    """

    reads_logits = True

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._recorder = LessonRecorder(TOP)
        self._running: dict[str, Request] = {}
        self._served: deque[Served] = deque()
        self._num_lessons = self._num_tokens = 0

    def __iter__(self) -> Iterator[Served]:
        """The newest first."""
        return reversed(self._served)

    @property
    def num_tokens(self) -> int:
        """Of the lessons that are kept, prompts included."""
        return self._num_tokens

    @property
    def num_unfinished(self) -> int:
        """Requests of which something is noted, and that have not ended."""
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
        """What is noted of requests that were ended from outside goes."""
        for request in [request for request in self._running.values() if request.is_finished]:
            self._take(request)

    def _take(self, request: Request) -> None:
        del self._running[request.request_id]
        lesson = self._recorder.finish(request)
        if lesson is None or request.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        lesson = last_part(lesson, MAX_LESSON)
        self._served.append(Served(self._num_lessons, lesson))
        self._num_lessons += 1
        self._num_tokens += len(lesson.tokens)
        while self._num_tokens > self._max_tokens:
            self._num_tokens -= len(self._served.popleft().lesson.tokens)


def last_part(lesson: Lesson, num_tokens: int) -> Lesson:
    """The end of a lesson: at most so many tokens, the first of which is prompt. A copy: the rest is let go."""
    start = max(len(lesson.tokens) - num_tokens, 0)
    part = _part(lesson, start, max(lesson.num_prompt, start + 1), len(lesson.tokens))
    arrays = {name: getattr(part, name).copy() for name in ("tokens", "top_ids", "top_logprobs", "generated_logprobs")}
    return replace(part, **arrays)


def pieces(lesson: Lesson, num_tokens: int) -> list[Lesson]:
    """A lesson as lessons of at most so many tokens, each token of the output taught by one of them.

    Where one goes on with another's text, half of it is text that it does not teach.
    """
    found, taught = [], lesson.num_prompt
    while taught < len(lesson.tokens):
        # A short prompt leaves room for more.
        end = min(taught + max(num_tokens // 2, num_tokens - taught), len(lesson.tokens))
        found.append(_part(lesson, max(end - num_tokens, 0), taught, end))
        taught = end
    return found


def _part(lesson: Lesson, start: int, taught: int, end: int) -> Lesson:
    """Tokens [start, end); those before `taught` count as prompt."""
    rows = slice(taught - lesson.num_prompt, end - lesson.num_prompt)
    return replace(
        lesson,
        tokens=lesson.tokens[start:end],
        num_prompt=taught - start,
        top_ids=lesson.top_ids[rows],
        top_logprobs=lesson.top_logprobs[rows],
        generated_logprobs=lesson.generated_logprobs[rows],
    )


def batches(lessons: Sequence[Lesson], num_tokens: int) -> Iterator[list[Lesson]]:
    """Lessons side by side, in order, as many as padded take at most so many tokens, but at least one."""
    batch: list[Lesson] = []
    longest = 0
    for lesson in lessons:
        longest = max(longest, len(lesson.tokens))
        if batch and longest * (len(batch) + 1) > num_tokens:
            yield batch
            batch, longest = [], len(lesson.tokens)
        batch.append(lesson)
    if batch:
        yield batch
