"""A rank without the engine, on another machine or started by torchrun. It serves rank 0 and ends with it."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from specinfer.core.config import EngineConfig, OffloadConfig, SpeculativeConfig, batched_tokens, parse_drafters
from specinfer.core.parallel_config import ParallelConfig, Place, find_place
from specinfer.drafters.remote.placement import place_drafters
from specinfer.drafters.remote.process import MODULE, make_job, work_at
from specinfer.model.target import TargetConfig
from specinfer.parallel.processes import Processes, share_cores
from specinfer.setup.assembly import find_folders
from specinfer.setup.drafter_setup import find_drafters


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
    drafter_placement: str = "auto",
    drafters: str | Sequence[str] = "auto",
    tree: str = "auto",
    select: str = "all",
    drafter_quantization: str | None = None,
    enable_prefix_caching: bool = True,
    adapt_drafters: bool = False,
    **_: Any,
) -> int:
    """Run the ranks of this machine until rank 0 ends.

    Args:
        node_rank: Number of this machine, from 1; 0 with torchrun.
        _: Other arguments of `LLM`, which only the engine needs.

    Returns:
        0 if rank 0 ended in order; 1 if it was lost, or a rank failed.

    Raises:
        ModelError, ValueError: An argument cannot be used, or rank 0 cannot be reached, as for `LLM`.
    """
    parallel = ParallelConfig(
        tensor_parallel_size, pipeline_parallel_size, nnodes, node_rank, master_addr, master_port, drafter_placement
    )
    place = find_place(parallel)
    if place.rank == 0:
        raise ValueError("node_rank: this is rank 0, which has the engine; use LLM, or specinfer serve")
    tokens = batched_tokens(max_num_batched_tokens, offload)
    limits = EngineConfig(None, max_num_batched_tokens=tokens, kv_cache_memory_bytes=kv_cache_memory_bytes)
    offloading = OffloadConfig(offload, memory_budget, offload_folder)
    speculative = SpeculativeConfig(parse_drafters(drafters), tree, select=select)
    folder, names = find_folders(model, speculative)
    # If all drafters run on rank 0, other machines need not have them.
    models = find_drafters(names) if drafter_placement == "spread" or place.local_size == parallel.world_size else {}
    placement = place_drafters(
        models, parallel, drafter_quantization,
        keeps_prefixes=enable_prefix_caching, must_be_here=adapt_drafters or speculative.max_asked is not None,
    )  # fmt: skip
    settings = TargetConfig(str(folder), dtype, device, quantization, offloading, limits)
    share_cores(place.local_size)
    with _companions(place, partial(make_job, settings, parallel, placement)):
        return work_at(settings, parallel, placement, place)


def has_engine(**ranks: Any) -> bool:
    """Return whether this process is rank 0. Arguments and errors are those of `ParallelConfig`."""
    return find_place(ParallelConfig(**ranks)).rank == 0


@contextlib.contextmanager
def _companions(place: Place, job: Any) -> Iterator[None]:
    """Run the other ranks of this machine. Rank 0 notices when one ends, and then ends all."""
    done = threading.Event()

    def keep() -> None:
        places = [
            replace(place, rank=place.rank + i, local_rank=i, num_started=0) for i in range(1, place.num_started + 1)
        ]
        children = Processes(MODULE, [job(one) for one in places], place.local_size)
        done.wait()  # the processes live as long as this thread
        children.kill()

    keeper = threading.Thread(target=keep, name="specinfer-ranks", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        done.set()
        keeper.join()
