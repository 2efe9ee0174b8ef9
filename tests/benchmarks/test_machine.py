"""What is measured of a machine: memory of processes, and direct reads from the disk."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks import disk, process
from benchmarks.disk import PIECE_BYTES, DiskBandwidth
from benchmarks.process import peak_resident, reset_peak


def test_what_a_process_holds() -> None:
    block = 64 * 2**20
    code = f"import sys; a = bytearray({block}); print(1, flush=True); input(); del a; print(2, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        with_block = peak_resident(child.pid)
        assert with_block > block
        print(file=child.stdin, flush=True)
        child.stdout.readline()
        assert peak_resident(child.pid) > block  # the most so far
        if reset_peak(child.pid):
            assert peak_resident(child.pid) < with_block - block / 2
        print(file=child.stdin, flush=True)
    assert peak_resident(child.pid) == 0  # it has gone
    assert not reset_peak(child.pid)


def test_a_system_that_reports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_PROC", tmp_path)
    assert peak_resident(1) == 0
    assert not reset_peak(1)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "status").write_text("Name:\tx\nVmPeak:\t900 kB\nVmHWM:\t   12 kB\n")
    assert peak_resident(1) == 12 * 1024


# -------------------------------------------------------------------------------------------- disk


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Of sizes that no piece divides; an empty one has nothing to read."""
    sizes = {"a": 2 * PIECE_BYTES + 12345, "b": 0, "c": 777}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(os.urandom(size))
    return [tmp_path / name for name in sizes]


def test_every_way_of_reading_is_timed_in_each_round(files: list[Path]) -> None:
    before = threading.active_count()
    bandwidth = DiskBandwidth(files)
    best = [bandwidth.measure(0.02) for _ in range(2)]
    assert list(bandwidth.rates) == ["1 thread", "3 threads"]
    assert all(len(rates) == 2 and min(rates) > 0 for rates in bandwidth.rates.values())
    assert best == [max(rates[turn] for rates in bandwidth.rates.values()) for turn in range(2)]
    assert threading.active_count() == before
    descriptors = [file.descriptor for file in bandwidth._files]
    bandwidth.close()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_files_are_read_from_end_to_end_again_and_again(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "NUM_THREADS", (1,))
    bandwidth, seen = DiskBandwidth(files), []
    read = disk._File.read

    def note(self: Any, buffer: Any, offset: int) -> int:
        count = read(self, buffer, offset)
        seen.append((self.size, offset, count))
        return count

    monkeypatch.setattr(disk._File, "read", note)
    while len(seen) < 8:
        bandwidth.measure(1e-6)
    whole = 2 * PIECE_BYTES + 12345
    turn = [(whole, 0, PIECE_BYTES), (whole, PIECE_BYTES, PIECE_BYTES), (whole, 2 * PIECE_BYTES, 12345), (777, 0, 777)]
    assert seen == (turn * len(seen))[: len(seen)]
    bandwidth.close()


def test_an_error_of_the_disk_is_raised(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    bandwidth = DiskBandwidth(files)

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk._File, "read", fail)
    with pytest.raises(OSError, match="Input/output error"):
        bandwidth.measure(0.01)
    bandwidth.close()


def test_without_direct_reads_it_is_reported(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    open_file = os.open

    def refuse(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return open_file(path, flags, *args)

    monkeypatch.setattr(disk.os, "open", refuse)
    bandwidth = DiskBandwidth(files)
    assert not bandwidth.is_direct
    assert bandwidth.measure(0.01) > 0
    bandwidth.close()
