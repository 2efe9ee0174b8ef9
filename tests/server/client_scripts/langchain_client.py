"""LangChain's classes for three servers: a call, a stream, and structured output by each of its methods."""

import json
import sys
from pathlib import Path
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1], sys.argv[2]


class Purchase(BaseModel):
    """What to buy."""

    item: str
    count: int


@tool
def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


def converse(model: Any, methods: list[str]) -> dict[str, Any]:
    with_tools = model.bind_tools([read_file])
    messages: list[Any] = [HumanMessage("What is in notes.txt?")]
    first = with_tools.invoke(messages)
    (call,) = first.tool_calls
    messages += [first, ToolMessage(read_file.invoke(call["args"]), tool_call_id=call["id"])]
    second = with_tools.invoke(messages)
    streamed = None
    for chunk in with_tools.stream(messages):
        streamed = chunk if streamed is None else streamed + chunk
    streamed_call = None
    for chunk in with_tools.stream(messages[:1]):
        streamed_call = chunk if streamed_call is None else streamed_call + chunk
    structured = {}
    for method in methods:
        try:
            structured[method] = (
                model.with_structured_output(Purchase, method=method).invoke("A purchase as JSON.").model_dump()
            )
        except Exception as error:
            structured[method] = f"{type(error).__name__}: {error}"[:500]
    return {
        "thought": [
            first.additional_kwargs.get("reasoning_content"),
            [b for b in first.content_blocks if b.get("type") == "reasoning"],
        ],
        "answer": second.text,
        "cached": (second.usage_metadata or {}).get("input_token_details", {}).get("cache_read"),
        "streamed": streamed.text,
        "streamed_calls": [[c["name"], c["args"]] for c in streamed_call.tool_calls],
        "structured": structured,
    }


openai: dict[str, Any] = {"base_url": f"{URL}/v1", "api_key": "any", "model": MODEL}
both = ["json_schema", "function_calling"]
found = {
    "chat": converse(ChatOpenAI(**openai), [*both, "json_mode"]),
    "responses": converse(ChatOpenAI(use_responses_api=True, **openai), both),
    "anthropic": converse(ChatAnthropic(base_url=URL, api_key="any", model=MODEL), both),
    "ollama": converse(ChatOllama(base_url=URL, model=MODEL, reasoning=True), [*both, "json_mode"]),
}
print(json.dumps(found))
