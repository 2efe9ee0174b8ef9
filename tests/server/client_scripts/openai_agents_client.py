"""OpenAI's Agents SDK over two APIs: an agent with a tool, whole and streamed, and an output of a given type."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import agents
from agents import Agent, AsyncOpenAI, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from pydantic import BaseModel

URL, MODEL = sys.argv[1], sys.argv[2]
agents.set_tracing_disabled(True)


class Purchase(BaseModel):
    """What to buy."""

    item: str
    count: int


@function_tool
def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


async def converse(model: Any) -> dict[str, Any]:
    agent = Agent(name="reader", instructions="You answer questions.", tools=[read_file], model=model)
    result = await Runner.run(agent, "What is in notes.txt?")
    streamed = Runner.run_streamed(agent, "What is in notes.txt?")
    kinds = {event.type async for event in streamed.stream_events()}
    again = await Runner.run(agent, [*result.to_input_list(), {"role": "user", "content": "And again?"}])
    try:
        buyer = Agent(name="buyer", instructions="You buy.", output_type=Purchase, model=model)
        structured = (await Runner.run(buyer, "A purchase as JSON.")).final_output.model_dump()
    except Exception as error:
        structured = f"{type(error).__name__}: {error}"[:400]
    cached = again.context_wrapper.usage.input_tokens_details.cached_tokens
    return {
        "answer": result.final_output,
        "streamed": streamed.final_output,
        "kinds": sorted(kinds),
        "again": again.final_output,
        "cached": cached,
        "structured": structured,
    }


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="any")
    models = {"chat": OpenAIChatCompletionsModel(MODEL, client), "responses": OpenAIResponsesModel(MODEL, client)}
    print(json.dumps({name: await converse(model) for name, model in models.items()}))


asyncio.run(main())
