"""The number of replicas to run, by the number of requests and by the time to first token.

Ray Serve's controller pickles the class by value and applies the bounds and delays itself.
"""

from typing import Any


class LoadPolicy:
    """A policy of as many replicas as the requests need, and one more while first tokens are too late.

    Args:
        target_requests: Requests per replica, running and waiting together.
        target_ttft: Seconds to the first token for nine requests in ten, or None for no limit.
    """

    def __init__(self, target_requests: float, target_ttft: float | None = None) -> None:
        self._target_requests, self._target_ttft = target_requests, target_ttft

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas wanted now, and an empty state."""
        wanted = context.total_num_requests / self._target_requests
        slowest = max((context.aggregated_metrics or {}).get("ttft", {}).values(), default=0.0)
        # With no requests running, the last measured times are out of date.
        if self._target_ttft is not None and slowest > self._target_ttft and context.total_num_requests > 0:
            wanted = max(wanted, context.current_num_replicas + 1)
        return wanted, {}
