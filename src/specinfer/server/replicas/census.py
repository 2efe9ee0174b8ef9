"""The routers of this process. Apart from `routing.py`, which Ray carries away by value."""

from typing import Any
from weakref import WeakSet

routers: "WeakSet[Any]" = WeakSet()


def may_ask() -> bool:
    """Whether there is a replica to ask, or nobody has looked yet."""
    return not routers or any(router.curr_replicas for router in routers)
