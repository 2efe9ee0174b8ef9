"""Replaying a trace: what is shown, what it adds up to, and what is said of a file that is none."""

import asyncio
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specinfer import LLM, AsyncLLM, SamplingParams
from specinfer.cli import recording
from specinfer.cli.app import app
from specinfer.cli.recording import NEWEST_VERSION, Recording, Step, Tally
from specinfer.server.trace import VERSION, TraceFile

pytestmark = pytest.mark.usefixtures("small_demo")
Lines = list[dict[str, Any]]
_PARAMS = SamplingParams(max_tokens=24, temperature=0.7, seed=5, tree="3,2,1")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of two requests that ran at once."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"

    async def run(llm: LLM) -> None:
        async with AsyncLLM(llm) as engine:
            file = TraceFile(str(path), engine, ("demo",))
            names = {"a": "def f(", "b": "class A"}
            asked = [await engine.submit(prompt, _PARAMS, request_id=name) for name, prompt in names.items()]
            await asyncio.gather(*(generation.finish() for generation in asked))
            file.close()

    with LLM("demo") as llm:
        asyncio.run(run(llm))
    return path


def node(token: int, parent: int, *, accepted: bool, **more: Any) -> dict[str, Any]:
    return {"token": token, "text": f"t{token}", "parent": parent, "drafters": ["d"], "q": 0.5, "p": 0.25} | {
        "accepted": accepted,
        **more,
    }


def small() -> Lines:
    """One request of one step: a branch of two is kept to its end, another is not."""
    root = {"token": 1, "text": "("}
    nodes = [node(2, 0, accepted=True), node(3, 0, accepted=False), node(4, 1, accepted=True)]
    said = {"token": 9, "text": " end\n", "p": 0.75}
    return [
        {"type": "trace", "version": 1, "model": "m", "time": 1.0},
        {"type": "request", "request": "r", "prompt": "f", "prompt_token_ids": [7, 1], "params": {"seed": 5}},
        {"type": "step", "request": "r", "time": 2.0, "root": root, "nodes": nodes, "path": [1, 3], "next": said},
        {"type": "end", "request": "r", "finish_reason": "stop", "speculative_decoding": {"tokens_per_pass": 3.0}},
    ]


@pytest.fixture
def save(tmp_path: Path) -> Callable[[Lines], str]:
    def write(lines: Lines) -> str:
        path = tmp_path / "t.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return str(path)

    return write


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["trace", *words], env={"COLUMNS": "120"})
    assert result.exit_code == code, result.output
    return result.output if code == 0 else result.stderr


def test_a_step_is_shown_as_a_tree(save: Callable[[Lines], str]) -> None:
    assert run(save(small())).splitlines() == [
        "── request r (seed=5)",
        "step 1 of 1 · 2 of 3 draft tokens accepted · 3 tokens",
        "ft2t4 end",
        "",
        "(",
        "├── t2  d  q 0.50  p 0.25",
        "│   ┗━━ t4  d  q 0.50  p 0.25",
        "│       ┗━━ ·end↵  target  p 0.75",
        "└── t3  d  q 0.50  p 0.25",
        "ended: stop · 3.00 tokens a pass",
        "",
    ]


def test_all_that_was_written_is_shown_and_nothing_is_coloured_in_a_pipe(written: Path) -> None:
    shown = run(str(written))
    lines = [json.loads(line) for line in written.read_text(encoding="utf-8").splitlines()]
    assert len(re.findall(r"^step \d+ of ", shown, re.M)) == sum(line["type"] == "step" for line in lines)
    assert shown.count("ended: length") == 2
    assert "\x1b" not in shown


def test_one_step_of_one_request(written: Path) -> None:
    shown = run(str(written), "--request", "1-b.0", "--step", "3")
    assert re.findall(r"^(?:── request \S+|step \d+)", shown, re.M) == ["── request 1-b.0", "step 3"]
    assert "class A" in shown


@pytest.mark.parametrize("evil", ["\x1b[2J\x07", "\u202e", "\u2066", "\u2028", "\ufeff"])
def test_output_of_a_model_cannot_move_the_cursor(evil: str, save: Callable[[Lines], str]) -> None:
    lines = small()
    lines[1]["prompt"], lines[1]["params"], lines[3]["error"] = evil, {"prediction": evil}, evil
    lines[2]["next"]["text"] = evil
    assert evil[0] not in run(save(lines))


def test_the_summary_counts_draft_tokens_whose_parent_was_accepted(save: Callable[[Lines], str]) -> None:
    shown = run(save(small()), "--summary")
    assert "1 request of m: 3 tokens in 1 pass, 3.00 a pass; 2 of 3 draft tokens accepted" in shown
    assert "passes by the tokens they emitted: 3: 1" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["1", "2", "1", "50.0%", "50.0%", "25.0%"] in rows  # depth 1: two verified, one accepted
    assert ["2", "1", "0", "0.0%", "50.0%", "25.0%"] in rows  # rank 2
    assert ["d", "3", "2", "66.7%", "50.0%", "25.0%"] in rows


def test_what_hangs_on_the_last_token_was_not_put_to_the_test() -> None:
    step = small()[2] | {"path": [1], "next": None}
    tally = Tally()
    tally.add([Step.from_record(step)])
    assert {depth: (share.verified, share.accepted) for depth, share in tally.by_depth.items()} == {1: (2, 1)}


def test_a_summary_agrees_with_the_counters_of_the_engine(written: Path) -> None:
    file = Recording(str(written))
    for request in file.requests:
        tally = Tally()
        tally.add(file.steps(request))
        assert request.end is not None
        told = request.end["speculative_decoding"]
        assert (tally.num_passes, tally.num_drafted) == (told["num_target_passes"], told["num_draft_tokens"])
        assert tally.num_accepted == told["num_accepted_draft_tokens"]
        assert tally.tokens_per_pass == pytest.approx(told["tokens_per_pass"])
    file.close()


def test_the_reader_knows_what_the_writer_writes() -> None:
    assert NEWEST_VERSION == VERSION


def test_requests_that_did_not_end_and_skipped_lines_are_reported(save: Callable[[Lines], str]) -> None:
    shown = run(save([*small()[:3], {"type": "left_out", "lines": 4}]))
    assert "the trace ends before this request does" in shown
    assert "4 lines were skipped" in shown


@pytest.mark.parametrize(
    ("place", "line", "told"),
    [
        (0, {"version": 99}, "line 1: version 99 is newer than 1"),
        (0, {"type": "other"}, "line 1: a trace begins with a line of type trace"),
        (1, {"params": 3}, "line 2: params is missing, or of the wrong type"),
        (1, {"prompt": 3}, "line 2: prompt is not text"),
        (2, {"request": "else"}, "line 3: request 'else' has no line of type request before this"),
        (2, {"path": [3]}, "line 3: path holds 3, which is not a node that follows 0"),
        (2, {"path": [1, 9]}, "line 3: path holds 9"),
        (2, {"nodes": [node(2, 1, accepted=True)]}, "line 3: node 1 has the parent 1"),
        (2, {"nodes": [node(2, 0, accepted=True, q="much")]}, "line 3: q is missing, or of the wrong type"),
        (2, {"root": 5}, "line 3: root is missing, or of the wrong type"),
        (3, {"type": "odd"}, "line 4: type 'odd' is not known"),
    ],
)
def test_a_line_that_is_no_part_of_a_trace_is_named(
    save: Callable[[Lines], str], place: int, line: dict[str, Any], told: str
) -> None:
    lines = small()
    lines[place] |= line
    assert told in run(save(lines), code=2)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is empty"),
        (b"hello\n", "line 1: not valid JSON"),
        (b"[1]\n", "line 1: not a JSON object"),
        (b'{"type": "tra', "line 1: not valid JSON"),
        (b"\xff\xfe\x00\n", "line 1: not valid JSON"),
        (b"[" * 100_000 + b"\n", "line 1: not valid JSON"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_line(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    assert told in run(str(path), code=2)


def test_a_line_without_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_LINE", 2**20)
    path = tmp_path / "long.jsonl"
    path.write_bytes(b" " * (2**20 + 1))
    assert "line 1: longer than 1 MiB" in run(str(path), code=2)


def test_a_cut_file_is_read_up_to_its_last_line(written: Path, tmp_path: Path) -> None:
    whole = written.read_bytes()
    path = tmp_path / "cut.jsonl"
    path.write_bytes(whole[:-20])
    shorter = tmp_path / "shorter.jsonl"
    shorter.write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 1])
    *lines, told = run(str(path), "--summary").splitlines()
    assert told.startswith("the last line is incomplete")
    assert lines == run(str(shorter), "--summary").splitlines()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--step", "99"], "--step must be from 1 to 1"),
        (["--request", "x"], "--request x is not in"),
        (["--delay", "-1"], "--delay must be from 0"),
        (["--speed", "0"], "--speed must be above 0"),
        (["--speed", "1", "--delay", "1"], "give one of them"),
    ],
)
def test_what_cannot_be_shown_is_refused(save: Callable[[Lines], str], words: list[str], told: str) -> None:
    assert told in run(save(small()), *words, code=2)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in run(str(tmp_path / "none"), code=2)


def test_a_replay_takes_the_time_it_is_given(save: Callable[[Lines], str]) -> None:
    lines = small()
    lines[3:3] = [lines[2] | {"time": 2.3}]
    path = save(lines)
    start = time.monotonic()
    run(path, "--speed", "1")
    assert time.monotonic() - start >= 0.3
    start = time.monotonic()
    run(path, "--delay", "0.2")
    assert time.monotonic() - start >= 0.2


def test_keys_go_through_the_steps_at_a_terminal(written: Path) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "specinfer", "trace", str(written), "--delay", "3600"]
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)

    def shows(text: bytes) -> None:
        seen = b""
        while text not in re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", seen):
            assert select.select([ours], [], [], 20)[0], f"{text!r} is not in {seen!r}"
            seen += os.read(ours, 65536)

    try:
        shows(b"q: leave")
        os.write(ours, b"\x1b[C")
        shows(b"step 2 of")
        os.write(ours, b"\x1b[F")
        shows(b"request 1-b.0")
        os.write(ours, b"\x1b[H")
        shows(b"step 1 of")
        os.write(ours, b"q")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
