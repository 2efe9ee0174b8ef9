"""Measurement of one run: a request whose tokens are streamed, or a batch of requests.

The prefill runs without speculation, whatever the arm. The clock of decoding starts at the first token of the request,
or of the last request of the batch; what the drafter then reads counts as drafting time.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specinfer.bench.ceilings import now
from specinfer.bench.loop import Session, Turn
from specinfer.bench.prompts import run_salt
from specinfer.bench.results import Answer, Run
from specinfer.bench.stages import Roofline, StageSample
from specinfer.core.request import Request, Span
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.engine.timer import DeviceTimer
from specinfer.policy.base import FixedPolicy, SpeculationPolicy
from specinfer.verify import Acceptance


def measure_request(session: Session, turn: Turn, policy: SpeculationPolicy, *, samples: bool = True) -> Run:
    """Stream the answer to the only prompt of a turn, and time its tokens as they arrive.

    Args:
        samples: Whether steps are also timed on the device.

    Raises:
        RuntimeError: The request failed. The message names its prompt.
    """
    llm, (asked,) = session.llm, session.batch(turn)
    engine, device = llm.engine, llm.target.loaded.device
    timer = DeviceTimer(device) if samples else None
    engine.policy = FixedPolicy()
    start = now(device)
    stream = llm.stream(asked.prompt(run_salt(llm)), asked.params)
    chunk = next(stream)
    token_ids, steps, origins = chunk.token_ids, [], Counter[str | None]()
    first = now(device)
    engine.policy = policy
    engine.timer = timer
    for chunk in stream:  # one chunk for each step
        token_ids += chunk.token_ids
        origins.update(chunk.origins)
        steps.append(engine.metrics.recent[-1])
    last = now(device)
    engine.timer = None
    assert chunk.output is not None
    if chunk.output.error is not None:
        raise RuntimeError(f"prompt {turn.prompts[0]}: {chunk.output.error}")
    return Run(
        turn.repeat, turn.prompts, first - start, last - first, last - start, (tuple(token_ids),), tuple(steps),
        samples=_samples(timer, session.roofline), origins=origins,
    )  # fmt: skip


def measure_batch(
    session: Session,
    turn: Turn,
    policy: SpeculationPolicy,
    when_read: Callable[[], None] = lambda: None,
    *,
    samples: bool = True,
) -> Run:
    """Decode the prompts of a turn together, each with all of its outputs.

    Args:
        when_read: Function to call when the prefill is done and the clock of decoding starts.
        samples: Whether decoding steps are also timed on the device.

    Raises:
        RuntimeError: A request failed. The message names its prompt.
    """
    llm, batch = session.llm, session.batch(turn)
    device, size = llm.target.loaded.device, sum(asked.params.n for asked in batch)
    timer = DeviceTimer(device) if samples else None

    def begin() -> None:
        llm.engine.timer = timer
        when_read()

    salt = run_salt(llm)
    watch = _Watch(policy, size, device, begin)
    llm.engine.policy = watch
    start = now(device)
    outputs = llm.generate([asked.prompt(salt) for asked in batch], [asked.params for asked in batch], use_tqdm=False)
    end = now(device)
    llm.engine.timer = None
    for number, output in zip(turn.prompts, outputs, strict=True):
        if output.error is not None:
            raise RuntimeError(f"{size} requests together, prompt {number}: {output.error}")
    assert watch.read is not None
    return Run(
        repeat=turn.repeat,
        prompts=turn.prompts,
        prompt_time=watch.read - start,
        time=watch.last - watch.read,
        total_time=end - start,
        outputs=tuple(tuple(each.token_ids) for output in outputs for each in output.outputs),
        steps=tuple(watch.steps),
        times_verification=device.type == "cpu",
        samples=_samples(timer, session.roofline),
        answers=tuple(map(Answer.from_output, outputs)),
        origins=Counter(origin for output in outputs for each in output.outputs for origin in each.token_origins),
    )


def _samples(timer: DeviceTimer | None, roofline: Roofline) -> tuple[StageSample, ...]:
    if timer is None:
        return ()
    return tuple(StageSample.from_step(step, roofline.floors(step.record)) for step in timer.take())


class _Watch(SpeculationPolicy):
    """Policy that turns speculation off until all prompts are read, then follows an arm's policy and records steps."""

    def __init__(
        self, policy: SpeculationPolicy, num_requests: int, device: torch.device, when_read: Callable[[], None]
    ) -> None:
        self.steps: list[StepRecord] = []
        self.read: float | None = None  # when the prefill of the last prompt was done
        self.last = 0.0  # end of the last step
        self._policy = policy
        self._num_requests = num_requests
        self._device = device
        self._when_read = when_read
        self._decoding: set[str] = set()  # requests with a first token

    @property
    def reads_logits(self) -> bool:
        return self._policy.reads_logits

    def budgets(self, spans: Sequence[Span], reading: Sequence[Span] = ()) -> list[TreeBudget]:
        if self.read is not None:
            return self._policy.budgets(spans, reading)
        self._decoding |= {span.request.request_id for span in spans}
        return [OFF] * len(spans)

    def observe(self, step: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        # The results that the host has are complete. Waiting for all other device work would delay the next step.
        self.last = time.perf_counter()
        if self.read is not None:
            self._policy.observe(step, outcomes)
            self.steps.append(step)
        elif len(self._decoding) == self._num_requests:
            self.read = now(self._device)
            self._when_read()

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        if self.read is not None:
            self._policy.on_tokens(request, tree, acceptance, logits, num_generated)

    def reason(self, request: Request) -> str | None:
        return self._policy.reason(request)
