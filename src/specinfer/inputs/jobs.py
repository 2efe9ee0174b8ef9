"""Jobs: prompts turned into requests under the defaults of one engine, and their outputs with thoughts apart."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from specinfer.core.errors import ModelError, RequestError
from specinfer.core.limits import SLO
from specinfer.core.logprob import Logprob
from specinfer.core.lora import Adapter, LoRARequest
from specinfer.core.noise import derive_seed
from specinfer.core.outputs import CompletionOutput, RequestOutput
from specinfer.core.request import Request
from specinfer.core.sampling import MAX_SEED, SamplingParams
from specinfer.core.thought import Reasoning, Thought
from specinfer.inputs.arguments import Prompt, text_of
from specinfer.inputs.formats.parser import OutputParser
from specinfer.inputs.formats.reasoning import with_thought
from specinfer.inputs.prompts import PromptReader
from specinfer.model.adapters.registry import Adapters


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt and the requests, one for each of `n`, that serve it."""

    request_id: str
    prompt: str | None
    requests: list[Request]

    def output(self) -> RequestOutput:
        made = RequestOutput.from_requests(self.request_id, self.prompt, self.requests)
        pairs = zip(made.outputs, self.requests, strict=False)  # a failed one has no outputs
        return replace(made, outputs=[_parsed(output, request) for output, request in pairs])


def _parsed(output: CompletionOutput, request: Request) -> CompletionOutput:
    """Return an output with its thought apart from its answer."""
    if request.thought is None:
        return output
    parser = OutputParser(reasoning=request.thought.reasoning)
    deltas = [*parser.push(output.text), *parser.finish()]
    reasoning, content = ("".join(getattr(delta, name) for delta in deltas) for name in ("reasoning", "content"))
    return replace(output, reasoning=reasoning or None, content=content)


class JobReader:
    """A reader that turns prompts into requests, ready to be added to the engine.

    Args:
        reader: Reader of the prompts.
        adapters: Adapters of the target, or None if requests may have none.
        slo: Latency targets of requests that state none, or None.
        seed: Seed from which those of requests without one are derived.

    Attributes:
        has_drafters: Whether requests may have trees of their own.
    """

    def __init__(self, reader: PromptReader, adapters: Adapters | None, slo: SLO | None, seed: int) -> None:
        self._reader, self._adapters, self._slo, self._seed = reader, adapters, slo, seed
        self._count = itertools.count()
        self.has_drafters = False

    def read(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        seed: int,
        lora_request: LoRARequest | None = None,
    ) -> Job:
        """Return the requests for a prompt.

        Raises:
            RequestError: The prompt cannot be served, or the adapter cannot be loaded.
        """
        if not self.has_drafters and params.tree not in (None, "off", "auto"):
            raise RequestError(f"tree: {params.tree!r} needs drafters, and none were loaded; leave it out")
        if params.slo is None and self._slo is not None:
            params = replace(params, slo=self._slo)
        adapter = self._adapter(lora_request)
        ids, given = self._reader.read(prompt, params), params
        reasoning = self.reasoning(prompt, ids, params)
        if reasoning is not None:
            params = with_thought(params, reasoning, self._reader.special_tokens)
        try:
            grammar = self._reader.grammar(params)
        except RequestError:
            self._reader.grammar(given)  # an error of this one has the names of the caller
            raise
        bad_words, prediction = self.bad_words_ids(params), self.prediction_ids(params)
        salt = self.cache_salt(prompt) + ("" if adapter is None else f"\0{adapter.salt}")
        prompt_logprobs: list[dict[int, Logprob] | None] = []  # computed once
        thoughts: list[Thought | None] = [None] * params.n
        if reasoning is not None:
            decode = functools.partial(self._reader.tokenizer.decode, skip_special_tokens=False)
            thoughts = [Thought(reasoning, decode, params.thinking_token_budget) for _ in thoughts]
        requests = [
            Request(
                request_id=f"{request_id}.{i}",
                prompt_ids=ids,
                params=params,
                seed=(seed + i) & MAX_SEED,
                eos_token_ids=self._reader.eos_token_ids,
                max_model_len=self._reader.max_model_len,
                text=self._reader.text_buffer(params, thought),
                decode=self._decode_token,
                grammar=None if grammar is None else grammar.copy(),
                bad_words_ids=bad_words,
                thought=thought,
                prediction_ids=prediction,
                adapter=adapter,
                cache_salt=salt,
                prompt_logprobs=prompt_logprobs,
            )
            for i, thought in enumerate(thoughts)
        ]
        return Job(request_id, text_of(prompt), requests)

    def read_next(self, prompt: Prompt, params: SamplingParams, lora_request: LoRARequest | None = None) -> Job:
        """Return the requests for a prompt, named by their number, from which its seed is derived if it has none."""
        number = next(self._count)
        seed = derive_seed(self._seed, number) if params.seed is None else params.seed
        return self.read(str(number), prompt, params, seed, lora_request)

    def next_seed(self) -> int:
        """Return the seed of the next request that has none of its own."""
        return derive_seed(self._seed, next(self._count))

    def _adapter(self, lora_request: LoRARequest | None) -> Adapter | None:
        if lora_request is None:
            return None
        if self._adapters is None:
            raise RequestError("lora_request: the model was loaded without adapters; load it with enable_lora=True")
        try:
            return self._adapters.find(lora_request)
        except ModelError as error:
            raise RequestError(str(error)) from error

    def cache_salt(self, prompt: Prompt) -> str:
        """Return the text that separates this prompt's cached prefix from those of others, or "" for a shared one.

        Raises:
            RequestError: The salt is not text, is empty, or could be that of an adapter's requests.
        """
        if not isinstance(prompt, Mapping) or prompt.get("cache_salt") is None:
            return ""
        salt = prompt["cache_salt"]
        if not isinstance(salt, str) or not salt:
            raise RequestError(f"cache_salt: give text that is not empty, or leave it out, not {salt!r:.60}")
        if "\0" in salt:  # what is cached with an adapter has a salt that ends with one and the adapter's
            raise RequestError(f"cache_salt: may not contain the character U+0000, as in {salt!r:.60}")
        return salt

    def reasoning(self, prompt: Prompt, ids: Sequence[int], params: SamplingParams) -> Reasoning | None:
        """Return the thought of the outputs of a prompt, or None if they have none.

        A prompt that does not say so has one if its budget is limited and the model thinks.

        Raises:
            RequestError: The value is not a `Reasoning`, or there is no tokenizer.
        """
        if not (isinstance(prompt, Mapping) and "reasoning" in prompt):
            return None if params.thinking_token_budget is None else self._reader.reasoning_of(ids)
        given = prompt["reasoning"]
        if not isinstance(given, Reasoning | None):
            raise RequestError(f"reasoning: give a Reasoning, or leave it out, not {given!r:.60}")
        if given is not None and self._reader.tokenizer is None:
            raise RequestError("reasoning: this model has no tokenizer; leave it out")
        return given

    def bad_words_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each bad word, at the start of a text and after a space."""
        if params.bad_words and self._reader.tokenizer is None:
            raise RequestError("bad_words: this model has no tokenizer; use logit_bias")
        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_words or ():
            bare = word.lstrip(" ")
            for text in (bare, " " + bare):
                ids = self._reader.texts.encode(text, "bad_words", add_special_tokens=False)
                if ids and max(ids) < self._reader.vocab_size:
                    words[tuple(ids)] = None
        return tuple(words)

    def prediction_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the tokens of the text that the output is likely to resemble, as many as an output can have."""
        given, size = params.prediction, self._reader.vocab_size
        if given is None:
            return ()
        if isinstance(given, str):
            if self._reader.tokenizer is None and given:
                raise RequestError("prediction: this model has no tokenizer; give token ids")
            given = given[: self._reader.limits.max_characters]
            given = self._reader.texts.encode(given, "prediction", add_special_tokens=False) if given else ()
        if wrong := [i for i in given if i >= size]:
            raise RequestError(f"prediction: token id {wrong[0]} is not in the vocabulary of {size} tokens")
        return tuple(given[: self._reader.max_model_len])

    @functools.cached_property
    def _decode_token(self) -> Callable[[int], str] | None:
        """Function that returns the text of a token alone, or None without a tokenizer."""
        if self._reader.tokenizer is None:
            return None
        return functools.lru_cache(2**16)(
            lambda token: self._reader.tokenizer.decode([token], skip_special_tokens=False)
        )
