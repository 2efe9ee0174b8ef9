"""Worker: a rank without an engine. It follows rank 0's orders until rank 0 ends or is gone."""

import logging
import os
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Protocol

import torch

from specinfer.core.errors import ModelError, RanksError
from specinfer.core.parallel_config import ParallelConfig, Place
from specinfer.model.capacity import bytes_per_token, fitting_slots
from specinfer.model.load import LoadedModel
from specinfer.model.offload.budget import Budget
from specinfer.model.sharding.rank_pass import Part, next_type, offer
from specinfer.model.sharding.wire import PieceReader
from specinfer.model.target import TargetSettings, load_part, num_sharing, rank_device, settle_part
from specinfer.parallel.health import Pulse, error_key
from specinfer.parallel.messages import Mail
from specinfer.parallel.ranks import Connections
from specinfer.parallel.rendezvous import meet

logger = logging.getLogger(__name__)


class Order(IntEnum):
    """The kind of a message from rank 0; numbers follow it."""

    SLOTS = 1  # number of slots of the caches
    PASS = 2  # pieces
    STOP = 3


class Guest(Protocol):
    """Work that a rank does for rank 0 in addition to its part of the target."""

    def load(self, target: LoadedModel) -> Sequence[LoadedModel]:
        """Load models whose caches share the memory with the part's, with as many slots; raises as `load_model`."""
        ...

    def serve(self, num_slots: int, mail: Mail) -> None:
        """Start a thread that answers rank 0's letters until one is empty."""
        ...

    def end(self) -> None:
        """Wait a moment for that thread to end."""
        ...


class Worker:
    """One rank, from the rendezvous with the others to the end.

    Args:
        wanted: Values that must be the same on all ranks, by name.
    """

    def __init__(
        self,
        settings: TargetSettings,
        parallel: ParallelConfig,
        place: Place,
        wanted: Mapping[str, str],
        guest: Guest | None = None,
    ) -> None:
        self._settings, self._place, self._guest = settings, place, guest
        self._meeting = meet(place)
        self._pulse = Pulse(self._meeting.another(), place.rank, lambda why: _leave(place.rank, why))
        self._meeting.agree(wanted)
        self._connections = Connections(self._meeting, parallel, rank_device(settings.device, place))

    def run(self) -> None:
        """Serve until rank 0 sends a stop.

        Raises:
            RuntimeError: Another rank is gone.
            Exception: Any error on this rank. The others are notified of its message.
        """
        try:
            part = self._load()
            if part is not None:
                self._serve(part)
                if self._guest is not None:
                    self._guest.end()
        except Exception as error:
            kind = "" if isinstance(error, (ModelError, ValueError)) else f"{type(error).__name__}: "
            if not is_broken(error):
                self._meeting.store.set(error_key(self._place.rank), f"{kind}{error}")
            raise
        finally:
            self._pulse.stop()  # from now on rank 0 may end
            self._connections.close()

    def _load(self) -> Part | None:
        """Load this rank's part and return it, or None if rank 0 stops before passes begin."""
        settings, connections = self._settings, self._connections
        loaded = load_part(settings, connections.share, self._place)
        guests = [] if self._guest is None else self._guest.load(loaded)
        budget = Budget(settings.offload.budget_bytes, loaded.device) if loaded.stream is not None else None
        most = None if budget is None else budget.cache_bytes
        models = (loaded, *guests)
        fitting = fitting_slots(settings.limits, models, most, num_sharing(loaded.device, self._place))
        offers = connections.world.all_gather(offer(loaded, fitting))
        order = connections.orders.take().tolist()
        if order[0] == Order.STOP:
            return None
        assert order[0] == Order.SLOTS
        if budget is not None:
            settle_part(loaded, budget, order[1] * bytes_per_token(models), settings.limits)
        taken = next_type(offers, self._place.rank, loaded.share.tensor.size)
        part = Part(loaded, order[1], connections.stages, taken)
        if self._guest is not None:
            self._guest.serve(order[1], connections.mail)
        connections.world.all_gather(torch.zeros(1, dtype=torch.int64))
        share = loaded.share
        logger.info(
            "rank %d: stage %d of %d, part %d of %d: %.1f MiB on %s, ready",
            self._place.rank, share.stage + 1, share.num_stages, share.tensor.rank + 1, share.tensor.size,
            loaded.num_bytes / 2**20, loaded.device,
        )  # fmt: skip
        return part

    def _serve(self, part: Part) -> None:
        reader = PieceReader()
        while True:
            order = self._connections.orders.take()
            if order[0] == Order.STOP:
                return
            assert order[0] == Order.PASS
            part.run(reader.read(order[1:]))


def work(
    settings: TargetSettings,
    parallel: ParallelConfig,
    place: Place,
    wanted: Mapping[str, str],
    guest: Guest | None = None,
) -> int:
    """Run a rank from beginning to end, and return the exit code of its process."""
    try:
        Worker(settings, parallel, place, wanted, guest).run()
    except (RanksError, ModelError, ValueError) as error:
        logger.error("rank %d: %s", place.rank, error)
        return 1
    except Exception as error:
        if is_broken(error):
            logger.error("rank %d: another rank is gone, this one ends", place.rank)
        else:
            logger.exception("rank %d failed", place.rank)
        return 1
    logger.info("rank %d: rank 0 has ended, and so does this one", place.rank)
    return 0


def is_broken(error: Exception) -> bool:
    """Return whether an error is a broken connection, in which case another rank is the cause."""
    return isinstance(error, RuntimeError) and ("gloo" in str(error) or "NCCL" in str(error))


def _leave(rank: int, why: str) -> None:
    logger.error("rank %d: %s; this one ends", rank, why)
    os._exit(1)
