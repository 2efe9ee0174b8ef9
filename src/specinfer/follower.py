"""A rank that is not the engine's: on another machine, or started by torchrun. It serves rank 0, and ends with it."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from specinfer.config import EngineConfig, OffloadConfig, batched_tokens
from specinfer.demo.pair import demo_folders
from specinfer.model.folder import find_folder
from specinfer.model.target import TargetSettings
from specinfer.model.worker import MODULE, make_job, work
from specinfer.parallel.config import ParallelConfig, Place, find_place
from specinfer.parallel.processes import Processes, share_cores


def follow(
    model: str | Path,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str | None = None,
    master_port: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str | None = None,
    offload: str | None = None,
    memory_budget: int | str | None = None,
    offload_folder: str | Path | None = None,
    max_num_batched_tokens: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    **_: Any,
) -> int:
    """Runs the ranks of this machine until rank 0 ends.

    Args:
        node_rank: Of this machine, from 1; with torchrun 0.
        _: Whatever else `LLM` takes: what only the engine needs.

    Returns:
        0 if rank 0 has ended in order; 1 if it is gone, or a rank failed.

    Raises:
        ModelError, ValueError: An argument cannot be used, or rank 0 is not to be reached; as `LLM`.
    """
    parallel = ParallelConfig(tensor_parallel_size, pipeline_parallel_size, nnodes, node_rank, master_addr, master_port)
    place = find_place(parallel)
    if place.rank == 0:
        raise ValueError("node_rank: this is rank 0, which has the engine; use LLM, or specinfer serve")
    tokens = batched_tokens(max_num_batched_tokens, offload)
    limits = EngineConfig(None, max_num_batched_tokens=tokens, kv_cache_memory_bytes=kv_cache_memory_bytes)
    offloading = OffloadConfig(offload, memory_budget, offload_folder)
    folder = demo_folders().target if str(model) == "demo" else find_folder(model)
    settings = TargetSettings(str(folder), dtype, device, quantization, offloading, limits)
    share_cores(place.local_size)
    with _companions(place, partial(make_job, settings, parallel)):
        return work(settings, parallel, place)


def has_engine(**ranks: Any) -> bool:
    """Whether this process is rank 0; arguments and errors are those of `ParallelConfig`."""
    return find_place(ParallelConfig(**ranks)).rank == 0


@contextlib.contextmanager
def _companions(place: Place, job: Any) -> Iterator[None]:
    """The other ranks of this machine. One that ends is noticed by rank 0, which ends all."""
    done = threading.Event()

    def keep() -> None:
        places = [
            replace(place, rank=place.rank + i, local_rank=i, num_started=0) for i in range(1, place.num_started + 1)
        ]
        children = Processes(MODULE, [job(one) for one in places], place.local_size)
        done.wait()  # they live as long as this thread
        children.kill()

    keeper = threading.Thread(target=keep, name="specinfer-ranks", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        done.set()
        keeper.join()
