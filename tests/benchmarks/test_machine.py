"""What measurements ask of the machine: caps on memory, what a process holds, how fast the disk is read directly."""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks import disk, memory_cap, resident
from benchmarks.disk import PIECE_BYTES, DiskBandwidth, forget_pages
from benchmarks.memory_cap import MemoryCap, cap_memory
from benchmarks.process import Worker, WorkerError
from benchmarks.resident import peak_resident, reset_peak

LIMIT = 300 * 2**20

# ------------------------------------------------------------------------------------------- caps


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the control groups; groups made in it have the files that `offer` was told."""
    monkeypatch.setattr(memory_cap, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(memory_cap, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(memory_cap, "SYSTEMD_MARK", tmp_path / "systemd")
    return tmp_path


def offer(monkeypatch: pytest.MonkeyPatch, *files: str) -> None:
    """Groups made from now on have these files, as the kernel would put them there."""
    make = tempfile.mkdtemp

    def made(*args: Any, **kwargs: Any) -> str:
        folder = make(*args, **kwargs)
        for name in files:
            (Path(folder) / name).touch()
        return folder

    monkeypatch.setattr(memory_cap.tempfile, "mkdtemp", made)


def test_a_group_of_the_first_version(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "own").write_text("9:name=systemd:/\n4:memory:/of/ours\n1:cpu:/\n0::/\n")
    (machine / "memory" / "of" / "ours").mkdir(parents=True)
    offer(monkeypatch, "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "cgroup.procs")
    cap = cap_memory(LIMIT)
    assert (cap.method, cap.limit) == ("cgroup v1", LIMIT)
    assert cap.folder is not None
    assert cap.folder.parent == machine / "memory" / "of" / "ours"
    assert (cap.folder / "memory.limit_in_bytes").read_text() == str(LIMIT)
    assert (cap.folder / "memory.memsw.limit_in_bytes").read_text() == str(LIMIT)
    said = subprocess.run([*cap.command, "sh", "-c", 'echo $$ "$1"', "sh", "a b"], capture_output=True, text=True)
    pid, words = said.stdout.split(maxsplit=1)
    assert (cap.folder / "cgroup.procs").read_text().strip() == pid  # it entered the group, and became the command
    assert words == "a b\n"


def test_a_group_of_the_second_version(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "own").write_text("0::/user.slice/mine\n")
    (machine / "user.slice" / "mine").mkdir(parents=True)
    offer(monkeypatch, "memory.max", "memory.swap.max")
    cap = cap_memory(LIMIT)
    assert cap.method == "cgroup v2"
    assert cap.folder is not None
    assert (cap.folder / "memory.max").read_text() == str(LIMIT)
    assert (cap.folder / "memory.swap.max").read_text() == "0"


def test_a_group_is_given_back(machine: Path) -> None:
    folder = machine / "group"
    folder.mkdir()
    cap = MemoryCap("cgroup v2", LIMIT, (), folder)
    cap.close()
    assert not folder.exists()
    cap.close()  # twice is no fault


def test_where_memory_is_not_counted_no_group_is_left(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "own").write_text("0::/mine\n")
    (machine / "mine").mkdir()
    assert cap_memory(LIMIT) == MemoryCap()  # the group had no such file
    assert list((machine / "mine").iterdir()) == []
    (machine / "own").write_text("0::/nowhere\n")
    assert cap_memory(LIMIT).method == "none"
    (machine / "own").unlink()
    assert cap_memory(LIMIT).method == "none"


@pytest.mark.parametrize(("user", "words"), [(0, ()), (1000, ("--user",))])
def test_a_scope_where_systemd_runs(
    machine: Path, monkeypatch: pytest.MonkeyPatch, user: int, words: tuple[str, ...]
) -> None:
    (machine / "systemd").mkdir()
    monkeypatch.setattr(memory_cap.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(memory_cap.os, "geteuid", lambda: user)
    cap = cap_memory(LIMIT)
    assert cap.method == "systemd scope"
    assert cap.command == (
        "systemd-run", *words, "--scope", "--quiet", "-p", f"MemoryMax={LIMIT}", "-p", "MemorySwapMax=0", "--",
    )  # fmt: skip
    monkeypatch.setattr(memory_cap.shutil, "which", lambda name: None)
    assert cap_memory(LIMIT).method == "none"


def test_a_worker_that_its_memory_limit_ends_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "group"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"), prepend=os.pathsep)
    process = Worker("fake_peer", 1, MemoryCap("cgroup v1", LIMIT, ("sh", "-c", 'exec "$@"', "sh"), folder))
    os.kill(process.pid, 9)
    with pytest.raises(WorkerError, match="its process ended with status -9, limited to 300 MiB"):
        process.ask({"do": "load"}, 20)
    process.close()
    assert not folder.exists()


# ------------------------------------------------------------------------------------ what is held


def test_what_a_process_holds() -> None:
    block = 64 * 2**20
    code = f"import sys; a = bytearray({block}); print(1, flush=True); input(); del a; print(2, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        with_block = peak_resident(process.pid)
        assert with_block > block
        print(file=process.stdin, flush=True)
        process.stdout.readline()
        assert peak_resident(process.pid) > block  # the most so far
        if reset_peak(process.pid):
            assert peak_resident(process.pid) < with_block - block / 2
        print(file=process.stdin, flush=True)
    assert peak_resident(process.pid) == 0  # it has gone
    assert not reset_peak(process.pid)


def test_a_system_that_reports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "PROC", tmp_path)
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


def test_pages_of_files_are_forgotten(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "DROP_CACHES", tmp_path / "dropped")
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(disk.os, "posix_fadvise", lambda _, *how: asked.append(how))
    forget_pages(files)
    assert asked == [(0, 0, os.POSIX_FADV_DONTNEED)] * 3
    assert (tmp_path / "dropped").read_text() == "1"
    monkeypatch.setattr(disk, "DROP_CACHES", tmp_path / "none" / "dropped")
    forget_pages(files)  # only an administrator may
