"""pydantic-ai by three of its models: an agent with a tool, the same streamed, and an output of a given type."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ThinkingPart, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1], sys.argv[2]


class Purchase(BaseModel):
    """What to buy."""

    item: str
    count: int


def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


async def converse(model: Any) -> dict[str, Any]:
    agent = Agent(model, tools=[read_file])
    result = await agent.run("What is in notes.txt?")
    async with agent.run_stream("What is in notes.txt?") as stream:
        streamed = await stream.get_output()
    again = await agent.run("And again?", message_history=result.all_messages())
    structured = {}
    kinds: dict[str, Any] = {"tool": ToolOutput(Purchase), "native": NativeOutput(Purchase)}
    if isinstance(model, AnthropicModel):
        del kinds["native"]  # it knows the names of the models that have it
    for name, kind in kinds.items():
        try:
            structured[name] = (await Agent(model, output_type=kind).run("A purchase as JSON.")).output.model_dump()
        except Exception as error:
            structured[name] = f"{type(error).__name__}: {error}"[:400]
    thoughts = [
        part.content for message in result.all_messages() for part in message.parts if isinstance(part, ThinkingPart)
    ]
    return {
        "thoughts": thoughts,
        "answer": result.output,
        "streamed": streamed,
        "again": again.output,
        "cached": again.usage.cache_read_tokens,
        "structured": structured,
    }


async def main() -> None:
    openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="any")
    models = {
        "chat": OpenAIChatModel(MODEL, provider=openai),
        "responses": OpenAIResponsesModel(MODEL, provider=openai),
        "anthropic": AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="any")),
    }
    print(json.dumps({name: await converse(model) for name, model in models.items()}))


asyncio.run(main())
