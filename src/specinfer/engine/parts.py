"""Division of an amount among tenants, such as the rows of a step."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from specinfer.core.request import Request

T = TypeVar("T")


def by_tenant(requests: Sequence[Request]) -> dict[str, list[Request]]:
    """Return the requests of each tenant, in their order."""
    tenants = dict[str, list[Request]]()
    for request in requests:
        tenants.setdefault(request.tenant, []).append(request)
    return tenants


def even_parts(demands: Mapping[T, float], total: float) -> dict[T, float]:
    """Return even parts of a total, of which nobody gets more than it demands; the others get what it leaves."""
    parts, left, num_left = dict[T, float](), max(total, 0.0), len(demands)
    for key in sorted(demands, key=demands.__getitem__):
        parts[key] = min(demands[key], left / num_left)
        left, num_left = left - parts[key], num_left - 1
    return parts


def in_turn(demands: Mapping[T, float], total: float) -> dict[T, float]:
    """Return the parts of a total if the smallest demand is met first, then the next one."""
    parts, left = dict[T, float](), max(total, 0.0)
    for key in sorted(demands, key=demands.__getitem__):
        parts[key] = min(demands[key], left)
        left -= parts[key]
    return parts
