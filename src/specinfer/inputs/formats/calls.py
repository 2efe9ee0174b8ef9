"""Models' formats of tool calls.

A format is the texts around a call's name and its arguments, with optional whitespace between any two of them. The
format that a model was trained on is detected in its chat template. Other models are shown one in a system message.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The texts of a call, in order.

    Attributes:
        first: The texts before the name of the first call; the first of them marks the beginning of a call.
        again: The texts before the name of a further call; empty if there is one call at most.
        between: The texts from the name to the arguments, which are a JSON object.
        after: The texts after the arguments.
        end: The texts after the last call.
        lead: A special token that the model may generate first; it is not shown and has no meaning for the parser.
        quotes_name: Whether the name is in double quotes.
        follows_text: Whether text may precede the first call; if not, text that begins like a call is one.
        has_short_ids: Whether the template only accepts call ids of nine letters and digits.
        is_native: Whether the chat template itself writes tools, calls and results.
    """

    name: str
    first: tuple[str, ...]
    again: tuple[str, ...]
    between: tuple[str, ...]
    after: tuple[str, ...]
    end: tuple[str, ...] = ()
    lead: str | None = None
    quotes_name: bool = True
    follows_text: bool = True
    has_short_ids: bool = False
    is_native: bool = True

    @property
    def trigger(self) -> str:
        """The text that marks the beginning of a call."""
        return self.first[0]

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of the format, which are never shown to the reader of an answer."""
        return tuple(dict.fromkeys((*self.first, *self.again, *self.between, *self.after, *self.end)))


_NAME, _ARGUMENTS = ('"name"', ":"), (",", '"arguments"', ":")
_TAGGED = ("<tool_call>", "{", *_NAME)

HERMES = ToolFormat("hermes", _TAGGED, _TAGGED, _ARGUMENTS, ("}", "</tool_call>"))
LLAMA = ToolFormat(
    "llama", ("{", *_NAME), (), (",", '"parameters"', ":"), ("}",), lead="<|python_tag|>", follows_text=False
)
MISTRAL = ToolFormat(
    "mistral",
    ("[TOOL_CALLS]", "[", "{", *_NAME),
    (",", "{", *_NAME),
    _ARGUMENTS,
    ("}",),
    ("]",),
    has_short_ids=True,
)
MISTRAL_BARE = ToolFormat(
    "mistral-bare", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), ("[ARGS]",), (), quotes_name=False, has_short_ids=True
)
# The format of Hermes, which many models have seen in training; models without tools are shown it in a message.
SYSTEM_PROMPT_FORMAT = ToolFormat("system-prompt", _TAGGED, _TAGGED, _ARGUMENTS, ("}", "</tool_call>"), is_native=False)


def find_format(chat_template: str | None) -> ToolFormat:
    """Return the format of a chat template; one that is not native if the template has no tools or an unknown one."""
    text = (chat_template or "").replace("\\", "")
    if "tools" not in text:
        return SYSTEM_PROMPT_FORMAT
    if "[TOOL_CALLS]" in text:
        return MISTRAL_BARE if "[ARGS]" in text else MISTRAL
    if "<tool_call>" in text and "arguments" in text and not any(tag in text for tag in ("<function=", "<arg_key>")):
        return HERMES
    if '{"name": "' in text and '"parameters": ' in text:
        return LLAMA
    return SYSTEM_PROMPT_FORMAT
