"""Which rank each drafter lives on. Those that are models are data parallel: each rank guesses with another one."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specinfer.model.target import digest
from specinfer.parallel.config import ParallelConfig


@dataclass(frozen=True, slots=True)
class Lodging:
    """A drafter that lives on another rank than the engine; `folder` is of this machine."""

    name: str
    folder: str
    rank: int


@dataclass(frozen=True, slots=True)
class Hosting:
    """All drafters that live on other ranks than the engine, in the order that all ranks number them in.

    Attributes:
        quantization: Of all drafters.
        keeps_prefixes: Of their caches.
    """

    lodgings: tuple[Lodging, ...] = ()
    quantization: str | None = None
    keeps_prefixes: bool = True

    def of(self, rank: int) -> dict[int, Lodging]:
        """Those of one rank, by number."""
        return {i: one for i, one in enumerate(self.lodgings) if one.rank == rank}

    def wanted(self) -> dict[str, str]:
        """What must be the same on all ranks, by the names of options."""
        if not self.lodgings:
            return {}
        places = [f"{digest(Path(one.folder))} on rank {one.rank}" for one in self.lodgings]
        return {"drafters": ", ".join(places), "drafter_quantization": str(self.quantization)}

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Hosting":
        return cls(**(fields | {"lodgings": tuple(Lodging(**one) for one in fields["lodgings"])}))


def place_drafters(models: Sequence[str], parallel: ParallelConfig, *, must_be_here: bool) -> dict[str, int]:
    """The rank of each drafter that is a model: one after the other, the engine's first.

    "auto" uses the ranks of the engine's machine: another may not have the drafters. On one, each rank has its own
    cores or GPU, which are idle while rank 0 drafts, so that drafting at the same time is never slower.

    Args:
        models: Names of drafters.
        must_be_here: Something is wanted that only drafters on the engine's rank do: scores, or learning.
    """
    num_ranks = {"first": 1, "spread": parallel.world_size, "auto": 1 if must_be_here else parallel.local_size}
    return {name: i % num_ranks[parallel.drafter_placement] for i, name in enumerate(models)}


def make_hosting(
    ranks: Mapping[str, int], folders: Mapping[str, Path], quantization: str | None, *, keeps_prefixes: bool
) -> Hosting:
    """Of the drafters that `place_drafters` has placed, those that are not on rank 0."""
    lodgings = [Lodging(name, str(folders[name]), rank) for name, rank in ranks.items() if rank]
    return Hosting(tuple(lodgings), quantization, keeps_prefixes)
