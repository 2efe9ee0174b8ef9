"""LLM: text in, text out, in this process."""

import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from specinfer.config import DEFAULT_KV_CACHE_BYTES, EngineConfig, SpeculativeConfig, parse_drafters
from specinfer.demo.pair import demo_folders
from specinfer.drafters import make_drafter
from specinfer.engine.engine import Engine
from specinfer.engine.scheduler import Scheduler
from specinfer.engine.speculation import make_policy
from specinfer.errors import ModelError, RequestError
from specinfer.model.kv_cache import bytes_per_slot
from specinfer.model.load import LoadedModel, find_folder, load_model, load_tokenizer
from specinfer.model.runner import ModelRunner
from specinfer.noise import derive_seed
from specinfer.outputs import RequestOutput
from specinfer.request import Request
from specinfer.sampling import MAX_SEED, SamplingParams
from specinfer.text import TextBuffer

logger = logging.getLogger(__name__)

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Message: TypeAlias = Mapping[str, Any]
DTYPES: dict[str, str | torch.dtype] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float": torch.float32,
}


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Text that one or more accepted tokens added to a streamed output.

    Attributes:
        text: New text; may be empty while a character or a stop string is unfinished.
        token_ids: New tokens.
        origins: For each, the drafter that guessed it, or None: said by the target.
        output: Set on the last chunk.
    """

    text: str
    token_ids: list[int]
    origins: list[str | None]
    output: RequestOutput | None = None


class LLM:
    """A target, its drafters and an engine. Not safe for use by several threads at once.

    Args:
        model: A local folder, a hub name, or "demo" for the embedded pair.
        drafters: "auto", or a list of folders, hub names and "ngram"; [] for none.
        tree: "auto" (by measured cost), "off", or children per level such as "1,1,3,1".
        verification: "coupled": the output is that of plain decoding with the same seed, token for token.
        dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16"; drafters follow the target.
        device: "auto", "cpu", "cuda", "cuda:1", ...
        max_model_len: Longest prompt and output together, in tokens.
        max_num_seqs: Requests running at once.
        max_num_batched_tokens: Known tokens computed in one step; longer prompts are read in chunks.
        kv_cache_memory_bytes: Bound of the target's cache.
        seed: Of requests that bring none of their own.

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
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        kv_cache_memory_bytes: int | None = None,
        seed: int = 0,
    ) -> None:
        speculative = SpeculativeConfig(parse_drafters(drafters), tree, verification)
        config = EngineConfig(max_model_len, max_num_seqs, max_num_batched_tokens, kv_cache_memory_bytes, seed)
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        place = _device(device)
        if str(model) == "demo":
            pair = demo_folders()
            folder, names = pair.target, speculative.drafters
            drafter_folders = ("demo",) if names is None else names
        else:
            folder = find_folder(model)
            drafter_folders = ("ngram",) if speculative.drafters is None else speculative.drafters
        if speculative.widths == ():
            drafter_folders = ()
        self.tokenizer = load_tokenizer(folder)
        loaded = load_model(folder, DTYPES[dtype], place)
        self.max_model_len = _max_model_len(config, loaded)
        self.target = ModelRunner(loaded, _num_slots(config, loaded, self.max_model_len))
        kinds = [name if name == "ngram" else self._load_drafter(name) for name in drafter_folders]
        drafter = make_drafter(kinds, loaded.vocab_size, [Path(name).name for name in drafter_folders])
        policy = make_policy(speculative.widths, self.target, drafter)
        scheduler = Scheduler(self.target.cache, config.max_num_seqs, config.max_num_batched_tokens)
        self.engine = Engine(self.target, drafter, policy, scheduler)
        self._seed = config.seed
        self._count = itertools.count()
        logger.info(
            "%s: %.1f M parameters in %s on %s, KV cache of %d tokens, drafters: %s",
            folder, loaded.num_parameters / 1e6, loaded.dtype, place, self.target.cache.num_slots,
            ", ".join(drafter_folders) or "none",
        )  # fmt: skip

    def _load_drafter(self, name: str) -> ModelRunner:
        """A small model beside the target, with room for the same tokens and a tree for each request."""
        target = self.target.loaded
        folder = demo_folders().drafter if name == "demo" else find_folder(name)
        loaded = load_model(folder, target.dtype, target.device)
        tokenizer = load_tokenizer(folder)
        if tokenizer is not None and self.tokenizer is not None:
            if tokenizer.get_vocab() != self.tokenizer.get_vocab():
                raise ModelError(
                    f"drafters: {name} has another tokenizer than the target; use a drafter trained with the "
                    "target's tokenizer"
                )
        elif loaded.vocab_size != target.vocab_size:
            raise ModelError(
                f"drafters: {name} has a vocabulary of {loaded.vocab_size} tokens, the target of {target.vocab_size}; "
                "use a drafter with the target's tokenizer"
            )
        return ModelRunner(loaded, self.target.cache.num_slots)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Ends every request and gives the cache back."""
        for request in list(self.engine.scheduler.requests()):
            self.engine.abort(request)

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
        prompts = _prompt_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        sampling_params = _params_list(sampling_params)
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"sampling_params: {len(sampling_params)} given for {len(prompts)} prompts; give one for each"
            )
        jobs: list[_Job | RequestOutput] = []
        for prompt, params in zip(prompts, sampling_params, strict=True):
            number = next(self._count)
            try:
                jobs.append(self._job(number, prompt, params))
            except RequestError as error:
                jobs.append(RequestOutput.refused(str(number), _text_of(prompt), [], str(error)))
        accepted = [job for job in jobs if isinstance(job, _Job)]
        if jobs and not accepted:
            refused = jobs[0]
            assert isinstance(refused, RequestOutput)
            raise RequestError(refused.error)
        self._run(accepted, show=use_tqdm)
        return [job.output() if isinstance(job, _Job) else job for job in jobs]

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
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise RequestError("messages: this model has no chat template; use generate with a plain prompt")
        try:
            rendered = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # templates are programs and raise what they like
            raise RequestError(f"messages: the chat template refuses them: {error}") from error
        return self.tokenizer.encode(rendered, add_special_tokens=False)  # type: ignore[no-any-return]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[TextChunk]:
        """Completes one prompt, step by step; leaving the loop early ends the request.

        Raises:
            RequestError: The prompt or its parameters are refused.
        """
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise RequestError("n: a stream has one output; leave n at 1 or use generate")
        job = self._job(next(self._count), prompt, params)
        request = job.requests[0]
        shown = said = 0
        self.engine.add(request)
        try:
            while True:
                # Other calls on this engine may have stepped in the meantime.
                if request.num_output == said and not request.is_finished:
                    self.engine.step()
                    continue
                text = "" if request.text is None else request.text.text
                if request.text is not None and not request.is_finished:
                    text = request.text.settled()
                chunk = TextChunk(
                    text[shown:],
                    request.output_ids[said:],
                    request.origins[said:],
                    job.output() if request.is_finished else None,
                )
                shown, said = max(shown, len(text)), request.num_output
                yield chunk
                if chunk.output is not None:
                    return
        finally:
            self.engine.abort(request)

    def _job(self, number: int, prompt: Prompt, params: SamplingParams) -> "_Job":
        text, ids = self._tokens(prompt)
        self._check(ids, params)
        seed = derive_seed(self._seed, number) if params.seed is None else params.seed
        requests = [
            Request(
                request_id=f"{number}.{i}",
                prompt_ids=ids,
                params=params,
                seed=(seed + i) & MAX_SEED,
                eos_token_ids=self.target.loaded.eos_token_ids,
                max_model_len=self.max_model_len,
                text=self._text_buffer(params),
            )
            for i in range(params.n)
        ]
        return _Job(str(number), text, requests)

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return _text_of(prompt), _token_list(prompt["prompt_token_ids"])
            prompt = prompt.get("prompt", "")
        if not isinstance(prompt, str):
            return None, _token_list(prompt)
        if not prompt:
            raise RequestError("prompt: empty; give at least one character, or one token id")
        if self.tokenizer is None:
            raise RequestError("prompt: this model has no tokenizer; give token ids")
        try:
            return prompt, self.tokenizer.encode(prompt)
        except (TypeError, UnicodeError) as error:
            raise RequestError("prompt: the text is not valid Unicode (a lone surrogate); mend its decoding") from error

    def _check(self, ids: list[int], params: SamplingParams) -> None:
        if not ids:
            raise RequestError("prompt: empty; give at least one token")
        vocab = self.target.loaded.vocab_size
        if min(ids) < 0 or max(ids) >= vocab:
            wrong = next(i for i in ids if not 0 <= i < vocab)
            raise RequestError(f"prompt: token id {wrong} is not in the vocabulary of {vocab} tokens")
        if params.largest_token_id() >= vocab:
            raise RequestError(
                f"sampling_params: token id {params.largest_token_id()} in stop_token_ids, logit_bias or "
                f"allowed_token_ids is not in the vocabulary of {vocab} tokens"
            )
        if len(ids) >= self.max_model_len:
            raise RequestError(
                f"prompt: {len(ids)} tokens leave no room to answer in a context of {self.max_model_len} "
                "(max_model_len); shorten it"
            )
        if params.max_tokens is not None and len(ids) + params.max_tokens > self.max_model_len:
            raise RequestError(
                f"max_tokens: a prompt of {len(ids)} tokens and {params.max_tokens} more do not fit into the context "
                f"of {self.max_model_len} (max_model_len); use at most {self.max_model_len - len(ids)}, or None"
            )
        ends = {*self.target.loaded.eos_token_ids, *params.stop_tokens}
        if params.min_tokens and params.allowed_token_ids is not None and ends.issuperset(params.allowed_token_ids):
            raise RequestError(
                "allowed_token_ids: only tokens that end the output are allowed, and min_tokens forbids those; "
                "allow others or leave min_tokens at 0"
            )
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop: this model has no tokenizer; use stop_token_ids")

    def _text_buffer(self, params: SamplingParams) -> TextBuffer | None:
        if self.tokenizer is None:
            return None
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        return TextBuffer(decode, params.stop_strings, include_stop=params.include_stop_str_in_output)

    def _run(self, jobs: Sequence["_Job"], *, show: bool) -> None:
        requests = [request for job in jobs for request in job.requests]
        for request in requests:
            self.engine.add(request)
        console = Console(stderr=True)
        with _progress(console, enabled=show and console.is_terminal) as progress:
            task = progress.add_task("tokens", total=len(requests), speed="")
            try:
                while any(not request.is_finished for request in requests):
                    self.engine.step()
                    finished = sum(request.is_finished for request in requests)
                    said = sum(request.num_output for request in requests)
                    seconds = progress.tasks[task].elapsed or 1e-9
                    progress.update(task, completed=finished, speed=f"{said / seconds:.1f} tokens/s")
            finally:  # an interrupt leaves nothing behind in the cache
                for request in requests:
                    self.engine.abort(request)


@dataclass(frozen=True, slots=True)
class _Job:
    """One prompt and the requests, one for each of `n`, that serve it."""

    request_id: str
    prompt: str | None
    requests: list[Request]

    def output(self) -> RequestOutput:
        return RequestOutput.of(self.request_id, self.prompt, self.requests)


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


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _params_list(params: Any) -> list[SamplingParams]:
    if isinstance(params, (list, tuple)) and all(isinstance(one, SamplingParams) for one in params):
        return list(params)
    raise ValueError(f"sampling_params: give a SamplingParams, or a list with one for each prompt, not {params!r:.80}")


def _token_list(ids: Any) -> list[int]:
    if isinstance(ids, (list, tuple, range)) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        return list(ids)
    raise RequestError(f"prompt: give text or a list of token ids, not {type(ids).__name__}")


def _text_of(prompt: Prompt) -> str | None:
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f'device: {name!r} is not known; use "auto", "cpu" or "cuda"') from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError('device: no CUDA device is at hand; use "cpu" or "auto"')
    return device


def _max_model_len(config: EngineConfig, loaded: LoadedModel) -> int:
    if config.max_model_len is None:
        return loaded.max_position
    if config.max_model_len > loaded.max_position:
        raise ValueError(
            f"max_model_len: {config.max_model_len} is more than the model's {loaded.max_position} positions; "
            "use at most that"
        )
    return config.max_model_len


def _num_slots(config: EngineConfig, loaded: LoadedModel, max_model_len: int) -> int:
    """Slots for every request at full length and a tree each, or as many as the memory holds."""
    wanted = config.max_num_seqs * (max_model_len + 64)
    each = bytes_per_slot(loaded.layer_shapes, loaded.dtype)
    memory = config.kv_cache_memory_bytes
    if memory is None:
        memory = DEFAULT_KV_CACHE_BYTES
        if loaded.device.type == "cuda":
            memory = int(0.8 * torch.cuda.mem_get_info(loaded.device)[0])
    slots = min(wanted, memory // each)
    if slots < max_model_len:
        needed = max_model_len * each
        if config.kv_cache_memory_bytes is None and config.max_model_len is not None:
            return max_model_len  # asked for by name
        raise ValueError(
            f"max_model_len: one request of {max_model_len} tokens needs {needed / 2**20:.0f} MiB of KV cache and "
            f"{memory / 2**20:.0f} are allowed; lower max_model_len to {memory // each}, or raise kv_cache_memory_bytes"
        )
    return int(slots)
