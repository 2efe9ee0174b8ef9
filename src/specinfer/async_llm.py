"""AsyncLLM: the engine for many concurrent callers in one event loop.

One thread steps the engine (`engine/thread.py`) and others read prompts (`inputs/read_pool.py`): tokenizers, templates
and grammars take time, and the event loop must not wait for them. The tokens of a step are delivered to the loop in one
call (`delivery.py`).
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from specinfer.admission import Admission
from specinfer.core.clock import epoch_seconds
from specinfer.core.errors import EngineDeadError
from specinfer.core.limits import QueueLimits
from specinfer.core.lora import LoRARequest
from specinfer.core.outputs import RequestOutput
from specinfer.core.progress import ProgressCallback
from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.delivery import Delivery
from specinfer.engine.thread import EngineThread
from specinfer.engine_args import EngineArgs
from specinfer.generation import Generation
from specinfer.inputs.arguments import Prompt, check_call, is_brief, one_params
from specinfer.inputs.read_pool import ReadPools
from specinfer.llm import LLM
from specinfer.quotas import Quotas

T = TypeVar("T")
_SPARE_READS = 64  # prompts that may wait to be read in addition to those that the queue can take


class AsyncLLM:
    """An interface for any number of concurrent requests to one `LLM`, which nothing else may use meanwhile.

    Use it as `async with AsyncLLM(llm) as engine:`, or call `shutdown` at the end. A model's name in place of `llm` is
    loaded with the default settings; `from_engine_args` takes others.

    Attributes:
        on_end: Functions that are called in the event loop when a generation has ended.
    """

    def __init__(self, llm: LLM | str | Path, limits: QueueLimits | None = None) -> None:
        self._owns_llm = not isinstance(llm, LLM)
        self.llm = llm = llm if isinstance(llm, LLM) else LLM(llm)
        self.limits = limits or QueueLimits()
        self.admission = Admission(llm.max_num_seqs, self.limits)
        self._delivery = Delivery(self.admission)
        self.on_end = self._delivery.on_end
        self._thread = EngineThread(llm.engine, self._delivery.deliver, self._delivery.deliver_ends, llm.adaptation)
        self._reads = ReadPools(self.admission.capacity + _SPARE_READS)
        llm.reader.is_bounded = True  # callers need not be trusted
        self._count = itertools.count()
        self._is_draining = False

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, limits: QueueLimits | None = None, progress: ProgressCallback | None = None
    ) -> Self:
        """Load the models of these arguments, which `shutdown` ends, too; errors are those of `LLM`."""
        engine = cls(LLM.from_engine_args(engine_args, progress), limits)
        engine._owns_llm = True
        return engine

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of the model, as `LLM.get_tokenizer` does."""
        return self.llm.get_tokenizer()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    def put_quotas(self, quotas: Quotas) -> None:
        """Limit tenants from now on; called before the first request."""
        self.admission.quotas = quotas
        limits = {tenant: each.max_num_seqs for tenant, each in quotas.limits.items()}
        self.llm.engine.scheduler.waiting.max_running = {
            tenant: most for tenant, most in limits.items() if most is not None
        }

    def start(self) -> None:
        """Start the engine, if it has not been started. The first request does, too.

        Raises:
            EngineDeadError: It has been started in another event loop.
        """
        if not self._thread.has_started:
            self._delivery.loop = asyncio.get_running_loop()
            self._thread.start()
        elif self._delivery.loop is not asyncio.get_running_loop():
            raise EngineDeadError("the engine was started in another event loop; make an AsyncLLM in each")

    # ------------------------------------------------------------------------------- requests

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        timeout: float | None = None,
        trace: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> Generation:
        """Read a prompt and queue its requests.

        Args:
            request_id: Name in outputs, in logs and for `abort`; it need not be unique. (default: a number)
            priority: Lower values are served first.
            tenant: Name of the client. Tenants with waiting requests share the engine evenly.
            timeout: Seconds until the request is ended, at most `QueueLimits.request_timeout`.
            trace: Attach the token trees of each step to the chunks.
            lora_request: Adapter for the request, loaded first if it is not in memory.

        Raises:
            RequestError: The prompt or its parameters cannot be served, or the adapter cannot be loaded.
            QueueFullError: The queue is full.
            EngineDeadError: The engine has failed, or is shutting down.
        """
        params = one_params(params)
        arrival, arrival_time = time.monotonic(), epoch_seconds()
        self.check_seats(params.n, tenant)
        self.start()
        with self.admission.reading(params.n, tenant):
            # A number before the caller's name keeps two requests of the same name apart.
            name = f"{next(self._count)}-{request_id or ''}".removesuffix("-")
            seed = self.llm.jobs.next_seed() if params.seed is None else params.seed
            job = await self._reads.run(
                partial(self.llm.jobs.read, name, prompt, params, seed, lora_request),
                tenant,
                num_bytes=len(prompt) if isinstance(prompt, str) else 0,
                has_grammar=bool(params.structured_outputs),
                is_brief=lora_request is None and is_brief(prompt, params),
            )
            self._check_alive()
            self.admission.check_tokens(job)
        if request_id is not None:
            job = replace(job, request_id=request_id)
        self.admission.quotas.charge(tenant, num_prompt_tokens=len(job.requests[0].prompt_ids))
        for request in job.requests:
            request.priority, request.tenant, request.times.arrival = priority, tenant, arrival_time
            request.trace = [] if trace else None
            request.deadline, request.start_deadline = self.limits.deadlines(arrival, timeout)
        generation = Generation(job, self._forget)
        self.admission.add(generation)
        if not self._thread.add(job.requests):
            self.admission.remove(generation.requests)
            raise EngineDeadError("the engine has ended")
        return generation

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        **vllm: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt and yield the outputs of `SamplingParams.output_kind` as it grows.

        Leaving the loop early ends the request. The arguments and errors are those of `submit`. If the request fails
        while it runs, the last output has `error` set and no `outputs`, and a `RuntimeWarning` is emitted.
        """
        check_call("generate", vllm)
        generation = await self.submit(
            prompt, sampling_params, request_id=request_id, priority=priority, lora_request=lora_request
        )
        async with aclosing(generation.outputs()) as outputs:
            async for output in outputs:
                yield output

    async def complete(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, lora_request: LoRARequest | None = None
    ) -> RequestOutput:
        """Complete one prompt; cancelling the call ends the request. Errors are those of `generate`."""
        return await (await self.submit(prompt, sampling_params, lora_request=lora_request)).finish()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End the requests of these names; their last output has the finish reason "abort"."""
        names = {request_id} if isinstance(request_id, str) else set(request_id)
        for generation in self.admission.generations:
            if generation.request_id in names:
                self._forget(generation)

    async def read(self, action: Callable[[], T], tenant: str = "", *, num_bytes: int = 0, is_brief: bool = False) -> T:
        """Run an action with the tokenizer, templates or grammars in a thread, when it is the tenant's turn.

        Args:
            num_bytes: Size of the request. Few long ones are read at once, and not by the threads of shorter ones.
            is_brief: Whether it takes less time than a thread's turn; then it runs in the event loop.

        Raises:
            QueueFullError: Too many actions of this tenant wait.
            EngineDeadError: The engine has been shut down.
        """
        return await self._reads.run(action, tenant, num_bytes=num_bytes, is_brief=is_brief)

    def _forget(self, generation: Generation) -> None:
        """End a generation that has no reader any more; the engine reports its end as for any other."""
        unfinished = [request for request in generation.requests if self.admission.generation_of(request) is not None]
        if unfinished and not self._thread.abort(unfinished):
            self.admission.remove(generation.requests)

    def check_seats(self, count: int, tenant: str) -> None:
        """Check that a tenant may have this many more outputs.

        Raises:
            EngineDeadError: The engine has failed, or is shutting down.
            QuotaError: The tenant has reached one of its own limits.
            QueueFullError: The queue is full. A tenant without any output gets one all the same.
        """
        self._check_alive()
        if self._is_draining:
            raise EngineDeadError("the server is shutting down; send the request to another or later")
        self.admission.check(count, tenant, self.num_waiting)

    # ---------------------------------------------------------------------------------- state

    @property
    def num_live(self) -> int:
        """Number of outputs that are being read, waiting or running."""
        return self.admission.num_live

    @property
    def num_running(self) -> int:
        return len(self.llm.engine.scheduler.running)

    def num_running_by_tenant(self) -> Counter[str]:
        return Counter(request.tenant for request in tuple(self.llm.engine.scheduler.running))

    def reading(self) -> list[Request]:
        """Return the running requests whose prompts are not computed yet."""
        running = tuple(self.llm.engine.scheduler.running)
        return [request for request in running if request.num_prompt_computed < len(request.prompt_ids)]

    @property
    def num_waiting(self) -> int:
        """Number of outputs that have not been admitted yet, or were preempted."""
        return max(self.num_live - self.num_running, 0)

    @property
    def reading_seconds(self) -> float:
        """Seconds for which the oldest prompt has been read; 0 if none is being read."""
        return self._reads.age

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def has_failed(self) -> bool:
        """True if the engine failed as a whole, or a process that it needs is gone."""
        return self._thread.error is not None or self.llm.failure is not None

    @property
    def has_stopped(self) -> bool:
        """True if the engine's thread has ended; prompts may still be read."""
        return self._thread.has_stopped

    @property
    def is_hung(self) -> bool:
        """True if a step takes longer than `QueueLimits.max_step_seconds`."""
        return self._thread.step_seconds > self.limits.max_step_seconds

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine failed or hangs."""
        self.check_working()

    def check_working(self) -> None:
        """Raise `EngineDeadError` if the engine failed or hangs, where nothing can be awaited."""
        self._check_alive()
        if self.is_hung:
            raise EngineDeadError(f"one step has been going on for {self._thread.step_seconds:.0f} seconds")

    def _check_alive(self) -> None:
        if self._thread.error is not None:
            raise EngineDeadError(f"the engine failed: {type(self._thread.error).__name__}")
        if self.llm.failure is not None:
            raise EngineDeadError(f"the engine failed: {self.llm.failure}")

    # ------------------------------------------------------------------------------------ end

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests, wait for the current ones, and return whether all ended in time."""
        self._is_draining = True
        try:
            async with asyncio.timeout(timeout):
                while self.num_live:  # there is none for a moment between the reading of a prompt and its queueing
                    await self.admission.idle.wait()
        except TimeoutError:
            pass
        return self.admission.idle.is_set()

    def shutdown(self, timeout: float = 10.0) -> asyncio.Future[bool]:
        """Stop the engine; running requests end with an error. Awaited, return whether its threads ended in time."""
        self._is_draining = True
        self._thread.ask_to_stop()  # at once, because a program written for vLLM does not await
        return asyncio.ensure_future(self._join(timeout))

    async def _join(self, timeout: float) -> bool:
        ended = await asyncio.to_thread(self._thread.stop, timeout)
        all_read = await self._reads.close(min(timeout, 1.0))
        self.llm.reader.close()
        if self._owns_llm and ended:  # nobody else could end its other ranks, and threads that read weights
            await asyncio.to_thread(self.llm.close)
        return ended and all_read
