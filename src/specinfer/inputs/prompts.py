"""The conversion of prompts into requests, or a refusal that names the field."""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from specinfer.core.config import AUTO
from specinfer.core.errors import RequestError, as_python
from specinfer.core.grammar.compiler import GrammarCompiler
from specinfer.core.grammar.state import Grammar
from specinfer.core.logprob import Logprob
from specinfer.core.lora import Adapter
from specinfer.core.request import Request
from specinfer.core.sampling import MAX_SEED, SamplingParams
from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.core.text import TextBuffer
from specinfer.core.thought import Reasoning, Thought
from specinfer.inputs.arguments import Message, Prompt, text_of
from specinfer.inputs.formats.calls import CallFormat
from specinfer.inputs.formats.lark import SpecialToken
from specinfer.inputs.formats.reasoning import ReasoningFormat, with_thought
from specinfer.inputs.job import Job
from specinfer.inputs.prompt_limits import PromptLimits
from specinfer.inputs.text_reader import BoundedTextReader, LocalTextReader, TextReader


class PromptReader:
    """A reader that turns prompts into token ids and refuses prompts that cannot be served.

    Args:
        tokenizer: The target's tokenizer, or None if prompts are token ids and outputs have no text.
        vocab_size: Number of tokens in the target's vocabulary.
        max_model_len: Longest prompt and output together, in tokens.
        eos_token_ids: Tokens that end a text.
        reasoning_parser: Format of the model's thoughts: a name, "auto" or "none".
        tool_call_parser: Format of the model's calls: a name or "auto".

    Attributes:
        is_bounded: Whether long texts are read and grammars are tried in other processes, with limits on time and
            memory.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        *,
        reasoning_parser: str = AUTO,
        tool_call_parser: str = AUTO,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = tuple(eos_token_ids)
        self.is_bounded = False
        self._limits = PromptLimits(tokenizer, vocab_size, max_model_len, self._eos_token_ids)
        self._local = LocalTextReader(tokenizer, max_model_len, (reasoning_parser, tool_call_parser))
        self._bounded = BoundedTextReader(self._local)
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()  # of the compiler's creation

    def job(
        self, request_id: str, prompt: Prompt, params: SamplingParams, seed: int, adapter: Adapter | None = None
    ) -> Job:
        """Return the requests for a prompt, each with its own seed.

        Raises:
            RequestError: The prompt, or the parameters with it, cannot be served.
        """
        ids, given = self.read(prompt, params), params
        reasoning = self.reasoning(prompt, ids, params)
        if reasoning is not None:
            params = with_thought(params, reasoning, self.special_tokens)
        try:
            grammar = self.grammar(params)
        except RequestError:
            self.grammar(given)  # an error of this one has the names of the caller
            raise
        bad_words, prediction = self.bad_words_ids(params), self.prediction_ids(params)
        salt = self.cache_salt(prompt) + ("" if adapter is None else f"\0{adapter.salt}")
        prompt_logprobs: list[dict[int, Logprob] | None] = []  # computed once
        thoughts: list[Thought | None] = [None] * params.n
        if reasoning is not None:
            decode = functools.partial(self._tokenizer.decode, skip_special_tokens=False)
            thoughts = [Thought(reasoning, decode, params.thinking_token_budget) for _ in thoughts]
        requests = [
            Request(
                request_id=f"{request_id}.{i}",
                prompt_ids=ids,
                params=params,
                seed=(seed + i) & MAX_SEED,
                eos_token_ids=self._eos_token_ids,
                max_model_len=self._max_model_len,
                text=self.text_buffer(params, thought),
                decode=self.decode_token,
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

    def read(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Return the prompt's token ids."""
        ids = self._tokens(prompt)
        self._limits.check_prompt(ids)
        self._limits.check_params(len(ids), params)
        return ids

    def read_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, ready for the model's answer.

        Args:
            messages: Messages in the format of OpenAI's chat completions.
            tools: Functions that the model may call, in the same format.
            add_generation_prompt: End with the header of the model's answer; otherwise any role may follow.
            continue_final_message: Let the answer continue the last message.
            template_kwargs: Plain values for variables of the template, such as `enable_thinking`.

        Raises:
            RequestError: The model has no chat template, or a message does not fit it.
        """
        return self.texts.read_chat(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )

    def unread_kwargs(self, given: Mapping[str, Any] | None, *, with_tools: bool = False) -> list[str]:
        """Return the names of `template_kwargs` that the chat template does not read."""
        return self._local.chat.unread_kwargs(given or {}, with_tools=with_tools)

    def reasoning_of(self, ids: Sequence[int]) -> Reasoning | None:
        """Return the thought of the outputs of a rendered conversation, or None for a model that does not think."""
        return self._local.chat.formats.reasoning(self.chat_template, ids)

    @property
    def call_format(self) -> CallFormat:
        """Format of the model's tool calls."""
        return self._local.chat.formats.calls(self.chat_template)

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """Format of the model's thoughts, or None for a model that does not think."""
        return self._local.chat.formats.reasoning_format(self.chat_template)

    @property
    def chat_template(self) -> str | None:
        """Text of the chat template; set it to replace the model's own."""
        return self._local.chat.text()

    @chat_template.setter
    def chat_template(self, text: str | None) -> None:
        self._local.chat.replace(text)
        self._bounded.close()

    @property
    def special_tokens(self) -> dict[str, SpecialToken]:
        """Special tokens in addition to the vocabulary, by name: those of the chat template, and others."""
        return self._local.chat.special_tokens

    def encode(
        self, text: str, *, add_special_tokens: bool = True, keeps: Literal["start", "end"] | None = None
    ) -> list[int]:
        """Return the token ids of a plain text.

        Args:
            keeps: Instead of refusing a text that cannot fit into the context, read only its start or end, because
                reading all of it takes long.

        Raises:
            RequestError: There is no tokenizer, or the value is not valid text.
        """
        if self._tokenizer is None:
            raise RequestError("prompt: this model has no tokenizer; give token ids")
        if keeps is not None:
            text = text[: self._limits.max_characters] if keeps == "start" else text[-self._limits.max_characters :]
        self._limits.check_characters(len(text), "prompt")
        return self.texts.encode(text, "prompt", add_special_tokens=add_special_tokens)

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
            return None if params.thinking_token_budget is None else self.reasoning_of(ids)
        found = prompt["reasoning"]
        if not isinstance(found, Reasoning | None):
            raise RequestError(f"reasoning: give a Reasoning, or leave it out, not {found!r:.60}")
        if found is not None and self._tokenizer is None:
            raise RequestError("reasoning: this model has no tokenizer; leave it out")
        return found

    def bad_words_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each bad word, at the start of a text and after a space."""
        if params.bad_words and self._tokenizer is None:
            raise RequestError("bad_words: this model has no tokenizer; use logit_bias")
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words or ():
            bare = word.lstrip(" ")
            for text in (bare, " " + bare):
                ids = self.texts.encode(text, "bad_words", add_special_tokens=False)
                if ids and max(ids) < self._vocab_size:
                    found[tuple(ids)] = None
        return tuple(found)

    def prediction_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the tokens of the text that the output is likely to resemble, as many as an output can have."""
        given = params.prediction
        if given is None:
            return ()
        if isinstance(given, str):
            if self._tokenizer is None and given:
                raise RequestError("prediction: this model has no tokenizer; give token ids")
            given = given[: self._limits.max_characters]
            given = self.texts.encode(given, "prediction", add_special_tokens=False) if given else ()
        if wrong := [i for i in given if i >= self._vocab_size]:
            raise RequestError(f"prediction: token id {wrong[0]} is not in the vocabulary of {self._vocab_size} tokens")
        return tuple(given[: self._max_model_len])

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """Return the constraint on the output in its initial state; each of `n` outputs takes a copy.

        Raises:
            RequestError: The constraint cannot be parsed, or no output satisfies it.
        """
        asked = params.structured_outputs
        if asked is None:
            return None
        assert isinstance(asked, StructuredOutputsParams)
        if self._tokenizer is None:
            raise RequestError("structured_outputs: this model has no tokenizer; leave it out")
        with self._lock:
            if self._compiler is None:  # reading a large tokenizer takes about a second
                self._compiler = GrammarCompiler(
                    self._tokenizer, self._vocab_size, self._eos_token_ids, has_trials=self.is_bounded
                )
        return self._compiler.compile(asked, ignore_eos=params.ignore_eos)

    @property
    def texts(self) -> TextReader:
        """Reader of texts of any length, which need not fit into the context; there must be a tokenizer."""
        return self._bounded if self.is_bounded else self._local

    def close(self) -> None:
        """End the processes that read texts and try grammars."""
        self._bounded.close()
        if self._compiler is not None:
            self._compiler.close()

    def text_buffer(self, params: SamplingParams, thought: Thought | None = None) -> TextBuffer | None:
        """Return an empty text buffer for an output of this request, or None without a tokenizer."""
        if self._tokenizer is None:
            return None
        decode = functools.partial(self._tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        include_stop = params.include_stop_str_in_output
        return TextBuffer(decode, params.stop_strings, include_stop=include_stop, thought=thought)

    @functools.cached_property
    def decode_token(self) -> Callable[[int], str] | None:
        """Function that returns the text of a token alone, or None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return functools.lru_cache(2**16)(lambda token: self._tokenizer.decode([token], skip_special_tokens=False))

    def _tokens(self, prompt: Prompt) -> list[int]:
        given: Any = prompt
        if isinstance(prompt, Mapping):
            if unknown := sorted(set(map(str, prompt)) - {"prompt", "prompt_token_ids", "cache_salt", "reasoning"}):
                raise RequestError(
                    f"prompt: key {unknown[0]!r} is not known; use prompt or prompt_token_ids, and cache_salt"
                )
            given = prompt.get("prompt")
            if "prompt_token_ids" in prompt:
                return self._ids(prompt["prompt_token_ids"])
        if isinstance(given, str):
            if self._tokenizer is None:
                raise RequestError("prompt: this model has no tokenizer; give token ids")
            self._limits.check_characters(len(given), "prompt")
            return self.texts.encode(given, "prompt")
        return self._ids(given)

    def _ids(self, given: Any) -> list[int]:
        given = given.tolist() if hasattr(given, "tolist") else given  # of NumPy, or a tensor
        if not isinstance(given, (list, tuple, range)):
            raise RequestError(f"prompt: give text or a list of token ids, not {type(given).__name__}")
        ids = [i if type(i) is int else as_python(i) for i in given]
        if wrong := [i for i in ids if type(i) is not int]:
            raise RequestError(f"prompt: a token id must be a whole number, not {wrong[0]!r:.60}")
        return ids
