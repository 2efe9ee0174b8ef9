"""Placement of drafters on ranks. Drafters that are models are data parallel: each rank drafts with another one."""

import itertools
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specinfer.core.drafter_forms import TOKEN_MAP_AUTO
from specinfer.core.parallel_config import ParallelConfig, find_place
from specinfer.model.target import digest


@dataclass(frozen=True, slots=True)
class PlacedDrafter:
    """A drafter on another rank than the engine; `folder` is on this machine."""

    name: str
    folder: str
    rank: int


@dataclass(frozen=True, slots=True)
class DrafterPlacement:
    """All drafters on other ranks than the engine, in the order in which all ranks number them.

    Attributes:
        quantization: The quantization of all drafters.
        token_map: The tokens that all of them propose, see `drafter_forms.parse_token_map`.
        keeps_prefixes: True if their caches keep prefixes.
    """

    placed: tuple[PlacedDrafter, ...] = ()
    quantization: str | None = None
    keeps_prefixes: bool = True
    token_map: str = TOKEN_MAP_AUTO

    def of(self, rank: int) -> dict[int, PlacedDrafter]:
        """Return the drafters of one rank, by number."""
        return {i: placed for i, placed in enumerate(self.placed) if placed.rank == rank}

    def wanted(self) -> dict[str, str]:
        """Return what must be the same on all ranks, by the names of options."""
        if not self.placed:
            return {}
        places = [f"{digest(Path(placed.folder))} on rank {placed.rank}" for placed in self.placed]
        options = {"drafter_quantization": str(self.quantization), "drafter_token_map": self.token_map}
        return {"drafters": ", ".join(places)} | options

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "DrafterPlacement":
        return cls(**(fields | {"placed": tuple(PlacedDrafter(**placed) for placed in fields["placed"])}))


def place_drafters(
    models: Mapping[str, Path],
    parallel: ParallelConfig,
    quantization: str | None,
    token_map: str = TOKEN_MAP_AUTO,
    *,
    keeps_prefixes: bool,
    must_be_here: bool,
) -> DrafterPlacement:
    """Place the drafters on ranks in turn, the first on the engine's rank.

    "auto" spreads them if all ranks are on one machine, since other machines may not have them, and if the machine has
    two CPUs per rank. These would be idle while rank 0 drafts for all. With fewer CPUs the drafters would only slow
    each other down.

    Args:
        models: Folders of all drafters that are models, by name.
        must_be_here: True if a setting needs drafters on the engine's rank: scores, learning, another tokenizer, or
            a rule that is chosen for each request.

    Raises:
        ValueError: The place is invalid, as in `find_place`, or the drafters cannot be spread.
    """
    placement, size = parallel.drafter_placement, parallel.world_size
    if placement == "spread" and len(models) < 2:
        raise ValueError(
            "drafter_placement: fewer than two drafters are models, and there is nothing to spread; name another in "
            "drafters, or leave it out"
        )
    if placement == "spread" and must_be_here:
        raise ValueError(
            "drafter_placement: drafters on other ranks do not learn, are not scored, have the model's tokenizer and "
            "draw for one rule; leave adapt_drafters, select, tokenizer and verification auto out, or place them first"
        )
    # Counted for the machine, not for this process: all ranks must find the same number.
    has_cpus = (os.cpu_count() or 1) >= 2 * size
    is_spread = placement == "spread" or (
        placement == "auto" and 1 < size == find_place(parallel).local_size and has_cpus and not must_be_here
    )
    if not is_spread:
        return DrafterPlacement()
    places = zip(models.items(), itertools.cycle(range(size)))
    placed = [PlacedDrafter(name, str(folder), rank) for (name, folder), rank in places if rank]
    return DrafterPlacement(tuple(placed), quantization, keeps_prefixes, token_map)
