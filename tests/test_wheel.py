"""The package away from its checkout: a wheel has all that the commands need, and runs alone."""

import ctypes
import dataclasses
import os
import platform
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from specinfer.ops import describe

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "specinfer"
_COMPILED = (".so", ".pyd", ".pyc")
_BUILD_SECONDS = 1500  # the native kernels take minutes, and longer where others compute, too
# Without what would lead back to the checkout.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


def data_files() -> set[str]:
    """What is neither code nor compiled of it, by its path in the package."""
    sources = {".py", ".cpp", ".h"}
    files = (path for path in PACKAGE.rglob("*") if path.is_file())
    return {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in files
        if path.suffix not in {*sources, *_COMPILED} and "__pycache__" not in path.parts
    }


def test_every_file_of_data_is_declared() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    declared = {
        path.relative_to(PACKAGE.parent).as_posix()
        for package, globs in patterns.items()
        for pattern in globs
        for path in (ROOT / "src" / package.replace(".", "/")).glob(pattern)
    }
    assert len(data_files()) > 5
    assert data_files() <= declared


def execute(*words: str, folder: Path, timeout: float = 280) -> str:
    environment = _ENVIRONMENT | {"XDG_CACHE_HOME": str(folder)}
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: building leaves files behind
    shutil.copytree(
        ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "_native*")
    )
    for name in ("LICENSE", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, source)
    words = ("wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", str(source))
    execute(sys.executable, "-m", "pip", *words, folder=folder, timeout=_BUILD_SECONDS)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment of its own, which borrows all other packages from this one."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    words = ("--python", str(folder / "bin" / "python"), "install", "-q", "--no-deps", "--no-index", str(wheel))
    execute(sys.executable, "-m", "pip", *words, folder=folder)
    # A path in a .pth file is searched, but .pth files there are not read: the editable install stays out of it.
    (packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin"


@pytest.mark.slow
@pytest.mark.timeout(_BUILD_SECONDS + 300)
def test_a_wheel_holds_the_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert data_files() <= names
    assert all(name.startswith("specinfer") for name in names)
    assert not [name for name in names if name.endswith((".cpp", ".h"))]


@pytest.mark.slow
@pytest.mark.timeout(_BUILD_SECONDS + 300)
def test_an_installed_wheel_runs_alone(programs: Path, tmp_path: Path) -> None:
    code = "import specinfer; print(specinfer.__file__)"
    assert Path(execute(str(programs / "python"), "-c", code, folder=tmp_path)).is_relative_to(programs.parent)
    program = str(programs / "specinfer")
    assert execute(program, "version", folder=tmp_path).startswith("specinfer 0.")
    assert "--api-key-file" in execute(program, "serve", "demo", "--help", folder=tmp_path)
    said = execute(program, "generate", "demo", "def f(", "--max-tokens", "4", "--temperature", "0", folder=tmp_path)
    assert said.strip()
    assert "native kernels" in execute(program, "collect-env", folder=tmp_path)


def kernels(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, str(ROOT / "tools" / "wheels.py"), "--out", str(out), *options)
    return subprocess.run(words, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)


@pytest.mark.slow
@pytest.mark.timeout(_BUILD_SECONDS + 300)
@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="the wheel is for Linux x86_64")
def test_a_wheel_of_zigs_compiler_has_the_native_kernels_of_this_machine(tmp_path: Path) -> None:
    for package in ("build", "lief", "wheel", "ziglang"):
        pytest.importorskip(package)
    tag = "manylinux_2_28_x86_64"
    done = kernels(tmp_path, "--platform", tag)
    assert done.returncode == 0, done.stderr
    (built,) = tmp_path.glob("*.whl")
    assert built.name.endswith(f"-py3-none-{tag}.whl")
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path)
    assert [name for name in names if Path(name).suffix in {*_COMPILED, ".cpp", ".h", ".lib"}] == [
        "specinfer/ops/cpu/_native.so"
    ]
    library = ctypes.CDLL(str(tmp_path / "specinfer" / "ops" / "cpu" / "_native.so"))
    library.specinfer_name.restype = ctypes.c_char_p
    assert library.specinfer_name().decode() == describe()  # the compiler changes nothing in what is chosen
    tests = (str(ROOT / "tests" / name) for name in ("ops/test_kernels.py", "model/test_stored_codes.py"))
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    environment = _ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout  # nor in a row's bits among others


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="the library is for Linux x86_64")
def test_a_library_that_is_wrong_for_its_platform_gets_into_no_wheel(tmp_path: Path) -> None:
    pytest.importorskip("lief")
    wheels = runpy.run_path(str(ROOT / "tools" / "wheels.py"))
    linux, arm, *_ = wheels["PLATFORMS"]
    library = tmp_path / "_native.so"
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no compiler")
    words = (compiler, "-shared", "-fPIC", "-x", "c", "-", "-lm", "-o", str(library))
    code = "#include <math.h>\ndouble specinfer_x(double x) { return lgamma(x) + __builtin_sin(x); }\n"
    subprocess.run(words, input=code, text=True, check=True, timeout=60)
    lacks, exports = wheels["faults_of"](library, linux, ROOT)
    assert lacks.startswith("the library lacks ")
    assert "specinfer_linear" in lacks
    assert exports == "the library exports specinfer_x"
    assert list(wheels["faults_of"](library, arm, ROOT)) == ["the library is not for ARM64"]
    strict = dataclasses.replace(linux, tag="manylinux_2_1_x86_64", requires="nothing")
    faults = list(wheels["faults_of"](library, strict, ROOT))
    assert "the library requires libm.so.6" in faults
    assert [fault for fault in faults if "GLIBC" in fault]
