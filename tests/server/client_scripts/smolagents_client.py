"""smolagents: an agent that calls tools."""

import json
import sys
from pathlib import Path

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

URL, MODEL = sys.argv[1], sys.argv[2]


@tool
def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: Its path.
    """
    return Path(path).read_text()


model = OpenAIServerModel(model_id=MODEL, api_base=f"{URL}/v1", api_key="any")
agent = ToolCallingAgent(tools=[read_file], model=model, max_steps=4, verbosity_level=0)
print(json.dumps({"answer": str(agent.run("What is in notes.txt?")), "steps": len(agent.memory.steps)}))
