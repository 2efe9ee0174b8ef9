"""Outlines with OpenAI's client and its own for vLLM servers: JSON of a given type, a choice, a regex and a grammar."""

import json
import sys
from typing import Any, Literal

import openai
import outlines
from outlines.types import CFG, Regex
from pydantic import BaseModel

URL, MODEL = sys.argv[1], sys.argv[2]
GRAMMAR = """
?start: "Rome" | "Paris"
"""


class Purchase(BaseModel):
    """What to buy."""

    item: str
    count: int


client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any")
found: dict[str, Any] = {}
for kind, model in (("openai", outlines.from_openai(client, MODEL)), ("vllm", outlines.from_vllm(client, MODEL))):
    made = found[kind] = {}
    questions: list[tuple[str, str, Any]] = [("type", "A purchase as JSON.", Purchase)]
    if kind == "vllm":
        questions += [
            ("choice", "Which city?", Literal["Rome", "Paris"]),
            ("regex", "Which number?", Regex("[0-9]{4}")),
            ("grammar", "Which city?", CFG(GRAMMAR)),
        ]
    for name, question, wanted in questions:
        try:
            made[name] = model(question, wanted, max_tokens=60)
        except Exception as error:
            made[name] = f"{type(error).__name__}: {error}"[:400]
print(json.dumps(found))
