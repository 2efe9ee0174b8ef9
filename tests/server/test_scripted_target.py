"""The scripted target: exactly the texts of its script, with trees, grammars and over HTTP."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving import choices_of, post
from specinfer import LLM, SamplingParams
from tests.server import scripted_target
from tests.server.scripted_target import TEMPLATES, scripted
from tests.server.served_command import PATIENCE, status_of
from worlds import await_that, free_port

CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "notes.txt"}}\n</tool_call>'
ANSWER = "The notes say: buy milk, buy bread, buy milk, buy bread, buy milk. \u00e9\u20ac\U0001f642"
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
READ = {
    "id": "a", "type": "function", "function": {"name": "read_file", "arguments": json.dumps({"path": "notes.txt"})},
}  # fmt: skip
USER = {"role": "user", "content": "What is in notes.txt?"}
GREEDY = SamplingParams(temperature=0, max_tokens=200)


def _chat(llm: LLM, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    return [choices_of(answer)[0] for answer in post(llm, "/v1/chat/completions", *bodies)]


@pytest.mark.parametrize("options", [{}, {"drafters": ["ngram"], "tree": "1,3,2,1,1"}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_output_is_the_script(options: Any, temperature: float) -> None:
    with scripted([ANSWER, CALL], **options) as llm:
        params = SamplingParams(temperature=temperature, max_tokens=200)
        first, second = llm.chat([USER], params), llm.chat([USER], params)
    assert [one[0].outputs[0].text for one in (first, second)] == [ANSWER, CALL]
    assert [one[0].outputs[0].finish_reason for one in (first, second)] == ["stop", "stop"]


def test_draft_tokens_are_accepted_and_rejected() -> None:
    with scripted([ANSWER], drafters=["ngram"], tree="1,3,2,1,1") as llm:
        (output,) = llm.chat([USER], GREEDY)
    assert output.outputs[0].text == ANSWER
    assert 0 < output.metrics.speculative_decoding["draft_acceptance_rate"] < 1


def test_a_call_and_an_answer_over_http() -> None:
    with scripted([CALL, ANSWER], drafters=["ngram"]) as llm:
        call, answer = _chat(
            llm,
            {"messages": [USER], "tools": [TOOL]},
            {"messages": [USER, {"role": "assistant", "content": "x"}, USER], "tools": [TOOL]},
        )
        assert len(llm.script.prompts) == 2
        assert "What is in notes.txt?" in llm.script.prompts[0]
    assert json.loads(call["message"]["tool_calls"][0]["function"]["arguments"]) == {"path": "notes.txt"}
    assert answer["message"]["content"] == ANSWER


def test_a_prompt_may_choose_the_text() -> None:
    with scripted(lambda prompt: "Rome" if "Italy" in prompt else "Paris") as llm:
        texts = [llm.chat([{"role": "user", "content": name}], GREEDY)[0].outputs[0].text for name in ("Italy", "x")]
    assert texts == ["Rome", "Paris"]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_grammars_let_the_script_through(choice: str) -> None:
    tool = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    with scripted([CALL]) as llm:
        (call,) = _chat(llm, {"messages": [USER], "tools": [tool], "tool_choice": choice, "max_tokens": 80})
    assert call["finish_reason"] == "tool_calls"
    assert call["message"]["tool_calls"][0]["function"]["name"] == "read_file"


def test_a_script_that_a_grammar_forbids_ends() -> None:
    with scripted(["Hello"]) as llm:
        body = {"messages": [USER], "structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 8}
        (choice,) = _chat(llm, body)
    assert choice["message"]["content"] in ("yes", "no")


def test_a_thinking_template_writes_thoughts_and_calls() -> None:
    thought = {"role": "assistant", "content": "", "reasoning_content": "Milk?", "tool_calls": [READ]}
    result = {"role": "tool", "tool_call_id": "a", "content": "milk"}
    with scripted(["Milk."], template=TEMPLATES["thinking"]) as llm:
        (output,) = llm.chat([USER, thought, result], GREEDY)
        (prompt,) = llm.script.prompts
    assert output.outputs[0].text == "Milk."
    assert "<think>\nMilk?\n</think>" in prompt
    assert CALL in prompt


@pytest.mark.slow
def test_a_process_serves_a_script(tmp_path: Path) -> None:
    (tmp_path / "turns.json").write_text(json.dumps([ANSWER]))
    port = free_port()
    words = [sys.executable, scripted_target.__file__, str(tmp_path / "turns.json"), "--port", str(port)]
    with (
        subprocess.Popen(words, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client,
    ):
        try:
            await_that(lambda: status_of(client) == 200, PATIENCE)
            answer = client.post("/v1/chat/completions", json={"messages": [USER]})
        finally:
            process.terminate()
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER
