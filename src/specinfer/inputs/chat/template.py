"""Rendering of conversations to token ids, with the model's chat template or the operator's.

Only the template may write control tokens. If a client's text contains the text of one, a character that occurs nowhere
else is put into it before rendering. The rendered text is split at that character and the pieces are encoded one by
one, so no tokenizer can join them. Other conversations are encoded as a whole, exactly as `apply_chat_template` does.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError

from specinfer.core.errors import RequestError, first_line
from specinfer.core.rules import AUTO
from specinfer.inputs.chat.control_tokens import ControlTokens, breaks_for, has_in_order, texts_in
from specinfer.inputs.chat.forms import add_tools, as_written, forms_of, system_texts
from specinfer.inputs.chat.messages import THOUGHTS, Message, read_messages
from specinfer.inputs.chat.output_formats import OutputFormats
from specinfer.inputs.chat.rendering import SlowTemplateError, render
from specinfer.inputs.formats.lark import SpecialToken
from specinfer.inputs.prompt_limits import PromptLimits

logger = logging.getLogger(__name__)
_MAX_KWARGS = 32
_MAX_KWARG_CHARACTERS = 16_384
# Names that the renderer or any template uses, whether this template mentions them or not.
_REFUSED_KWARGS = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "cycler", "dict", "documents",
    "joiner", "lipsum", "loop", "max_length", "messages", "namespace", "padding", "raise_exception", "range",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens", "self", "strftime_now",
    "tokenize", "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Code:
    """Facts about a template's code: its names, its literal texts joined, and the tokens that only it may write.

    Attributes:
        thoughts: The names under which it reads the thoughts of a message.
    """

    names: frozenset[str]
    literals: str
    control: ControlTokens
    thoughts: tuple[str, ...]


class ChatTemplate:
    """A renderer of conversations for one model.

    Args:
        tokenizer: The model's tokenizer with `apply_chat_template`, or None if there is none and no chat can be read.
        max_model_len: Conversations that cannot fit into this many tokens are refused before they are encoded.
        parsers: Names of the formats of thoughts and of calls, or "auto".

    Attributes:
        formats: The formats of the model's thoughts and calls.
        override: Template in place of the model's, if there is one; see `replace`.
    """

    def __init__(self, tokenizer: Any, max_model_len: int, parsers: tuple[str, str] = (AUTO, AUTO)) -> None:
        self._tokenizer = tokenizer
        self.formats = OutputFormats(tokenizer, *parsers)
        self._limits = PromptLimits(tokenizer, 0, max_model_len, ())
        self.override: str | None = None
        self._codes: dict[str, _Code] = {}

    def replace(self, text: str | None) -> None:
        """Use another template than the model's, or the model's again if the text is None.

        Raises:
            ValueError: The text is not a valid template.
        """
        if text is not None:
            if self._tokenizer is None:
                raise ValueError("chat_template: this model has no tokenizer; leave it out")
            self._codes[text] = self._read_code(text)
            trial = [{"role": "user", "content": "?"}]
            try:
                render(self._tokenizer, trial, chat_template=text)
            except TemplateSyntaxError as error:
                raise ValueError(f"chat_template cannot be read: {first_line(error)}") from error
            except SlowTemplateError as error:
                raise ValueError(f"chat_template: {error} for one message; use another template") from error
            except Exception:  # errors about other messages are reported when they come
                logger.info("the chat template refuses a first message of the user", exc_info=True)
        self.override = text

    def text(self, *, with_tools: bool = True) -> str | None:
        """Return the template's text; if the model has several, the one for conversations with or without tools."""
        if self.override is not None:
            return self.override
        given = getattr(self._tokenizer, "chat_template", None)
        if isinstance(given, Mapping):
            given = (given.get("tool_use") if with_tools else None) or given.get("default")
        return given if isinstance(given, str) and given else None

    def read(
        self,
        messages: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation.

        Raises:
            RequestError: There is no template, or it does not accept a message, a tool or a keyword.
        """
        text = self.text(with_tools=bool(tools))
        if text is None:
            raise RequestError("messages: this model has no chat template; use generate with a plain prompt")
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message: the last message cannot go on and be followed; choose one")
        try:
            code = self._code_of(text)
        except ValueError as error:
            raise RequestError(f"messages: this model's {error}") from error
        call_format = self.formats.calls(text)
        options: dict[str, Any] = {
            "chat_template": text,
            "add_generation_prompt": add_generation_prompt,
            **self._checked(template_kwargs, code),
        }
        has_developer = "developer" in code.literals
        given = read_messages(messages, has_developer=has_developer, call_format=call_format)
        conversation = [as_written(message, call_format) for message in given]
        for message in conversation:
            if thoughts := message.pop(THOUGHTS[0], ""):
                message |= dict.fromkeys(code.thoughts, thoughts)
        if call_format.is_native:
            options["tools"] = list(tools) if tools else None
        else:
            conversation = add_tools(conversation, tools)
        forms = forms_of(conversation, needs_objects=not call_format.has_text_arguments)
        return self._encode(conversation, forms, options, code, goes_on=continue_final_message)

    def unread_kwargs(self, given: Mapping[str, Any], *, with_tools: bool) -> list[str]:
        """Return the names of keywords that the template does not read."""
        text = self.text(with_tools=with_tools)
        return [] if text is None else sorted(given.keys() - self._code_of(text).names)

    def _code_of(self, text: str) -> _Code:
        return self._codes.get(text) or self._codes.setdefault(text, self._read_code(text))

    def _read_code(self, text: str) -> _Code:
        try:
            tokens = list(Environment().lex(text))
        except TemplateError as error:
            raise ValueError(f"chat_template cannot be read: {first_line(error)}") from error
        literals = "\0".join(value for _, kind, value in tokens if kind in ("data", "string"))
        names = frozenset(value for _, kind, value in tokens if kind == "name")
        quoted = {value[1:-1] for _, kind, value in tokens if kind == "string"}
        normalizer = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "normalizer", None)
        thought = self.formats.reasoning_format(text)  # templates may write only one of its marks, or none
        marks = "" if thought is None else f"\0{thought.start}\0{thought.end}"
        control = ControlTokens(
            self._added_tokens.values(), literals + marks, None if normalizer is None else normalizer.normalize_str
        )
        return _Code(names, literals, control, tuple(name for name in THOUGHTS if name in names | quoted))

    @cached_property
    def special_tokens(self) -> dict[str, SpecialToken]:
        """The tokens added to the vocabulary, by name."""
        return {token.content: SpecialToken(i, not token.special) for i, token in self._added_tokens.items()}

    @property
    def _added_tokens(self) -> Mapping[int, Any]:
        return getattr(self._tokenizer, "added_tokens_decoder", {})

    def _checked(self, given: Mapping[str, Any] | None, code: _Code) -> dict[str, Any]:
        """Return the keywords that the template reads, after checking that their values are short."""
        if given is None:
            return {}
        if not isinstance(given, Mapping) or len(given) > _MAX_KWARGS:
            raise RequestError(f"chat_template_kwargs: must be an object with at most {_MAX_KWARGS} names")
        taken = _REFUSED_KWARGS | set(self._tokenizer.special_tokens_map)
        for name in given:
            if not isinstance(name, str) or name in taken or name.startswith("_"):
                raise RequestError(f"chat_template_kwargs: {name!r:.60} is not for requests to set; leave it out")
        read = {name: value for name, value in given.items() if name in code.names}
        try:
            length = len(json.dumps(read))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"chat_template_kwargs: must be JSON: {error}") from error
        if length > _MAX_KWARG_CHARACTERS:
            raise RequestError(f"chat_template_kwargs: {length} characters are too many; send {_MAX_KWARG_CHARACTERS}")
        return read

    # ----------------------------------------------------------------------------------- encoding

    def _encode(
        self,
        conversation: Sequence[Message],
        forms: Iterable[list[Message]],
        options: dict[str, Any],
        code: _Code,
        *,
        goes_on: bool,
    ) -> list[int]:
        given = {key: value for key, value in options.items() if key != "chat_template"}
        texts = list(texts_in([conversation, given]))
        self._limits.check_characters(sum(map(len, texts)), "messages")
        mark, end = breaks_for(texts)
        options = options | code.control.broken(given, mark)
        wanted = [str(code.control.broken(text, mark, is_data=False)).strip() for text in system_texts(conversation)]
        broken = (
            [code.control.broken(one, mark, is_data=one["role"] in ("user", "tool")) for one in form] for form in forms
        )
        rendered = self._rendered(broken, options, wanted, end if goes_on else "")
        self._limits.check_characters(len(rendered), "messages")
        first, *others = rendered.split(mark)
        try:
            ids: list[int] = self._encode_text(first)
            for piece in others:
                ids += self._encode_piece(piece)
        except (TypeError, UnicodeError) as error:
            raise RequestError("messages: a text is not valid Unicode (a lone surrogate); mend its decoding") from error
        return ids

    def _rendered(
        self, forms: Iterable[list[Message]], options: dict[str, Any], wanted: Sequence[str], end: str
    ) -> str:
        """Return the text of the first form of a conversation that the template takes, with all texts that are wanted.

        If there is none, it is the first one that the template takes.
        """
        rendered, refusal, last = list[str](), None, None
        for form in forms:
            if form == last:
                continue
            last = list(form)
            try:
                rendered.append(self._render(form, options, end))
            except RequestError as error:
                if isinstance(error.__cause__, SlowTemplateError):
                    raise
                refusal = refusal or error
            else:
                if has_in_order(rendered[-1], wanted):
                    return rendered[-1]
        if not rendered:
            assert refusal is not None
            raise refusal
        return rendered[0]

    def _render(self, messages: list[Message], options: dict[str, Any], end: str) -> str:
        """Return the text of messages, up to `end` after the last one if it is a character."""
        if end:  # the space shows whether the template trims the message
            messages[-1] = messages[-1] | {"content": f"{messages[-1]['content']}{end} "}
        try:
            rendered = render(self._tokenizer, messages, **options)
        except Exception as error:  # templates are programs and may raise anything
            raise RequestError(f"messages: the chat template refuses them: {first_line(error)}") from error
        if not end:
            return rendered
        before, mark, after = rendered.rpartition(end)
        if not mark:
            raise RequestError("continue_final_message: the chat template leaves the last message out")
        content = messages[-1]["content"].removesuffix(f"{end} ")
        return before if after.startswith(" ") else before.removesuffix(content[len(content.rstrip()) :])

    def _encode_text(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, verbose=False, add_special_tokens=False)  # type: ignore[no-any-return]

    def _encode_piece(self, text: str) -> list[int]:
        """Encode a piece from within a text: at the start of a text, some tokenizers put a space before it."""
        before, ids = self._encode_text("\n"), self._encode_text("\n" + text)
        return ids[len(before) :] if ids[: len(before)] == before else self._encode_text(text)
