"""instructor by its modes, for two APIs."""

import json
import sys
from typing import Any

import anthropic
import instructor
import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1], sys.argv[2]


class Purchase(BaseModel):
    """What to buy."""

    item: str
    count: int


chat = openai.OpenAI(base_url=f"{URL}/v1", api_key="any")
messages = anthropic.Anthropic(base_url=URL, api_key="any")
made = {
    "tools": instructor.from_openai(chat, mode=instructor.Mode.TOOLS),
    "json_schema": instructor.from_openai(chat, mode=instructor.Mode.JSON_SCHEMA),
    "json": instructor.from_openai(chat, mode=instructor.Mode.JSON),
    "responses": instructor.from_openai(chat, mode=instructor.Mode.RESPONSES_TOOLS),
    "anthropic": instructor.from_anthropic(messages, mode=instructor.Mode.ANTHROPIC_TOOLS),
}
found: dict[str, Any] = {}
for name, client in made.items():
    try:
        more = {"max_tokens": 100} if name == "anthropic" else {}
        answer = client.chat.completions.create(
            model=MODEL,
            response_model=Purchase,
            max_retries=1,
            messages=[{"role": "user", "content": "A purchase as JSON."}],
            **more,
        )
        found[name] = answer.model_dump()
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"[:400]
print(json.dumps(found))
