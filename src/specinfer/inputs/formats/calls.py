"""Models' formats of tool calls.

A format is a description: the texts around a call's name and its arguments, in order, with optional whitespace between
any two of them. The parser (`parser.py`) and the grammar (`call_grammar.py`) are made from it. Which format a model
uses is found in its chat template (`chat/output_formats.py`). Models that know no tools are shown the format of Hermes.
"""

from dataclasses import dataclass, replace
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Name:
    """The function's name; `is_quoted` if it is a JSON string."""

    is_quoted: bool = False


@dataclass(frozen=True, slots=True)
class CallNumber:
    """The number of a call in the conversation, which is a part of its id."""


@dataclass(frozen=True, slots=True)
class Label:
    """A text without meaning here, such as an id that the model gives: letters, digits, `_` and `-`."""

    is_quoted: bool = False


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """Arguments as a JSON object."""


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """Arguments each between tags: texts as they are, other values as JSON.

    Attributes:
        before_key: Text before the name of an argument.
        after_key: Texts between the name and a value.
        after_value: Text after the value.
        after_key_of_json: Texts between the name and a value that is not text, where they differ.
        has_lines: Whether a value has lines of its own: the line breaks next to the tags are not a part of it.
    """

    before_key: str
    after_key: tuple[str, ...]
    after_value: str
    after_key_of_json: tuple[str, ...] = ()
    has_lines: bool = False


@dataclass(frozen=True, slots=True)
class KeywordArguments:
    """Arguments of a Python call: `key=value`, with commas between, from the opening parenthesis to the closing one."""


@dataclass(frozen=True, slots=True)
class BracedArguments:
    """Arguments as an object whose keys have no quotes, and whose texts are between two `quote`s."""

    quote: str


Arguments: TypeAlias = JsonArguments | TaggedArguments | KeywordArguments | BracedArguments
Part: TypeAlias = str | Name | CallNumber | Label | Arguments
Parts: TypeAlias = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The texts of tool calls, in order.

    Attributes:
        call: The parts of one call. A line break is written by such models, and may be missing.
        begin: The texts before the first call.
        between: The texts between two calls.
        end: The texts after the last call.
        lead: A special token that the model may generate first; it is not shown and has no meaning for the parser.
        is_repeated: Whether there can be more than one call.
        follows_text: Whether text may precede the first call; if not, text that begins like a call is one.
        also: Other forms of a call that such models write at the beginning of a line; only the parser reads them.
        id_format: Ids of calls that the template writes back, with `{name}` and `{number}`; None for any id.
        has_short_ids: Whether the template only accepts call ids of nine letters and digits.
        has_text_arguments: Whether the template takes the arguments of earlier calls as JSON text, not as an object.
        is_native: Whether the chat template itself writes tools and results.
        writes_calls: Whether it also writes earlier calls; if not, they are written into the content.
        has_channels: Whether every message of the answer has a channel, as gpt-oss writes them (`harmony.py`).
        rendered_trigger: The text with which the template writes the beginning of a call, if it is not the trigger.
    """

    name: str
    call: Parts
    begin: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    lead: str | None = None
    is_repeated: bool = True
    follows_text: bool = True
    also: tuple[Parts, ...] = ()
    id_format: str | None = None
    has_short_ids: bool = False
    has_text_arguments: bool = False
    is_native: bool = True
    writes_calls: bool = True
    has_channels: bool = False
    rendered_trigger: str | None = None

    @property
    def trigger(self) -> str:
        """The text that marks the beginning of the first call."""
        first = (self.begin or self.call)[0]
        return first if isinstance(first, str) else ""

    @property
    def texts(self) -> frozenset[str]:
        """All texts of the format, which are never shown to the reader of an answer."""
        texts: set[str] = set()
        for part in (*self.begin, *self.call, *self.between, *self.end):
            if isinstance(part, TaggedArguments):
                texts |= {part.before_key, *part.after_key, *part.after_key_of_json, part.after_value}
            elif isinstance(part, BracedArguments):
                texts.add(part.quote)
            elif isinstance(part, str):
                texts.add(part.strip())
        return frozenset(texts - {""})


_LINE = "\n"


def _json(key: str = '"arguments"', name: str = '"name"') -> Parts:
    """Return the parts of a call that is a JSON object with a name and arguments."""
    return ("{", name, ": ", Name(is_quoted=True), ", ", key, ": ", JsonArguments(), "}")


def _in_list(name: str, before: str, *after: str, call: Parts | None = None) -> CallFormat:
    """Return a format of calls that are objects in a JSON list after a text, and perhaps before another one."""
    return CallFormat(name, call or _json(), (before, "["), (", ",), ("]", *after))


def _in_tags(name: str, before: str, after: str, *call: Part) -> CallFormat:
    """Return a format of calls that are each between two texts."""
    return CallFormat(name, (before, *call, after))


# Models of Hermes' format also write calls without tags, in other tags, and in fenced code.
_BARE: tuple[Parts, ...] = (
    ("```json", _LINE, "<tool_call>", *_json(), "</tool_call>", _LINE, "```"),
    ("```json", _LINE, *_json(), _LINE, "```"),
    ("```", _LINE, *_json(), _LINE, "```"),
    *((f"<{tag}>", *_json(), f"</{tag}>") for tag in ("function_call", "tools", "tool", "json", "response")),
    _json(),
)
HERMES = replace(_in_tags("hermes", "<tool_call>", "</tool_call>", _LINE, *_json(), _LINE), also=_BARE)
# Models without tools of their own are shown this format in a message; many have seen it in training.
SYSTEM_PROMPT_FORMAT = replace(HERMES, name="system-prompt", is_native=False)
LLAMA = CallFormat(
    "llama3_json", _json('"parameters"'), between=("; ",), lead="<|python_tag|>", follows_text=False, also=(_json(),)
)
GIGACHAT = CallFormat("gigachat3", ("<|function_call|>", *_json()))
INTERNLM = _in_tags("internlm", "<|action_start|>", "<|action_end|>", "<|plugin|>", _LINE, *_json('"parameters"'))
FUNCTIONARY = CallFormat("functionary", ("<function=", Name(), ">", JsonArguments(), "</function>"))

MISTRAL = replace(_in_list("mistral", "[TOOL_CALLS]"), has_short_ids=True)
MISTRAL_BARE = CallFormat(
    "mistral-bare",
    ("[TOOL_CALLS]", Name(), "[ARGS]", JsonArguments()),
    has_short_ids=True,
)
MISTRAL_WITH_IDS = replace(
    MISTRAL_BARE,
    name="mistral-ids",
    call=("[TOOL_CALLS]", Name(), "[CALL_ID]", Label(), "[ARGS]", JsonArguments()),
    also=(MISTRAL_BARE.call,),
)
GRANITE = _in_list("granite", "<|tool_call|>")
PHI4_MINI = _in_list("phi4_mini_json", "functools")
JAMBA = _in_list("jamba", "<tool_calls>", "</tool_calls>")
NEMOTRON = _in_list("nemotron", "<TOOLCALL>", "</TOOLCALL>")
APERTUS = _in_list(
    "apertus", "<|tools_prefix|>", "<|tools_suffix|>", call=("{", Name(is_quoted=True), ": ", JsonArguments(), "}")
)
COHERE = _in_list(
    "cohere_command3",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    call=("{", '"tool_call_id"', ": ", Label(is_quoted=True), ", ", *_json('"parameters"', '"tool_name"')[1:]),
)
MINIMAX = CallFormat("minimax", _json(), ("<tool_calls>", _LINE), (_LINE,), (_LINE, "</tool_calls>"))

_XML = TaggedArguments("<parameter=", (">",), "</parameter>")
_QWEN: Parts = ("<function=", Name(), ">", _LINE, replace(_XML, has_lines=True), "</function>")
QWEN3_CODER = replace(_in_tags("qwen3_coder", "<tool_call>", "</tool_call>", _LINE, *_QWEN, _LINE), also=(_QWEN,))
SEED_OSS = _in_tags(
    "seed_oss", "<seed:tool_call>", "</seed:tool_call>", _LINE, "<function=", Name(), ">", _LINE, _XML, "</function>",
    _LINE,
)  # fmt: skip
GLM = _in_tags(
    "glm45", "<tool_call>", "</tool_call>", Name(), _LINE,
    TaggedArguments("<arg_key>", ("</arg_key>", _LINE, "<arg_value>"), "</arg_value>"),
)  # fmt: skip
HY_V3 = CallFormat(
    "hy_v3",
    ("<tool_call:opensource>", Name(), "<tool_sep:opensource>", _LINE,
     TaggedArguments("<arg_key:opensource>", ("</arg_key:opensource>", _LINE, "<arg_value:opensource>"),
                     "</arg_value:opensource>"),
     "</tool_call:opensource>"),
    ("<tool_calls:opensource>", _LINE), (_LINE,), (_LINE, "</tool_calls:opensource>"),
)  # fmt: skip
MINIMAX_M2 = CallFormat(
    "minimax_m2",
    ('<invoke name="', Name(), '">', _LINE, TaggedArguments('<parameter name="', ('">',), "</parameter>"), "</invoke>"),
    ("<minimax:tool_call>", _LINE), (_LINE,), (_LINE, "</minimax:tool_call>"),
)  # fmt: skip
MINICPM5 = CallFormat(
    "minicpm5",
    ('<function name="', Name(), '">', TaggedArguments('<param name="', ('">',), "</param>"), "</function>"),
)
_DSML = TaggedArguments(
    '<｜DSML｜parameter name="', ('"', 'string="true">'), "</｜DSML｜parameter>", ('"', 'string="false">')
)
DEEPSEEK_V32 = CallFormat(
    "deepseek_v32", ('<｜DSML｜invoke name="', Name(), '">', _LINE, _DSML, "</｜DSML｜invoke>"),
    ("<｜DSML｜function_calls>", _LINE), (_LINE,), (_LINE, "</｜DSML｜function_calls>"),
)  # fmt: skip
DEEPSEEK_V4 = replace(
    DEEPSEEK_V32,
    name="deepseek_v4",
    begin=("<｜DSML｜tool_calls>", _LINE),
    end=(_LINE, "</｜DSML｜tool_calls>"),
)

_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_V31 = CallFormat(
    "deepseek_v31", (_DEEPSEEK_CALL[0], Name(), "<｜tool▁sep｜>", JsonArguments(), _DEEPSEEK_CALL[1]),
    _DEEPSEEK[:1], (), _DEEPSEEK[1:],
)  # fmt: skip
DEEPSEEK_V3 = CallFormat(
    "deepseek_v3",
    (_DEEPSEEK_CALL[0], "function", "<｜tool▁sep｜>", Name(), _LINE, "```json", _LINE, JsonArguments(), _LINE, "```",
     _DEEPSEEK_CALL[1]),
    _DEEPSEEK[:1], (_LINE,), _DEEPSEEK[1:],
)  # fmt: skip
KIMI_K2 = CallFormat(
    "kimi_k2",
    ("<|tool_call_begin|>", "functions.", Name(), ":", CallNumber(), "<|tool_call_argument_begin|>", JsonArguments(),
     "<|tool_call_end|>"),
    ("<|tool_calls_section_begin|>",), (), ("<|tool_calls_section_end|>",), id_format="functions.{name}:{number}",
)  # fmt: skip
SOLAR_OPEN = CallFormat(
    "solar_open2",
    ("<|tool_call:begin|>", Label(), "<|tool_call:name|>", Name(), "<|tool_call:args|>", JsonArguments(),
     "<|tool_call:end|>"),
    ("<|tool_calls|>",),
)  # fmt: skip

_PYTHON: Parts = (Name(), KeywordArguments())
PYTHONIC = CallFormat("pythonic", _PYTHON, ("[",), (", ",), ("]",), follows_text=False)
LFM2 = CallFormat("lfm2", _PYTHON, ("<|tool_call_start|>", "["), (", ",), ("]", "<|tool_call_end|>"))
OLMO3 = CallFormat("olmo3", _PYTHON, ("<function_calls>",), (_LINE,), ("</function_calls>",))
GEMMA4 = _in_tags("gemma4", "<|tool_call>", "<tool_call|>", "call:", Name(), BracedArguments('<|"|>'))
FUNCTION_GEMMA = _in_tags(
    "functiongemma", "<start_function_call>", "<end_function_call>", "call:", Name(), BracedArguments("<escape>")
)
HARMONY = CallFormat(
    "openai",
    ("<|channel|>", "commentary to=functions.", Name(), " <|constrain|>", "json", "<|message|>", JsonArguments()),
    is_repeated=False,
    has_channels=True,
    rendered_trigger=" to=functions.",
)  # fmt: skip

# Those with texts of their own come first; the others are told apart by reading a call.
FORMATS = (
    HARMONY, DEEPSEEK_V32, DEEPSEEK_V4, DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, SOLAR_OPEN, MINIMAX_M2, HY_V3, SEED_OSS,
    QWEN3_CODER, GLM, GEMMA4, FUNCTION_GEMMA, COHERE, INTERNLM, GIGACHAT, APERTUS, LFM2, OLMO3, NEMOTRON, JAMBA,
    MINIMAX, PHI4_MINI, GRANITE, MISTRAL, MISTRAL_BARE, MISTRAL_WITH_IDS, HERMES, FUNCTIONARY, MINICPM5, LLAMA,
    PYTHONIC,
)  # fmt: skip
_ALIASES = {
    "ernie45": HERMES, "glm47": GLM, "granite4": HERMES, "hunyuan_a13b": JAMBA, "llama4_json": LLAMA,
    "llama4_pythonic": PYTHONIC, "mimo": QWEN3_CODER, "poolside_v1": GLM, "qwen3_xml": QWEN3_CODER,
    "step3p5": QWEN3_CODER, "xlam": HERMES,
}  # fmt: skip
# Formats by the names of vLLM's `--tool-call-parser`.
CALL_FORMATS = {call_format.name: call_format for call_format in FORMATS} | _ALIASES
