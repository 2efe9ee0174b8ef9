"""The files of the page as they are sent: complete, closed against other sites, and without markup made of text."""

import asyncio
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from specinfer.server import page
from specinfer.server.app import create_app
from specinfer.server.config import ServerConfig
from specinfer.server.state import ServerState

_ROOT = Path(__file__).parents[2]
_PATHS = ["/", *(f"/static/{name}" for name in page.assets())]


def app_of(*, template: str | None = "{{ messages }}", has_tokenizer: bool = True, **settings: Any) -> FastAPI:
    """The page needs of an engine only what its model is."""
    llm = SimpleNamespace(
        max_model_len=512,
        drafter_choice="ngram: no small model is known",
        tokenizer=SimpleNamespace() if has_tokenizer else None,
        reader=SimpleNamespace(chat_template=template if has_tokenizer else None),
    )
    engine: Any = SimpleNamespace(llm=llm, is_draining=False, put_quotas=lambda _: None)
    return create_app(ServerState(engine, ServerConfig(**settings), ("model", "other")))


def ask(path: str, method: str = "GET", *, app: FastAPI | None = None, **headers: str) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app or app_of(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(send())


@pytest.mark.parametrize("path", _PATHS)
def test_every_file_is_sent_whole_and_closed(path: str) -> None:
    answer = ask(path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    kind = {"": "html", "html": "html", "js": "javascript", "css": "css", "svg": "svg+xml"}[path.partition(".")[2]]
    assert kind in answer.headers["content-type"]


@pytest.mark.parametrize("path", ["/", "/static/page.js"])
def test_a_known_file_is_not_sent_again(path: str) -> None:
    first = ask(path)
    for known in (first.headers["etag"], f'"x", W/{first.headers["etag"]}', "*"):
        again = ask(path, **{"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
    assert ask(path, **{"If-None-Match": '"x"'}).content == first.content
    assert first.headers["cache-control"] == "no-cache"


def test_a_head_has_no_body() -> None:
    answer = ask("/", "HEAD")
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("name", ["none.js", "..%2fpage.py", "%2e%2e/page.py", "index.html%00", ""])
def test_nothing_else_is_sent(name: str) -> None:
    assert ask(f"/static/{name}").status_code in (400, 404)


@pytest.mark.parametrize("path", ["/", "/static/page.js", "/page.json"])
def test_without_the_page_there_is_nothing(path: str) -> None:
    assert ask(path, app=app_of(page=False)).status_code in (401, 404)


@pytest.mark.parametrize(
    ("model", "has_text", "has_chat"),
    [({}, True, True), ({"template": None}, True, False), ({"has_tokenizer": False}, False, False)],
)
def test_the_page_learns_what_the_model_can(model: dict[str, Any], has_text: bool, has_chat: bool) -> None:
    told = ask("/page.json", app=app_of(**model)).json()
    assert (told["model"], told["max_model_len"]) == ("model", 512)
    assert told["drafters"] == "ngram: no small model is known"
    assert (told["has_text"], told["has_chat"]) == (has_text, has_chat)


def _read(condition: Callable[[str], bool]) -> dict[str, str]:
    return {name: asset.body.decode() for name, asset in page.assets().items() if condition(name)}


def test_all_that_is_named_is_there() -> None:
    markup = page.assets()["index.html"].body.decode()
    named = set(re.findall(r'(?:src|href)="static/([^"]+)"', markup))
    for text in _read(lambda name: name.endswith(".js")).values():
        named |= set(re.findall(r'from "\./([^"]+)"', text))
        assert not re.search(r'from "[^.]', text)
    assert named == set(page.assets()) - {"index.html"}


def test_the_page_loads_nothing_from_other_sites() -> None:
    for name, text in _read(lambda name: True).items():
        text = text.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
        assert not re.search(r"https?:|//[a-z]+\.[a-z]|@import|url\(", text), name


def test_markup_holds_no_script_and_no_style() -> None:
    markup = page.assets()["index.html"].body.decode()
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*src=)", markup)


def test_text_never_becomes_markup() -> None:
    made = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|srcdoc|DOMParser")
    for name, text in _read(lambda name: name.endswith(".js")).items():
        assert not made.search(text), name


def test_the_package_holds_the_files() -> None:
    folder = _ROOT / "src" / "specinfer" / "server"
    settings = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["specinfer.server"]
    packed = {path.name for pattern in patterns for path in folder.glob(pattern)}
    assert packed == set(page.assets())


def test_every_field_has_a_name() -> None:
    markup = page.assets()["index.html"].body.decode()
    for field in re.findall(r"<(?:input|select|textarea)[^>]*>", markup):
        name = re.search(r'id="([^"]+)"', field)
        before = markup[: markup.index(field)]
        is_inside = before.rfind("<label") > before.rfind("</label>")
        assert is_inside or "aria-label=" in field or (name and f'for="{name[1]}"' in markup), field
