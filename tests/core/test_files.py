"""Files that are written completely or not at all."""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from specinfer.core.files import TemporaryFolder, write_atomically
from specinfer.core.systems import child_environment


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


_KILLED = """
import os, signal
from specinfer.core.files import TemporaryFolder

folder = TemporaryFolder("test")
(folder.path / "0").write_text("left")
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def _age(folder: Path) -> None:
    os.utime(folder / ".lock", (0, 0))


@pytest.fixture
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no such locks")
@pytest.mark.usefixtures("_temporary")
def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    env = child_environment() | {"TMPDIR": str(tmp_path)}
    shown = subprocess.run([sys.executable, "-c", _KILLED], capture_output=True, text=True, env=env, check=False)
    left = Path(shown.stdout.strip())
    assert left.parent == tmp_path
    TemporaryFolder("test").close()
    assert (left / "0").exists()  # its lock is young: it may not be held yet
    _age(left)
    TemporaryFolder("other").close()
    assert (left / "0").exists()
    TemporaryFolder("test").close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no such locks")
@pytest.mark.usefixtures("_temporary")
def test_a_folder_in_use_and_what_links_lead_to_are_not_removed(tmp_path: Path) -> None:
    used = TemporaryFolder("test")
    _age(used.path)
    (own := tmp_path / "own").mkdir()
    (own / ".lock").touch()
    _age(own)
    (tmp_path / "specinfer-test-link").symlink_to(own)
    (trap := tmp_path / "specinfer-test-trap").mkdir()
    (trap / ".lock").symlink_to(own / ".lock")
    TemporaryFolder("test").close()
    assert used.path.exists()
    assert (own / ".lock").exists()
    assert used.path.stat().st_mode & 0o077 == 0
    used.close()
    assert not used.path.exists()
