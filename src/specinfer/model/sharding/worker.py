"""Worker: a rank without an engine. It runs rank 0's commands until rank 0 ends or is gone."""

import logging
import os
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Protocol

import torch

from specinfer.core.errors import ModelError, RanksError
from specinfer.core.parallel_config import ParallelConfig, Place
from specinfer.model.capacity import bytes_per_state, bytes_per_token, cache_bytes, num_states
from specinfer.model.graphs.capture import make_graphs
from specinfer.model.graphs.check import captured_bytes
from specinfer.model.kv_tensors import TapShape
from specinfer.model.load import LoadedModel
from specinfer.model.offload.budget import Budget
from specinfer.model.self_copy import load_self
from specinfer.model.sharding.adapter_messages import ReceivedAdapters
from specinfer.model.sharding.shard_runner import ShardRunner, describe_shard, next_dtypes
from specinfer.model.sharding.wire import PieceReader
from specinfer.model.target import (
    TargetConfig,
    connect_devices,
    load_shard,
    num_sharing,
    rank_device,
    settle_shard,
    with_rank_budget,
)
from specinfer.parallel.group import Channel
from specinfer.parallel.health import Heartbeat, error_key
from specinfer.parallel.ranks import Connections
from specinfer.parallel.rendezvous import join_rendezvous
from specinfer.parallel.sender import LinkError

logger = logging.getLogger(__name__)


class Command(IntEnum):
    """The kind of a message from rank 0; numbers follow it."""

    # Number of slots of the caches, usual largest number of requests, and the width and the layers of hidden states to
    # store, if any.
    SLOTS = 1
    PASS = 2  # 0 for the target or the number of its copy, and pieces
    STOP = 3
    ADAPTERS = 4  # a message about adapters


class RankService(Protocol):
    """Work that a rank does for rank 0 in addition to computing its shard."""

    def load(self, target: LoadedModel) -> Sequence[LoadedModel]:
        """Load models whose caches share the memory with the shard's, with as many slots; raises as `load_model`."""
        ...

    def serve(self, num_slots: int, num_states: int, channel: Channel) -> None:
        """Start a thread that answers rank 0's messages until an empty one; each model keeps so many states."""
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
        settings: TargetConfig,
        parallel: ParallelConfig,
        place: Place,
        wanted: Mapping[str, str],
        service: RankService | None = None,
    ) -> None:
        self._settings, self._place, self._service = settings, place, service
        self._rendezvous = join_rendezvous(place)
        self._heartbeat = Heartbeat(self._rendezvous.another(), place.rank, lambda reason: _leave(place.rank, reason))
        self._rendezvous.check_settings(wanted)
        self._connections = Connections(self._rendezvous, parallel, rank_device(settings.device, place))

    def run(self) -> None:
        """Serve until rank 0 sends a stop.

        Raises:
            RuntimeError: Another rank is gone.
            Exception: Any error on this rank. The others are notified of its message.
        """
        try:
            runner = self._load()
            if runner is not None:
                self._serve(runner)
                if self._service is not None:
                    self._service.end()
        except Exception as error:
            kind = "" if isinstance(error, (ModelError, ValueError)) else f"{type(error).__name__}: "
            if not is_broken(error):
                self._rendezvous.store.set(error_key(self._place.rank), f"{kind}{error}")
            raise
        finally:
            self._heartbeat.stop()  # from now on rank 0 may end
            self._connections.close()

    def _load(self) -> ShardRunner | None:
        """Load this rank's shard and return it, or None if rank 0 stops before passes begin."""
        connections = self._connections
        connect_devices(self._settings, connections, self._place)
        settings = with_rank_budget(self._settings, self._place)
        loaded = load_shard(settings, connections.shard, self._place)
        copies = [load_self(name, loaded, settings.offload) for name in settings.copies]
        service_models = [] if self._service is None else self._service.load(loaded)
        budget = Budget(settings.offload.budget_bytes, loaded.device) if loaded.stream is not None else None
        most = None if budget is None else budget.cache_bytes
        models = (loaded, *service_models)
        graphs = make_graphs(loaded.device, enforce_eager=settings.enforce_eager)
        reserved = 0 if graphs is None else captured_bytes(loaded, settings.limits.max_num_seqs)
        memory = cache_bytes(settings.limits, loaded, most, num_sharing(loaded.device, self._place), reserved)
        kept = num_states(settings.limits, models, memory)
        fitting = (memory - kept * bytes_per_state(models)) // bytes_per_token(models)
        descriptions = connections.world.all_gather(describe_shard((loaded, *copies), fitting))
        command = connections.commands.receive(0).tolist()
        if command[0] == Command.STOP:
            return None
        assert command[0] == Command.SLOTS
        if budget is not None:
            settle_shard(
                loaded, budget, command[1] * bytes_per_token(models) + kept * bytes_per_state(models), settings.limits
            )
        taken = next_dtypes(descriptions, self._place.rank, loaded.shard.tensor.size)
        taps = TapShape(tuple(command[4:]), command[3]) if command[3:] else None
        runner = ShardRunner(loaded, command[1], connections.stages, taken, taps, kept, copies)
        runner.capture(graphs, command[2])
        if self._service is not None:
            self._service.serve(command[1], kept, connections.messages)
        connections.world.all_gather(torch.zeros(1, dtype=torch.int64))
        shard = loaded.shard
        logger.info(
            "rank %d: stage %d of %d, shard %d of %d: %.1f MiB on %s, ready",
            self._place.rank, shard.stage + 1, shard.num_stages, shard.tensor.rank + 1, shard.tensor.size,
            loaded.num_bytes / 2**20, loaded.device,
        )  # fmt: skip
        return runner

    def _serve(self, runner: ShardRunner) -> None:
        commands = self._connections.commands
        adapters = ReceivedAdapters(runner.loaded, commands)
        reader = PieceReader(adapters.tables)
        while True:
            command = commands.receive(0)
            if command[0] == Command.STOP:
                return
            if command[0] == Command.ADAPTERS:
                adapters.receive(command[1:])
                continue
            assert command[0] == Command.PASS
            runner.run(reader.read(command[2:]), int(command[1]))


def work(
    settings: TargetConfig,
    parallel: ParallelConfig,
    place: Place,
    wanted: Mapping[str, str],
    service: RankService | None = None,
) -> int:
    """Run a rank from beginning to end, and return the exit code of its process."""
    try:
        Worker(settings, parallel, place, wanted, service).run()
    except (RanksError, ModelError, ValueError) as error:
        logger.error("rank %d: %s", place.rank, error)
        return 1
    except Exception as error:
        if is_broken(error):
            # NCCL has the same kind of error for what is wrong here, such as too little shared memory.
            logger.error("rank %d: another rank is gone, this one ends: %s", place.rank, " ".join(str(error).split()))
        else:
            logger.exception("rank %d failed", place.rank)
        return 1
    logger.info("rank %d: rank 0 has ended, and so does this one", place.rank)
    return 0


def is_broken(error: Exception) -> bool:
    """Return whether an error is a broken connection, in which case another rank is the cause."""
    return isinstance(error, LinkError) or (isinstance(error, RuntimeError) and "NCCL" in str(error))


def _leave(rank: int, reason: str) -> None:
    logger.error("rank %d: %s; this one ends", rank, reason)
    os._exit(1)
