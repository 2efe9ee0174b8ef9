"""The routers of this process. Not in `routing.py`, because Ray pickles that module's class by value."""

from typing import Any
from weakref import WeakSet

routers: "WeakSet[Any]" = WeakSet()


def may_ask() -> bool:
    """Return whether there is a replica to ask; also True if no router exists yet."""
    return not routers or any(router.curr_replicas for router in routers)
