"""How many replicas there are to be: by the requests there are, and by how long first tokens take.

Ray Serve's controller carries the class away by value and keeps to the bounds and delays itself.
"""

from typing import Any


class LoadPolicy:
    """So many replicas that each has its share of requests; one more while first tokens come too late.

    Args:
        target_requests: A replica's share, running and waiting together.
        target_ttft: Seconds to the first token for nine requests in ten; None: no matter.
    """

    def __init__(self, target_requests: float, target_ttft: float | None = None) -> None:
        self._target_requests, self._target_ttft = target_requests, target_ttft

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """How many are wanted now, and nothing to remember."""
        wanted = context.total_num_requests / self._target_requests
        slowest = max((context.aggregated_metrics or {}).get("ttft", {}).values(), default=0.0)
        # Of an idle replica the last times say nothing.
        if self._target_ttft is not None and slowest > self._target_ttft and context.total_num_requests > 0:
            wanted = max(wanted, context.current_num_replicas + 1)
        return wanted, {}
