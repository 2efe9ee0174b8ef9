"""DistributedRunner: the engine's interface on rank 0 to a target that is split over several ranks."""

import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specinfer.core.errors import RanksError
from specinfer.core.progress import ProgressCallback
from specinfer.model.batch import Piece
from specinfer.model.graphs.capture import Graphs
from specinfer.model.kv_cache import KVCache
from specinfer.model.load import LoadedModel
from specinfer.model.offload.budget import PassCapacity
from specinfer.model.runner import Pass
from specinfer.model.sharding.adapter_messages import SharedAdapters
from specinfer.model.sharding.shard_runner import ShardRunner, describe_shard
from specinfer.model.sharding.wire import PieceWriter
from specinfer.model.sharding.worker import Command, is_broken
from specinfer.model.target import TargetConfig, connect_devices, load_shard
from specinfer.parallel.group import Traffic
from specinfer.parallel.ranks import Ranks


def load_first_shard(ranks: Ranks, settings: TargetConfig, progress: ProgressCallback | None) -> LoadedModel:
    """Load rank 0's shard while the others load theirs.

    Raises:
        ModelError, ValueError: As `load_model`.
        RanksError: Another rank failed to load its shard.
    """
    ranks.call(partial(connect_devices, settings, ranks.connections, ranks.place))
    return ranks.call(partial(load_shard, settings, ranks.shard, ranks.place, progress))


def min_remote_slots(ranks: Ranks, models: Sequence[LoadedModel]) -> int:
    """Return the smallest number of slots that fit into another rank's memory, once all have loaded.

    Args:
        models: Rank 0's shard and its copies.
    """
    descriptions = ranks.call(partial(ranks.connections.world.all_gather, describe_shard(models, 0)))
    return min(int(description[0]) for description in descriptions[1:])


class DistributedRunner:
    """A runner that sends passes to all ranks, and computes rank 0's shard.

    Rank 0's shard runs in the thread of `Ranks`, one pass after the other, whatever the caller does in the meantime,
    and even if the caller is interrupted.

    Args:
        copies: The copies of rank 0's shard that draft, by name.
        graphs: Captured graphs, which nothing else may use, or None to run passes unpadded.
        max_requests, progress: As for `ShardRunner.capture`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_slots: int,
        ranks: Ranks,
        *,
        keeps_prefixes: bool = False,
        capacity: PassCapacity | None = None,
        num_states: int = 0,
        copies: Mapping[str, LoadedModel] | None = None,
        graphs: Graphs | None = None,
        max_requests: int = 32,
        progress: ProgressCallback | None = None,
    ) -> None:
        self.loaded, self.capacity = loaded, capacity
        copies = copies or {}
        self._numbers = {name: i for i, name in enumerate(copies, start=1)}
        self.cache = KVCache(num_slots, keeps_prefixes=keeps_prefixes)
        self._ranks, self._writer = ranks, PieceWriter()
        self._sending = threading.Lock()  # adapters are sent by the threads that ask for them
        self.adapters = SharedAdapters(ranks, partial(self._send, Command.ADAPTERS))
        taps = () if loaded.taps is None else (loaded.taps.width, *loaded.taps.layers)
        self._send(Command.SLOTS, torch.tensor([num_slots, max_requests, *taps], dtype=torch.int32))
        # Rank 0 sends no hidden states.
        self.shard_runner = ShardRunner(
            loaded, num_slots, ranks.connections.stages, (), loaded.taps, num_states, tuple(copies.values())
        )
        ranks.call(partial(self.shard_runner.capture, graphs, max_requests, progress))
        ranks.call(partial(ranks.connections.world.all_gather, torch.zeros(1, dtype=torch.int64)))  # all are ready
        ranks.serve()

    @property
    def compute_path(self) -> str:
        captured = ", captured passes" if self.why_not_captured is None else ""
        return f"{self.loaded.compute_path}{captured}, on {self._ranks.place.world_size} ranks"

    @property
    def why_not_captured(self) -> str | None:
        return self.shard_runner.why_not_captured

    @property
    def num_programs(self) -> int:
        """Count those of rank 0; passes on other ranks have the same sizes."""
        return self.shard_runner.num_programs

    @property
    def max_in_flight(self) -> int:
        return self.loaded.shard.num_stages

    @property
    def traffic(self) -> Traffic:
        """Bytes that rank 0 has sent and received, over all its groups."""
        return self._ranks.connections.traffic

    def begin(self, pieces: Sequence[Piece], copy: str | None = None) -> Pass:
        """Send the pieces to all ranks, which begin at once.

        Args:
            copy: Name of the copy that computes the pass in place of the target, or None.

        Raises:
            RanksError: A rank is gone, hangs or failed.
        """
        self._ranks.check()
        try:
            self.adapters.send_dropped()
            model = 0 if copy is None else self._numbers[copy]
            self._send(Command.PASS, self._writer.write(pieces), model)
            return _PendingPass(self._ranks, self._ranks.submit(partial(self._run, pieces, model)))
        except BaseException as error:  # an interrupt too: only some ranks may have received the pass
            self._ranks.fail(f"a pass could not be begun on all ranks: {type(error).__name__} {error}")
            raise

    @property
    def taps(self) -> Mapping[int, Tensor]:
        return self.shard_runner.taps

    def keep_taps(self, layers: Collection[int]) -> None:
        """Do nothing: all ranks have agreed on the layers."""

    def read_taps(self, layers: Sequence[int], request_id: str, start: int, end: int) -> list[Tensor]:
        return self.shard_runner.read_taps(layers, self.cache.slots(request_id)[start:end])

    def forward(self, pieces: Sequence[Piece]) -> Tensor:
        """Run a pass as `ModelRunner.forward` does; raises as `begin` does."""
        return self.begin(pieces).wait()

    def close(self) -> None:
        """Stop the other ranks. The target cannot be used afterwards."""
        self._ranks.close(self._stop_others)

    def _stop_others(self) -> None:
        nothing = torch.empty(0, dtype=torch.int32)
        self._ranks.connections.messages.send_all(nothing)
        self._send(Command.STOP, nothing)

    def _run(self, pieces: Sequence[Piece], model: int) -> Tensor:
        try:
            return self.shard_runner.run(pieces, model)
        except Exception as error:
            if is_broken(error):
                raise  # the waiting caller finds out which rank failed
            # Fail at once, waited for or not: the next pass would receive what others sent for this one.
            self._ranks.fail(f"a pass failed on rank 0: {type(error).__name__}: {error}")
            raise RanksError(str(error)) from error

    def _send(self, command: Command, numbers: Tensor, *first: int) -> None:
        message = torch.cat([torch.tensor([command, *first], dtype=torch.int32), numbers])
        with self._sending:
            self._ranks.connections.commands.send_all(message)


@dataclass(frozen=True, slots=True)
class _PendingPass:
    """A pass that was sent to all ranks."""

    ranks: Ranks
    future: "Future[Tensor]"

    def wait(self) -> Tensor:
        return self.ranks.result(self.future)
