"""Files that are written completely or not at all."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from specinfer.core.files import write_atomically


def _full(*_: object) -> None:
    raise OSError(28, os.strerror(28))


def _half(partial: Path) -> None:
    partial.write_text("half")
    _full()


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("write", [_full, _half])
def test_a_write_that_fails_leaves_the_file_before_and_no_litter(
    tmp_path: Path, write: Callable[[Path], None], is_shared: bool
) -> None:
    (path := tmp_path / "a").write_text("before")
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, write, is_shared=is_shared)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_threads_that_write_one_file_do_not_mix_their_texts(tmp_path: Path) -> None:
    path, meeting = tmp_path / "a", threading.Barrier(2)

    def write(text: str) -> None:
        write_atomically(path, lambda partial: slowly(partial, text), is_shared=True)

    def slowly(partial: Path, text: str) -> None:
        with partial.open("w") as file:
            meeting.wait()
            file.write(text)
            meeting.wait()

    threads = [threading.Thread(target=write, args=(text,)) for text in ("a" * 10, "bb")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in ("a" * 10, "bb")
    assert list(tmp_path.iterdir()) == [path]


def test_what_an_interrupted_write_left_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a"
    (tmp_path / ".a-partial").write_text("left")
    write_atomically(path, lambda partial: partial.write_text("whole"))
    assert path.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]
