"""Which rank each drafter lives on. Those that are models are data parallel: each rank guesses with another one."""

import itertools
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specinfer.model.target import digest
from specinfer.parallel.config import ParallelConfig, find_place


@dataclass(frozen=True, slots=True)
class PlacedDrafter:
    """A drafter that lives on another rank than the engine; `folder` is of this machine."""

    name: str
    folder: str
    rank: int


@dataclass(frozen=True, slots=True)
class DrafterPlacement:
    """All drafters that live on other ranks than the engine, in the order that all ranks number them in.

    Attributes:
        quantization: Of all drafters.
        keeps_prefixes: Of their caches.
    """

    placed: tuple[PlacedDrafter, ...] = ()
    quantization: str | None = None
    keeps_prefixes: bool = True

    def of(self, rank: int) -> dict[int, PlacedDrafter]:
        """Those of one rank, by number."""
        return {i: one for i, one in enumerate(self.placed) if one.rank == rank}

    def wanted(self) -> dict[str, str]:
        """What must be the same on all ranks, by the names of options."""
        if not self.placed:
            return {}
        places = [f"{digest(Path(one.folder))} on rank {one.rank}" for one in self.placed]
        return {"drafters": ", ".join(places), "drafter_quantization": str(self.quantization)}

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "DrafterPlacement":
        return cls(**(fields | {"placed": tuple(PlacedDrafter(**one) for one in fields["placed"])}))


def place_drafters(
    models: Mapping[str, Path],
    parallel: ParallelConfig,
    quantization: str | None,
    *,
    keeps_prefixes: bool,
    must_be_here: bool,
) -> DrafterPlacement:
    """One after the other, the first on the engine's rank.

    "auto" spreads them where all ranks are on one machine, since another may not have them, and each has two of its
    CPUs: what would be idle while rank 0 drafts for all. Scarce CPUs they would only take from each other.

    Args:
        models: Folders of all drafters that are models, by name.
        must_be_here: Something is wanted that only drafters on the engine's rank do: scores, or learning.

    Raises:
        ValueError: As `find_place`; or they cannot be spread.
    """
    placement, size = parallel.drafter_placement, parallel.world_size
    if placement == "spread" and len(models) < 2:
        raise ValueError(
            "drafter_placement: fewer than two drafters are models, and there is nothing to spread; name another in "
            "drafters, or leave it out"
        )
    if placement == "spread" and must_be_here:
        raise ValueError(
            "drafter_placement: drafters on other ranks neither learn nor are scored; leave adapt_drafters and select "
            "out, or place them first"
        )
    # Of the machine, not of this process: all ranks have to find the same.
    has_cpus = (os.cpu_count() or 1) >= 2 * size
    is_spread = placement == "spread" or (
        placement == "auto" and 1 < size == find_place(parallel).local_size and has_cpus and not must_be_here
    )
    if not is_spread:
        return DrafterPlacement()
    places = zip(models.items(), itertools.cycle(range(size)))
    placed = [PlacedDrafter(name, str(folder), rank) for (name, folder), rank in places if rank]
    return DrafterPlacement(tuple(placed), quantization, keeps_prefixes)
