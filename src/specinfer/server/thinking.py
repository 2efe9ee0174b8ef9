"""Keywords for the chat template and a budget for thoughts, from what a request asks of them."""

import re
from typing import Any

from specinfer.server.protocol import ChatFields

_SWITCHES = ("enable_thinking", "thinking")  # variables of chat templates that turn thoughts on or off
_EFFORT = "reasoning_effort"
_HIGHEST = ("max", "xhigh")  # efforts that many templates do not know
_BUDGETS = {"minimal": 256, "low": 1024, "medium": 4096}  # tokens of a thought


def template_kwargs(fields: ChatFields, template: str) -> dict[str, Any]:
    """Return the keywords that a request has for the template, with those for thoughts that the template reads."""
    effort, is_on = _asked(fields)
    kwargs: dict[str, Any] = {name: is_on for name in _SWITCHES if is_on is not None and _reads(template, name)}
    if effort is not None and _reads(template, _EFFORT):
        kwargs[_EFFORT] = "high" if effort in _HIGHEST and effort not in template else effort
    return kwargs | (fields.chat_template_kwargs or {})


def thinking_budget(fields: ChatFields, kwargs: dict[str, Any]) -> int | None:
    """Return the most tokens of a thought; it stands for an effort, or for "off", that is not among the keywords."""
    effort, is_on = _asked(fields)
    if fields.thinking_token_budget is not None:
        return fields.thinking_token_budget
    if is_on is False and kwargs.keys().isdisjoint((*_SWITCHES, _EFFORT)):
        return 0
    if effort not in _BUDGETS or _EFFORT in kwargs:
        return None
    return min(_BUDGETS[effort], (fields.token_limit or 1 << 30) // 2)  # half is left for the answer


def _asked(fields: ChatFields) -> tuple[str | None, bool | None]:
    """Return the effort, and whether thoughts are wanted; `reasoning` is OpenRouter's field for both."""
    reasoning = fields.reasoning or {}
    effort = reasoning.get("effort") if fields.reasoning_effort is None else fields.reasoning_effort
    is_on = reasoning.get("enabled") if fields.enable_thinking is None else fields.enable_thinking
    is_on = False if effort == "none" else is_on
    return effort if isinstance(effort, str) else None, is_on if isinstance(is_on, bool) else None


def _reads(template: str, name: str) -> bool:
    """Return whether a name is one of the template's variables, and no attribute or text."""
    return re.search(rf"(?<![.\w'\"]){name}(?![\w'\"])", template) is not None
