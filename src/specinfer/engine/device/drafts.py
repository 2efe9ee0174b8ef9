"""DeviceDrafts: what the drafters of a device executor have read of each request, and the slots of their tokens."""

from collections.abc import Sequence

from specinfer.core.tree import TreeBudget
from specinfer.drafters.small_model import SmallModelDrafter
from specinfer.engine.device.launch import Answer, DeviceRequest, Launch
from specinfer.engine.device.rows import DeviceRows
from specinfer.model.kv_cache import NO_SLOTS, KVCache, Slots


class DeviceDrafts:
    """State of the drafters' caches, kept in step with what is launched and read.

    Args:
        drafters: The drafters; none without speculation.
        rows: Rows on the device where their slots are stored.
    """

    def __init__(self, drafters: Sequence[SmallModelDrafter], rows: DeviceRows) -> None:
        self._drafters, self._rows = drafters, rows
        self.kinds = [drafter.kind for drafter in drafters]

    @property
    def names(self) -> list[str]:
        return [drafter.name for drafter in self._drafters]

    @property
    def _caches(self) -> list[KVCache | None]:
        """The caches of their own; None for a drafter that attends to what the target has stored."""
        pairs = zip(self._drafters, self.kinds, strict=True)
        return [None if kind.shares_cache else drafter.runner.cache for drafter, kind in pairs]

    def make_ready(self, device_requests: Sequence[DeviceRequest], budgets: Sequence[TreeBudget]) -> bool:
        """Let the drafters read what they have missed. Return False if they cannot because a step is in flight."""
        unread = [
            (number, served, row)
            for row, (served, budget) in enumerate(zip(device_requests, budgets, strict=True))
            for number, name in enumerate(self.names)
            if budget.max_nodes and budget.asks(name) and name not in served.read_by | served.lost_by
        ]
        if any(served.num_in_flight and not self.kinds[number].shares_cache for number, served, _ in unread):
            return False
        for number, served, row in unread:
            drafter = self._drafters[number]
            if self.kinds[number].shares_cache:
                served.read_by.add(drafter.name)
            elif drafter.read(served.request):
                served.read_by.add(drafter.name)
                slots = drafter.runner.cache.slots(served.request.request_id)
                assert len(served.request.token_ids) - len(slots) in (1, 2)
                self._rows.write_drafter(number, row, slots)
            else:
                served.lost_by.add(drafter.name)
        return True

    def count_read(self, device_requests: Sequence[DeviceRequest], budgets: Sequence[TreeBudget]) -> int:
        """Return the number of tokens that drafters have read for the first time."""
        readers = {name for name, kind in zip(self.names, self.kinds, strict=True) if not kind.shares_cache}
        count = 0
        for served, budget in zip(device_requests, budgets, strict=True):
            if budget.max_nodes and served.read_by and not served.request.drafting.is_read:
                served.request.drafting.note_read()
                if readers & served.read_by:
                    count += len(served.request.token_ids) - served.request.num_cached
        return count

    def reserve(self, launch: Launch) -> bool:
        """Reserve slots for what the drafters compute. Return False, with none reserved, if there are not enough."""
        if not launch.size.shape.num_models:
            return True
        count = launch.size.shape.num_columns
        drafted = [[name in served.read_by for served in launch.device_requests] for name in self.names]
        pairs = list(zip(drafted, self._caches, strict=True))
        if any(cache is not None and count * sum(of) > cache.num_available for of, cache in pairs):
            return False

        def reserved(served: DeviceRequest, cache: KVCache | None) -> Slots:
            return NO_SLOTS if cache is None else cache.reserve(served.request.request_id, count)

        launch.draft_slots = [
            [
                reserved(served, cache) if is_drafted else None
                for served, is_drafted in zip(launch.device_requests, of, strict=True)
            ]
            for of, cache in pairs
        ]
        return True

    def share_slots(self, launch: Launch) -> None:
        """Give copies of the target the slots that the step has reserved; its pass overwrites what they store."""
        for number, of_rows in enumerate(launch.draft_slots):
            if self.kinds[number].borrows_slots:
                count, pairs = launch.size.shape.of_model(number).num_columns, zip(of_rows, launch.slots, strict=True)
                launch.draft_slots[number] = [None if reserved is None else slots[:count] for reserved, slots in pairs]

    def names_of(self, launch: Launch, row: int) -> list[str | None]:
        """Return the names of those that drafted for a request, with None in place of the others."""
        return [
            name if of_rows[row] is not None and launch.budgets[row].asks(name) else None
            for name, of_rows in zip(self.names, launch.draft_slots, strict=False)
        ]

    def settle(self, launch: Launch, row: int, answer: Answer, *, is_kept: bool) -> None:
        """Keep what each drafter computed of an accepted path, and free the rest."""
        served = launch.device_requests[row]
        for number, (drafter, cache) in enumerate(zip(self._drafters, self._caches, strict=True)):
            name = drafter.name
            if cache is not None and launch.draft_slots and launch.draft_slots[number][row] is not None:
                kept = answer.draft_columns[number] if is_kept and name not in served.lost_by else ()
                cache.commit(served.request.request_id, kept, launch.size.shape.num_columns)
            if is_kept and cache is not None and drafter.kind.keeps_drafts and name in served.read_by:
                # It reads two known tokens in a step. Of a path that others proposed it has computed less.
                num_known = len(served.request.token_ids) + len(answer.path)
                if num_known - len(cache.slots(served.request.request_id)) > 1:
                    served.read_by.remove(name)
            if is_kept and answer.next_token >= drafter.runner.loaded.vocab_size:
                served.read_by.discard(name)  # the drafter does not have this token
                served.lost_by.add(name)

    def forget(self, served: DeviceRequest) -> None:
        """Free the slots that dropped steps of a request would have kept."""
        for cache in self._caches:
            if cache is not None:
                cache.commit(served.request.request_id, ())
