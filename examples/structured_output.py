"""Output that follows a JSON schema: draft tokens outside the grammar are never accepted."""

import json

from specinfer import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["push", "pop"]}, "arguments": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}


def main() -> None:
    llm = LLM("demo")
    params = SamplingParams(temperature=1.0, max_tokens=60, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    for output in llm.generate(["# a call of the stack, as JSON\n"] * 3, params):
        tokens_per_pass = output.metrics.speculative_decoding["tokens_per_pass"]
        print(json.loads(output.outputs[0].text), f"{tokens_per_pass:.2f} tokens per target pass")


if __name__ == "__main__":
    main()
