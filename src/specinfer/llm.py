"""LLM: text in, text out, in this process."""

import itertools
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from specinfer.config import (
    EngineConfig,
    OffloadConfig,
    SpeculativeConfig,
    TreeShape,
    batched_tokens,
    check_quantization,
    parse_drafters,
)
from specinfer.demo.pair import demo_folders
from specinfer.drafters import MergedDrafter
from specinfer.engine.device_lane import DeviceLane
from specinfer.engine.engine import Engine
from specinfer.engine.predictor import Predictor
from specinfer.engine.scheduler import Scheduler
from specinfer.engine.speculation import Policy
from specinfer.errors import RequestError
from specinfer.learning.adaptation import Adaptation
from specinfer.model.capacity import bytes_per_token, plan_capacity
from specinfer.model.definition import load_tokenizer
from specinfer.model.device import DTYPES, find_device
from specinfer.model.folder import find_folder
from specinfer.model.graphs.capture import make_graphs
from specinfer.model.graphs.check import captured_bytes
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.offload.budget import Budget, PassRoom, usual_budget
from specinfer.model.offload.needs import check_budget
from specinfer.model.ranked_runner import RankedRunner, least_elsewhere, load_first, start_ranks
from specinfer.model.runner import ModelRunner, TargetRunner
from specinfer.model.target import TargetSettings, num_sharing, settle_part
from specinfer.noise import derive_seed
from specinfer.outputs import OutputCursor, RequestOutput, TextChunk
from specinfer.parallel.config import ParallelConfig
from specinfer.progress import Tell, gigabytes
from specinfer.prompts import Job, Message, Prompt, PromptReader, as_list, text_of
from specinfer.sampling import SamplingParams
from specinfer.speculator import Speculator, check_drafters, load_drafters

logger = logging.getLogger(__name__)


class LLM:
    """A target, its drafters and an engine. Not safe for use by several threads at once.

    Args:
        model: A local folder, a hub name, or "demo" for the embedded pair.
        drafters: "auto", or a list of folders, hub names, "ngram" and "suffix"; [] for none.
        tree: "auto" (by measured cost), "off", children per level such as "1,1,3,1", or "best-first:32".
        verification: "coupled" or "target-only": the output is that of plain decoding with the same seed, token for
            token. "multi-step" or "traversal": it has the same law.
        drawing: How guesses are drawn: "auto" is the rule's own way; docs/verification.md has the others.
        select: Which drafters that are models guess for a request: "all", or "hedge" or "hedge:1" for at most so many,
            those that would have guessed its text best. Lookups always do.
        scheduler: A file made by `specinfer tune --policy`: what "auto" chooses by, for each request and step.
        step_log: A file for what was known before each step and came of it, to train a scheduler from.
        dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16"; drafters follow the target.
        quantization: "int8" or "int4": round the target's linear layers to so many bits; None leaves them as they are.
        drafter_quantization: The same for drafters that are models; they do not follow the target in this.
        offload: "disk": layers of the target that do not fit into memory are read for every pass; "cpu": those of a
            target on a GPU stay in host memory. None: all layers stay on the device.
        memory_budget: What the whole process may hold, in bytes or as "4GiB", with `offload`; None: 80 % of the memory
            to be had.
        offload_folder: Keep a packed copy of the layers there and read that instead; quantized ones need it.
        device: "auto", "cpu", "cuda", "cuda:1", ...
        max_model_len: Longest prompt and output together, in tokens.
        max_num_seqs: Requests running at once.
        max_num_batched_tokens: Known tokens computed in one step; longer prompts are read in chunks. None: 512, or 1024
            with `offload`, since what is read for a pass should serve many.
        kv_cache_memory_bytes: Bound of the caches of target and drafters together.
        enable_prefix_caching: Keep what was computed for a prompt for others that begin alike.
        seed: Of requests that bring none of their own.
        tensor_parallel_size: Processes that share every layer of the target.
        pipeline_parallel_size: Stages of layers, each held by that many processes.
        nnodes: Machines; this one is the first. The others run the command line's `--node-rank`.
        master_addr: Of this machine, as the others reach it.
        master_port: There, for the ranks to meet.
        adapt_drafters: Drafters that are models learn from what is served: in idle moments of an `AsyncLLM`, else when
            `adapt` is called. Outputs stay as they are; but how fast one comes then depends on what others asked.
        adapt_dir: Where what they learn is kept for the next time; None: nowhere.
        enforce_eager: On a GPU, launch passes kernel by kernel, with PyTorch's attention: slower, and nothing is captured
            when the model is loaded. On a CPU that is so in any case.
        progress: Called with what is being done, the bytes done of it and the bytes in all, while a target that is
            streamed is loaded and timed; on a GPU with the sizes of passes that are captured, and how many there are.

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
        adapt_drafters: bool = False,
        adapt_dir: str | Path | None = None,
        enforce_eager: bool = False,
        progress: Tell | None = None,
    ) -> None:
        if adapt_dir is not None and not adapt_drafters:
            raise ValueError("adapt_dir: drafters learn only with adapt_drafters; set that too, or leave it out")
        speculative = SpeculativeConfig(
            parse_drafters(drafters), tree, verification, drawing, select, None if scheduler is None else str(scheduler)
        )
        if scheduler is not None:
            Predictor.load(scheduler)  # found out before models are loaded
        tokens = batched_tokens(max_num_batched_tokens, offload)
        config = EngineConfig(max_model_len, max_num_seqs, tokens, kv_cache_memory_bytes, seed)
        parallel = ParallelConfig(
            tensor_parallel_size, pipeline_parallel_size, nnodes, master_addr=master_addr, master_port=master_port
        )
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        check_quantization("quantization", quantization)
        check_quantization("drafter_quantization", drafter_quantization)
        offloading = OffloadConfig(offload, memory_budget, offload_folder)
        place = find_device(device)
        if str(model) == "demo":
            pair = demo_folders()
            folder, names = pair.target, speculative.drafters
            drafter_folders = ("demo",) if names is None else names
        else:
            folder = find_folder(model)
            drafter_folders = ("ngram",) if speculative.drafters is None else speculative.drafters
        if speculative.shape.is_off:
            drafter_folders = ()
        check_drafters(speculative, drafter_folders, drafter_quantization, adapts=adapt_drafters)
        if offloading.offload is not None and offloading.memory_budget is None and parallel.world_size == 1:
            offloading = replace(offloading, memory_budget=usual_budget(place))
        if offloading.offload is not None and parallel.world_size == 1:
            budget, sizes = Budget(offloading.budget_bytes, place), (tokens, max_num_seqs, kv_cache_memory_bytes)
            check_budget(budget, folder, drafter_folders, *sizes)
        settings = TargetSettings(str(folder), dtype, device, quantization, offloading, config)
        with ExitStack() as undo:
            # Whole, or rank 0's part.
            self._ranks = None if parallel.world_size == 1 else start_ranks(parallel, settings)
            if self._ranks is None:
                target = load_model(folder, DTYPES[dtype], place, quantization, offload=offloading, progress=progress)
            else:
                undo.callback(self._ranks.close)
                weakref.finalize(self, self._ranks.close)
                target = load_first(self._ranks, settings, progress)
            if target.stream is not None:
                undo.callback(target.stream.close)
            self.tokenizer = load_tokenizer(folder)
            small = load_drafters(drafter_folders, target, self.tokenizer, drafter_quantization)
            graphs = None if parallel.world_size > 1 else make_graphs(place, enforce_eager=enforce_eager)
            models = [one.loaded for one in small.values()]
            num_slots, room = self._plan(config, target, models, offloading, captures=graphs is not None)
            make_runner = partial(
                ModelRunner,
                num_slots=num_slots, keeps_prefixes=enable_prefix_caching, graphs=graphs, max_requests=max_num_seqs,
            )  # fmt: skip
            self.target: TargetRunner = (
                make_runner(target, room=room)
                if self._ranks is None
                else RankedRunner(target, num_slots, self._ranks, keeps_prefixes=enable_prefix_caching, room=room)
            )
            if isinstance(self.target, RankedRunner):
                weakref.finalize(self, self.target.close)  # comes before the one above, and lets ranks end in order
            kinds = {name: make_runner(small[name].loaded) if name in small else name for name in drafter_folders}
            vocabularies = {name: one.vocabulary for name, one in small.items()}
            for runner in (self.target, *kinds.values()):
                if isinstance(runner, ModelRunner):
                    runner.prepare(progress)
            self._speculator = Speculator(self.target, kinds, vocabularies, step_log, progress)
            most_told = None if room is None else room.num_guesses
            self._scheduler = Scheduler(self.target.cache, max_num_seqs, tokens, most_told)
            self.adaptation: Adaptation | None = None
            self.speculate(speculative)
            if adapt_drafters:
                asked = () if self.drafter is None else self.drafter.drafters
                self.adaptation = Adaptation(self.engine, asked, adapt_dir)
            self.reader = PromptReader(self.tokenizer, target.vocab_size, self.max_model_len, target.eos_token_ids)
            self.max_num_seqs = config.max_num_seqs
            self._seed = config.seed
            self._count = itertools.count()
            undo.pop_all()
        logger.info(
            "%s: %.1f M parameters in %s on %s, %.1f MiB, KV cache of %d tokens, drafters: %s",
            folder, target.num_parameters / 1e6, target.quantization or target.dtype, place,
            target.num_bytes / 2**20, num_slots,
            ", ".join(drafter_folders) or "none",
        )  # fmt: skip

    def _plan(
        self,
        config: EngineConfig,
        target: LoadedModel,
        drafters: Sequence[LoadedModel],
        offload: OffloadConfig,
        *,
        captures: bool,
    ) -> tuple[int, PassRoom | None]:
        """Slots of the caches; and which layers stay, beside all that was loaded and what a pass takes."""
        budget = Budget(offload.budget_bytes, target.device) if target.stream is not None else None
        most = None if budget is None else budget.cache_bytes
        others = None if self._ranks is None else least_elsewhere(self._ranks, target)
        sharing = 1 if self._ranks is None else num_sharing(target.device, self._ranks.place)
        reserved = sum(captured_bytes(model, config.max_num_seqs) for model in (target, *drafters)) if captures else 0
        self.max_model_len, num_slots = plan_capacity(
            config, target, drafters, most, num_sharing=sharing, elsewhere=others, reserved=reserved
        )
        if budget is None:
            return num_slots, None
        return num_slots, settle_part(target, budget, num_slots * bytes_per_token((target, *drafters)), config)

    @property
    def failure(self) -> str | None:
        """Why the target cannot be used any more: a process that holds a part of it is gone; None: all is well."""
        return None if self._ranks is None else self._ranks.failure

    def speculate(self, config: SpeculativeConfig) -> None:
        """Guesses in this way from now on, with nothing learned yet. No request may be running.

        Args:
            config: Its drafters are some of those that were loaded; None is all of them.
        """
        assert not list(self._scheduler.requests())
        assert self.adaptation is None, "what drafters learn is that of one engine"
        self._speculator.configure(config)
        policy = self._speculator.policy
        is_coupled = config.verification == "coupled"
        lane = DeviceLane.of(self.target, self.drafter, self._scheduler) if is_coupled else None
        self.engine = Engine(self.target, self.drafter, policy, self._scheduler, config.verification, lane)

    @property
    def drafter(self) -> MergedDrafter | None:
        """All that guess, as one; None: nobody does."""
        return self._speculator.drafter

    @property
    def small_models(self) -> dict[str, ModelRunner]:
        """The drafters that are models, by the names they were loaded with."""
        return self._speculator.small_models

    def make_policy(self, shape: TreeShape, *, fresh: bool = False, learned: bool = True) -> Policy:
        """How far to guess; as `Speculator.make_policy`."""
        return self._speculator.make_policy(shape, fresh=fresh, learned=learned)

    def prepare(self) -> None:
        """Measures now what a request may need that asks for "auto" by itself; else the first one that does waits."""
        self._speculator.prepare(self.engine.policy)

    def adapt(self, seconds: float) -> None:
        """Lets drafters learn from what was served, for so long or until there is nothing to learn.

        Raises:
            ValueError: `seconds` is no time, or the model was loaded without `adapt_drafters`.
        """
        if self.adaptation is None:
            raise ValueError("adapt: drafters do not learn here; load the model with adapt_drafters=True")
        self.adaptation.run(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Ends every request and gives the cache back; a target that is streamed cannot be used any more."""
        for request in list(self.engine.scheduler.requests()):
            self.engine.abort(request)
        if self.adaptation is not None:
            self.adaptation.close()
        self._speculator.close()
        if self.target.loaded.stream is not None:
            self.target.loaded.stream.close()
        if isinstance(self.target, RankedRunner):
            self.target.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes each prompt; outputs come in the order of the prompts.

        Args:
            prompts: Text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}; one or a list.
            sampling_params: One for all prompts, or one for each.
            use_tqdm: Show a progress bar on a terminal when the work is long.

        Raises:
            RequestError: Every prompt was refused; the message is the first one's. If only some are,
                they come back with `error` set and the others are served.
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
        """Answers one conversation, or each of several, through the model's chat template.

        Raises:
            RequestError: The model has no chat template, or a message does not fit it.
        """
        if not messages:
            raise RequestError("messages: empty; give at least one message with role and content")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [{"prompt_token_ids": self.chat_prompt(c)} for c in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the model's answer."""
        return self.reader.read_chat(messages)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[TextChunk]:
        """Completes one prompt, step by step; leaving the loop early ends the request.

        Raises:
            RequestError: The prompt or its parameters are refused.
        """
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise RequestError("n: a stream has one output; leave n at 1 or use generate")
        return self._stream(self._job(next(self._count), prompt, params))

    def _stream(self, job: Job) -> Iterator[TextChunk]:
        request = job.requests[0]
        cursor, num_said = OutputCursor(request), 0
        self.engine.add(request)
        try:
            while not request.is_finished:
                # Other calls on this engine may have stepped in the meantime.
                if request.num_output == num_said:
                    self.engine.step()
                if request.num_output > num_said and not request.is_finished:
                    num_said = request.num_output
                    yield cursor.advance()
            yield replace(cursor.advance(), output=job.output())
        finally:
            self.engine.abort(request)

    def job(self, request_id: str, prompt: Prompt, params: SamplingParams, seed: int) -> Job:
        """The requests for a prompt, to be added to the engine.

        Raises:
            RequestError: It cannot be served.
        """
        if self.drafter is None and params.tree not in (None, "off", "auto"):
            raise RequestError(f"tree: {params.tree!r} needs drafters, and none were loaded; leave it out")
        return self.reader.job(request_id, prompt, params, seed)

    def next_seed(self) -> int:
        """The seed of the next request that brings none."""
        return derive_seed(self._seed, next(self._count))

    def _job(self, number: int, prompt: Prompt, params: SamplingParams) -> Job:
        seed = derive_seed(self._seed, number) if params.seed is None else params.seed
        return self.job(str(number), prompt, params, seed)

    def _run(self, jobs: Sequence[Job], *, show: bool) -> None:
        requests = [request for job in jobs for request in job.requests]
        for request in requests:
            self.engine.add(request)
        console = Console(stderr=True)
        with _progress(console, enabled=show and console.is_terminal) as progress:
            task = progress.add_task("tokens", total=len(requests), speed="")
            unfinished = {request.request_id for request in requests}
            said_before = self.engine.metrics.num_said
            stream = self.target.loaded.stream
            read_before = 0 if stream is None else stream.bytes_read
            try:
                while unfinished:
                    for request in self.engine.step():
                        if request.is_finished:
                            unfinished.discard(request.request_id)
                    num_said = self.engine.metrics.num_said - said_before
                    seconds = progress.tasks[task].elapsed or 1e-9
                    speed = f"{num_said / seconds:.1f} tokens/s"
                    if stream is not None:
                        speed += f", read {gigabytes(stream.bytes_read - read_before, seconds)}"
                    progress.update(task, completed=len(requests) - len(unfinished), speed=speed)
            finally:  # an interrupt leaves nothing behind in the cache
                for request in requests:
                    self.engine.abort(request)


def _progress(console: Console, *, enabled: bool) -> Progress:
    return Progress(
        TextColumn("requests {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not enabled,
        transient=True,
    )


def _params_list(params: Any) -> list[SamplingParams]:
    if isinstance(params, (list, tuple)) and all(isinstance(one, SamplingParams) for one in params):
        return list(params)
    raise ValueError(f"sampling_params: give a SamplingParams, or a list with one for each prompt, not {params!r:.80}")
