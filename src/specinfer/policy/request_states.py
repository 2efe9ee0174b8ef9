"""States of running requests, which are forgotten when the requests end."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from specinfer.core.request import Request, Span

State = TypeVar("State")
_MOST_ENDED = 64  # states of requests that ended without notice


class RequestStates(Generic[State]):
    """One state for each request. Two requests of one id, one after the other, have two.

    Args:
        make: Function that makes the state of a new request.
    """

    def __init__(self, make: Callable[[], State]) -> None:
        self._make = make
        self._states: dict[str, tuple[Request, State]] = {}

    def __len__(self) -> int:
        return len(self._states)

    def of_spans(self, spans: Sequence[Span]) -> list[State]:
        """Return the states of the requests of a step, those of new ones included."""
        if len(self._states) > 2 * len(spans) + _MOST_ENDED:
            self._states = {name: stored for name, stored in self._states.items() if not stored[0].is_finished}
        return [self._state_of(span.request) for span in spans]

    def _state_of(self, request: Request) -> State:
        state = self.find(request)
        if state is None:
            state = self._make()
            self._states[request.request_id] = request, state
        return state

    def find(self, request: Request) -> State | None:
        """Return the state of a request, or None if it has none or has ended; that of one that ended is dropped."""
        if request.is_finished:
            self._states.pop(request.request_id, None)
            return None
        stored = self._states.get(request.request_id)
        return stored[1] if stored is not None and stored[0] is request else None
