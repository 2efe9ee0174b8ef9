"""Files of cached prefixes: what is refused, what makes way, and what a full or shared folder costs."""

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from full_disk import limited_files
from specinfer.model import prefix_folder
from specinfer.model.prefix_file import Block
from specinfer.model.prefix_folder import PrefixFolder

SIZES = (1000, 24)  # of a body, and of states after it


def _key(number: int) -> bytes:
    return bytes([number]) * 32


def _block(number: int, *chain: int, fill: int | None = None, state_end: int = 0) -> Block:
    size = SIZES[0] + (SIZES[1] if state_end else 0)
    body = memoryview(bytes([number if fill is None else fill]) * size)
    return Block(_key(number), [_key(each) for each in chain], 16, state_end, body, lambda: True)


def _folder(path: Path, *blocks: Block, max_bytes: int = 1 << 20) -> PrefixFolder:
    folder = PrefixFolder(path, max_bytes)
    for block in blocks:
        folder.put(block)
    folder.close()
    return folder


def _read(folder: PrefixFolder, number: int) -> bytes | None:
    body = bytearray(sum(SIZES))
    state_end = folder.read(_key(number), 16, memoryview(body), SIZES)
    return None if state_end is None else bytes(body[: SIZES[0] + (SIZES[1] if state_end else 0)])


def _files(folder: PrefixFolder) -> list[Path]:
    return sorted(folder.path.iterdir())


def test_blocks_are_read_by_another_process_as_they_were_written(tmp_path: Path) -> None:
    writes = f"from test_prefix_folder import _block, _folder; _folder({str(tmp_path)!r}, _block(1), _block(2, 1))"
    places = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    folder = PrefixFolder(tmp_path, 1 << 20)
    assert not folder.has(_key(1))
    subprocess.run([sys.executable, "-c", writes], check=True, env=os.environ | {"PYTHONPATH": places}, timeout=300)
    assert folder.has(_key(1))
    assert [_read(folder, number) for number in (1, 2, 3)] == [b"\1" * 1000, b"\2" * 1000, None]
    folder.put(_block(4, 1, state_end=5))
    folder.close()
    assert _read(folder, 4) == b"\4" * 1024


def test_nobody_else_may_read_the_files(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "new", _block(1))
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert [file.stat().st_mode & 0o777 for file in _files(folder)] == [0o600]
    folder.path.chmod(0o755)
    with pytest.raises(ValueError, match=r"^prefix_cache_dir: .* is open to other users, .* with mode 700$"):
        PrefixFolder(tmp_path / "new", 100)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^prefix_cache_dir: .*file cannot be used .*; name a folder"):
        PrefixFolder(tmp_path / "file", 100)


def test_a_link_is_refused_and_nothing_that_it_leads_to_is_removed(tmp_path: Path) -> None:
    (private := tmp_path / "private").mkdir(mode=0o700)
    (unfinished := private / f".{_key(1).hex()}.prefix-1-1").touch()
    os.utime(unfinished, (0, 0))
    (tmp_path / "prefixes-1").symlink_to(private)
    with pytest.raises(ValueError, match=r"^prefix_cache_dir: .*prefixes-1 is a link; remove it, and name the folder"):
        PrefixFolder(tmp_path, 100)
    assert unfinished.exists()


def test_the_home_folder_of_an_unknown_user_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^prefix_cache_dir: '~nobody-here/a' names the home folder of no user; give"):
        PrefixFolder("~nobody-here/a", 100)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-1], "it is cut"),
        (lambda data: data + b"x", "it is cut"),
        (lambda data: data[:40], "it is no block of a prefix"),
        (lambda data: b"", "it is no block of a prefix"),
        (lambda data: b"A text of somebody." * 90, "it is no block of a prefix"),
        (lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:], "its checksum does not agree"),
        (lambda data: data[:8] + bytes([data[8] ^ 1]) + data[9:], "its checksum does not agree"),
        (lambda data: data[:12] + b"\2" * 32 + data[44:], "it is a block of something else"),
        (lambda data: data[:44] + b"\x20" + data[45:], "it is a block of something else"),
        (lambda data: data[:48] + b"\x20" + data[49:], "it is a block of something else"),
        (lambda data: data[:52] + b"\xff" * 8 + data[60:], "it is a block of something else"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_and_removed(
    damage: Callable[[bytes], bytes], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _folder(tmp_path, _block(1), _block(3))
    (file, other) = _files(folder)
    file.write_bytes(damage(file.read_bytes()))
    other.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert _read(folder, 1) is None
        assert _read(folder, 3) is None  # not named again
    assert [record.getMessage() for record in caplog.records] == [f"prefix cache: {file} is removed: {reason}"]
    assert not _files(folder)
    assert not folder.has(_key(1))
    folder.put(_block(1))
    folder.close()
    assert _read(folder, 1) == b"\1" * 1000


def test_the_least_recently_used_files_make_way(tmp_path: Path) -> None:
    folder = _folder(tmp_path, _block(1), _block(2, 1), _block(3), max_bytes=3300)
    assert folder.num_bytes == 3 * 1060
    folder.use([_key(1), _key(2)])
    folder.put(_block(4))
    folder.close()
    assert [number for number in range(1, 5) if folder.has(_key(number))] == [1, 2, 4]
    folder.use([_key(4)])
    folder.use([_key(1), _key(2)])
    folder.put(_block(5, 4))  # 4 was used before, but 5 would be of no use without it: 2 goes, of the others the last
    folder.close()
    assert [number for number in range(1, 6) if folder.has(_key(number))] == [1, 4, 5]
    again = PrefixFolder(tmp_path, 1100)  # with a smaller limit
    again.put(_block(6))
    again.close()
    assert [file.name[:2] for file in _files(again)] == ["06"]


def test_the_times_of_use_outlast_the_process(tmp_path: Path) -> None:
    folder = _folder(tmp_path, _block(1), _block(2))
    folder.use([_key(1)])
    folder.close()
    again = PrefixFolder(tmp_path, 2200)
    again.put(_block(3))
    again.close()
    assert [number for number in range(1, 4) if again.has(_key(number))] == [1, 3]


def test_a_block_larger_than_the_limit_or_without_the_one_before_is_not_kept(tmp_path: Path) -> None:
    folder = _folder(tmp_path, _block(1), max_bytes=1059)
    assert not _files(folder)
    folder = _folder(tmp_path, _block(3, 1, 2))
    assert not _files(folder)


def test_numbers_that_are_not_finite_are_not_kept(tmp_path: Path) -> None:
    folder = _folder(tmp_path, _block(1)._replace(is_sound=lambda: False))
    assert not _files(folder)


def test_a_full_disk_costs_nothing_but_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = PrefixFolder(tmp_path, 1 << 20)
    with limited_files(100), caplog.at_level(logging.WARNING):
        folder.put(_block(1))
        folder.put(_block(2))
        folder.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"prefix cache: {folder.path} cannot be written ([Errno 27] File too large); it is tried again"
    ]
    assert folder.is_paused
    assert not _files(folder)
    assert _read(folder, 1) is None


def test_a_file_stays_where_the_process_has_no_descriptor_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _folder(tmp_path, _block(1))

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(prefix_folder, "read_block", fail)
        assert _read(folder, 1) is None
    assert _read(folder, 1) == b"\1" * 1000


def test_unfinished_files_of_processes_that_are_gone_are_removed(tmp_path: Path) -> None:
    folder = _folder(tmp_path, _block(1))
    old, new = (folder.path / f".{_key(number).hex()}.prefix-{number}-1" for number in (1, 2))
    others = [folder.path / name for name in ("notes.txt", ".profile", ".a.prefix-1-1")]
    for file in (old, new, *others):
        file.write_bytes(b"half")
    for file in (old, *others):
        os.utime(file, (0, 0))
    again = PrefixFolder(tmp_path, 1 << 20)
    assert again.num_bytes == 1060
    assert not old.exists()
    assert all(file.exists() for file in (new, *others))


def test_two_writers_share_a_folder(tmp_path: Path) -> None:
    first, second = (PrefixFolder(tmp_path, 5400) for _ in range(2))
    for number in range(1, 30):
        (first if number % 2 else second).put(_block(number))
        second.put(_block(number))
        first.close()
        second.close()
        assert sum(file.stat().st_size for file in _files(first)) <= 5400
    assert _read(first, 29) == _read(second, 29) == b"\x1d" * 1000
    gone = next(number for number in range(1, 29) if not (first.path / f"{_key(number).hex()}.prefix").exists())
    assert _read(first, gone) is None


def test_too_many_blocks_do_not_wait_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specinfer.model.prefix_folder._MAX_PENDING", 2000)
    folder = PrefixFolder(tmp_path, 1 << 20)
    monkeypatch.setattr(folder, "_start", lambda: None)  # a disk that does not come to it
    assert folder.has_room(5000)  # a block larger than that waits alone
    folder.put(_block(1))
    assert folder.has_room(1000)
    assert not folder.has_room(1001)
    assert folder.has(_key(1))
    assert _read(folder, 1) is None
