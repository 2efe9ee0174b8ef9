"""A real terminal: what is typed while a model answers is not shown, and Tab completes commands and flags."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Answers when a byte comes through a pipe: w goes on with the conversation, x fails.
PROGRAM = """
import os, sys
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import typed_lines
from specinfer.cli.chat import _converse

def answer(line):
    print(f"answer to {line}:", flush=True)
    if os.read(int(sys.argv[1]), 1) == b"x":
        raise RuntimeError("failed")

_converse(typed_lines(), Screen(), answer)
"""


class Terminal:
    """A program that runs on a pseudo terminal."""

    def __init__(self, start: Callable[[int], "subprocess.Popen[bytes]"]) -> None:
        self.master, self.slave = pty.openpty()
        self.process = start(self.slave)
        self.shown = ""

    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self.slave)[3] & termios.ECHO)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        """Read until the text is shown after what was waited for before."""
        read, end = "", time.monotonic() + seconds
        while text not in read:
            assert time.monotonic() < end, f"{text!r} was not shown: {self.shown + read!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                read += os.read(self.master, 4096).decode(errors="replace")
        self.shown += read

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


def _take_terminal() -> None:
    os.close(os.open(os.ttyname(0), os.O_RDWR))  # makes it the controlling terminal
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which is ignored in what a shell runs in the background


@pytest.fixture
def conversation() -> Iterator[tuple[Terminal, int]]:
    read, write = os.pipe()

    def start(slave: int) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", PROGRAM, str(read)]
        return subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, pass_fds=[read], start_new_session=True,
            preexec_fn=_take_terminal,
            env=os.environ | {"TERM": "dumb"},
        )  # fmt: skip

    terminal = Terminal(start)
    yield terminal, write
    terminal.close()
    os.close(read)
    os.close(write)


def test_what_is_typed_during_an_answer_is_shown_with_the_next_line_only(conversation: tuple[Terminal, int]) -> None:
    terminal, pipe = conversation
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("answer to hello:")
    assert not terminal.echoes()
    terminal.type("impatient")
    time.sleep(0.2)
    os.write(pipe, b"w")
    terminal.wait_for("> ")
    assert "impatient" not in terminal.shown.partition("answer to hello:")[2].rpartition("> ")[0]
    terminal.type(" words\n")
    terminal.wait_for("answer to impatient words:")


def interrupt(terminal: Terminal, _: int) -> int:
    deadline = time.monotonic() + 60
    while terminal.process.poll() is None and time.monotonic() < deadline:
        terminal.type("\x03")  # one that arrives while a line is shown is lost now and then
        with contextlib.suppress(subprocess.TimeoutExpired):
            terminal.process.wait(timeout=5)
    return -signal.SIGINT


def terminate(terminal: Terminal, _: int) -> int:
    terminal.process.send_signal(signal.SIGTERM)
    return 128 + signal.SIGTERM


def fail(_: Terminal, pipe: int) -> int:
    os.write(pipe, b"x")
    return 1


@pytest.mark.parametrize("end", [interrupt, terminate, fail])
def test_the_terminal_shows_typing_again_however_the_program_ends(
    conversation: tuple[Terminal, int], end: Callable[[Terminal, int], int]
) -> None:
    terminal, pipe = conversation
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("answer to hello:")
    assert not terminal.echoes()
    code = end(terminal, pipe)
    assert terminal.process.wait(timeout=60) == code
    assert terminal.echoes()


def test_tab_completes_commands_and_flags_in_bash(tmp_path: Path) -> None:
    (tmp_path / "specinfer").write_text(f'#!/bin/sh\nexec {sys.executable} -m specinfer "$@"\n')
    (tmp_path / "specinfer").chmod(0o755)
    environment = os.environ | {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", "TERM": "dumb"}
    installed = subprocess.run(
        ["bash", "-c", "specinfer --install-completion; true"], env=environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert "bash completion installed" in installed.stdout
    terminal = Terminal(lambda slave: subprocess.Popen(
        ["bash", "-i"], stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=environment
    ))  # fmt: skip
    try:
        terminal.type("specinfer genera\t")
        terminal.wait_for("specinfer generate ")
        terminal.type("--temper\t")
        terminal.wait_for("--temperature ")
    finally:
        terminal.close()
