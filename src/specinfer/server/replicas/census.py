"""How many replicas this process knows of. Apart from `routing.py`, which Ray carries away by value."""

from typing import Any
from weakref import WeakSet

routers: "WeakSet[Any]" = WeakSet()  # those of this process


def num_replicas() -> int:
    """Replicas that can be asked."""
    return max((len(router.curr_replicas) for router in routers), default=0)
