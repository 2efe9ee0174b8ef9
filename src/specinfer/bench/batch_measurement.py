"""Measurement of one batch of requests that is decoded once."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specinfer.bench.clock import now
from specinfer.bench.inputs import fresh_salt
from specinfer.bench.roofline import Roofline
from specinfer.bench.stages import StageSample
from specinfer.bench.throughput_report import Answer, BatchRun
from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.engine.timer import DeviceTimer
from specinfer.llm import LLM
from specinfer.policy.base import SpeculationPolicy
from specinfer.verify import Acceptance


def measure_batch(
    llm: LLM,
    policy: SpeculationPolicy,
    numbers: Sequence[int],
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    repeat: int,
    when_read: Callable[[], None] = lambda: None,
    roofline: Roofline | None = None,
) -> BatchRun:
    """Decode these prompts together. The prefill runs without speculation, whatever the policy.

    Args:
        numbers: Numbers of the prompts, for the report.
        when_read: Function to call when the prefill is done and the clock of decoding starts.
        roofline: Roofline to compare decoding steps with. If given, steps are also timed on the device.

    Raises:
        RuntimeError: A request failed. The message names its prompt.
    """
    device, size = llm.target.loaded.device, len(prompts)
    timer = DeviceTimer(device)

    def begin() -> None:
        llm.engine.timer = None if roofline is None else timer
        when_read()

    salt = fresh_salt()
    watch = _Watch(policy, size, device, begin)
    llm.engine.policy = watch
    start = now(device)
    asked = [{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in prompts]
    outputs = llm.generate(asked, params, use_tqdm=False)
    end = now(device)
    llm.engine.timer = None
    timed = [] if roofline is None else [(step, roofline.floors(step.record)) for step in timer.take()]
    for number, output in zip(numbers, outputs, strict=True):
        if output.error is not None:
            raise RuntimeError(f"{size} requests together, prompt {number}: {output.error}")
    assert watch.read is not None
    return BatchRun(
        repeat=repeat,
        prompts=tuple(numbers),
        read_time=watch.read - start,
        decode_time=watch.last - watch.read,
        total_time=end - start,
        outputs=tuple(tuple(output.outputs[0].token_ids) for output in outputs),
        answers=tuple(Answer.of(output) for output in outputs),
        steps=tuple(watch.steps),
        times_verification=device.type == "cpu",
        samples=tuple(StageSample.of(step, floors) for step, floors in timed),
    )


class _Watch:
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
        self._saying: set[str] = set()

    @property
    def reads_logits(self) -> bool:
        return self._policy.reads_logits

    def budgets(self, spans: Sequence[Span]) -> list[TreeBudget]:
        if self.read is not None:
            return self._policy.budgets(spans)
        self._saying |= {span.request.request_id for span in spans}
        return [OFF] * len(spans)

    def observe(self, step: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        # The results that the host has are complete. Waiting for all other device work would delay the next step.
        self.last = time.perf_counter()
        if self.read is not None:
            self._policy.observe(step, outcomes)
            self.steps.append(step)
        elif len(self._saying) == self._num_requests:
            self.read = now(self._device)
            self._when_read()

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        if self.read is not None:
            self._policy.on_tokens(request, tree, acceptance, logits, num_generated)
