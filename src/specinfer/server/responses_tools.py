"""The tools of /v1/responses as those of chat completions, and the items in which a response reports their calls.

Functions within a namespace get names of their own, which are flat: the namespace, then the function. A search for
tools that the client carries out is a function. Other kinds are read, or left out, by `tools.py`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

_SEARCH = "tool_search"


def flat_name(namespace: Any, name: Any) -> Any:
    """Return the name of a function of a namespace, or of none."""
    if not isinstance(namespace, str) or not isinstance(name, str):
        return name
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


def flat_tools(tools: Sequence[Any] | None) -> tuple[list[Any], dict[str, dict[str, Any]]]:
    """Return tools without namespaces, and for names among them the fields of the items that report their calls."""
    flat: list[Any] = []
    items: dict[str, dict[str, Any]] = {}
    for namespace, given in _of_namespaces(tools or ()):
        tool, kind = given, given.get("type")
        name = flat_name(namespace, given.get("name"))
        if kind == _SEARCH and given.get("execution") == "client":
            tool, name = given | {"type": "function", "name": _SEARCH}, _SEARCH
            items[name] = {"type": "tool_search_call", "execution": "client"}
        elif isinstance(name, str) and (kind == "custom" or namespace is not None):
            tool = given | {"name": name}
            item = {"type": "custom_tool_call" if kind == "custom" else "function_call", "name": given["name"]}
            items[name] = item | ({} if namespace is None else {"namespace": namespace})
        flat.append(tool)
    return flat, items


def flat_choice(choice: Any) -> Any:
    """Return a choice among tools without namespaces."""
    if not isinstance(choice, dict):
        return choice
    flat = choice | {"name": flat_name(choice.get("namespace"), choice.get("name"))}
    return flat | {"tools": list(map(flat_choice, flat["tools"]))} if isinstance(flat.get("tools"), list) else flat


def added_tools(items: Any) -> list[Any]:
    """Return the tools that items of an input add to those of the request."""
    kinds = ("tool_search_output", "additional_tools")
    of_items = [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    lists = [item.get("tools") for item in of_items if item.get("type") in kinds]
    return [tool for tools in lists if isinstance(tools, list) for tool in tools if isinstance(tool, dict)]


def _of_namespaces(tools: Sequence[Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield each tool with its namespace, if it has one."""
    for tool in tools:
        if tool.get("type") != "namespace":
            yield None, tool
            continue
        inner = tool.get("tools")
        for one in inner if isinstance(inner, list) else ():
            if isinstance(one, dict):
                yield tool.get("name"), one
