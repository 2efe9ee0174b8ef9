"""Calls in every format, and chat templates that write them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specinfer.inputs.chat.forms import written_calls
from specinfer.inputs.formats.calls import BracedArguments, CallFormat, KeywordArguments, TaggedArguments

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "mode": {"enum": ["read", "write"]},
        "count": {"type": "integer"},
        "deep": {"type": "object", "properties": {"on": {"type": "boolean"}}},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["path", "count"],
    "additionalProperties": False,
}
FUNCTIONS = {"open_file": SCHEMA, "list.all": {"type": "object", "properties": {}, "additionalProperties": False}}
CALLS = [
    ("open_file", {"path": 'a "b"\\\n<x> {é}', "mode": "read", "count": -3, "deep": {"on": True}, "tags": ["1", "{"]}),
    ("list.all", {}),
]


def written(call_format: CallFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    if not call_format.has_channels:
        return written_calls(call_format, calls)
    ((name, arguments),) = calls
    return (
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments, ensure_ascii=False)}"
    )


def template_of(call_format: CallFormat, *, as_text: bool = False, leaves_out: bool = False) -> str:
    """A chat template that shows tools and writes calls in a format."""
    name, arguments = "{{ call.function.name }}", "{{ call.function.arguments | tojson }}"
    style = call_format.call[-1] if call_format.has_channels else None
    kinds = (TaggedArguments, KeywordArguments, BracedArguments)
    tags = next((part for part in call_format.call if isinstance(part, kinds)), style)
    if as_text:
        arguments = "{{ call.function.arguments + '' }}"
    elif isinstance(tags, TaggedArguments):
        after = " ".join(tags.after_key) if tags.after_key_of_json else "".join(tags.after_key)
        json_after = " ".join(tags.after_key_of_json) or after
        line = "\n" if tags.has_lines else ""
        arguments = (
            "{% for key, value in call.function.arguments | items %}"
            f"{tags.before_key}{{{{ key }}}}{{% if value is string %}}{after}{line}{{{{ value }}}}{{% else %}}"
            f"{json_after}{line}{{{{ value | tojson }}}}{{% endif %}}{line}{tags.after_value}\n{{% endfor %}}"
        )
    elif isinstance(tags, KeywordArguments):
        arguments = (
            "({% for key, value in call.function.arguments | items %}{{ key }}={{ value | tojson }}"
            "{{ ', ' if not loop.last }}{% endfor %})"
        )
    elif isinstance(tags, BracedArguments):
        arguments = (
            "{ {%- for key, value in call.function.arguments | items %}{{ key }}:{% if value is string %}"
            f"{tags.quote}{{{{ value }}}}{tags.quote}{{% else %}}{{{{ value }}}}{{% endif %}}"
            "{{ ',' if not loop.last }}{% endfor %}}"
        )
    parts = [part if isinstance(part, str) else None for part in call_format.call]
    made, is_named = "", False
    for part, kind in zip(parts, call_format.call, strict=True):
        if part is not None:
            made += part
        elif type(kind).__name__ == "Name":
            made += f'"{name}"' if getattr(kind, "is_quoted", False) else name
            is_named = True
        else:
            plain = '"0"' if getattr(kind, "is_quoted", False) else "0"
            made += arguments if is_named and "Arguments" in type(kind).__name__ else plain
    calls = "" if leaves_out else (
        "".join(call_format.begin) + "{% for call in message.tool_calls or [] %}" + made + "{% endfor %}"
        + ("<|call|>" if call_format.has_channels else "".join(call_format.end))
    )  # fmt: skip
    return (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{{ message.content or '' }}{% if message.tool_calls %}" + calls + "{% endif %}<|im_end|>\n{% endfor %}"
    )
