"""LLM: text in, text out, in the calling process."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import RLock
from typing import Any, NoReturn, Self

from specinfer.core.config import SpeculativeConfig
from specinfer.core.errors import RequestError, reworded
from specinfer.core.limits import SLO
from specinfer.core.lora import LoRARequest
from specinfer.core.options import current_names
from specinfer.core.outputs import RequestOutput, TextChunk
from specinfer.core.progress import ProgressCallback
from specinfer.core.sampling import SamplingParams
from specinfer.core.systems import ReturnsMemory
from specinfer.core.tree_shape import TreeShape
from specinfer.drafters import MergedDrafter
from specinfer.engine_args import EngineArgs, LoadArgs, with_arguments_of
from specinfer.in_process import run, stream
from specinfer.inputs.arguments import Message, Prompt, as_list, check_call, lora_list, one_params, params_list
from specinfer.inputs.chat.conversations import read_conversations
from specinfer.inputs.jobs import JobReader
from specinfer.inputs.prompts import PromptReader
from specinfer.learning.adapt.adaptation import Adaptation
from specinfer.metrics import EngineCounters, Metric
from specinfer.model.prefix_folder import PrefixFolder
from specinfer.model.runner import ModelRunner
from specinfer.policy.acceptance import AcceptanceProfile
from specinfer.policy.base import SpeculationPolicy
from specinfer.policy.network import PolicyNetwork
from specinfer.setup.acceptance_profile import TREE, measure_acceptance
from specinfer.setup.assembly import assemble
from specinfer.setup.engine import make_engine

_PUBLIC = (
    *("adapt", "chat", "chat_prompt", "classify", "compute_paths", "drafter", "embed", "encode", "from_engine_args"),
    *("generate", "get_default_sampling_params", "get_metrics", "get_tokenizer", "max_model_len", "max_num_seqs"),
    *("reward", "score", "shutdown", "speculate", "stream", "tokenizer"),
)


class LLM:
    """A target model, its drafters and an engine.

    Several threads may call it: `generate` and `chat` run one after the other, and streams take turns with them.
    `AsyncLLM` serves many callers in one batch.

    The arguments are the fields of `EngineArgs`, and `progress`, a callback that receives the name of the work, the
    units done and their total while models are loaded.

    Raises:
        ModelError: A model cannot be used; the message says what to change.
        ValueError: Another argument cannot be used; the message names it.
    """

    @with_arguments_of(LoadArgs)
    def __init__(self, *model: str | Path, progress: ProgressCallback | None = None, **options: Any) -> None:
        args = EngineArgs(*model, **current_names(EngineArgs, options))
        speculative = args.speculative_config
        if speculative.speculation_policy is not None:
            PolicyNetwork.load(speculative.speculation_policy)  # checked before models are loaded
        self._name = Path(args.model).name
        self._turn = RLock()  # of the thread that adds requests and runs steps
        self._parts = assemble(args, progress)
        self._parts.close_with(self)
        with ExitStack() as undo:
            undo.callback(self._parts.close)
            self.target, self.tokenizer = self._parts.target, self._parts.tokenizer
            self.max_model_len, self.max_num_seqs = self._parts.max_model_len, args.max_num_seqs
            self.adapters = self._parts.adapters
            self.adaptation: Adaptation | None = None
            self._counters = EngineCounters()
            loaded = self.target.loaded
            self.reader = PromptReader(
                self.tokenizer, loaded.vocab_size, self.max_model_len, loaded.eos_token_ids,
                reasoning_parser=args.reasoning_parser, tool_call_parser=args.tool_call_parser,
            )  # fmt: skip
            self.jobs = JobReader(self.reader, self.adapters, SLO.parse(args.slo), args.seed)
            self.speculate(speculative, progress)
            self._parts.keep_prefixes(args.max_model_len)  # after what is measured with texts of no use to others
            if args.adapt_drafters:
                asked = () if self.drafter is None else self.drafter.drafters
                self.adaptation = Adaptation(self.engine, asked, args.adapt_dir)
            undo.pop_all()
        self._returns_memory = ReturnsMemory()  # the last attribute

    def __repr__(self) -> str:
        if not vars(self):
            return "<LLM, shut down>"
        names = ", ".join(self._parts.speculator.names) or "none"
        return f"<LLM {self._name}, drafters: {names}, verification: {self.engine.verification}>"

    def __getattr__(self, name: str) -> NoReturn:
        if not vars(self):
            raise AttributeError("this LLM was shut down; load the model again")
        raise AttributeError(f"LLM has no attribute {name!r}")

    @classmethod
    def from_engine_args(cls, args: EngineArgs, progress: ProgressCallback | None = None) -> Self:
        """Load the models of these arguments; errors are those of the class."""
        return cls(**args.as_dict(), progress=progress)

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
        assert not list(self._parts.scheduler.requests())
        assert self.adaptation is None, "what drafters learn is that of one engine"
        self.engine = make_engine(self._parts, config, progress)
        self.engine.observers.append(self._counters)
        self.jobs.has_drafters = self.drafter is not None

    @property
    def drafter(self) -> MergedDrafter | None:
        """All active drafters merged into one, or None without speculation."""
        return self._parts.speculator.drafter

    @property
    def prefixes(self) -> PrefixFolder | None:
        """Folder of cached prefixes that outlast the process, or None."""
        return self._parts.prefixes

    @property
    def small_models(self) -> dict[str, ModelRunner]:
        """Model drafters of this process, by the names they were loaded with."""
        return self._parts.speculator.small_models

    @property
    def drafter_choice(self) -> str | None:
        """The drafters that were chosen because none were named, and why, or None."""
        return self._parts.drafter_choice

    @property
    def compute_paths(self) -> dict[str, str]:
        """Compute paths, such as "native fused layers", of the target and of each model drafter in this process."""
        runners = {"target": self.target, **self.small_models}
        return {name: runner.compute_path for name, runner in runners.items()}

    def make_policy(self, shape: TreeShape, *, fresh: bool = False, learned: bool = True) -> SpeculationPolicy:
        """Return the policy for a tree shape, as `Speculator.make_policy` does."""
        return self._parts.speculator.make_policy(shape, fresh=fresh, learned=learned)

    def measure_acceptance(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, text: str, *, keep: bool = False
    ) -> AcceptanceProfile | None:
        """Let the target answer prompts, and return what was accepted of its drafters; None if nothing was drafted.

        Args:
            text: What the prompts are.
            keep: Expect the same of the next 30 days.

        Raises:
            RuntimeError: A request failed.
        """
        with self._turn:
            self.speculate(SpeculativeConfig(tree=TREE))
            profile = measure_acceptance(self.engine, prompts, params, text)
            if keep and profile is not None:
                self._parts.speculator.keep(profile)
            return profile

    def prepare(self) -> None:
        """Measure now the costs that requests with their own "auto" or with latency targets need.

        Otherwise the first one with "auto" waits, and without speculation targets are not planned for.
        """
        speculator = self._parts.speculator
        is_usual = self.engine.policy is speculator.policy
        speculator.prepare()
        if is_usual:
            self.engine.policy = speculator.policy
        self._parts.scheduler.plan_with(speculator.policy.planner)

    def adapt(self, seconds: float) -> None:
        """Let drafters learn from served text for the given time, or until there is nothing left to learn.

        Args:
            seconds: Time limit.

        Raises:
            ValueError: `seconds` is not a valid time, or the model was loaded without `adapt_drafters`.
        """
        if self.adaptation is None:
            raise ValueError("adapt: drafters do not learn here; load the model with adapt_drafters=True")
        with self._turn:
            self.adaptation.run(seconds)

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of the model, that of transformers, or None for a model without one."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return parameters with the values that the model's generation_config.json recommends."""
        defaults: dict[str, Any] = dict(self.target.loaded.sampling_defaults)
        return SamplingParams(**defaults)

    def get_metrics(self) -> list[Metric]:
        """Return the counters since the model was loaded, with vLLM's names and classes (`specinfer.metrics`)."""
        scheduler = self.engine.scheduler
        return self._counters.metrics(len(scheduler.running), len(scheduler.waiting), self.target.cache.usage)

    def embed(self, prompts: Prompt | Sequence[Prompt], *_: object, **__: object) -> NoReturn:
        """Refuse pooling: models generate text here.

        Raises:
            RequestError: Always. The message names what to use instead.
        """
        raise RequestError(
            "embed: models generate text here, and have no pooled output; use a library for embeddings, such as "
            "sentence-transformers"
        )

    encode = score = classify = reward = embed

    def __dir__(self) -> list[str]:
        return [name for name in _PUBLIC if hasattr(self, name)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End every request and free the memory of all models. The end of a `with` block does it, too."""
        if vars(self):
            self.close()
            vars(self).clear()

    def close(self) -> None:
        """End every request, and the threads and processes of the models."""
        with self._turn:
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
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **vllm: Any,
    ) -> list[RequestOutput]:
        """Complete each prompt and return the outputs in the order of the prompts.

        Args:
            prompts: Text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}; one or a list.
            sampling_params: One for all prompts, or one for each.
            use_tqdm: Show a progress bar on a terminal.
            lora_request: Adapter for all prompts, or one for each, of which some may be None.
            vllm: Further arguments of vLLM, which have no effect.

        Raises:
            RequestError: A prompt, or its parameters, cannot be served; the message names its index in a list. Nothing
                has run then.

        A request that fails while it runs does not end the others: its output has `error` set and no `outputs`, and a
        `RuntimeWarning` is emitted.
        """
        check_call("generate", vllm)
        prompts = as_list(prompts)
        all_params, adapters = params_list(sampling_params, len(prompts)), lora_list(lora_request, len(prompts))
        jobs = []
        for i, (prompt, params, adapter) in enumerate(zip(prompts, all_params, adapters, strict=True)):
            try:
                jobs.append(self.jobs.read_next(prompt, params, adapter))
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                raise reworded(error, f"prompts[{i}]: {str(error).removeprefix('prompt: ')}") from error
        run(self.engine, self._turn, jobs, show=use_tqdm)
        outputs = [job.output() for job in jobs]
        for output in outputs:
            output.warn_of_error(stacklevel=2)
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **vllm: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template.

        Args:
            messages: Messages with role and content; one conversation or a list of them.
            sampling_params: One for all conversations, or one for each.
            use_tqdm: Show a progress bar on a terminal.
            chat_template: Template in place of the model's own, for this call.
            add_generation_prompt: End the prompt with the header of the model's answer.
            continue_final_message: Let the answer continue the last message.
            tools: Functions that the template presents to the model.
            chat_template_kwargs: Further variables of the template, such as `enable_thinking`.
            lora_request: Adapter for all conversations, or one for each.
            vllm: Further arguments of vLLM, which have no effect.

        Raises:
            RequestError: The model has no chat template, or a message does not fit it; the message names the index of
                the conversation in a list. Nothing has run then. Failures while running are reported as by `generate`.
        """
        check_call("chat", vllm)
        prompts = read_conversations(
            self.reader, messages, chat_template,
            tools=tools, continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            template_kwargs=chat_template_kwargs,
        )  # fmt: skip
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation, ready for the model's answer."""
        return self.reader.read_chat(messages)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[TextChunk]:
        """Complete one prompt and yield a chunk after each step. Leaving the loop early ends the request.

        Raises:
            RequestError: The prompt or its parameters are refused.
        """
        params = one_params(sampling_params)
        if params.n != 1:
            raise RequestError("n: a stream has one output; leave n at 1 or use generate")
        return stream(self.engine, self._turn, self.jobs.read_next(prompt, params, lora_request))
