"""Models' formats of thoughts: the texts around one, and the grammar of a thought and a constrained answer after it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specinfer.core.sampling import SamplingParams
from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.core.thought import Reasoning
from specinfer.inputs.formats.harmony import CHANNEL, END, MESSAGE, START, TEXTS, channel_rules
from specinfer.inputs.formats.lark import SPACE, Literals, SpecialToken, escaped, ranges


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The texts around a thought.

    Attributes:
        start, end: Texts before and after it.
        forced_end: Text that ends a thought whose budget is spent.
        has_channels: Whether each message of the answer has a channel, as gpt-oss writes them (`harmony.py`).
        other_ends: Other texts that end a thought.
    """

    start: str
    end: str
    forced_end: str
    has_channels: bool = False
    other_ends: tuple[str, ...] = ()


def _tags(start: str, end: str) -> ReasoningFormat:
    return ReasoningFormat(start, end, f"\n{end}\n\n")


_FINAL = f"{CHANNEL}final{MESSAGE}"
THINK = _tags("<think>", "</think>")
HARMONY = ReasoningFormat(
    f"{CHANNEL}analysis{MESSAGE}",
    _FINAL,
    f"{END}{START}assistant{_FINAL}",
    has_channels=True,
    other_ends=(END,),
)
_FORMATS = {
    "openai_gptoss": HARMONY,
    "think": THINK,
    "mistral": _tags("[THINK]", "[/THINK]"),
    "seed_oss": _tags("<seed:think>", "</seed:think>"),
    "hy_v3": _tags("<think:opensource>", "</think:opensource>"),
    "cohere_command3": _tags("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": _tags("<|channel>thought", "<channel|>"),
    "apertus": _tags("<|inner_prefix|>", "<|inner_suffix|>"),
    "minimax_m3": _tags("<mm:think>", "</mm:think>"),
    "granite": _tags("Here is my thought process:", "Here is my response:"),
    "apriel": _tags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
}
# Names of vLLM's `--reasoning-parser` for formats that differ in nothing here.
_NAMES_OF_THINK = (
    "deepseek_r1", "deepseek_v3", "deepseek_v4", "ernie45", "exaone4", "glm45", "glm47", "holo2", "hunyuan_a13b",
    "kimi_k2", "mimo", "minimax_m2", "nemotron_v3", "olmo3", "poolside_v1", "qwen3", "step3", "step3p5",
)  # fmt: skip
REASONING_FORMATS = _FORMATS | dict.fromkeys(_NAMES_OF_THINK, THINK)


def find_reasoning(template: str | None) -> ReasoningFormat | None:
    """Return the format of the thoughts that a chat template knows, or None."""
    text = template or ""
    for form in _FORMATS.values():
        names = (CHANNEL, MESSAGE, "analysis") if form.has_channels else (form.end,)
        if all(name in text for name in names):
            return form
    return None


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
    until, options = (f"TEXT {literals.text(end)}", "") if end in special_tokens else literals.until(end)
    others = [token.id for name, token in special_tokens.items() if token.is_shown and name != end]
    return [
        f"start_mark: {literals.text(reasoning.start)}",
        "thought: (TEXT other)* last" if others else "thought: last",
        f"last{options}: {until}",
        *([f"other: <[{ranges(others)}]>"] if others else []),
        f"TEXT: /(?s:.*)/ & ~/(?s:.*){escaped(end)}(?s:.*)/",  # spelled as text it would look like the token
    ]
