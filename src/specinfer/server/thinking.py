"""Fields of chat completions for what requests of Anthropic's and Ollama's API ask of the model's thoughts."""

import re
from typing import Any

_SWITCHES = ("enable_thinking", "thinking")  # variables of chat templates that turn thoughts on or off
_HIGHEST = ("max", "xhigh")  # efforts that many templates do not know


def thinking_fields(template: str, is_on: bool | None, effort: str | None, given: Any = None) -> dict[str, Any]:
    """Return the fields that turn thoughts on or off and set their effort, as far as the chat template reads them.

    Args:
        is_on: Whether thoughts are wanted, or None for the default of the template.
        given: The keywords for the template that the request has itself; they take precedence.
    """
    kwargs = {} if is_on is None else {name: is_on for name in _SWITCHES if re.search(rf"\b{name}\b", template)}
    fields: dict[str, Any] = {"chat_template_kwargs": kwargs | given if isinstance(given, dict) else given or kwargs}
    if effort is not None:
        fields["reasoning_effort"] = "high" if effort in _HIGHEST and effort not in template else effort
    return fields
