"""Other projects' clients, as they are installed, in conversations of at least two turns.

`make clients` installs them. With CLIENTS_RECORD=tests/server/recorded the tests write what the clients send.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.client_programs import (
    ANSWER,
    MODEL,
    PURCHASE,
    QUESTION,
    SECRET,
    THOUGHT,
    Workplace,
    agent,
    call_of,
    library,
    node_program,
    program,
    workplace,
)
from tests.server.recording import Exchange

pytestmark = pytest.mark.clients
both = pytest.mark.parametrize("thinks", [False, True], ids=["plain", "thinking"])


def _name(name: str, thinks: bool) -> str:
    return f"{name}-thinking" if thinks else name


def _cached(exchange: Exchange) -> int:
    """Return the prompt tokens that were in the prefix cache, by the last usage of an answer."""
    found = [usage for event in (exchange.events or [json.loads(exchange.answer)]) for usage in _usages(event)]
    details = found[-1].get("prompt_tokens_details") or found[-1].get("input_tokens_details") or {}
    return int(details.get("cached_tokens", found[-1].get("cache_read_input_tokens", 0)))


def _usages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, list):
        return [found for one in value for found in _usages(one)]
    if not isinstance(value, dict):
        return []
    return [found for key, one in value.items() for found in ([one] if key == "usage" and one else _usages(one))]


def _check_cache(exchanges: list[Exchange], marker: str = SECRET) -> None:
    """Each request that has the call and its result in it shares all but its end with the one before."""
    later = [one for one in exchanges if marker in json.dumps(one.body)]
    assert later
    for one in later:
        assert _cached(one) > 0.9 * _cached(later[0])
        assert _cached(one) > 0


# ------------------------------------------------------------------------------------- agents


@both
def test_claude_code(thinks: bool, tmp_path: Path) -> None:
    claude = node_program("claude")
    words = [claude, "--model", MODEL, "--allowedTools", "Read", "--output-format", "stream-json", "--verbose", "-p"]

    def turns(project: Path) -> Any:
        return agent(call_of("Read", file_path=str(project / "notes.txt")), thinks=thinks)

    with workplace(tmp_path, _name("claude-code", thinks), turns, thinks=thinks) as place:
        models = {"ANTHROPIC_MODEL": MODEL, "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL}
        first = place.run(*words, QUESTION, **models)
        again = place.run(*words, "--continue", "And again?", **models)
        posts = place.posts("/v1/messages")
    for printed in (first, again):
        result = json.loads(printed.strip().splitlines()[-1])
        assert (result["result"], result["is_error"]) == (ANSWER, False)
    assert [one.status for one in posts] == [200] * 3
    _check_cache(posts)
    assert (THOUGHT in first) == thinks


def _configure_codex(place: Workplace) -> None:
    (place.home / ".codex").mkdir()
    (place.home / ".codex" / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "local"\nmodel_reasoning_summary = "auto"\n[model_providers.local]\n'
        f'name = "local"\nbase_url = "{place.url}/v1"\nwire_api = "responses"\n'
    )


@both
def test_codex(thinks: bool, tmp_path: Path) -> None:
    codex = node_program("codex")
    words = ["--skip-git-repo-check", "--json"]
    with workplace(
        tmp_path, _name("codex", thinks), lambda _: agent(call_of("exec_command", cmd="cat notes.txt"), thinks=thinks),
        thinks=thinks,
    ) as place:  # fmt: skip
        _configure_codex(place)
        first = place.run(codex, "exec", *words, "--sandbox", "danger-full-access", QUESTION)
        again = place.run(codex, "exec", "resume", "--last", *words, "And again?")
        posts = place.posts("/v1/responses")
    for printed in (first, again):
        items = [event.get("item", {}) for event in map(json.loads, printed.strip().splitlines())]
        assert ANSWER in [item.get("text") for item in items]
    assert [one.status for one in posts] == [200] * 3
    _check_cache(posts)


@both
def test_opencode(thinks: bool, tmp_path: Path) -> None:
    opencode = node_program("opencode")

    def turns(project: Path) -> Any:
        return agent(call_of("read", filePath=str(project / "notes.txt")), thinks=thinks)

    with workplace(tmp_path, _name("opencode", thinks), turns, thinks=thinks) as place:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{place.url}/v1", "apiKey": "any"},
            "models": {MODEL: {"tool_call": True, "reasoning": thinks, "limit": {"context": 65_536, "output": 4096}}},
        }
        name = f"local/{MODEL}"
        settings = {"provider": {"local": provider}, "model": name, "small_model": name, "share": "disabled"}
        (place.project / "opencode.json").write_text(json.dumps(settings))
        assert ANSWER in place.run(opencode, "run", QUESTION)
        assert ANSWER in place.run(opencode, "run", "--continue", "And again?")
        posts = place.posts("/v1/chat/completions")
    assert {one.status for one in posts} == {200}
    _check_cache(posts)


@both
def test_qwen_code(thinks: bool, tmp_path: Path) -> None:
    qwen = node_program("qwen")

    def turns(project: Path) -> Any:
        return agent(call_of("read_file", file_path=str(project / "notes.txt")), thinks=thinks)

    with workplace(tmp_path, _name("qwen-code", thinks), turns, thinks=thinks) as place:
        words = [qwen, "--auth-type", "openai", "--model", MODEL, "--openai-api-key", "any", "--approval-mode", "yolo"]
        words += ["--openai-base-url", f"{place.url}/v1"]
        assert ANSWER in place.run(*words, "-p", QUESTION)
        assert ANSWER in place.run(*words, "--continue", "-p", "And again?")
        posts = place.posts("/v1/chat/completions")
    assert {one.status for one in posts} == {200}
    _check_cache(posts[:3])  # then another agent, with tools of its own, looks for what to remember


_CHANGE = f"Remember to buy: {SECRET}\n=======\nRemember to sell: {SECRET}"
_EDIT = f"notes.txt\n```\n<<<<<<< SEARCH\n{_CHANGE}\n>>>>>>> REPLACE\n```\n"


@both
@pytest.mark.parametrize("api", ["openai", "ollama_chat"])
def test_aider(api: str, thinks: bool, tmp_path: Path) -> None:
    aider = program("aider/bin/aider")
    words = [
        aider,
        "--yes-always",
        "--no-check-update",
        "--no-show-release-notes",
        "--no-analytics",
        "--map-tokens",
        "0",
    ]
    words += ["--no-git", "--no-show-model-warnings", "--edit-format", "diff", "--model", f"{api}/{MODEL}"]
    thought = f"<think>\n{THOUGHT}\n</think>\n\n" if thinks else ""
    with workplace(
        tmp_path, _name(f"aider-{api}", thinks), lambda _: lambda _: thought + _EDIT, thinks=thinks
    ) as place:
        caches = place.home / ".aider" / "caches"
        caches.mkdir(parents=True)
        (caches / "model_prices_and_context_window.json").write_text(
            '{"none": {}}'
        )  # it would ask another host for them
        environment = {"OPENAI_API_BASE": f"{place.url}/v1"}
        printed = place.run(*words, "--message", "Change buy to sell.", "notes.txt", **environment)
        edited = (place.project / "notes.txt").read_text()
        more = [*words, "--restore-chat-history", "--message", "Again.", "notes.txt"]
        place.run(*more, "--dry-run", **environment)
        posts = place.posts("/api/chat" if api == "ollama_chat" else "/v1/chat/completions")
    assert "Applied edit to notes.txt" in printed
    assert edited == f"Remember to sell: {SECRET}\n"
    assert len(posts) >= 2
    assert {one.status for one in posts} == {200}


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("claude", ["--model", MODEL, "-p", QUESTION], "Prompt is too long"),
        ("codex", ["exec", "--skip-git-repo-check", QUESTION], "ran out of room"),
    ],
)
def test_agents_understand_that_a_prompt_is_too_long(name: str, words: list[str], said: str, tmp_path: Path) -> None:
    client = node_program(name)
    with workplace(tmp_path, f"{name}-too-long", lambda _: [ANSWER], max_len=8192) as place:
        _configure_codex(place)
        with pytest.raises(AssertionError, match=said):
            place.run(client, *words, ANTHROPIC_MODEL=MODEL)


# ---------------------------------------------------------------------------------- libraries


def _library(tmp_path: Path, name: str, script: str, *, thinks: bool = False) -> tuple[Any, Workplace]:
    with workplace(tmp_path, _name(name, thinks), lambda _: library(thinks=thinks), thinks=thinks) as place:
        return place.run_script(script), place


@both
def test_litellm(thinks: bool, tmp_path: Path) -> None:
    found, _ = _library(tmp_path, "litellm", "litellm_client.py", thinks=thinks)
    for api, made in found.items():
        assert made["reason"] == "tool_calls", api
        assert made["answer"] == made["streamed"] == ANSWER, api
        assert (made["streamed_name"], json.loads(made["streamed_arguments"])) == ("read_file", {"path": "notes.txt"})
        assert made["thought"] == (THOUGHT if thinks else None), api
        # It looks for the phrases of this error in answers of the two other APIs.
        assert made["error"] == ("BadRequestError" if api == "ollama" else "ContextWindowExceededError"), api
    assert found["openai"]["cached"] > 0
    assert found["anthropic"]["cached"] > 0


@both
def test_langchain(thinks: bool, tmp_path: Path) -> None:
    found, _ = _library(tmp_path, "langchain", "langchain_client.py", thinks=thinks)
    for api, made in found.items():
        assert made["answer"] == made["streamed"] == ANSWER, api
        assert made["streamed_calls"] == [["read_file", {"path": "notes.txt"}]], api
        # ChatOpenAI does not read thoughts of chat completions.
        assert (THOUGHT in json.dumps(made["thought"])) == (thinks and api != "chat"), api
        assert set(map(json.dumps, made["structured"].values())) == {json.dumps(PURCHASE)}, (api, made["structured"])
        assert api == "ollama" or made["cached"] > 0


@both
def test_pydantic_ai(thinks: bool, tmp_path: Path) -> None:
    found, _ = _library(tmp_path, "pydantic-ai", "pydantic_ai_client.py", thinks=thinks)
    for api, made in found.items():
        assert made["answer"] == made["streamed"] == made["again"] == ANSWER, api
        assert set(map(json.dumps, made["structured"].values())) == {json.dumps(PURCHASE)}, (api, made["structured"])
        assert made["cached"] > 0, api
        assert bool(made["thoughts"]) == thinks, api


@both
def test_openai_agents(thinks: bool, tmp_path: Path) -> None:
    found, _ = _library(tmp_path, "openai-agents", "openai_agents_client.py", thinks=thinks)
    for api, made in found.items():
        assert made["answer"] == made["streamed"] == made["again"] == ANSWER, api
        assert made["structured"] == PURCHASE, api
        assert made["cached"] > 0, api


@both
def test_ai_sdk(thinks: bool, tmp_path: Path) -> None:
    program("node/node_modules/ai")
    found, _ = _library(tmp_path, "ai-sdk", "ai_sdk_client.mjs", thinks=thinks)
    for api, made in found.items():
        assert made["answer"] == made["streamed"] == made["again"] == ANSWER, api
        assert made["structured"] == PURCHASE, api
        assert made["cached"] > 0, api
        assert all((thought == THOUGHT) if thinks else (thought is None) for thought in made["thoughts"]), api
        assert made["thoughts"] == made["streamedThoughts"], api


def test_instructor(tmp_path: Path) -> None:
    found, _ = _library(tmp_path, "instructor", "instructor_client.py")
    assert found == dict.fromkeys(["tools", "json_schema", "json", "responses", "anthropic"], PURCHASE)


def test_outlines(tmp_path: Path) -> None:
    found, _ = _library(tmp_path, "outlines", "outlines_client.py")
    assert json.loads(found["openai"]["type"]) == json.loads(found["vllm"]["type"]) == PURCHASE
    assert [found["vllm"][name] for name in ("choice", "regex", "grammar")] == ["Rome", "4711", "Rome"]


def test_guidance(tmp_path: Path) -> None:
    found, _ = _library(tmp_path, "guidance", "guidance_client.py")
    assert (found["text"], json.loads(found["type"])) == ("Hello there.", PURCHASE)


def test_smolagents(tmp_path: Path) -> None:
    found, place = _library(tmp_path, "smolagents", "smolagents_client.py")
    assert found["answer"] == ANSWER
    _check_cache(place.posts())


@both
def test_llm(thinks: bool, tmp_path: Path) -> None:
    llm = program("python/bin/llm")
    with workplace(tmp_path, _name("llm", thinks), lambda _: library(thinks=thinks), thinks=thinks) as place:
        (place.project / "extra-openai-models.yaml").write_text(
            f"- model_id: {MODEL}\n  model_name: {MODEL}\n  api_base: {place.url}/v1\n  supports_schema: true\n"
            "  supports_tools: true\n"
        )
        (place.project / "tools.py").write_text(
            'def read_file(path: str) -> str:\n    """Read a file."""\n    return open(path).read()\n'
        )
        environment = {"LLM_USER_PATH": str(place.project)}
        asked = [llm, "-m", MODEL, "--functions", "tools.py", QUESTION]
        assert ANSWER in place.run(*asked, **environment)
        assert ANSWER in place.run(llm, "-c", "--functions", "tools.py", "And again?", **environment)
        assert ANSWER in place.run(*asked, "--no-stream", **environment)
        schema = place.run(llm, "-m", MODEL, "--schema", "item, count int", "A purchase as JSON.", **environment)
        assert json.loads(schema) == PURCHASE
        _check_cache(place.posts())
