"""DeviceLane: requests whose steps need nothing of the host, two of them on their way at a time.

A request that is plain enough joins when it has said its first token. From then on its slots, last token and drafts
stand in a row on the device (`device_state`), and a step of all of them is two programs (`device_programs`), launched
one after the other. What a step said is read when the next one has been launched, so that the device works while the
host hands tokens on; what was launched for a request that has ended meanwhile is thrown away.

For the scheduler these requests are in a pass in flight, from joining to leaving: nobody takes their slots.

    reserved of a request    [of the step launched first | of the one after it]

Each step has slots of its own for a whole tree, and gives back what it does not keep when it has been read.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence

from specinfer.drafters import Drafter, MergedDrafter, PredictionDrafter
from specinfer.drafters.calibration import Calibration, source
from specinfer.drafters.small_model import SmallModelDrafter
from specinfer.engine.device_depth import LevelWorth
from specinfer.engine.device_launch import LaneStep, Launch, Resident
from specinfer.engine.device_programs import LaunchSize
from specinfer.engine.device_rows import DeviceRows
from specinfer.engine.device_sizes import holds, shape_of
from specinfer.engine.device_timer import DeviceTimer
from specinfer.engine.metrics import StageClock
from specinfer.engine.scheduler import Scheduler
from specinfer.model.graphs.graph_runner import MAX_ROWS
from specinfer.model.graphs.sizes import REQUESTS, at_least
from specinfer.model.runner import ModelRunner, TargetRunner
from specinfer.request import Request, Span
from specinfer.tree import OFF, TreeBudget

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 2  # steps: one computes while the host reads the one before
_CHANCES_EVERY = 16  # steps between looks at what guesses are worth

Budgets = Callable[[Sequence[Span]], Sequence[TreeBudget]]


class DeviceLane:
    """Launches steps of the requests that it serves, and reads what they said.

    Args:
        drafter: Who guesses; None: nobody, requests are decoded plainly.
        max_requests: At once.
        max_context: Longest request, in tokens.

    Attributes:
        num_launched: Steps since the start.
    """

    def __init__(
        self,
        target: ModelRunner,
        drafter: SmallModelDrafter | None,
        calibration: Calibration,
        scheduler: Scheduler,
        max_requests: int,
        max_context: int,
    ) -> None:
        self._target, self._drafter, self._scheduler = target, drafter, scheduler
        self._calibration = calibration
        num_rows = at_least(REQUESTS, max_requests) or REQUESTS[-1]
        self._max_requests = min(max_requests, num_rows)
        self._device = DeviceRows(target, drafter, num_rows, max_context)
        self._num_drafter_tokens = target.loaded.vocab_size if drafter is None else drafter.runner.loaded.vocab_size
        self._residents: list[Resident] = []  # by row
        self._launches: deque[Launch] = deque()  # oldest first
        self._barred: dict[Request, int] = {}  # who needs an ordinary step first, and what it had said when it left
        self._level_worth = LevelWorth()
        self.num_launched = 0

    @classmethod
    def of(cls, target: TargetRunner, drafter: Drafter | None, scheduler: Scheduler) -> "DeviceLane | None":
        """For a target and who guesses for it; None: not all of them run passes of fixed shapes, or guess in its way.

        Args:
            drafter: None: nobody guesses.
        """
        if not isinstance(target, ModelRunner) or target.padded is None:
            return None
        small, calibration = None, Calibration()
        if drafter is not None:
            if not isinstance(drafter, MergedDrafter) or drafter.selection is not None:
                return None
            # A prediction is made for requests that bring one, and these are not served here.
            others = [one for one in drafter.drafters if not isinstance(one, PredictionDrafter)]
            if len(others) != 1 or not isinstance(others[0], SmallModelDrafter):
                return None
            small, calibration = others[0], drafter.calibration
            if small.runner.padded is None or not small.shares_vocabulary or small.drawing != "shared-noise":
                return None
        max_context = min(target.loaded.max_position, target.cache.num_slots)
        return cls(target, small, calibration, scheduler, scheduler.max_num_seqs, max_context)

    @property
    def num_in_flight(self) -> int:
        """Steps that were launched and not yet read."""
        return len(self._launches)

    @property
    def requests(self) -> list[Request]:
        """Who is served here now, or was and still has steps in flight."""
        in_flight = [one.request for launch in self._launches for one in launch.residents]
        return list(dict.fromkeys([*in_flight, *(one.request for one in self._residents)]))

    # ---------------------------------------------------------------------------------------- launch

    def begin(self, budgets: Budgets, timer: DeviceTimer | None = None) -> bool:
        """Launches a step; False: there is nobody to launch one for, or what is in flight must be read first.

        Args:
            budgets: The policy's, for spans of the requests that it is asked for.
            timer: Marks some steps on the device's timeline.

        Raises:
            CaptureError: A program of the step cannot be captured.
        """
        clock = StageClock(timer)
        self._dismiss()
        if self._scheduler.is_starved:
            self.leave()
            return False
        self._join()
        going = [one for one in self._residents if one.request.max_new_tokens > one.num_in_flight]
        room = self._room()
        if not going or room < 0:
            if going:  # no slot for each: the scheduler puts somebody back
                self.leave()
            return False
        wanted = self._budgets(budgets)
        num_rows = at_least(REQUESTS, len(self._residents)) or REQUESTS[-1]
        most = MAX_ROWS // num_rows
        shape = shape_of(wanted, min(room, most - 1), most)
        if shape is not None and not self._make_ready(wanted):
            return False  # a drafter reads what was said, and not all of it is known here yet
        num_read = self._count_read(wanted)
        size = LaunchSize(num_rows, shape)
        launch = Launch(list(self._residents), size, num_read, sum(budget.max_nodes for budget in wanted), clock)
        if shape is not None and not self._reserve_drafts(launch):
            size = LaunchSize(num_rows, None)
            launch = Launch(launch.residents, size, num_read, launch.num_budgeted, clock)
        if size.shape is None:
            for one in self._residents:
                one.is_drafted = False  # from here on the drafter does not know what is said
        if self.num_launched % _CHANCES_EVERY == 0:
            self._device.tell_chances([self._calibration.lines(name) for name in self._sources()])
        self.num_launched += 1
        self._launches.append(launch)
        self._scheduler.charge([one.request for one in self._residents])
        for one in launch.residents:
            one.num_in_flight += 1
            launch.slots.append(self._target.cache.reserve(one.request.request_id, size.num_nodes))
        self._device.launch(launch, wanted)
        return True

    def _sources(self) -> list[str]:
        name = self._drafter.name if self._drafter is not None else ""
        return [name, f"{name} sampled"]

    def _join(self) -> None:
        """Takes in who may be served here; nobody of them is in a pass."""
        for request in self._scheduler.speaking():
            if len(self._residents) >= self._max_requests:
                return
            if not is_plain(request) or self._barred.get(request) == request.num_output:
                continue
            self._barred.pop(request, None)
            resident = Resident(request)
            self._scheduler.depart([resident.span()])
            self._device.write(len(self._residents), request, self._target.cache.slots(request.request_id))
            self._residents.append(resident)

    def _room(self) -> int:
        """Guesses that each request may have in the next step; below 0: there is no slot even for its last token."""
        spans = [one.span() for one in self._residents]
        available = self._target.cache.num_available
        if not spans or available < len(spans):
            return -1
        return min(self._scheduler.room_for_guesses(spans), available - len(spans)) // len(spans)

    def _budgets(self, budgets: Budgets) -> list[TreeBudget]:
        """What each request may guess, as far as is known here: what is in flight may say more."""
        name = self._drafter.name if self._drafter is not None else None
        spans = [one.span() for one in self._residents]
        found = []
        for one, budget in zip(
            self._residents, budgets(spans) if name is not None else [OFF] * len(spans), strict=True
        ):
            request = one.request
            may_guess = request.may_guess and name is not None and budget.asks(name) and one.can_be_drafted
            budget = budget.cut(request.max_new_tokens - 1, budget.max_nodes) if may_guess else OFF
            found.append(budget if holds(budget) else OFF)
        if name is None or not any(budget.least_gain for budget in found):
            return found
        sources = {source(name, span.request) for span in spans}
        return self._level_worth.cut(found, max(float(self._calibration.by_rank(each)[0]) for each in sources))

    def _make_ready(self, budgets: Sequence[TreeBudget]) -> bool:
        """Lets the drafter read what it has missed; False: it cannot as long as a step is in flight."""
        unread = [
            (one, row)
            for row, (one, budget) in enumerate(zip(self._residents, budgets, strict=True))
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
                self._device.write_drafter(row, slots)
        return True

    def _count_read(self, budgets: Sequence[TreeBudget]) -> int:
        """Tokens that the drafter has met for the first time."""
        count = 0
        for one, budget in zip(self._residents, budgets, strict=True):
            if budget.max_nodes and one.is_drafted and not one.request.drafter_knows:
                one.request.drafter_knows = True
                count += len(one.request.token_ids) - one.request.num_cached
        return count

    def _reserve_drafts(self, launch: Launch) -> bool:
        """Slots for what the drafter computes; False: there are not enough, and none was taken."""
        assert self._drafter is not None
        cache, count = self._drafter.runner.cache, launch.size.num_columns
        drafted = [one.is_drafted for one in launch.residents]
        if count * sum(drafted) > cache.num_available:
            return False
        for one, is_drafted in zip(launch.residents, drafted, strict=True):
            launch.draft_slots.append(cache.reserve(one.request.request_id, count) if is_drafted else None)
        return True

    # ------------------------------------------------------------------------------------------ read

    def finish(self) -> LaneStep:
        """Waits for the oldest step, and settles the slots of who is still served; tokens are the caller's to give."""
        launch = self._launches[0]
        draft_time, target_time = launch.wait()
        self._level_worth.observe(launch.worth())
        step = LaneStep(launch.num_read, launch.num_budgeted, launch.clock, draft_time, target_time)
        self._launches.popleft()
        name = self._drafter.name if self._drafter is not None else ""
        for row, one in enumerate(launch.residents):
            one.num_in_flight -= 1
            request_id, answer = one.request.request_id, launch.answer(row)
            is_kept = not (one.has_left or one.request.is_finished) and answer.next_token >= 0
            path = answer.path if is_kept else None
            self._target.cache.commit(request_id, () if path is None else (0, *path), launch.size.num_nodes)
            if self._drafter is not None and launch.draft_slots and launch.draft_slots[row] is not None:
                kept = answer.draft_columns if is_kept and one.can_be_drafted else ()
                self._drafter.runner.cache.commit(request_id, kept, launch.size.num_columns)
            if is_kept:
                span = one.span()
                assert answer.tokens[0] == one.request.token_ids[-1]
                step.spans.append(span)
                step.trees.append(answer.tree(name))
                step.acceptances.append(answer.acceptance())
                if answer.next_token >= self._num_drafter_tokens:  # from here on the drafter reads something else
                    one.is_drafted = one.can_be_drafted = False
                one.request.num_computed = len(self._target.cache.slots(request_id))
            elif not (one.has_left or one.request.is_finished):
                self._send_away(one)  # an ordinary step finds out what is the matter
            if one.has_left and not one.num_in_flight:
                self._scheduler.land([one.span()])
        return step

    # ----------------------------------------------------------------------------------------- leave

    def _dismiss(self) -> None:
        """Rows of who has ended go to others; nobody gets their slots as long as steps of theirs are in flight."""
        for one in [one for one in self._residents if one.request.is_finished or one.has_left]:
            row, last = self._residents.index(one), len(self._residents) - 1
            one.has_left = True
            if row != last:
                self._device.move(last, row)
                self._residents[row] = self._residents[last]
            self._residents.pop()
            if not one.num_in_flight:
                self._scheduler.land([one.span()])
        for request in [request for request in self._barred if request.is_finished]:
            del self._barred[request]

    def _send_away(self, one: Resident) -> None:
        one.has_left = True
        self._barred[one.request] = one.request.num_output

    def leave(self) -> None:
        """All go on with ordinary steps, once what is in flight has been read."""
        if not self._launches:
            for one in self._residents:
                self._send_away(one)
            self._dismiss()

    def abandon(self) -> None:
        """Forgets what is in flight: all go on with ordinary steps, from what was read last."""
        try:
            if self._launches:
                self._device.wait()
        finally:
            everybody = {id(one): one for launch in self._launches for one in launch.residents}
            everybody |= {id(one): one for one in self._residents}
            self._launches.clear()
            self._residents.clear()
            for one in everybody.values():
                one.num_in_flight, one.has_left = 0, True
                self._barred[one.request] = one.request.num_output
                self._target.cache.commit(one.request.request_id, ())
                if self._drafter is not None:
                    self._drafter.runner.cache.commit(one.request.request_id, ())
                self._scheduler.land([one.span()])


def is_plain(request: Request) -> bool:
    """Whether its next token is the argmax of logits and noise, and nobody wants to see the logits."""
    params = request.params
    return not (
        params.truncates
        or params.adjusts_logits
        or request.grammar is not None
        or request.bad_words_ids
        or request.prediction_ids
        or params.logprobs is not None
        or params.prompt_logprobs is not None
        or request.trace is not None
    )
