"""How models write calls of tools.

A format is the texts around a call's name and its arguments; whitespace may stand between any two of them. Which one
a model was taught is read off its chat template. A model that was taught none is told of one in a system message.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The texts of a call, in order.

    Attributes:
        first: Before the name of the first call; the first of them tells that a call begins.
        again: Before the name of a further call; empty: there is one call at most.
        between: From the name to the arguments, which are a JSON object.
        after: After the arguments.
        end: After the last call.
        lead: A special token that the model may say first; hidden from the text, so it tells nothing.
        quotes_name: Whether the name stands in double quotes.
        follows_text: Whether text may precede the first call; else a text that begins like a call is one.
        has_short_ids: Whether the template takes no other ids of calls than nine letters and digits.
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
        """The text that tells that a call begins."""
        return self.first[0]

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts that no reader of the answer is shown."""
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
# That of Hermes, which many models have met: one that knows no tools is told of it.
TOLD = ToolFormat("told", _TAGGED, _TAGGED, _ARGUMENTS, ("}", "</tool_call>"), is_native=False)


def find_format(chat_template: str | None) -> ToolFormat:
    """The format a chat template writes; `TOLD` if it knows no tools, or writes calls in a way not known here."""
    text = (chat_template or "").replace("\\", "")
    if "tools" not in text:
        return TOLD
    if "[TOOL_CALLS]" in text:
        return MISTRAL_BARE if "[ARGS]" in text else MISTRAL
    if "<tool_call>" in text and "arguments" in text and not any(tag in text for tag in ("<function=", "<arg_key>")):
        return HERMES
    if '{"name": "' in text and '"parameters": ' in text:
        return LLAMA
    return TOLD
