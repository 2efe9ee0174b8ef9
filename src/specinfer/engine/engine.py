"""Engine: processes requests step by step and emits their tokens."""

from typing import Any

from specinfer.core.clock import epoch_seconds
from specinfer.core.request import Fault, Request
from specinfer.core.rules import AUTO
from specinfer.drafters.base import Drafter
from specinfer.engine.commit import Committer
from specinfer.engine.device.executor import DeviceExecutor
from specinfer.engine.ending import Endings
from specinfer.engine.executor import Executor
from specinfer.engine.host_executor import HostExecutor
from specinfer.engine.learners import Learners
from specinfer.engine.recovery import Recovery
from specinfer.engine.scheduler import Scheduler
from specinfer.engine.timer import DeviceTimer
from specinfer.model.runner import TargetRunner
from specinfer.policy.base import SpeculationPolicy
from specinfer.policy.rule_choice import RuleChoice
from specinfer.verify import check_rule


class Engine:
    """A loop that serves any number of requests with one target, one drafter (or none) and one policy.

    Args:
        verification: Verification rule; `core.rules` lists the draft samplings that it supports.
        executor: Executor for requests whose steps need no logits on the host, or None to serve all by host
            steps.

    Raises:
        ValueError: The rule is not known, or names an algorithm or a walk that does not exist.
    """

    def __init__(
        self,
        target: TargetRunner,
        drafter: Drafter | None,
        policy: SpeculationPolicy,
        scheduler: Scheduler,
        verification: str = "coupled",
        executor: DeviceExecutor | None = None,
    ) -> None:
        check_rule(verification)
        self.target, self.drafter, self.scheduler = target, drafter, scheduler
        # Without draft tokens every rule is plain decoding.
        self.verification = verification if drafter is not None else "coupled"
        self.learners = Learners(policy)
        self.metrics, self.observers = self.learners.metrics, self.learners.observers
        self.timer: DeviceTimer | None = None  # set while stages are measured on the device
        self._endings = Endings(scheduler, drafter)
        self.rules = RuleChoice() if self.verification == AUTO else None
        if self.rules is not None:
            self.observers.append(self.rules)
        self.host = HostExecutor(target, drafter, scheduler, self.verification, self.metrics, self._endings, self.rules)
        # Steps on the device come first: the device computes while the host takes its own.
        self.executors: list[Executor[Any]] = [self.host] if executor is None else [executor, self.host]
        committer = Committer(scheduler, drafter, self.learners, self._endings)
        self._recovery = Recovery(self.executors, self.host, committer, self._endings)

    @property
    def policy(self) -> SpeculationPolicy:
        return self.learners.policy

    @policy.setter
    def policy(self, policy: SpeculationPolicy) -> None:
        self.learners.policy = policy

    @property
    def has_work(self) -> bool:
        in_flight = any(executor.num_in_flight for executor in self.executors)
        return bool(self.scheduler.running or self.scheduler.waiting or in_flight)

    def add(self, request: Request) -> None:
        """Queue a request; it starts at the next step with capacity for it."""
        request.times.arrival = request.times.arrival or epoch_seconds()
        self.scheduler.add(request)

    def abort(self, request: Request, error: str | None = None, fault: Fault = Fault.BROKEN) -> None:
        """End a request at once, in any state; with an error unless the caller asked for the end.

        Slots that a pass in flight writes to are freed when the pass has ended, or at once if no request is running.
        """
        self._endings.abort(request, error, fault)
        if not self.scheduler.running:
            self._abandon()

    def step(self) -> list[Request]:
        """Begin as many steps as may be in flight, and verify and commit the oldest, on each executor.

        Returns:
            The requests that emitted tokens or ended.

        Raises:
            EngineDeadError: A part of the target is lost.
            RuntimeError: Steps fail repeatedly for all requests, so no single request is the cause.
        """
        requests: list[Request] = []
        try:
            for executor in tuple(self.executors):  # on the device and on the host
                while (plan := executor.plan(self.learners, self.timer)) is not None:  # spans, budgets, masks
                    executor.draft(plan)  # trees
                    executor.score(plan)  # one pass of the target scores every node
                if executor.num_in_flight:
                    result = executor.verify()  # accept what the target would have generated
                    requests += self._recovery.commit(executor, result)  # cache, requests, drafter, policy
            if not self.scheduler.running:
                self._abandon()  # what is in flight serves no request any more
        except BaseException:  # an interrupt too: no request may keep slots that were never written
            self._abandon()
            raise
        return requests

    def _abandon(self) -> None:
        """Drop all steps in flight; what unfinished requests still need is computed again."""
        for executor in self.executors:
            executor.abandon()
