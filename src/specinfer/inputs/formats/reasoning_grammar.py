"""The grammar of a thought and of a constrained answer after it, in Lark's notation."""

from collections.abc import Mapping
from dataclasses import replace

from specinfer.core.sampling import SamplingParams
from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.core.thought import Reasoning
from specinfer.inputs.formats.harmony import TEXTS, channel_rules
from specinfer.inputs.formats.lark import SPACE, Literals, SpecialToken, escaped, ranges


def with_thought(
    params: SamplingParams, reasoning: Reasoning, special_tokens: Mapping[str, SpecialToken]
) -> SamplingParams:
    """Return parameters for outputs with a thought: constraints follow it, and its markers are a part of the text."""
    hidden = [name for name, token in special_tokens.items() if not token.is_shown]
    if any(name in text for name in hidden for text in (reasoning.start, reasoning.end)):
        params = replace(params, skip_special_tokens=False)
    asked = params.structured_outputs
    if not isinstance(asked, StructuredOutputsParams) or asked.enable_in_reasoning:
        return params
    if reasoning.has_channels:
        rules = channel_rules((), "@response", Literals(TEXTS, special_tokens))
    else:
        rules = _thought(reasoning, special_tokens)
        opening = "thought" if reasoning.is_open else "(WS? start_mark thought)?"
        rules = [f"start: {opening} WS? @response", *rules, SPACE]
    made = StructuredOutputsParams(grammar="\n".join(rules), schemas={"response": asked}, field=asked.field)
    return replace(params, structured_outputs=made)


def _thought(reasoning: Reasoning, special_tokens: Mapping[str, SpecialToken]) -> list[str]:
    """Return the rules of a thought: any text and any shown tokens, up to the first text that ends it."""
    end, literals = reasoning.end, Literals((reasoning.start, reasoning.end), special_tokens)
    until, options = (f"TEXT {literals.of(end)}", "") if end in special_tokens else literals.until(end)
    others = [token.id for name, token in special_tokens.items() if token.is_shown and name != end]
    return [
        f"start_mark: {literals.of(reasoning.start)}",
        "thought: (TEXT other)* last" if others else "thought: last",
        f"last{options}: {until}",
        *([f"other: <[{ranges(others)}]>"] if others else []),
        f"TEXT: /(?s:.*)/ & ~/(?s:.*){escaped(end)}(?s:.*)/",  # spelled as text it would look like the token
    ]
