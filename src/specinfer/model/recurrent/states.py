"""States of recurrent layers, as a cache by slot.

What a recurrence reads of a token is stored by slot, as keys are. So a layer can compute the state after any token from
any earlier state, and a state may be dropped at any time. The state after the last known token of each request in a
pass is kept under the token's slot. Whoever has this slot in its prefix continues there: the request itself, whatever
was accepted since, one that was preempted, a fork, and another one with the same prefix.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
NO_ROW = -1
ROWS_PER_REQUEST = 2  # in steps on a device, what a step reads and what it writes; else its own, and one of a prefix


class Borrower(Protocol):
    """A request with rows for its states."""

    @property
    def is_finished(self) -> bool: ...


class RecurrentStates:
    """The kept states, and the slots of the tokens that they follow; the least recently used ones make way.

    Args:
        shapes: Shape of a state by layer.
        num_rows: Number of states that can be kept of each layer.

    Attributes:
        pools: [rows, ...] float32 states by layer.
    """

    def __init__(
        self, shapes: Mapping[int, tuple[int, ...]], num_rows: int, num_slots: int, device: torch.device
    ) -> None:
        self.pools: dict[int, Tensor] = {
            layer: torch.empty(num_rows, *shape, dtype=torch.float32, device=device) for layer, shape in shapes.items()
        }
        num_rows = num_rows if shapes else 0
        self._row_of = np.full(num_slots if num_rows else 0, NO_ROW, dtype=np.int64)  # by slot
        self._slot_of = np.full(num_rows, -1, dtype=np.int64)  # by row; -1 is free
        self._last_used = np.zeros(num_rows, dtype=np.int64)
        self._clock = 0
        self._pending: dict[int, int] = {}  # slots by the rows that the pass writes
        self._readers: Counter[int] = Counter()  # requests of the pass that read a row
        self._unwritten: set[int] = set()  # layers that have not written them yet
        self._lent: dict[int, Borrower] = {}  # by rows that steps on a device write

    def clear(self) -> None:
        """Drop all states, because other weights computed them."""
        self._pending.clear()
        self._row_of.fill(NO_ROW)
        self._slot_of.fill(-1)
        self._lent.clear()

    def begin(self, new_slots: Sequence[Ints]) -> None:
        """Begin a pass that writes these slots; states of their former tokens, and of a failed pass, are dropped."""
        self._pending.clear()
        self._readers.clear()
        if not len(self._row_of):
            return
        self._clock += 1
        for slots in new_slots:
            self.drop(slots)

    def drop(self, slots: Ints) -> None:
        """Drop the states of the tokens in these slots, which will be written again."""
        if len(self._row_of):
            rows = self._row_of[slots]
            self._slot_of[rows[rows >= 0]] = -1
            self._row_of[slots] = NO_ROW

    def find(self, prefix_slots: Ints) -> tuple[int, int]:
        """Note that a pass reads the latest kept state of a prefix, and return what `latest` does."""
        count, row = self.latest(prefix_slots)
        if row != NO_ROW:
            self._readers[row] += 1
            self._last_used[row] = self._clock
        return count, row

    def latest(self, prefix_slots: Ints) -> tuple[int, int]:
        """Return how many tokens of a prefix the latest kept state covers, and its row; 0 and -1 for none."""
        if not len(self._row_of):
            return 0, NO_ROW
        rows = self._row_of[prefix_slots]
        known = np.flatnonzero(rows >= 0)
        return (int(known[-1]) + 1, int(rows[known[-1]])) if len(known) else (0, NO_ROW)

    def claim(self, slot: int, own: int = NO_ROW) -> int:
        """Return the row for the state after the token in a slot, or -1 if the pass needs all.

        A row that the pass reads is taken only for the one request that reads it: requests are computed side by side.

        Args:
            own: The row that the request reads.
        """
        needed = self._pending.keys() | {row for row, count in self._readers.items() if row != own or count > 1}
        row = self._free_row(needed | self._in_loans())
        if row != NO_ROW:
            self.forget(row)
            self._pending[row] = slot
            self._unwritten = set(self.pools)
        return row

    def take_row(self, slot: int) -> int:
        """Return the row for the state after the token in a slot, which is written at once and between two passes."""
        if (row := self._free_row(self._in_loans())) != NO_ROW:
            self._clock += 1
            self.note(row, slot)
        return row

    def _free_row(self, needed: Collection[int]) -> int:
        """Return a row whose state may be dropped, or -1 if all are needed."""
        is_used = self._slot_of >= 0
        # Free rows first, of these the one that was used last: its memory is at hand.
        order = np.lexsort((np.where(is_used, self._last_used, -self._last_used), is_used))
        return next((int(row) for row in order if int(row) not in needed), NO_ROW)

    def wrote(self, layer: int) -> None:
        """Record that a layer has written its rows; the last layer makes them known."""
        self._unwritten.discard(layer)
        if not self._unwritten:
            self.finish()

    def finish(self) -> None:
        """Make the rows of a pass known, all of whose layers have written them or will before another pass."""
        if self._pending:
            for row, slot in self._pending.items():
                self._row_of[slot], self._slot_of[row], self._last_used[row] = row, slot, self._clock
            self._pending.clear()

    # ------------------------------------------------------------------------------------ steps on a device

    def lend(
        self, borrower: Borrower, prefix_slots: Ints, most_recomputed: int, others: Sequence[int]
    ) -> "Loan | None":
        """Lend a request two rows, which its steps write in turns. Return None if it must take a host step first.

        Args:
            prefix_slots: Slots of its tokens.
            most_recomputed: Most tokens after its latest kept state that a step can recompute.
            others: Rows of other running requests without a loan, each of which has to keep a state; -1 for one that
                has none yet.
        """
        if not self.pools:
            return Loan((NO_ROW, NO_ROW), NO_ROW, len(prefix_slots))
        count, source = self.latest(prefix_slots)
        if source == NO_ROW or len(prefix_slots) - count > most_recomputed:
            return None
        lent = self._in_loans()
        order = np.lexsort((self._last_used, self._slot_of >= 0)).tolist()
        free = [row for row in order if row not in lent and row != source and row not in others]
        if source not in lent and source not in others:
            free.append(source)  # taken last: a prefix may share it
        if len(free) < 2 + others.count(NO_ROW):
            return None
        own = (source, free[0]) if free[1] == source else (free[0], free[1])
        for row in own:
            if row != source:
                self.forget(row)
            self._lent[row] = borrower
        if source not in lent:
            self._last_used[source] = 0  # copied: others may take it before the sources of further requests
        return Loan(own, source, count)

    def _in_loans(self) -> set[int]:
        """Return the rows that are lent. Those of requests that have ended are free: passes run in launch order."""
        return {row for row, borrower in self._lent.items() if not borrower.is_finished}

    def forget(self, row: int) -> None:
        """Forget which token's state is in a row, which is about to be written."""
        if row != NO_ROW:
            if (former := self._slot_of[row]) >= 0:
                self._row_of[former] = NO_ROW
            self._slot_of[row] = -1

    def note(self, row: int, slot: int) -> None:
        """Note that a row has the state after the token in a slot."""
        if row != NO_ROW:
            self.forget(row)
            self._row_of[slot], self._slot_of[row], self._last_used[row] = row, slot, self._clock

    def take_back(self, borrower: Borrower) -> None:
        """End the loan of a request; its rows keep the states that were noted."""
        self._lent = {row: one for row, one in self._lent.items() if one is not borrower}


class Loan(NamedTuple):
    """Two rows for the states of one request. Each step reads the one that the step before has written.

    Attributes:
        rows: The row that the first step reads, and the one that it writes.
        source: The row of the latest kept state. If it is not the first of `rows`, it must be copied there.
        num_known: The number of tokens that this state covers.
    """

    rows: tuple[int, int]
    source: int
    num_known: int
