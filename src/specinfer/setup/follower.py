"""A rank without the engine, on another machine or started by torchrun. It serves rank 0 and ends with it."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from specinfer.core.options import current_names
from specinfer.core.parallel_config import Place, find_place
from specinfer.drafters.remote.process import MODULE, make_job, work_at
from specinfer.engine_args import EngineArgs
from specinfer.parallel.processes import Processes, share_cores
from specinfer.setup.model_plan import plan_models


def follow(model: str | Path | EngineArgs, **options: Any) -> int:
    """Run the ranks of this machine until rank 0 ends.

    Args:
        model: All arguments of `LLM` and the `node_rank`, or the model alone.
        options: The other arguments by their names, if `model` is the model alone.

    Returns:
        0 if rank 0 ended in order; 1 if it was lost, or a rank failed.

    Raises:
        ModelError, ValueError: An argument cannot be used, or rank 0 cannot be reached, as for `LLM`.
    """
    args = model if isinstance(model, EngineArgs) else EngineArgs(model, **current_names(EngineArgs, options))
    parallel = args.parallel_config
    place = find_place(parallel)
    if place.rank == 0:
        raise ValueError("node_rank: this is rank 0, which has the engine; use LLM, or specinfer serve")
    # If all drafters run on rank 0, other machines need not have them.
    has_drafters = args.drafter_placement == "spread" or place.local_size == parallel.world_size
    plan = plan_models(args, finds_drafters=has_drafters)
    share_cores(place.local_size)
    with _companions(place, partial(make_job, plan.settings, parallel, plan.placement)):
        return work_at(plan.settings, parallel, plan.placement, place)


@contextlib.contextmanager
def _companions(place: Place, job: Any) -> Iterator[None]:
    """Run the other ranks of this machine. Rank 0 notices when one ends, and then ends all."""
    done = threading.Event()

    def keep() -> None:
        places = [
            replace(place, rank=place.rank + i, local_rank=i, num_started=0) for i in range(1, place.num_started + 1)
        ]
        children = Processes(MODULE, [job(each) for each in places], place.local_size)
        done.wait()  # the processes live as long as this thread
        children.kill()

    keeper = threading.Thread(target=keep, name="specinfer-ranks", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        done.set()
        keeper.join()
