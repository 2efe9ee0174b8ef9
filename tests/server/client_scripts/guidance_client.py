"""guidance with OpenAI's API: free text, and JSON of a given type."""

import json
import sys
from typing import Any

import guidance
from guidance import assistant, gen, user
from guidance import json as as_json
from pydantic import BaseModel

URL, MODEL = sys.argv[1], sys.argv[2]


class Purchase(BaseModel):
    """What to buy."""

    item: str
    count: int


found: dict[str, Any] = {}
for name, question, wanted in (
    ("text", "Hello?", gen("made", max_tokens=40)),
    ("type", "A purchase as JSON.", as_json("made", schema=Purchase)),
):
    try:
        lm = guidance.models.OpenAI(MODEL, base_url=f"{URL}/v1", api_key="any", echo=False)
        with user():
            lm += question
        with assistant():
            lm += wanted
        found[name] = lm["made"]
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"[:400]
print(json.dumps(found))
