"""The processes of a world of ranks: how rank 0 starts them, and the program that each of the others runs.

`python -m specinfer.drafters.remote.process` reads its job, a line of JSON, from standard input.
"""

import json
import logging
import os
import signal
import sys
from dataclasses import asdict
from functools import partial
from typing import NoReturn

from specinfer.core.parallel_config import ParallelConfig, Place, find_place
from specinfer.core.systems import STOP_SIGNALS, die_with_parent
from specinfer.drafters.remote.host import Host
from specinfer.drafters.remote.placement import DrafterPlacement
from specinfer.model.sharding.worker import work
from specinfer.model.target import TargetConfig, rank_device
from specinfer.parallel.ranks import Ranks

MODULE = "specinfer.drafters.remote.process"


def start_ranks(parallel: ParallelConfig, settings: TargetConfig, placement: DrafterPlacement) -> Ranks:
    """Start the ranks of this machine and return all ranks of a target, connected.

    Raises:
        ValueError, RanksError: Raised by `Ranks`.
    """
    wanted, job = _wanted(settings, parallel, placement), partial(make_job, settings, parallel, placement)
    return Ranks(parallel, wanted, MODULE, job, rank_device(settings.device, find_place(parallel)))


def work_at(settings: TargetConfig, parallel: ParallelConfig, placement: DrafterPlacement, place: Place) -> int:
    """Run the rank at this place from beginning to end and return the exit code of its process."""
    placed = placement.of(place.rank)
    service = (
        Host(placed, placement.quantization, keeps_prefixes=placement.keeps_prefixes, token_map=placement.token_map)
        if placed
        else None
    )
    return work(settings, parallel, place, _wanted(settings, parallel, placement), service)


def make_job(settings: TargetConfig, parallel: ParallelConfig, placement: DrafterPlacement, place: Place) -> str:
    """Return the job line for a worker at this place."""
    level = logging.getLogger("specinfer").getEffectiveLevel()
    return json.dumps(
        {
            "place": asdict(place),
            "parallel": asdict(parallel),
            "settings": settings.as_json(),
            "placement": placement.as_json(),
            "parent": os.getpid(),
            "log_level": level,
        }
    )


def _wanted(settings: TargetConfig, parallel: ParallelConfig, placement: DrafterPlacement) -> dict[str, str]:
    return settings.wanted() | parallel.wanted() | placement.wanted()


def main() -> NoReturn:
    """Run a worker that another process has started and will end."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a terminal sends these signals to all; rank 0 decides
    die_with_parent()
    job = json.loads(sys.stdin.readline())
    if os.getppid() != job["parent"]:
        sys.exit(1)  # the parent ended before the system was asked to notify this process
    logging.basicConfig(level=job["log_level"], format="%(asctime)s %(levelname)s %(message)s")
    place, parallel = Place(**job["place"]), ParallelConfig(**job["parallel"])
    settings, placement = TargetConfig.from_json(job["settings"]), DrafterPlacement.from_json(job["placement"])
    code = work_at(settings, parallel, placement, place)
    logging.shutdown()
    os._exit(code)  # open connections would keep the process alive


if __name__ == "__main__":
    main()
