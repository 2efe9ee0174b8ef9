"""Requests of clients, cut to what tells them apart: a few tools, short texts, no paths and no identities."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.server.recording import Exchange
from tests.server.scripted_target import Script

FOLDER = Path(__file__).resolve().parent / "recorded"
_HEADERS = ("accept", "anthropic-beta", "anthropic-version", "openai-beta", "user-agent", "x-api-key")
_MAX_TOOLS, _MAX_TEXT, _MAX_DESCRIPTION = 4, 100, 30
_IDENTITY = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32,}")


def keep(
    name: str, exchanges: Sequence[Exchange], script: Script, home: Path, folder: Path = FOLDER, having: str = ""
) -> None:
    """Write the last request of each kind with this text in it, and the text that the model has generated for it."""
    kinds = {}
    for one in exchanges:
        asked = one.answer_headers.get("x-request-id", "?")
        texts = [text for name, text in zip(script.request_ids, script.texts, strict=True) if asked in name]
        if one.status == 200 and texts and having in json.dumps(one.body):
            kinds[one.path, *sorted(one.body)] = one, texts[0]
    requests = [
        {
            "path": one.path,
            "headers": _headers(one),
            "body": trimmed(one.body, text, home),
            "generates": _anonymous(text, home),
        }
        for one, text in kinds.values()
    ]
    if not requests:
        return
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(request, ensure_ascii=False) for request in requests)
    (folder / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _headers(exchange: Exchange) -> dict[str, str]:
    given = {name: value for name, value in exchange.headers.items() if name in _HEADERS}
    return given | ({"user-agent": given["user-agent"].split()[0]} if "user-agent" in given else {})


def trimmed(body: Any, generated: str, home: Path) -> Any:
    """Return a body with few tools, those that are called among them, and short texts."""
    written = json.dumps({key: value for key, value in body.items() if key != "tools"}) + generated
    called = set(re.findall(r'"name": "(\w+)"', written))
    if body.get("tools"):
        body = body | {"tools": _chosen(body["tools"], called)}
    return _short(body, home)


def _chosen(tools: Sequence[Any], called: set[str]) -> list[Any]:
    """Return the tools that are called, and those with a keyword of schemas or a type that none before them has."""
    chosen, seen = [], set()
    for tool in sorted(tools, key=lambda one: _name(one) not in called):
        words = _keywords(tool)
        if _name(tool) in called or (not words <= seen and len(chosen) < _MAX_TOOLS):
            nested = {"tools": _chosen(tool["tools"], called)[:2]} if "tools" in tool else {}
            chosen.append(tool | nested)
            seen |= words
    return chosen


def _name(tool: Any) -> str:
    return str(tool.get("function", tool).get("name"))


def _keywords(value: Any) -> set[str]:
    """Return the keys of a tool, without the names of its properties, and its types."""
    if isinstance(value, list):
        return set().union(*map(_keywords, value))
    if not isinstance(value, dict):
        return set()
    found = {f"type {value['type']}"} if isinstance(value.get("type"), str) else set()
    for key, inner in value.items():
        found |= _keywords(list(inner.values())) if key == "properties" else {key} | _keywords(inner)
    return found


def _short(value: Any, home: Path, limit: int = _MAX_TEXT) -> Any:
    if isinstance(value, dict):
        return {
            key: _short(one, home, _MAX_DESCRIPTION if key == "description" else limit) for key, one in value.items()
        }
    if isinstance(value, list):
        return [_short(one, home, limit) for one in value]
    if not isinstance(value, str):
        return value
    text = _anonymous(value, home)
    is_whole = len(text) <= limit or (text.startswith("{") and len(text) <= 3 * limit)  # arguments stay JSON
    return text if is_whole else text[: limit - 3] + "..."


def _anonymous(text: str, home: Path) -> str:
    text = text.replace(str(home), "/home/user").replace(str(home).replace("/", "-"), "-home-user")
    return _IDENTITY.sub(
        lambda found: "0" * 32 if "-" not in found[0] else "0" * 8 + "-0000-4000-8000-" + "0" * 12, text
    )
