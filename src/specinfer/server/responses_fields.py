"""The fields of requests to /v1/responses, and their conversion to a chat.

Each input item becomes a chat message: calls join the assistant message before them, and their outputs become tool
messages. Nothing is stored, so references to stored things are refused; `store` itself is accepted without effect.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from specinfer.core.errors import ContextLengthError, RequestError, reworded, too_long
from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.server.errors import ApiError
from specinfer.server.field_checks import few
from specinfer.server.protocol import USE_CHAT, Label, Objects, SharedFields, check_single
from specinfer.server.response_format import json_schema_params, structured_outputs_of
from specinfer.server.tools import left_out_tools

MAX_ITEMS = 4096
_INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_CHOICE = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}], "default": None}
_SEND_ALL = "nothing is stored; send the whole conversation in input"
_REFUSED = {
    "background": "answers are not kept for later; leave it out and wait, or stream",
    "context_management": "shorten the input instead",
    "conversation": _SEND_ALL,
    "max_tokens": "use max_output_tokens",
    "previous_response_id": _SEND_ALL,
    "prompt": "no prompts are stored; use instructions and input",
    "response_format": "use text.format",
    "add_special_tokens": "the chat template writes them; leave it out",
}


class ResponsesFields(SharedFields):
    """The body of a request to /v1/responses."""

    prompt_field = "input"
    input: Annotated[Any, WithJsonSchema(_INPUT)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Objects | None = None
    tool_choice: Annotated[Any, WithJsonSchema(_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: Annotated[list[Label], Field(max_length=64, fail_fast=True)] | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], few(16)] | None = None
    truncation: Label | None = None
    store: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self, left_out: Sequence[str] = ()) -> dict[str, str]:
        """Check the fields and return the headers that the response gets because of them.

        Raises:
            ApiError: A field is not supported here.
        """
        check_single(self, _REFUSED | {"top_logprobs": USE_CHAT})
        if self.truncation not in (None, "auto", "disabled"):
            raise ApiError(400, f"truncation: use auto or disabled, not {self.truncation!r:.60}", param="truncation")
        if "message.output_text.logprobs" in (self.include or ()):
            raise ApiError(400, "include: no log-probabilities here; use /v1/chat/completions", param="include")
        return super().check([*left_out, *left_out_tools(self.tools, self.tool_choice)])

    @property
    def prompt_limit(self) -> int | None:
        is_auto = self.truncation == "auto" and self.truncate_prompt_tokens is None
        return -1 if is_auto else self.truncate_prompt_tokens

    @property
    def format(self) -> dict[str, Any]:
        """The "text.format" field, which is the requested format of the response's text.

        Raises:
            RequestError: The field is not an object.
        """
        asked = (self.text or {}).get("format")
        if asked is None:
            return {"type": "text"}
        if not isinstance(asked, dict):
            raise RequestError(f'text: format must be an object such as {{"type": "text"}}, not {asked!r:.60}')
        return asked

    def structured_outputs_params(self) -> StructuredOutputsParams | None:
        """Return the constraints on the response's text; calls are not constrained by them.

        Raises:
            RequestError: The format cannot be served, or there are two.
        """
        asked = self.format
        if asked.get("type") != "json_schema":
            if asked.get("type") not in ("text", "json_object"):
                raise RequestError(
                    f"text: format.type must be text, json_object or json_schema, not {asked.get('type')!r:.60}"
                )
            return structured_outputs_of(asked, self.structured_outputs)
        if self.structured_outputs is not None:
            raise RequestError("structured_outputs: a response has one format; leave this or text.format out")
        return json_schema_params("text", asked)


# ---------------------------------------------------------------------------------------- tools


def chat_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return tools in the format of chat completions."""
    if tools is None:
        return None
    return [
        tool
        if tool.get("type") != "function"
        else {"type": "function", "function": {k: v for k, v in tool.items() if k != "type" and v is not None}}
        for tool in tools
    ]


def chat_tool_choice(choice: Any) -> Any:
    """Return a tool choice in the format of chat completions."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [{"type": "function", "function": tool} for tool in choice["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return choice


# ---------------------------------------------------------------------------------------- input


@dataclass(slots=True)
class Conversation:
    """The messages of a chat, and the fields that they came from.

    Attributes:
        name: The field of the request that has them.
        places: For each message the item that it began with, then the items of its calls.
    """

    name: str = "input"
    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[list[str]] = field(default_factory=list)

    @classmethod
    def of(cls, fields: ResponsesFields) -> "Conversation":
        """Convert instructions and input.

        Raises:
            RequestError: An item is of a kind that is not served; the message names it.
        """
        made = cls()
        if fields.instructions is not None:
            made.add({"role": "system", "content": fields.instructions}, "instructions")
        if isinstance(fields.input, str):
            made.add({"role": "user", "content": fields.input}, "input")
            return made
        if not isinstance(fields.input, list):
            raise RequestError(f"input: must be text or a list of items, not {fields.input!r:.60}")
        if not fields.input:
            raise RequestError("input: empty; give text, or at least one item")
        if len(fields.input) > MAX_ITEMS:
            raise RequestError(f"input: {len(fields.input)} items are too many; send at most {MAX_ITEMS}")
        for i, item in enumerate(fields.input):
            made._add_item(i, item)
        return made

    def named(self, error: RequestError) -> RequestError:
        """Return an error about messages as one about the items that they came from."""
        if isinstance(error, ContextLengthError):  # of a conversation that was not encoded
            return too_long(self.name, error.num_tokens, error.max_model_len, is_encoded=False)
        message = str(error)
        if found := re.match(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\](?:\.function)?)?", message):
            places = self.places[int(found[1])]
            return reworded(error, places[0 if found[2] is None else int(found[2]) + 1] + message[found.end() :])
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

    def _add_item(self, i: int, item: Any) -> None:
        place = f"input[{i}]"
        if not isinstance(item, dict):
            raise RequestError(f"{place}: must be an object with a type, not {item!r:.60}")
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            if wrong := [key for key in ("tool_calls", "function_call", "tool_call_id") if item.get(key) is not None]:
                raise RequestError(f"{place}.{wrong[0]}: is not known here; calls and outputs are items of their own")
            self.add({key: value for key, value in item.items() if key != "type"}, place)
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            self.add_call(call, place)
        elif kind == "function_call_output":
            self.add({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}, place)
        elif kind == "item_reference":
            raise RequestError(f"{place}.type: nothing is stored; send the item itself")
        else:
            raise RequestError(f"{place}.type: use message, function_call or function_call_output, not {kind!r:.60}")
