"""Measurement of the processor time of a message: a small sum over two ranks, without a model."""

import time
from collections.abc import Mapping
from typing import Any

import torch

from specinfer.core.parallel_config import Place
from specinfer.parallel.group import HostGroup
from specinfer.parallel.rendezvous import join_rendezvous

_WARMUP, _COUNT = 20, 200
_NUM_VALUES = 1024


def create(num_threads: int) -> None:
    """Set the number of threads. No state is kept between messages."""
    torch.set_num_threads(num_threads)


def answer(_: None, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the median seconds of one sum. Both ranks must receive this message at the same time."""
    meeting = join_rendezvous(Place(message["rank"], 2, 0, 1, message["host"], message["port"]))
    group = HostGroup(meeting.links, [0, 1], message["rank"], 1)
    tensor, seconds = torch.ones(_NUM_VALUES), []
    for i in range(_WARMUP + _COUNT):
        before = time.perf_counter()
        group.all_reduce(tensor)
        if i >= _WARMUP:
            seconds.append(time.perf_counter() - before)
    meeting.links.close()
    return {"seconds": sorted(seconds)[len(seconds) // 2]}
