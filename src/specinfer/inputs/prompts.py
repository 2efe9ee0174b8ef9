"""Prompts and conversations read to token ids, or a refusal that names the field."""

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from specinfer.core.errors import RequestError, as_python
from specinfer.core.grammar.compiler import GrammarCompiler
from specinfer.core.grammar.state import Grammar
from specinfer.core.rules import AUTO
from specinfer.core.sampling import SamplingParams
from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.core.text import TextBuffer
from specinfer.core.thought import Reasoning, Thought
from specinfer.inputs.arguments import Message, Prompt
from specinfer.inputs.formats.calls import CallFormat
from specinfer.inputs.formats.lark import SpecialToken
from specinfer.inputs.formats.reasoning import ReasoningFormat
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
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self.is_bounded = False
        self.limits = PromptLimits(tokenizer, vocab_size, max_model_len, self.eos_token_ids)
        self._local = LocalTextReader(tokenizer, max_model_len, (reasoning_parser, tool_call_parser))
        self._bounded = BoundedTextReader(self._local)
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()  # of the compiler's creation

    def read(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Return the prompt's token ids."""
        ids = self._tokens(prompt)
        self.limits.check_prompt(ids)
        self.limits.check_params(len(ids), params)
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
        if self.tokenizer is None:
            raise RequestError("prompt: this model has no tokenizer; give token ids")
        if keeps is not None:
            text = text[: self.limits.max_characters] if keeps == "start" else text[-self.limits.max_characters :]
        self.limits.check_characters(len(text), "prompt")
        return self.texts.encode(text, "prompt", add_special_tokens=add_special_tokens)

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """Return the constraint on the output in its initial state; each of `n` outputs takes a copy.

        Raises:
            RequestError: The constraint cannot be parsed, or no output satisfies it.
        """
        asked = params.structured_outputs
        if asked is None:
            return None
        assert isinstance(asked, StructuredOutputsParams)
        if self.tokenizer is None:
            raise RequestError("structured_outputs: this model has no tokenizer; leave it out")
        with self._lock:
            if self._compiler is None:  # reading a large tokenizer takes about a second
                self._compiler = GrammarCompiler(
                    self.tokenizer, self.vocab_size, self.eos_token_ids, has_trials=self.is_bounded
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
        if self.tokenizer is None:
            return None
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        include_stop = params.include_stop_str_in_output
        return TextBuffer(decode, params.stop_strings, include_stop=include_stop, thought=thought)

    def _tokens(self, prompt: Prompt) -> list[int]:
        given: Any = prompt
        if isinstance(prompt, Mapping):
            if "role" in prompt:
                raise RequestError("prompt: a message of a conversation is no prompt; use chat")
            if unknown := sorted(set(map(str, prompt)) - {"prompt", "prompt_token_ids", "cache_salt", "reasoning"}):
                raise RequestError(
                    f"prompt: key {unknown[0]!r} is not known; use prompt or prompt_token_ids, and cache_salt"
                )
            given = prompt.get("prompt")
            if "prompt_token_ids" in prompt:
                return self._ids(prompt["prompt_token_ids"])
        if isinstance(given, str):
            return self.encode(given)
        if isinstance(given, list) and given and all(isinstance(item, str | Mapping) for item in given):
            raise RequestError("prompt: a list of prompts stands where one is expected; use generate for several")
        return self._ids(given)

    def _ids(self, given: Any) -> list[int]:
        given = given.tolist() if hasattr(given, "tolist") else given  # of NumPy, or a tensor
        if not isinstance(given, (list, tuple, range)):
            raise RequestError(f"prompt: give text or a list of token ids, not {type(given).__name__}")
        ids = [i if type(i) is int else as_python(i) for i in given]
        if wrong := [i for i in ids if type(i) is not int]:
            raise RequestError(f"prompt: a token id must be a whole number, not {wrong[0]!r:.60}")
        return ids
