"""Room for prompts: how many waiting requests may begin in a step, so that short ones do not wait for long ones.

A prompt is long if a whole step cannot read it. Two long prompts are read at a time. Others wait, and short ones go
past them, as far as the step has tokens left: `token_shares` gives half of a step to the prompt that has been read
longest, and the rest to the shortest first.
"""

from collections.abc import Iterable

from specinfer.core.request import Request

_MAX_LOOKED_UP = 4  # long prompts without room whose cached prefixes are looked up in a step, as the rest may be short


class PromptRoom:
    """Room of one step for the prompts of further requests, considered in the order of the queue.

    Args:
        running: Requests that run, the oldest first.
        max_tokens: Token budget of the step.
    """

    def __init__(self, running: Iterable[Request], max_tokens: int) -> None:
        counts = [request.num_unread for request in running]
        self._max_tokens = max_tokens
        self._unread = [count for count in counts if count > 1]
        self._num_free = max_tokens - len(counts) + len(self._unread)
        self._num_looked_up = 0
        self._passed: dict[str, int] = {}  # for tenants, the priority of their first prompt without room

    @property
    def is_empty(self) -> bool:
        """True if no tokens are left for a prompt of any length."""
        left = self._num_free - sum(count for count in self._unread[1:] if count <= self._max_tokens)
        left -= min(self._unread[0], left // 2) if self._unread else 0
        return left <= 0

    def may_look_up(self, request: Request) -> bool:
        """Return whether a request may have room: it goes past none of its tenant with a better priority."""
        if request.priority > self._passed.get(request.tenant, request.priority):
            return False
        return self._num_looked_up < _MAX_LOOKED_UP or self._has_room(request)

    def offer(self, request: Request) -> bool:
        """Return whether there is room for a request that has been given its cached prefix, and note if there is none.

        The caller has made sure that the room is not empty.
        """
        if self._has_room(request):
            return True
        self._num_looked_up += 1
        self._passed.setdefault(request.tenant, request.priority)
        return False

    def take(self, request: Request) -> None:
        """Use the room for a request."""
        self._unread.append(request.num_unread)

    def _has_room(self, request: Request) -> bool:
        is_long = request.num_unread > self._max_tokens
        return not is_long or all(count <= self._max_tokens for count in self._unread[1:])
