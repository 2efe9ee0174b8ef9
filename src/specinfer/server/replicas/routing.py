"""Which replica a request goes to: where its beginning was read of late, else where the fewest requests are."""

import random
from collections import OrderedDict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from specinfer.server.replicas import census

_MAX_KNOWN = 20_000  # beginnings


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray may be missing where types are checked
    """Ray Serve makes one in each process that has a handle."""

    def initialize_state(self, slack: int = 0, **_: Any) -> None:
        """Begins without knowledge.

        Args:
            slack: So many requests more than the least busy one may a replica have that knows the beginning.
        """
        self._slack = slack
        self._readers: OrderedDict[str, ReplicaID] = OrderedDict()  # by digest, who read that beginning last
        census.routers.add(self)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas; within one the least busy is taken."""
        digests, avoid = _wishes(pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if all are full, wait before asking again
        others = [one for one in candidate_replicas if one.replica_id.unique_id not in avoid]
        others = others or list(candidate_replicas)
        random.shuffle(others)  # among equals the first is taken
        favoured = self._favoured(digests, others)
        return [others] if favoured is None else [[favoured], others]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remembers who reads what now."""
        for digest in _wishes(pending_request)[0]:
            self._readers[digest] = replica_id
            self._readers.move_to_end(digest)
        while len(self._readers) > _MAX_KNOWN:
            self._readers.popitem(last=False)

    def _favoured(self, digests: list[str], candidates: list[RunningReplica]) -> RunningReplica | None:
        reader = next((self._readers[digest] for digest in digests if digest in self._readers), None)
        found = next((one for one in candidates if one.replica_id == reader), None)
        if found is None:
            return None
        least = min(self._load(one) for one in candidates)
        return found if self._load(found) <= least + self._slack else None

    def _load(self, replica: RunningReplica) -> int:
        """Requests it has, as far as is known here."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


def _wishes(request: PendingRequest | None) -> tuple[list[str], list[str]]:
    """What `EngineReplica.answer` is called with for the router."""
    if request is None or len(request.args) < 4:
        return [], []
    return request.args[2], request.args[3]
