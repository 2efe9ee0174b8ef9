"""DeviceDrafts: what the drafter of a device executor has read of each request, and the slots of its draft tokens."""

from collections.abc import Sequence

from specinfer.core.tree import TreeBudget
from specinfer.drafters.small_model import SmallModelDrafter
from specinfer.engine.device.launch import Answer, DeviceRequest, Launch
from specinfer.engine.device.rows import DeviceRows


class DeviceDrafts:
    """State of the drafter's cache, kept in step with what is launched and read.

    Args:
        drafter: The drafter, or None without speculation.
        rows: Rows on the device where its slots are stored.
    """

    def __init__(self, drafter: SmallModelDrafter | None, rows: DeviceRows) -> None:
        self._drafter, self._rows = drafter, rows

    @property
    def name(self) -> str | None:
        return None if self._drafter is None else self._drafter.name

    def make_ready(self, device_requests: Sequence[DeviceRequest], budgets: Sequence[TreeBudget]) -> bool:
        """Let the drafter read what it has missed. Return False if it cannot because a step is in flight."""
        unread = [
            (one, row)
            for row, (one, budget) in enumerate(zip(device_requests, budgets, strict=True))
            if budget.max_nodes and not one.is_drafted
        ]
        if any(one.num_in_flight for one, _ in unread):
            return False
        assert self._drafter is not None
        for one, row in unread:
            one.is_drafted = one.can_be_drafted = self._drafter.read(one.request)
            if one.is_drafted:
                slots = self._drafter.runner.cache.slots(one.request.request_id)
                assert len(slots) == len(one.request.token_ids) - 1
                self._rows.write_drafter(row, slots)
        return True

    def reserve(self, launch: Launch) -> bool:
        """Reserve slots for what the drafter computes. Return False, with none reserved, if there are not enough."""
        assert self._drafter is not None
        cache, count = self._drafter.runner.cache, launch.size.num_columns
        drafted = [one.is_drafted for one in launch.device_requests]
        if count * sum(drafted) > cache.num_available:
            return False
        for one, is_drafted in zip(launch.device_requests, drafted, strict=True):
            launch.draft_slots.append(cache.reserve(one.request.request_id, count) if is_drafted else None)
        return True

    def settle(self, launch: Launch, row: int, answer: Answer, *, is_kept: bool) -> None:
        """Keep what the drafter computed of an accepted path, and free the rest."""
        if self._drafter is None:
            return
        one = launch.device_requests[row]
        if launch.draft_slots and launch.draft_slots[row] is not None:
            kept = answer.draft_columns if is_kept and one.can_be_drafted else ()
            self._drafter.runner.cache.commit(one.request.request_id, kept, launch.size.num_columns)
        if is_kept and one.is_drafted:
            # It reads two known tokens in a step. Of a path that lookups proposed it has computed less.
            num_known = len(one.request.token_ids) + len(answer.path)
            one.is_drafted = num_known - len(self._drafter.runner.cache.slots(one.request.request_id)) <= 1
        if is_kept and answer.next_token >= self._drafter.runner.loaded.vocab_size:
            one.is_drafted = one.can_be_drafted = False  # the drafter does not have this token

    def forget(self, one: DeviceRequest) -> None:
        """Free the slots that dropped steps of a request would have kept."""
        if self._drafter is not None:
            self._drafter.runner.cache.commit(one.request.request_id, ())


def count_read(device_requests: Sequence[DeviceRequest], budgets: Sequence[TreeBudget]) -> int:
    """Return the number of tokens that the drafter has read for the first time."""
    count = 0
    for one, budget in zip(device_requests, budgets, strict=True):
        if budget.max_nodes and one.is_drafted and not one.request.drafter_knows:
            one.request.drafter_knows = True
            count += len(one.request.token_ids) - one.request.num_cached
    return count
