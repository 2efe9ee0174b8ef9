"""LLM: text in, text out, in the calling process."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from specinfer.core.config import (
    EngineConfig,
    OffloadConfig,
    SpeculativeConfig,
    TreeShape,
    batched_tokens,
    check_quantization,
    parse_drafters,
)
from specinfer.core.errors import RequestError
from specinfer.core.noise import derive_seed
from specinfer.core.outputs import OutputCursor, RequestOutput, TextChunk
from specinfer.core.parallel_config import ParallelConfig
from specinfer.core.progress import ProgressCallback
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TreeBudget
from specinfer.drafters import MergedDrafter
from specinfer.drafters.remote.placement import place_drafters
from specinfer.engine.device.executor import DeviceExecutor
from specinfer.engine.engine import Engine
from specinfer.inputs.prompts import Job, Message, Prompt, PromptReader, as_list, text_of
from specinfer.learning.adaptation import Adaptation
from specinfer.model.device import DTYPES, find_device
from specinfer.model.runner import ModelRunner
from specinfer.model.target import TargetConfig
from specinfer.policy.base import SpeculationPolicy, budget_of
from specinfer.policy.network import PolicyNetwork
from specinfer.reporting.progress_bar import running_bar
from specinfer.setup.assembly import assemble, find_folders
from specinfer.setup.drafter_setup import check_drafters, find_drafters

AUTO = TreeBudget(max_nodes=16, max_depth=8)  # captured ahead for "auto" on a GPU; other sizes when they occur


class LLM:
    """A target model, its drafters and an engine. It must not be used by several threads at once.

    Args:
        model: A local folder, a .gguf file, a hub name, or "demo" for the embedded pair.
        drafters: "auto", or a list of folders, .gguf files, hub names, "ngram" and "suffix"; [] for none.
        tree: "auto" (by measured cost), "off", children per level such as "1,1,3,1", or "best-first:32".
        verification: "coupled" or "target-only": the output equals that of plain decoding with the same seed, token for
            token. "multi-step" or "traversal": the output has the same distribution as that of plain decoding.
        drawing: Method by which draft tokens are drawn. "auto" is the verification rule's own method;
            docs/verification.md has the others.
        select: Which model drafters propose tokens for a request: "all", or "hedge" or "hedge:1" for at most this many,
            those that would have predicted its text best. Lookup drafters always propose.
        scheduler: File made by `specinfer tune --policy`, by which "auto" chooses for each request and step.
        step_log: File to record what is known before each step and its outcome, to train a scheduler from.
        dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16". Drafters follow the target.
        quantization: "int8", "int4" or "fp8" (GPUs) to round the target's linear layers, or None to leave them
            unchanged.
        drafter_quantization: The same for model drafters, which do not follow the target in this.
        offload: "disk" to read the layers of the target that do not fit into memory for every pass, "cpu" to keep those
            of a target on a GPU in host memory, or None to keep all layers on the device.
        memory_budget: Memory limit of the whole process with `offload`, in bytes or as "4GiB", or None for 80 % of the
            available memory.
        offload_folder: Folder for a packed copy of the layers, which is read instead. Quantized layers need it.
        device: "auto", "cpu", "cuda", "cuda:1", ...
        max_model_len: Longest prompt and output together, in tokens.
        max_num_seqs: Maximum number of requests that run at once.
        max_num_batched_tokens: Known tokens computed in one step; longer prompts are prefilled in chunks. None is 512,
            or 1024 with `offload`, because one read of the weights should then serve many tokens.
        kv_cache_memory_bytes: Limit of the KV caches of target and drafters together, in bytes.
        enable_prefix_caching: Reuse what was computed for a prompt for later prompts with the same beginning.
        seed: Base seed of requests that have none of their own.
        tensor_parallel_size: Processes that share every layer of the target.
        pipeline_parallel_size: Pipeline stages; each one is run by `tensor_parallel_size` processes.
        nnodes: Number of machines. This one is the first; the others run the command line's `--node-rank`.
        master_addr: Address of this machine, as the others reach it.
        master_port: Port on this machine where the ranks meet.
        drafter_placement: "first": all model drafters run on the engine's rank. "spread": each rank runs a different
            drafter, all at the same time. "auto": "spread", unless drafters learn or are selected per request, or ranks
            are on several machines or have fewer than two CPUs each.
        adapt_drafters: Let model drafters learn from served text: in idle moments of an `AsyncLLM`, otherwise when
            `adapt` is called. Outputs do not change, but a request's speed then depends on what others asked.
        adapt_dir: Folder where the learned weights are kept for the next run, or None to keep nothing.
        enforce_eager: On a GPU, launch passes kernel by kernel, with PyTorch's attention. This is slower, but nothing
            is captured. On a CPU passes always run this way.
        progress: Callback that receives the name of the work, the bytes done and the total bytes while a streamed
            target is loaded and timed; on a GPU, the number of pass sizes captured and their total.

    Raises:
        ModelError: A model cannot be used; the message says what to change.
        ValueError: Another argument cannot be used; the message names it.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        drafters: str | Sequence[str] = "auto",
        tree: str = "auto",
        verification: str = "coupled",
        drawing: str = "auto",
        select: str = "all",
        scheduler: str | Path | None = None,
        step_log: str | Path | None = None,
        dtype: str = "auto",
        quantization: str | None = None,
        drafter_quantization: str | None = None,
        offload: str | None = None,
        memory_budget: int | str | None = None,
        offload_folder: str | Path | None = None,
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        seed: int = 0,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        nnodes: int = 1,
        master_addr: str | None = None,
        master_port: int | None = None,
        drafter_placement: str = "auto",
        adapt_drafters: bool = False,
        adapt_dir: str | Path | None = None,
        enforce_eager: bool = False,
        progress: ProgressCallback | None = None,
    ) -> None:
        if adapt_dir is not None and not adapt_drafters:
            raise ValueError("adapt_dir: drafters learn only with adapt_drafters; set that too, or leave it out")
        speculative = SpeculativeConfig(
            parse_drafters(drafters), tree, verification, drawing, select, None if scheduler is None else str(scheduler)
        )
        if scheduler is not None:
            PolicyNetwork.load(scheduler)  # checked before models are loaded
        tokens = batched_tokens(max_num_batched_tokens, offload)
        config = EngineConfig(max_model_len, max_num_seqs, tokens, kv_cache_memory_bytes, seed)
        parallel = ParallelConfig(
            tensor_parallel_size, pipeline_parallel_size, nnodes, 0, master_addr, master_port, drafter_placement
        )
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        check_quantization("quantization", quantization)
        check_quantization("drafter_quantization", drafter_quantization)
        offloading = OffloadConfig(offload, memory_budget, offload_folder)
        find_device(device)  # checked before a folder is fetched
        folder, names = find_folders(model, speculative)
        check_drafters(speculative, names, drafter_quantization, adapts=adapt_drafters)
        settings = TargetConfig(str(folder), dtype, device, quantization, offloading, config)
        models = find_drafters(names)
        placement = place_drafters(
            models, parallel, drafter_quantization,
            keeps_prefixes=enable_prefix_caching, must_be_here=adapt_drafters or speculative.max_asked is not None,
        )  # fmt: skip
        self._parts = assemble(
            settings, parallel, {name: models.get(name) for name in names}, drafter_quantization, placement,
            keeps_prefixes=enable_prefix_caching, enforce_eager=enforce_eager, step_log=step_log, progress=progress,
        )  # fmt: skip
        self._parts.close_with(self)
        with ExitStack() as undo:
            undo.callback(self._parts.close)
            self.target, self.tokenizer = self._parts.target, self._parts.tokenizer
            self.max_model_len, self.max_num_seqs = self._parts.max_model_len, max_num_seqs
            self.adaptation: Adaptation | None = None
            self.speculate(speculative, progress)
            if adapt_drafters:
                asked = () if self.drafter is None else self.drafter.drafters
                self.adaptation = Adaptation(self.engine, asked, adapt_dir)
            loaded = self.target.loaded
            self.reader = PromptReader(self.tokenizer, loaded.vocab_size, self.max_model_len, loaded.eos_token_ids)
            self._seed = config.seed
            self._count = itertools.count()
            undo.pop_all()

    @property
    def failure(self) -> str | None:
        """Reason why the target cannot be used any more: a process that it needs has ended. None if all is well."""
        return None if self._parts.ranks is None else self._parts.ranks.failure

    def speculate(self, config: SpeculativeConfig, progress: ProgressCallback | None = None) -> None:
        """Replace the drafter and the policy by new ones that have learned nothing. No request may be running.

        Args:
            config: New settings. Its drafters are some of those that were loaded; None is all of them.
            progress: Progress callback, as for the class.
        """
        scheduler = self._parts.scheduler
        assert not list(scheduler.requests())
        assert self.adaptation is None, "what drafters learn is that of one engine"
        self._parts.speculator.configure(config)
        policy = self._parts.speculator.policy
        executor = DeviceExecutor.of(self.target, self.drafter, scheduler) if config.verification == "coupled" else None
        if executor is not None and not policy.reads_logits:
            executor.prepare(AUTO if config.shape.is_auto else budget_of(config.shape), progress)
        self.engine = Engine(self.target, self.drafter, policy, scheduler, config.verification, executor)

    @property
    def drafter(self) -> MergedDrafter | None:
        """All active drafters merged into one, or None without speculation."""
        return self._parts.speculator.drafter

    @property
    def small_models(self) -> dict[str, ModelRunner]:
        """Model drafters of this process, by the names they were loaded with."""
        return self._parts.speculator.small_models

    @property
    def compute_paths(self) -> dict[str, str]:
        """Compute path of the target, and of each model drafter that runs in this process."""
        runners = {"target": self.target, **self.small_models}
        return {name: runner.compute_path for name, runner in runners.items()}

    def make_policy(self, shape: TreeShape, *, fresh: bool = False, learned: bool = True) -> SpeculationPolicy:
        """Return the policy for a tree shape, as `Speculator.make_policy` does."""
        return self._parts.speculator.make_policy(shape, fresh=fresh, learned=learned)

    def prepare(self) -> None:
        """Measure now the costs that a request with its own "auto" needs; otherwise the first such request waits."""
        self._parts.speculator.prepare(self.engine.policy)

    def adapt(self, seconds: float) -> None:
        """Let drafters learn from served text for the given time, or until there is nothing left to learn.

        Args:
            seconds: Time limit.

        Raises:
            ValueError: `seconds` is not a valid time, or the model was loaded without `adapt_drafters`.
        """
        if self.adaptation is None:
            raise ValueError("adapt: drafters do not learn here; load the model with adapt_drafters=True")
        self.adaptation.run(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End every request and free the cache. A streamed target cannot be used any more."""
        for request in list(self.engine.scheduler.requests()):
            self.engine.abort(request)
        if self.adaptation is not None:
            self.adaptation.close()
        self._parts.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt and return the outputs in the order of the prompts.

        Args:
            prompts: Text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}; one or a list.
            sampling_params: One for all prompts, or one for each.
            use_tqdm: Show a progress bar on a terminal.

        Raises:
            RequestError: Every prompt was refused; the message is that of the first. If only some are refused,
                they are returned with `error` set and the others are served.
        """
        prompts = as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        sampling_params = _params_list(sampling_params)
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"sampling_params: {len(sampling_params)} given for {len(prompts)} prompts; give one for each"
            )
        jobs: list[Job | RequestOutput] = []
        for prompt, params in zip(prompts, sampling_params, strict=True):
            number = next(self._count)
            try:
                jobs.append(self._job(number, prompt, params))
            except RequestError as error:
                jobs.append(RequestOutput.refused(str(number), text_of(prompt), [], str(error)))
        accepted = [job for job in jobs if isinstance(job, Job)]
        if jobs and not accepted:
            refused = jobs[0]
            assert isinstance(refused, RequestOutput)
            raise RequestError(refused.error)
        self._run(accepted, show=use_tqdm)
        return [job.output() if isinstance(job, Job) else job for job in jobs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template.

        Raises:
            RequestError: The model has no chat template, or a message does not fit it.
        """
        if not messages:
            raise RequestError("messages: empty; give at least one message with role and content")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [{"prompt_token_ids": self.chat_prompt(c)} for c in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation, ready for the model's answer."""
        return self.reader.read_chat(messages)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[TextChunk]:
        """Complete one prompt and yield a chunk after each step. Leaving the loop early ends the request.

        Raises:
            RequestError: The prompt or its parameters are refused.
        """
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise RequestError("n: a stream has one output; leave n at 1 or use generate")
        return self._stream(self._job(next(self._count), prompt, params))

    def _stream(self, job: Job) -> Iterator[TextChunk]:
        request = job.requests[0]
        cursor, num_generated = OutputCursor(request), 0
        self.engine.add(request)
        try:
            while not request.is_finished:
                # Other calls on this engine may have stepped in the meantime.
                if request.num_output == num_generated:
                    self.engine.step()
                if request.num_output > num_generated and not request.is_finished:
                    num_generated = request.num_output
                    yield cursor.advance()
            yield replace(cursor.advance(), output=job.output())
        finally:
            self.engine.abort(request)

    def job(self, request_id: str, prompt: Prompt, params: SamplingParams, seed: int) -> Job:
        """Return the requests for a prompt, ready to be added to the engine.

        Raises:
            RequestError: The prompt cannot be served.
        """
        if self.drafter is None and params.tree not in (None, "off", "auto"):
            raise RequestError(f"tree: {params.tree!r} needs drafters, and none were loaded; leave it out")
        return self.reader.job(request_id, prompt, params, seed)

    def next_seed(self) -> int:
        """Return the seed of the next request that has none of its own."""
        return derive_seed(self._seed, next(self._count))

    def _job(self, number: int, prompt: Prompt, params: SamplingParams) -> Job:
        seed = derive_seed(self._seed, number) if params.seed is None else params.seed
        return self.job(str(number), prompt, params, seed)

    def _run(self, jobs: Sequence[Job], *, show: bool) -> None:
        requests = [request for job in jobs for request in job.requests]
        for request in requests:
            self.engine.add(request)
        unfinished = {request.request_id for request in requests}
        with running_bar(self.engine, len(requests), show=show) as progress:
            try:
                while unfinished:
                    unfinished -= {request.request_id for request in self.engine.step() if request.is_finished}
                    progress(len(requests) - len(unfinished))
            finally:  # so that an interrupt leaves nothing in the cache
                for request in requests:
                    self.engine.abort(request)


def _params_list(params: Any) -> list[SamplingParams]:
    if isinstance(params, (list, tuple)) and all(isinstance(one, SamplingParams) for one in params):
        return list(params)
    raise ValueError(f"sampling_params: give a SamplingParams, or a list with one for each prompt, not {params!r:.80}")
