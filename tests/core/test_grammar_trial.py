"""Trials of grammars: what takes too much time or memory is refused soon, and the next trial is not affected."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from specinfer import RequestError, StructuredOutputsParams
from specinfer.core.grammar import trial
from specinfer.core.grammar.compiler import GrammarCompiler
from tiny import EOS, VOCAB, make_tokenizer


def patterns(count: int) -> dict[str, Any]:
    """Return a schema whose automaton doubles with each pattern."""
    return {"allOf": [{"type": "string", "pattern": f"a{{{i},}}.*b"} for i in range(1, count + 1)]}


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(make_tokenizer(), VOCAB, (EOS,), has_trials=True)
    yield made
    made.close()


@pytest.mark.parametrize(
    "bomb",
    [
        pytest.param({"json": patterns(22)}, id="22 patterns"),
        pytest.param({"json": patterns(200)}, id="200 patterns"),
        pytest.param({"json": {"anyOf": [patterns(24), {"type": "object"}]}}, id="patterns in an alternative"),
    ],
)
def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_compiled(
    compiler: GrammarCompiler, bomb: dict[str, Any]
) -> None:
    start = time.process_time()
    with pytest.raises(RequestError, match=r"structured_outputs: json: takes more than .* to compile"):
        compiler.compile(StructuredOutputsParams(**bomb))
    assert time.process_time() - start < trial.CPU_SECONDS, "this process did not compile it"
    assert compiler.compile(StructuredOutputsParams(regex="[ab]+")).mask(()).any()


@pytest.mark.skipif(os.name == "nt", reason="address space cannot be limited there")
def test_a_grammar_that_takes_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "from specinfer.core.grammar import trial\n"
        "trial.check = lambda *_: str(len(bytearray(1700 << 20)))\n"  # stands for a compiler without measure
        "trial.main()\n"
    )
    monkeypatch.setattr(trial, "COMMAND", ("-c", script))
    compiler = GrammarCompiler(make_tokenizer(), VOCAB, (EOS,), has_trials=True)
    try:
        with pytest.raises(RequestError, match="512 MiB"):
            compiler.compile(StructuredOutputsParams(regex="a"))
    finally:
        compiler.close()


def test_faults_are_those_that_are_found_without_a_trial(compiler: GrammarCompiler) -> None:
    plain = GrammarCompiler(make_tokenizer(), VOCAB, (EOS,))
    for given in (
        {"regex": "("},
        {"json": {"type": "nothing"}},
        {"grammar": "start: nobody"},
        {"regex": "a" * 200_000},
    ):
        messages = []
        for each in (plain, compiler):
            with pytest.raises(RequestError) as caught:
                each.compile(StructuredOutputsParams(**given))  # type: ignore[arg-type]
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


def test_a_trial_at_its_limit_does_not_delay_another(compiler: GrammarCompiler) -> None:
    compiler.compile(StructuredOutputsParams(regex="warm"))
    bomb = json.dumps(patterns(200))
    refused = []

    def attack() -> None:
        with pytest.raises(RequestError):
            compiler.compile(StructuredOutputsParams(json=bomb))
        refused.append(True)

    attacker = threading.Thread(target=attack)
    attacker.start()
    compiler.compile(StructuredOutputsParams(regex="[abc]+"))
    assert attacker.is_alive(), "it was answered while the other was still being tried"
    attacker.join()
    assert refused


@pytest.mark.covering(1)
@pytest.mark.skipif(os.name == "nt", reason="has no signals")
@pytest.mark.parametrize("number", ["SIGKILL", "SIGSEGV"])
@pytest.mark.parametrize("moment", ["start", "idle", "trial"])
def test_a_process_that_is_killed_is_replaced_and_its_trial_done_again(
    number: str, moment: str, compiler: GrammarCompiler
) -> None:
    if moment != "start":
        compiler.compile(StructuredOutputsParams(regex="warm"))
    (process,) = compiler._trials._processes._idle  # type: ignore[union-attr]
    kill = threading.Timer(0.1 if moment == "trial" else 0, process._child.send_signal, [getattr(signal, number)])
    kill.start()
    if moment == "trial":
        with pytest.raises(RequestError, match="takes more than"):
            compiler.compile(StructuredOutputsParams(json=patterns(200)))
    else:
        kill.join()
    assert compiler.compile(StructuredOutputsParams(regex="[ab]+")).mask(()).any()
    assert process._child.poll() == -getattr(signal, number)


def test_processes_that_cannot_start_are_an_error_and_not_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "COMMAND", ("-c", "raise SystemExit(3)"))
    compiler = GrammarCompiler(make_tokenizer(), VOCAB, (EOS,), has_trials=True)
    with pytest.raises(RuntimeError, match="ended with code 3 at its start"):
        compiler.compile(StructuredOutputsParams(regex="a"))
    compiler.close()
