"""Search for the highest request rate at which enough requests meet their latency targets, for each arm.

All arms are measured at each rate, so that they are compared at the same load. An example: 90 % are wanted, and the
first rate is 2 a second, which plain decoding meets and a tree, too. 4 is tried, and only the tree meets it; so plain
decoding's rate is between 2 and 4, and the tree's above 4. The next rates are 2.83, 8, ... until the rates that an arm
meets and misses are close together.
"""

import math
from collections.abc import Iterable, Mapping

from specinfer.bench.serve_report import RateResult

_CLOSE = 1.12  # factor between the rates that an arm meets and misses at which the search ends
_MOST_RATES = 16
_LOWEST = 16  # the first rate over the lowest, below which a run takes long and waits decide little


def next_rate(first: float, met: Mapping[float, Mapping[str, bool]]) -> float | None:
    """Return the next rate to measure, or None if the search has ended.

    Args:
        first: Rate to begin with.
        met: For each measured rate, whether each arm met the targets.
    """
    if not met:
        return first
    if len(met) >= _MOST_RATES:
        return None
    for arm in next(iter(met.values())):
        low, high = highest_rate(arm, met), lowest_missed(arm, met)
        if low is None and min(met) > first / _LOWEST:
            return min(met) / 2
        if low is None:
            continue
        if math.isinf(high):
            return max(met) * 2
        if high > _CLOSE * low:
            return math.sqrt(low * high)
    return None


def lowest_missed(arm: str, met: Mapping[float, Mapping[str, bool]]) -> float:
    """Return the lowest rate at which an arm missed the targets, or infinity."""
    return min((rate for rate, arms in met.items() if not arms[arm]), default=math.inf)


def highest_rate(arm: str, met: Mapping[float, Mapping[str, bool]]) -> float | None:
    """Return the highest rate at which an arm met the targets, and at all lower ones; None if there is none."""
    return max((rate for rate in met if rate < lowest_missed(arm, met)), default=None)


def targets_met(
    results: Iterable[RateResult], limits: Mapping[str, float], share: float
) -> dict[float, dict[str, bool]]:
    """Return for each rate whether each arm met the targets.

    Args:
        limits: Limits in milliseconds of requests without their own.
        share: Percentage of requests that must meet their targets.
    """
    return {result.rate: {arm.name: arm.share_good(limits) >= share for arm in result.arms} for result in results}
