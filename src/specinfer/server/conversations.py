"""Conversations of all APIs: read to a prompt, queued, and errors about them in the names of the API.

Fields that ask for thoughts become keywords of the chat template and a budget. Of a conversation that is longer than
the context, the newest messages may be read, as Ollama does.
"""

import bisect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specinfer.core.errors import ContextLengthError, RequestError, reworded, too_long
from specinfer.core.sampling import SamplingParams
from specinfer.generation import Generation
from specinfer.inputs.chat.messages import unread_keys
from specinfer.inputs.prompts import PromptReader
from specinfer.llm import LLM
from specinfer.server.blocks import Blocks
from specinfer.server.call import Call
from specinfer.server.parameters import sampling_params, truncated
from specinfer.server.protocol import ChatFields
from specinfer.server.response_format import structured_outputs_of
from specinfer.server.tools import ToolPlan, ignored_tools, plan_tools, tools_of_functions

_ROOM = 8  # a conversation that was shortened leaves an eighth of the context for the answer
_SWITCHES = ("enable_thinking", "thinking")  # variables of chat templates that turn thoughts on or off
_EFFORT = "reasoning_effort"
_HIGHEST = ("max", "xhigh")  # efforts that many templates do not know
_BUDGETS = {"minimal": 256, "low": 1024, "medium": 4096}  # tokens of a thought


@dataclass(slots=True)
class Conversation:
    """The messages of a chat, and the fields that they came from.

    Attributes:
        name: The field of the request that has them.
        places: For each message the item that it began with, then the items of its calls.
        ignored: The types of items that are ignored, as names for the header of ignored fields.
    """

    name: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[list[str]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def named(self, error: RequestError) -> RequestError:
        """Return an error about messages as one about the items that they came from."""
        if isinstance(error, ContextLengthError):
            was_encoded = error.field == self.name
            return (
                error if was_encoded else too_long(self.name, error.num_tokens, error.max_model_len, is_encoded=False)
            )
        message = str(error)
        if match := re.match(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\](?:\.function)?)?", message):
            places = self.places[int(match[1])]
            return reworded(error, places[0 if match[2] is None else int(match[2]) + 1] + message[match.end() :])
        return reworded(error, re.sub(r"^messages\b", self.name, message))

    def add(self, message: dict[str, Any], place: str) -> None:
        self.messages.append(message)
        self.places.append([place])

    def add_call(self, call: dict[str, Any], place: str) -> None:
        """Add a call to the assistant's message before it, or to a new one."""
        if not self.messages or self.messages[-1].get("role") != "assistant":
            self.add({"role": "assistant", "content": None}, place)
        self.messages[-1].setdefault("tool_calls", []).append(call)
        self.places[-1].append(place)


@dataclass(frozen=True, slots=True)
class ReadConversation:
    """A conversation as the engine takes it.

    Attributes:
        plan: The plan for parsing its response.
        ignored: Names of what was ignored in it.
        calls: The fields of the items of /v1/responses that report calls, by names of functions.
    """

    ids: list[int]
    params: SamplingParams
    plan: ToolPlan
    ignored: Sequence[str] = ()
    calls: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def blocks(self, *, separates_thoughts: bool = True) -> Blocks:
        """Return the blocks of one response, of which there are none yet; see `ToolPlan.parser`."""
        return Blocks(self.plan.parser(separates_thoughts=separates_thoughts))


async def queue_conversation(call: Call, read: Callable[[], ReadConversation]) -> tuple[ReadConversation, Generation]:
    """Read a conversation of an API without choices and queue it."""
    conversation = await call.read(read)
    (generation,) = await call.submit([(conversation.ids, conversation.params)], conversation.plan.reasoning)
    return conversation, generation


def read_conversation(llm: LLM, fields: ChatFields) -> ReadConversation:
    """Render and check a conversation; runs in the thread that may use the tokenizer."""
    return read_chat(llm.reader, llm.target.loaded.sampling_defaults, fields)


def read_chat(reader: PromptReader, defaults: Mapping[str, float], fields: ChatFields) -> ReadConversation:
    """Render and check a conversation for a model of which only the reader is needed.

    Args:
        defaults: Values of sampling parameters that the model's makers recommend.
    """
    tools, choice = fields.tools, fields.tool_choice
    if fields.functions:
        tools, choice = tools_of_functions(fields.functions, fields.function_call)
    plan = plan_tools(
        tools,
        choice,
        False if fields.functions else fields.parallel_tool_calls,
        reader.call_format,
        special_tokens=reader.special_tokens,
    )
    kwargs = template_kwargs(fields, reader.chat_template or "")
    asked = structured_outputs_of(fields.response_format, fields.constraints)
    params = sampling_params(
        fields,
        defaults,
        max_tokens=fields.token_limit,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        prompt_logprobs=fields.prompt_logprobs,
        structured_outputs=plan.combined(asked),
        thinking_token_budget=thinking_budget(fields, kwargs),
        shows_special_tokens=plan.shows_special_tokens,
    )
    goes_on = bool(fields.continue_final_message)
    ids = reader.read_chat(
        fields.messages,
        tools=plan.tools_for_template,
        add_generation_prompt=not goes_on and fields.add_generation_prompt is not False,
        continue_final_message=goes_on,
        template_kwargs=kwargs or None,
    )
    plan = replace(plan, reasoning=reader.reasoning_of(ids))
    unread = reader.unread_kwargs(kwargs, with_tools=bool(plan.tools_for_template))
    ignored = [*ignored_tools(tools, choice), *(f"messages.{name}" for name in unread_keys(fields.messages))]
    ignored += [f"chat_template_kwargs.{name}" for name in unread]
    return ReadConversation(truncated(ids, fields, reader.max_model_len, fields.token_limit), params, plan, ignored)


def read_newest(llm: LLM, fields: ChatFields) -> ReadConversation:
    """Read a conversation, without its oldest messages if it is too long; system messages and the last one stay."""
    try:
        read = read_conversation(llm, fields)
        if len(read.ids) < llm.max_model_len:
            return read
    except ContextLengthError:
        pass
    room = min(fields.token_limit or llm.max_model_len // _ROOM, llm.max_model_len // 2)
    # A result is not read without its call.
    starts = [i for i, message in enumerate(fields.messages) if i and message.get("role") not in ("system", "tool")]
    starts = starts or [len(fields.messages) - 1]

    def read_from(start: int) -> ReadConversation:
        system = [message for message in fields.messages[:start] if message.get("role") == "system"]
        return read_conversation(llm, fields.model_copy(update={"messages": system + fields.messages[start:]}))

    def fits(start: int) -> bool:
        try:
            return len(read_from(start).ids) <= llm.max_model_len - room
        except RequestError:  # it is still too long, or a conversation may not begin so in this template
            return False

    return read_from(starts[min(bisect.bisect_left(starts, True, key=fits), len(starts) - 1)])


# -------------------------------------------------------------------------------------- thoughts


def template_kwargs(fields: ChatFields, template: str) -> dict[str, Any]:
    """Return the keywords that a request has for the template, with those for thoughts that the template reads."""
    effort, is_on = _asked(fields)
    kwargs: dict[str, Any] = {name: is_on for name in _SWITCHES if is_on is not None and _reads(template, name)}
    if effort is not None and _reads(template, _EFFORT):
        kwargs[_EFFORT] = "high" if effort in _HIGHEST and effort not in template else effort
    return kwargs | (fields.chat_template_kwargs or {})


def thinking_budget(fields: ChatFields, kwargs: dict[str, Any]) -> int | None:
    """Return the most tokens of a thought; it stands for an effort, or for "off", that is not among the keywords."""
    effort, is_on = _asked(fields)
    if fields.thinking_token_budget is not None:
        return fields.thinking_token_budget
    if is_on is False and kwargs.keys().isdisjoint((*_SWITCHES, _EFFORT)):
        return 0
    if effort not in _BUDGETS or _EFFORT in kwargs:
        return None
    return min(_BUDGETS[effort], (fields.token_limit or 1 << 30) // 2)  # half is left for the answer


def _asked(fields: ChatFields) -> tuple[str | None, bool | None]:
    """Return the effort, and whether thoughts are wanted; `reasoning` is OpenRouter's field for both."""
    reasoning = fields.reasoning or {}
    effort = reasoning.get("effort") if fields.reasoning_effort is None else fields.reasoning_effort
    is_on = reasoning.get("enabled") if fields.enable_thinking is None else fields.enable_thinking
    is_on = False if effort == "none" else is_on
    return effort if isinstance(effort, str) else None, is_on if isinstance(is_on, bool) else None


def _reads(template: str, name: str) -> bool:
    """Return whether a name is one of the template's variables, and no attribute or text."""
    return re.search(rf"(?<![.\w'\"]){name}(?![\w'\"])", template) is not None
