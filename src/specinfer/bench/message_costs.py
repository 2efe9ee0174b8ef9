"""What a small sum over two ranks takes, without a model: the processor's part of a message."""

import time
from collections.abc import Mapping
from typing import Any

import torch

from specinfer.parallel.config import Place
from specinfer.parallel.rendezvous import meet
from specinfer.parallel.torch_group import TorchGroup

_WARMUP, _COUNT = 20, 200
_NUM_VALUES = 1024


def create(num_threads: int) -> None:
    """Nothing is kept between messages."""
    torch.set_num_threads(num_threads)


def answer(_: None, message: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of one sum, both ranks having been asked at the same time: the median of many."""
    meeting = meet(Place(message["rank"], 2, 0, 1, message["host"], message["port"]))
    group = TorchGroup(meeting.connect(), [0, 1], message["rank"], 1)
    tensor, seconds = torch.ones(_NUM_VALUES), []
    for i in range(_WARMUP + _COUNT):
        before = time.perf_counter()
        group.all_reduce(tensor)
        if i >= _WARMUP:
            seconds.append(time.perf_counter() - before)
    group.close()
    return {"seconds": sorted(seconds)[len(seconds) // 2]}
