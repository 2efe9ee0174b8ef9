"""Who may ask: keys on every path but those named, and without keys nothing that another site's page could send."""

import hmac
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request
from fastapi.routing import APIRoute

from serving import Server, error_of, serve
from specinfer.llm import LLM
from specinfer.server import app
from specinfer.server.auth import cache_salt_of
from specinfer.server.config import ServerConfig
from specinfer.server.keys import KeySettings
from specinfer.server.state import ServerState

KEY, OTHER = "a-long-key-of-one", "a-long-key-of-another"


@pytest.fixture(scope="module")
def llm(model_folder: Callable[..., Path]) -> LLM:
    return LLM(model_folder(tokenizer=True), tree="off")


def status(headers: dict[str, str], path: str = "/version", method: str = "GET", **config: Any) -> int:
    with Server(None, **config) as server:
        answer = server.request(method, path, headers=headers)
    if answer.status_code >= 400 and method != "HEAD" and not path.startswith(("/api/", "/v1/messages")):
        error_of(answer)
    return answer.status_code


# --------------------------------------------------------------------------------------------- keys


def _paths() -> list[tuple[str, str]]:
    found = {("/openapi.json", "GET"), ("/nothing", "GET"), ("/nothing", "POST")}
    for route in (route for module in app._MODULES for route in module.router.routes):
        assert isinstance(route, APIRoute)
        found |= {(route.path, method) for method in {"GET", "POST", *route.methods}}
    assert len(found) > 40
    return sorted(found)


OPEN = {(path, method) for path in ("/health", "/health/ready", "/ping") for method in ("GET", "HEAD", "POST")}
OPEN |= {(path, method) for path in ("/", "/static/{name}") for method in ("GET", "HEAD")}


def test_every_path_needs_a_key_but_those_named() -> None:
    with Server(None, api_keys=(KEY,)) as server:
        for path, method in _paths():
            named = path.replace("{name:path}", "tiny").replace("{name}", "page.js")
            got = server.request(method, named).status_code
            assert (got != 401) == ((path, method) in OPEN), f"{method} {path}: {got}"


def test_a_key_comes_in_one_of_three_headers() -> None:
    for headers in (
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer  {KEY} "},
        {"api-key": KEY},
        {"x-api-key": KEY},
        {"authorization": "Bearer wrong", "api-key": KEY},  # some clients send both
    ):
        assert status(headers, api_keys=(OTHER, KEY)) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": "Bearer "},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY.upper()}"},
        {"api-key": ""},
        {"x-api-key": "\u00e9" * 8},
        {"cookie": f"api-key={KEY}"},
    ],
)
def test_what_is_no_key_is_refused(headers: dict[str, str]) -> None:
    sent = {name: value.encode("latin-1") for name, value in headers.items()}
    assert status(sent, api_keys=(KEY,)) == 401  # type: ignore[arg-type]


def test_the_refusal_is_openais() -> None:
    with Server(None, api_keys=(KEY,)) as server:
        answer = server.post("/v1/completions", json={"prompt": "a"})
        error = error_of(answer)
        assert error["code"] == "invalid_api_key"
        assert error["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("path", "host"),
    [
        ("/version", "x/health?"),
        ("/version?/health", "localhost"),
        ("/%2fhealth", "localhost"),
        ("/health/../version", "localhost"),
        ("/health/", "localhost"),
        ("/health%2f..%2fversion", "localhost"),
        ("/static/%2e%2e/version", "localhost"),
        ("/staticx", "localhost"),
    ],
)
def test_a_path_is_not_opened_by_looking_like_an_open_one(path: str, host: str) -> None:
    got = status({"host": host}, path, api_keys=(KEY,))
    # A path below /static/ is the page's, which knows none of these names.
    assert got == (404 if path.startswith("/static/") else 401)


def test_a_host_opens_no_path() -> None:
    hosts = ("x/health?", "/health", "127.0.0.1/health?x=", "x?/health", "health", "[::1]/health")
    to_read = ("/v1/models", "/metrics", "/load", "/openapi.json", "/version", "/page.json", "/nope", "/health/")
    to_write = (
        "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/health/../v1/completions", "/PING",
    )  # fmt: skip

    with Server(None, api_keys=(KEY,)) as server:
        for host in hosts:
            for method, path in (*(("GET", path) for path in to_read), *(("POST", path) for path in to_write)):
                answer = server.request(method, path, json={"prompt": "a"}, headers={"host": host})
                assert answer.status_code == 401, (host, method, path)
                assert "API key" in error_of(answer)["message"]


def test_all_keys_are_compared_whichever_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    for key in (KEY, OTHER, "wrong-key"):
        compared.clear()
        status({"api-key": key}, api_keys=(KEY, OTHER))
        assert len(compared) == 2
        assert all(len(digest) == 32 for pair in compared for digest in pair)  # never the keys themselves


def test_metrics_are_public_only_if_configured(llm: LLM) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> int:
        return (await client.get("/metrics")).status_code

    assert serve(llm, body, api_keys=(KEY,)) == 401
    assert serve(llm, body, api_keys=(KEY,), metrics_public=True) == 404  # nothing scrapes here


def test_without_the_page_nothing_of_it_is_open() -> None:
    assert status({}, "/", api_keys=(KEY,), page=False) == 401
    assert status({}, "/static/page.js", api_keys=(KEY,), page=False) == 401


def test_each_key_is_a_tenant_of_its_own() -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> list[str]:
        app = client._transport.app  # type: ignore[attr-defined]

        @app.get("/tenant")
        async def tenant(request: Request) -> str:
            return str(request.state.tenant)

        keys = (KEY, OTHER, KEY)
        return [(await client.get("/tenant", headers={"api-key": key})).json() for key in keys]

    one, other, again = serve(None, body, api_keys=(KEY, OTHER))
    assert (one, other, again) == ("key-1", "key-2", "key-1"), "and no part or digest of a key is in its name"
    assert serve(None, body) == ["", "", ""]


def test_a_key_finds_no_prefix_of_the_one_that_had_its_place_before_a_restart() -> None:
    def salts(*keys: str, **settings: KeySettings) -> list[str | None]:
        config = ServerConfig(api_keys=keys, key_settings=settings)
        requests = [Request({"type": "http", "state": {"tenant": name}}) for name in config.tenants]
        return [cache_salt_of(request, config, "asked") for request in requests]

    before, after = salts(KEY, OTHER), salts("a-long-new-key", OTHER)
    assert before[1] == after[1]
    assert len({*before, *after}) == 3
    assert not any(key in str(salt) for key in (KEY, OTHER) for salt in before)
    named = {KEY: KeySettings(name="key-2"), OTHER: KeySettings(name="alice")}
    assert salts(KEY, OTHER, **named) == ["key-2:asked", "alice:asked"]
    assert salts(KEY) == ["asked"]


# ------------------------------------------------------------------------------------- without keys


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("192.168.7.7", True),
        ("app.localhost", True),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("evil.example/localhost", False),
        ("localhost@evil.example", False),
        ("", False),
    ],
)
def test_names_that_others_could_point_here_are_refused(host: str, allowed: bool) -> None:
    assert status({"host": host}) == (200 if allowed else 403)
    assert status({"host": host}, "/health") == 503  # open for all; the model is not loaded


def test_names_of_the_server_are_allowed_one_by_one() -> None:
    allowed = {"allowed_hosts": ("llm.example",)}
    assert status({"host": "llm.example:443"}, **allowed) == 200
    assert status({"host": "evil.example"}, **allowed) == 403
    assert status({"host": "evil.example"}, allowed_hosts=("*",)) == 200
    # With a key another site has nothing to send.
    assert status({"host": "any.example", "api-key": KEY}, api_keys=(KEY,)) == 200
    assert status({"host": "any.example", "api-key": KEY}, api_keys=(KEY,), **allowed) == 403


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        (None, True),
        ("http://localhost:8000", True),
        ("http://localhost:3000", False),
        ("https://evil.example", False),
        ("http://localhost:8000.evil.example", False),
        ("https://localhost:8000", False),
        ("ftp://localhost:8000", False),
        ("localhost:8000", False),
        ("null", False),
        ("", False),
    ],
)
def test_pages_of_other_sites_are_refused(origin: str | None, allowed: bool) -> None:
    headers = {"host": "localhost:8000"} | ({} if origin is None else {"origin": origin})
    assert status(headers) == (200 if allowed else 403)


def test_pages_are_allowed_one_by_one() -> None:
    headers = {"host": "localhost:8000", "origin": "http://localhost:3000"}
    assert status(headers, allowed_origins=("http://localhost:3000",)) == 200
    assert status(headers, allowed_origins=("http://localhost:3001",)) == 403
    assert status(headers, allowed_origins=("*",)) == 200
    assert status({"host": "localhost", "origin": "http://localhost:80"}) == 200
    assert status({"host": "localhost:80", "origin": "http://localhost"}) == 200


def test_a_page_of_the_same_name_under_another_scheme_is_another_site() -> None:
    assert status({"host": "localhost", "origin": "https://localhost"}) == 403
    assert status({"host": "localhost:443", "origin": "https://localhost"}) == 403
    forwarded = {"host": "localhost", "x-forwarded-proto": "https"}  # as a proxy in front, for TLS, sends it
    assert status(forwarded | {"origin": "https://localhost"}) == 200
    assert status(forwarded | {"origin": "http://localhost"}) == 403


def test_traces_do_not_show_one_key_what_drafters_learned_from_another(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "adaptation", object())
    asked = {"prompt": "the", "max_tokens": 2, "trace": True}

    async def body(client: httpx.AsyncClient, state: ServerState) -> httpx.Response:
        return await client.post("/v1/completions", json=asked, headers={"authorization": f"Bearer {KEY}"})

    refused = serve(llm, body, api_keys=(KEY, OTHER))
    assert refused.status_code == 400
    assert "trace: drafters learn from the texts of all keys" in error_of(refused)["message"]
    assert serve(llm, body, api_keys=(KEY,)).status_code == 200, "with one key there is nothing to hide"


@pytest.mark.parametrize(
    ("roles", "allowed"),
    [
        (None, {"/metrics", "/load", "/version", "/v1/completions"}),
        (("generate",), {"/version", "/v1/completions"}),
        (("metrics",), {"/metrics", "/load", "/version"}),
        (("generate", "metrics"), {"/metrics", "/load", "/version", "/v1/completions"}),
    ],
)
def test_a_key_may_do_what_its_roles_say(llm: LLM, roles: tuple[str, ...] | None, allowed: set[str]) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> set[str]:
        state.scrape = lambda: b""
        found, headers = set(), {"authorization": f"Bearer {KEY}"}
        for path in ("/metrics", "/load", "/version"):
            if (await client.get(path, headers=headers)).status_code == 200:
                found.add(path)
        answer = await client.post("/v1/completions", json={"prompt": "the", "max_tokens": 1}, headers=headers)
        if answer.status_code == 200:
            found.add("/v1/completions")
        elif answer.status_code == 403:
            assert error_of(answer)["code"] == "insufficient_permissions"
        return found

    settings = {} if roles is None else {KEY: KeySettings(roles=roles)}
    assert serve(llm, body, api_keys=(KEY, OTHER), key_settings=settings) == allowed


# ------------------------------------------------------------------------------------- types of content

CURL = {"user-agent": "curl/8.5.0", "accept": "*/*", "content-type": "application/x-www-form-urlencoded"}


def generate(llm: LLM, headers: dict[str, str], path: str = "/api/generate", **config: Any) -> httpx.Response:
    """Send what `curl -d` does, with these headers in place of its own."""
    content = b'{"model": "tiny", "prompt": "the", "stream": false, "options": {"num_predict": 2}}'

    with Server(llm, **config) as server:
        return server.post(path, content=content, headers=headers)


@pytest.mark.parametrize("kind", [CURL["content-type"], "text/plain", None])
def test_ollamas_paths_take_what_curl_sends(llm: LLM, kind: str | None) -> None:
    headers = {name: value for name, value in CURL.items() if name != "content-type"}
    headers |= {"content-type": kind} if kind else {}
    answer = generate(llm, headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["done"] is True
    assert generate(llm, headers, api_keys=(KEY,)).status_code == 401
    assert generate(llm, headers | {"x-api-key": KEY}, api_keys=(KEY,)).status_code == 200
    assert generate(llm, headers, path="/v1/completions").status_code == 415


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1"}, 415),  # the page of this server, which sends JSON by its name
        ({"sec-fetch-site": "cross-site"}, 415),
        ({"host": "evil.example"}, 403),
    ],
)
def test_browsers_cannot_send_forms_to_ollamas_paths(llm: LLM, headers: dict[str, str], expected: int) -> None:
    for path in ("/api/generate", "/api/chat", "/api/show"):
        assert generate(llm, CURL | headers, path=path).status_code == expected


def test_a_page_that_is_allowed_still_names_json(llm: LLM) -> None:
    origin = {"origin": "https://friend.example"}
    allowed = {"allowed_origins": ("https://friend.example",)}
    assert generate(llm, CURL | origin, **allowed).status_code == 415
    assert generate(llm, CURL | origin | {"x-api-key": KEY}, api_keys=(KEY,)).status_code == 415
    assert generate(llm, CURL | origin | {"content-type": "application/json"}, **allowed).status_code == 200
