"""Other projects' clients, each in a home of its own, against a scripted target whose exchanges are recorded.

`make clients` installs them in build/clients; the variable CLIENTS names another folder. None of them is asked to reach
another server than the one under test.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.server.recorded_requests import keep
from tests.server.recording import Exchange, recorded
from tests.server.scripted_target import TEMPLATES, Script, Turns, scripted

ROOT = Path(__file__).resolve().parent.parent.parent
CLIENTS = Path(os.environ.get("CLIENTS", ROOT / "build" / "clients")).resolve()
SCRIPTS = Path(__file__).parent / "client_scripts"
MODEL, SECRET, QUESTION = "tiny", "kumquat-4711", "What is in notes.txt?"
ANSWER, THOUGHT = f"You must buy the {SECRET}.", "The notes should say it."
PURCHASE = {"item": "kumquats", "count": 3}
_ANSWERS = {"Which city?": "Rome", "Which number?": "4711"}
_QUIET = {
    "AIDER_ANALYTICS": "false", "ANTHROPIC_AUTH_TOKEN": "any", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1", "DISABLE_ERROR_REPORTING": "1", "DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1", "LANGSMITH_TRACING": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "127.0.0.1", "OPENAI_AGENTS_DISABLE_TRACING": "1", "OPENAI_API_KEY": "any",
    "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1", "QWEN_TELEMETRY_ENABLED": "false",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Workplace:
    """A home with a project, and a server for the client that works there.

    Attributes:
        name: Client's name, which recorded requests get.
        exchanges: All requests and answers so far.
    """

    name: str
    home: Path
    url: str
    exchanges: list[Exchange]
    script: Script

    @property
    def project(self) -> Path:
        return self.home / "project"

    def run(self, *words: str | Path, **environment: str) -> str:
        """Return what a program prints. It must succeed."""
        given = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        given |= _QUIET | {"HOME": str(self.home), "XDG_CONFIG_HOME": str(self.home / ".config")}
        given |= {"ANTHROPIC_BASE_URL": self.url, "OLLAMA_API_BASE": self.url, "OPENAI_BASE_URL": f"{self.url}/v1"}
        done = subprocess.run(
            list(map(str, words)), cwd=self.project, env=given | environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
        return done.stdout

    def run_script(self, name: str) -> Any:
        """Return the JSON that one of the scripts for Python or Node prints last."""
        script = SCRIPTS / name
        if name.endswith(".mjs"):
            (self.project / "node_modules").symlink_to(CLIENTS / "node" / "node_modules")
            words = ["node", self.project / name]
            (self.project / name).write_bytes(script.read_bytes())
        else:
            words = [program("python/bin/python"), script]
        return json.loads(self.run(*words, self.url, MODEL).strip().splitlines()[-1])

    def posts(self, path: str = "") -> list[Exchange]:
        """Return the exchanges in which something was posted to paths with this end."""
        return [one for one in self.exchanges if one.method == "POST" and one.path.endswith(path)]


def program(place: str) -> Path:
    """Return the path of a client's program; the test is skipped if it is not there."""
    found = CLIENTS / place
    if not found.exists():
        pytest.skip(f"{found} is missing; make clients installs it, and CLIENTS names another folder")
    return found


def node_program(name: str) -> Path:
    return program(f"node/node_modules/.bin/{name}")


@contextmanager
def workplace(
    folder: Path, name: str, turns: Callable[[Path], Turns], *, thinks: bool = False, **options: Any
) -> Iterator[Workplace]:
    """A workplace whose target follows a script that may depend on the project's path."""
    home = folder / "home"
    project = home / "project"
    project.mkdir(parents=True)
    (project / "notes.txt").write_text(f"Remember to buy: {SECRET}\n")
    template = TEMPLATES["thinking" if thinks else "hermes"]
    target = scripted(turns(project), template=template, **({"drafters": ["ngram"]} | options))
    with target as llm, recorded(llm) as (url, exchanges):
        place = Workplace(name, home, url, exchanges, llm.script)
        yield place
        assert not [(one.path, one.status, one.answer[:300]) for one in exchanges if one.status >= 500]
        if "CLIENTS_RECORD" in os.environ:
            # Of models that think, only what tells how their thoughts come back.
            keep(name, exchanges, llm.script, home, Path(os.environ["CLIENTS_RECORD"]), THOUGHT if thinks else "")


def call_of(name: str, **arguments: Any) -> str:
    """A call as the model of these tests writes it."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def agent(call: str, *, thinks: bool = False) -> Turns:
    """A model that makes one call, answers once the note is in its prompt, and finds titles without tools."""
    thought = f"<think>\n{THOUGHT}\n</think>\n\n" if thinks else ""

    def turn(prompt: str) -> str:
        if SECRET in prompt:
            return thought + ANSWER
        return thought + (call if "</tools>" in prompt else "A short title")

    return turn


def library(*, thinks: bool = False) -> Turns:
    """A model for libraries: as an agent, and with a purchase where JSON or a call for it is wanted."""
    thought = f"<think>\n{THOUGHT}\n</think>\n\n" if thinks else ""

    def turn(prompt: str) -> str:
        named = [name for name in ("Purchase", "final_result", "json") if f'"name": "{name}"' in prompt]
        if SECRET in prompt:
            answers = '"name": "final_answer"' in prompt
            return thought + (call_of("final_answer", answer=ANSWER) if answers else ANSWER)
        if "as JSON" in prompt:
            return thought + (call_of(named[0], **PURCHASE) if named else json.dumps(PURCHASE))
        if "</tools>" in prompt:
            return thought + call_of("read_file", path="notes.txt")
        return thought + next((text for question, text in _ANSWERS.items() if question in prompt), "Hello there.")

    return turn
