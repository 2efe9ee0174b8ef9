"""CPUs that a process may use: its affinity, and the limits of its control groups."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specinfer.core import systems


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hierarchy of control groups, on a machine of eight CPUs."""
    monkeypatch.setattr(systems.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(systems, "_GROUPS", tmp_path)
    monkeypatch.setattr(systems, "_OWN", tmp_path / "own")
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_without_limits_all_cpus_that_it_may_run_on(groups: Path) -> None:
    assert systems.usable_cpus() == 8  # no control groups at all
    (groups / "own").write_text("0::/some/group\n")
    write(groups / "some" / "group", cpu__max="max 100000\n")
    assert systems.usable_cpus() == 8


@pytest.mark.parametrize(
    ("limit", "expected"), [("200000 100000", 2), ("150000 100000", 2), ("5000 100000", 1), ("2000000 100000", 8)]
)
def test_a_limit_counts_rounded_up(groups: Path, limit: str, expected: int) -> None:
    (groups / "own").write_text("0::/\n")  # as a container sees its own group
    write(groups, cpu__max=limit + "\n")
    assert systems.usable_cpus() == expected


@pytest.mark.parametrize("limit", ["", "max", "abc 100000", "100000", "100000 0", "1e5 100000", "0 100000", "1 2 3"])
def test_a_limit_in_another_form_is_none(groups: Path, limit: str) -> None:
    (groups / "own").write_text("0::/inner\n")
    write(groups, cpu__max="300000 100000\n")
    write(groups / "inner", cpu__max=limit)
    assert systems.usable_cpus() == 3


@pytest.mark.parametrize("text", [b"\n", b"0\n", b"nonsense", b"0::/\xff\n", b"1:cpu\n"])
def test_groups_in_another_form_are_none(groups: Path, text: bytes) -> None:
    (groups / "own").write_bytes(text)
    assert systems.usable_cpus() == 8


def test_a_limit_that_may_not_be_read_is_none(groups: Path) -> None:
    (groups / "own").write_text("0::/\n")
    (groups / "cpu.max").mkdir()  # also root cannot read it
    assert systems.usable_cpus() == 8


def test_the_least_limit_of_all_groups_around_it_counts(groups: Path) -> None:
    (groups / "own").write_text("0::/outer/inner\n")
    write(groups / "outer", cpu__max="300000 100000\n")
    write(groups / "outer" / "inner", cpu__max="max 100000\n")
    assert systems.usable_cpus() == 3


def test_limits_of_the_first_version_count(groups: Path) -> None:
    (groups / "own").write_text("3:memory:/a\n2:cpu,cpuacct:/hidden/by/the/container\n0::/\n")
    write(groups / "cpu", cpu__cfs_quota_us="400000\n", cpu__cfs_period_us="100000\n")
    assert systems.usable_cpus() == 4
    write(groups / "cpu", cpu__cfs_quota_us="-1\n")
    assert systems.usable_cpus() == 8


@pytest.mark.parametrize(("given", "expected"), [({}, True), ({"GOMP_SPINCOUNT": "77"}, False)])
def test_openmp_threads_spin_shortly_unless_the_user_has_set_how_long(given: dict[str, str], expected: bool) -> None:
    code = (
        "import os; from specinfer.core.systems import load_openmp; load_openmp(); "
        "print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", **given}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(given.get("GOMP_SPINCOUNT"))  # as it was: for children nothing has changed
    assert ("GOMP_SPINCOUNT = '10000'" in done.stderr) == expected
