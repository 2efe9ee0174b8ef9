"""Links between ranks, by their latency and bandwidth."""

import math
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIME = re.compile(r"([0-9]*\.?[0-9]+)\s*(s|ms|us|ns)")
_RATE = re.compile(r"([0-9]*\.?[0-9]+)\s*([kmgt]?)(bit|b)(?:/s|ps)?", re.IGNORECASE)
MAX_SECONDS = 3600.0
_MAX_RATE = 1e15  # bytes per second


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a link between two machines, or between two ranks of one machine.

    Attributes:
        latency: Seconds until the first byte arrives.
        bandwidth: Bytes per second.
    """

    latency: float
    bandwidth: float

    def seconds(self, num_bytes: npt.ArrayLike) -> Floats:
        """Return the seconds until a whole message arrives."""
        return np.asarray(self.latency + np.asarray(num_bytes) / self.bandwidth)


def parse_seconds(name: str, text: str) -> float:
    """Return the seconds of a time such as "1ms", "0.5 ms" or "20us".

    Raises:
        ValueError: The time has no unit, or is longer than an hour.
    """
    found = _TIME.fullmatch(text.strip().lower())
    seconds = math.nan if found is None else float(found[1]) * _SECONDS[found[2]]
    if not seconds <= MAX_SECONDS:
        raise ValueError(f'{name}: {text!r} is not a time; give a number and a unit, such as "1ms" or "20us"')
    return seconds


def parse_rate(name: str, text: str) -> float:
    """Return the bytes per second of a rate such as "1Gbit", "100 Mbit/s" or "12GB/s". Prefixes are powers of 1000.

    Raises:
        ValueError: The rate has no unit, or is not from 1 to 1e15 bytes per second.
    """
    found = _RATE.fullmatch(text.strip())
    rate = 0.0 if found is None else float(found[1]) * _PREFIXES[found[2].lower()]
    if found is not None and found[3].lower() == "bit":
        rate /= 8
    if not 1 <= rate <= _MAX_RATE:
        raise ValueError(f'{name}: {text!r} is no rate; give a number and a unit, such as "1Gbit" or "12GB/s"')
    return rate
