"""The choice of a replica: one that has recently read the request's prefix, otherwise one with the fewest requests."""

import random
from collections import OrderedDict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from specinfer.server.replicas import messages

_MAX_KNOWN = 20_000  # prefixes


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray may be missing where types are checked
    """A router of requests to replicas; Ray Serve creates one in each process that has a handle."""

    def initialize_state(self, slack: int = 0, **_: Any) -> None:
        """Start without any known prefixes.

        Args:
            slack: A replica that knows the prefix may have this many requests more than the least busy one.
        """
        self._slack = slack
        self._readers: OrderedDict[str, ReplicaID] = OrderedDict()  # the replica that last read a prefix, by digest
        messages.routers.add(self)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidates in ranks; Ray Serve takes the least busy replica of the first rank that has room."""
        digests, avoid = _wishes(pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if all are full, wait before asking again
        others = [replica for replica in candidate_replicas if replica.replica_id.unique_id not in avoid]
        others = others or list(candidate_replicas)
        random.shuffle(others)  # among equally busy replicas the first is taken
        favoured = self._favoured(digests, others)
        return [others] if favoured is None else [[favoured], others]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember which replica reads these prefixes."""
        for digest in _wishes(pending_request)[0]:
            self._readers[digest] = replica_id
            self._readers.move_to_end(digest)
        while len(self._readers) > _MAX_KNOWN:
            self._readers.popitem(last=False)

    def _favoured(self, digests: list[str], candidates: list[RunningReplica]) -> RunningReplica | None:
        reader = next((self._readers[digest] for digest in digests if digest in self._readers), None)
        replica = next((candidate for candidate in candidates if candidate.replica_id == reader), None)
        if replica is None:
            return None
        least = min(self._load(candidate) for candidate in candidates)
        return replica if self._load(replica) <= least + self._slack else None

    def _load(self, replica: RunningReplica) -> int:
        """Return the number of a replica's requests, as far as this process knows."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


def _wishes(request: PendingRequest | None) -> tuple[list[str], list[str]]:
    """Return the digests and the replicas to avoid, from the arguments of `EngineReplica.answer`."""
    if request is None or len(request.args) < 4:
        return [], []
    return request.args[2], request.args[3]
