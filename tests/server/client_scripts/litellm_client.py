"""LiteLLM by its three ways to the server: a call, a stream, and a prompt that is too long."""

import json
import sys
from pathlib import Path
from typing import Any

import litellm

URL, MODEL = sys.argv[1], sys.argv[2]
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
QUESTION = {"role": "user", "content": "What is in notes.txt?"}
litellm.telemetry = False


def converse(**settings: Any) -> dict[str, Any]:
    messages: list[Any] = [QUESTION]
    first = litellm.completion(messages=messages, tools=[TOOL], **settings).choices[0]
    (call,) = first.message.tool_calls
    messages += [
        first.message,
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": Path(json.loads(call.function.arguments)["path"]).read_text(),
        },
    ]
    second = litellm.completion(messages=messages, tools=[TOOL], **settings)
    details = second.usage.prompt_tokens_details
    stream = litellm.completion(
        messages=messages, tools=[TOOL], stream=True, stream_options={"include_usage": True}, **settings
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    streamed_call = list(litellm.completion(messages=[QUESTION], tools=[TOOL], stream=True, **settings))
    deltas = [delta for chunk in streamed_call if chunk.choices for delta in chunk.choices[0].delta.tool_calls or []]
    try:
        litellm.completion(messages=[{"role": "user", "content": "word " * 70_000}], **settings)
        error = "none"
    except Exception as raised:
        error = type(raised).__name__
    return {
        "reason": first.finish_reason,
        "thought": getattr(first.message, "reasoning_content", None),
        "answer": second.choices[0].message.content,
        "cached": details.cached_tokens if details else 0,
        "streamed": "".join(pieces),
        "streamed_name": deltas[0].function.name if deltas else None,
        "streamed_arguments": "".join(delta.function.arguments or "" for delta in deltas),
        "error": error,
    }


found = {
    "openai": converse(model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="any"),
    "anthropic": converse(model=f"anthropic/{MODEL}", api_base=URL, api_key="any"),
    "ollama": converse(model=f"ollama_chat/{MODEL}", api_base=URL),
}
print(json.dumps(found))
