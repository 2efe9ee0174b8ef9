"""Texts read in other processes: the same ids and refusals as here, limits, and processes that end."""

import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from native_calls import longest_native_call
from specinfer import RequestError
from specinfer.core.errors import ContextLengthError
from specinfer.inputs import text_reader
from specinfer.inputs.text_reader import BoundedTextReader, LocalTextReader
from tiny import make_tokenizer
from worlds import await_that, is_alive

LENGTH = 30_000
LONG = "abc " * 5000  # longer than what is read in the calling thread
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
TEXTS = [LONG + end for end in ("", "a\0b", "Grüße, 你好 🙂", "x" * 200_000, "\r\n\t ")]
CHATS: list[tuple[Any, Any, dict[str, Any]]] = [
    ([{"role": "user", "content": LONG}], None, {}),
    ([{"role": "user", "content": LONG}, {"role": "assistant", "content": ""}], None, {"add_generation_prompt": False}),
    ([{"role": "user", "content": "x" * 3_000_000}], None, {}),
    ([{"role": "nobody", "content": LONG}], None, {}),
    ([{"role": "user", "content": LONG + "\ud800"}], None, {}),
    ([{"role": "user", "content": LONG}], None, {"template_kwargs": {"messages": 1}}),
    ([{"role": "user", "content": LONG}], [{"type": "function", "function": {"name": "f", "parameters": {}}}], {}),
]  # fmt: skip
TOO_MUCH = r"stop: takes more than 1\.7 s or 1024 MiB to read"
# A tokenizer without measure for some texts.
SCRIPT = """
import os
from specinfer.inputs import text_reader
encode = text_reader.LocalTextReader.encode
def bomb(self, text, field, **options):
    if text.endswith("time"):
        while True: pass
    if text.endswith("memory"):
        bytearray(2 << 30)
    if text.endswith("crash"):
        os.abort()
    if text.endswith("niceness"):
        return [os.getpriority(os.PRIO_PROCESS, 0)]
    return encode(self, text, field, **options)
text_reader.LocalTextReader.encode = bomb
text_reader.main()
"""


def local_reader() -> LocalTextReader:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return LocalTextReader(tokenizer, LENGTH)


@pytest.fixture(scope="module")
def bounded() -> Iterator[BoundedTextReader]:
    reader = BoundedTextReader(local_reader())
    yield reader
    reader.close()


@pytest.fixture(scope="module")
def hostile() -> Iterator[BoundedTextReader]:
    reader = BoundedTextReader(local_reader())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_reader, "COMMAND", ("-c", SCRIPT))
        reader.encode(LONG, "prompt")  # its processes are started in this way from now on
    yield reader
    reader.close()


def outcome(call: Any, *values: Any, **options: Any) -> Any:
    try:
        return call(*values, **options)
    except RequestError as error:
        return type(error), str(error)


@pytest.mark.parametrize("special", [True, False])
def test_ids_are_those_that_are_read_here(bounded: BoundedTextReader, special: bool) -> None:
    local = local_reader()
    for text in [*TEXTS, LONG + "\ud800"]:
        for reader in (bounded, local):
            assert isinstance(outcome(reader.encode, text, "prompt"), list) == ("\ud800" not in text)
        assert outcome(bounded.encode, text, "prompt", add_special_tokens=special) == outcome(
            local.encode, text, "prompt", add_special_tokens=special
        )


def test_conversations_and_their_refusals_are_those_that_are_read_here(bounded: BoundedTextReader) -> None:
    local, found = local_reader(), []
    for messages, tools, options in CHATS:
        found.append(outcome(bounded.read_chat, messages, tools, **options))
        assert found[-1] == outcome(local.read_chat, messages, tools, **options)
    assert isinstance(found[0], list)
    assert found[2][0] is ContextLengthError
    assert found[3][0] is RequestError


def test_another_template_than_the_models_is_used_and_no_process_is_left_after_the_end(
    bounded: BoundedTextReader,
) -> None:
    local = local_reader()
    local.chat.replace("{{ messages[0].content }}{{ messages[0].content }}")
    reader = BoundedTextReader(local)
    message = [{"role": "user", "content": LONG}]
    assert reader.read_chat(message, None) == local.read_chat(message, None) != bounded.read_chat(message, None)
    (process,) = reader._processes._idle  # type: ignore[union-attr]
    reader.close()
    assert process._child.poll() is not None


def test_tokens_become_text_and_json_as_here(bounded: BoundedTextReader) -> None:
    local = local_reader()
    ids = local.encode(LONG + "wörld", "prompt")
    assert bounded.decode(ids) == local.decode(ids)
    for strings in (True, False):
        fields = local.described(ids, strings)
        assert json.loads(f"{{{fields}}}")["tokens"] == ids
        assert bounded.described(ids, strings) == fields
        assert bounded.tokenized(LONG + "wörld", add_special_tokens=True, with_strings=strings) == fields


@pytest.mark.skipif(os.name == "nt", reason="processor time and address space cannot be limited there")
@pytest.mark.parametrize("bomb", ["memory", "crash"])
def test_a_text_without_measure_is_refused_and_the_next_one_is_read(hostile: BoundedTextReader, bomb: str) -> None:
    with pytest.raises(RequestError, match=TOO_MUCH):
        hostile.encode(LONG + bomb, "stop")
    assert hostile.encode(LONG, "prompt") == local_reader().encode(LONG, "prompt")


@pytest.mark.skipif(os.name == "nt", reason="has no priorities of this kind")
def test_only_long_texts_are_read_by_other_processes_at_a_lower_priority(hostile: BoundedTextReader) -> None:
    assert hostile.encode("niceness", "prompt") == local_reader().encode("niceness", "prompt")
    assert hostile.encode(LONG + "niceness", "prompt") == [min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)]


@pytest.mark.skipif(os.name == "nt", reason="processor time cannot be limited there")
def test_a_text_that_takes_too_long_is_refused_soon_and_does_not_delay_another(hostile: BoundedTextReader) -> None:
    hostile.encode(LONG, "prompt")
    processes, refusals = hostile._processes, []
    assert processes is not None
    processes._idle.append(processes._make())  # on a busy machine the start of one takes as long as the limit
    hostile.encode(LONG, "prompt")
    start = time.monotonic()
    attacker = threading.Thread(target=lambda: refusals.append(outcome(hostile.encode, LONG + "time", "stop")))
    attacker.start()
    expected = local_reader().encode(LONG, "prompt")
    assert hostile.encode(LONG, "prompt") == expected
    assert attacker.is_alive(), "the other text was answered while this one was still being read"
    attacker.join()
    assert time.monotonic() - start < 30  # 1.7 s of processor time, at the lowest priority of a busy machine
    ((kind, message),) = refusals
    assert kind is RequestError
    assert re.match(TOO_MUCH, message)
    assert hostile.encode(LONG, "prompt") == expected


@pytest.mark.skipif(os.name == "nt", reason="has no signals")
@pytest.mark.parametrize("number", ["SIGKILL", pytest.param("SIGSEGV", marks=pytest.mark.slow)])
def test_a_process_that_is_killed_is_replaced_and_signals_of_a_terminal_do_not_end_it(
    number: str, bounded: BoundedTextReader
) -> None:
    expected = bounded.encode(LONG, "prompt")
    (process,) = bounded._processes._idle  # type: ignore[union-attr]
    for of_terminal in ("SIGINT", "SIGHUP"):
        process._child.send_signal(getattr(signal, of_terminal))
        assert bounded.encode(LONG, "prompt") == expected
        assert process._child.poll() is None
    process._child.send_signal(getattr(signal, number))
    process._child.wait(10)
    assert bounded.encode(LONG, "prompt") == expected


@pytest.mark.parametrize("fault", ["start", "pickle"])
def test_texts_are_read_here_with_a_warning_if_processes_cannot_read_them(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    local = local_reader()
    if fault == "start":
        monkeypatch.setattr(text_reader, "COMMAND", ("-c", "raise SystemExit(3)"))
    else:
        local._tokenizer.not_to_be_pickled = threading.Lock()
    with caplog.at_level(logging.WARNING):
        reader = BoundedTextReader(local)
        assert reader.encode(LONG, "prompt") == local.encode(LONG, "prompt")
        assert reader.encode(LONG, "prompt") == local.encode(LONG, "prompt")
    (record,) = caplog.records
    assert "without limits on time and memory" in record.message
    reader.close()


@pytest.mark.skipif(os.name == "nt", reason="has no signals")
def test_no_process_is_left_when_the_one_that_asks_is_killed() -> None:
    script = (
        "import os, pickle, signal, sys\n"
        "from specinfer.inputs.text_reader import BoundedTextReader\n"
        "reader = BoundedTextReader(pickle.load(sys.stdin.buffer))\n"
        f"reader.encode({LONG!r}, 'prompt')\n"
        "print(reader._processes._idle[0]._child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command, path = [sys.executable, "-c", script], os.pathsep.join(filter(None, sys.path))
    job = pickle.dumps(local_reader())
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, input=job, stdout=subprocess.PIPE, check=False
    )
    assert done.returncode == -signal.SIGKILL
    await_that(lambda: not is_alive(int(done.stdout)), 5)


def test_a_million_tokens_are_taken_in_pieces() -> None:
    """Other threads wait as long as one piece takes."""
    ids = array("i", range(1_000_003))
    answer, found = b"i" + ids.tobytes(), []
    assert longest_native_call(lambda: found.append(text_reader._read_answer(answer, "prompt", 1))) < 0.008
    assert found == [ids.tolist()]
