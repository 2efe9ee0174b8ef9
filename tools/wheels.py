"""Build a wheel for each platform, with native kernels inside, on one machine: `python tools/wheels.py [--out dist]`.

The kernels are plain C behind ctypes, so one wheel serves every version of Python on its platform. Zig's C++ compiler
builds for all platforms, with its C++ library linked in. The wheels are made from the source distribution, and each
library is checked for what it asks of its platform. What is needed comes with `pip install '.[wheels]'`.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lief

ROOT = Path(__file__).resolve().parent.parent
KERNELS = Path("specinfer", "ops", "cpu")
_GLIBC = r"lib(c|m|dl|pthread)\.so\.\d|ld-linux-.*"
_WINDOWS = r"kernel32\.dll|api-ms-win-crt-.*\.dll"  # of every Windows from 10 on

_VISIBLE = re.compile(
    "_Z(n[aw]|d[al])|__dso_handle|_mh_"
)  # new, delete, and more that Zig shows in libraries for macOS


@dataclass(frozen=True, slots=True)
class Platform:
    """A platform of wheels.

    Attributes:
        tag: Platform tag of the wheel.
        target: Zig's name of the platform.
        machine: Processor that the library is for, as its header names it.
        requires: Pattern of the system's libraries that the library may require.
    """

    tag: str
    target: str
    machine: str
    requires: str

    @property
    def library(self) -> str:
        """File name of the native library, with a suffix that Python loads there."""
        return "_native.pyd" if self.tag.startswith("win") else "_native.so"


PLATFORMS = (
    Platform("manylinux_2_28_x86_64", "x86_64-linux-gnu.2.28", "X86_64", _GLIBC),
    Platform("manylinux_2_28_aarch64", "aarch64-linux-gnu.2.28", "ARM64", _GLIBC),
    Platform("macosx_11_0_arm64", "aarch64-macos.11.0", "ARM64", r"/usr/lib/libSystem\.B\.dylib"),
    Platform("macosx_11_0_x86_64", "x86_64-macos.11.0", "X86_64", r"/usr/lib/libSystem\.B\.dylib"),
    Platform("win_amd64", "x86_64-windows-gnu", "X86_64", _WINDOWS),
)


def main() -> None:
    """Build the source distribution, and the wheels that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the packages (default: dist)")
    parser.add_argument("--platform", action="append", choices=[p.tag for p in PLATFORMS], help="only this platform")
    parser.add_argument("--sdist", type=Path, help="source distribution that was built before")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        sources = unpack_sdist(options.sdist or build_sdist(options.out), Path(folder))
        plain = build_plain(sources, Path(folder))
        for platform in PLATFORMS:
            if not options.platform or platform.tag in options.platform:
                library = compile_kernels(sources, platform, Path(folder, platform.tag))
                if faults := list(faults_of(library, platform, sources)):
                    sys.exit(f"{platform.tag}: {'; '.join(faults)}")
                print(pack(plain, library, platform, options.out), flush=True)


def build_sdist(out: Path) -> Path:
    """Build the source distribution and return its path."""
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.tar.gz")}
    run("-m", "build", "--sdist", "--no-isolation", "--outdir", out, ROOT)
    (built,) = (path for path in out.glob("*.tar.gz") if path.stat().st_mtime_ns != before.get(path))
    print(built, flush=True)
    return built


def unpack_sdist(sdist: Path, folder: Path) -> Path:
    """Unpack a source distribution: no file that lies in a checkout by chance gets into a wheel."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sources", filter="data")
    (sources,) = (folder / "sources").iterdir()
    return sources


def build_plain(sources: Path, folder: Path) -> Path:
    """Return a wheel without a native library, unpacked."""
    without = os.environ | {"SPECINFER_ISAS": "none"}
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, sources, env=without)
    (wheel,) = folder.glob("*.whl")
    run("-m", "wheel", "unpack", "--dest", folder / "plain", wheel)
    (unpacked,) = (folder / "plain").iterdir()
    left = [path for path in unpacked.rglob("*") if path.suffix in (".so", ".pyd", ".cpp", ".h", ".pyc")]
    if left:
        sys.exit(f"the wheel holds {', '.join(path.name for path in left)}")
    return unpacked


def compile_kernels(sources: Path, platform: Platform, folder: Path) -> Path:
    """Compile the kernels for a platform into an empty folder, and return the library."""
    folder.mkdir()
    extension = native_extension(sources)
    library = folder / platform.library
    options = [*extension["extra-compile-args"], "-fPIC", "-shared", "-s"]
    if "linux" in platform.target:  # the C++ library inside stays inside
        script = folder / "exports"
        script.write_text("{ global: specinfer_*; local: *; };")
        options.append(f"-Wl,--version-script={script}")
    if "macos" in platform.target:
        options.append(f"-Wl,-install_name,@rpath/{library.name}")  # otherwise the path of this folder
    files = [sources / source for source in extension["sources"]]
    run("-m", "ziglang", "c++", "-target", platform.target, *options, *files, "-o", library)
    return library


def native_extension(sources: Path) -> dict[str, Any]:
    """Return the extension module as pyproject.toml declares it."""
    project = tomllib.loads((sources / "pyproject.toml").read_text(encoding="utf-8"))
    (extension,) = project["tool"]["setuptools"]["ext-modules"]
    return dict(extension)


def faults_of(library: Path, platform: Platform, sources: Path) -> Iterator[str]:
    """Yield what a native library has, lacks or requires that it should not on its platform."""
    lief.logging.disable()
    binary: Any = lief.parse(str(library))
    if binary is None or binary.abstract.header.architecture.name != platform.machine:
        yield f"the library is not for {platform.machine}"
        return
    declared = (sources / "src" / KERNELS / "library.cpp").read_text(encoding="utf-8")
    wanted = set(re.findall(r"^PUBLIC .*?(specinfer_\w+)\(", declared, re.MULTILINE))
    found = {function.name.removeprefix("_") for function in binary.exported_functions}
    if binary.format.name == "MACHO":
        found = {name for name in found if not _VISIBLE.match(name)}
    if missing := wanted - found:
        yield f"the library lacks {', '.join(sorted(missing))}"
    if extra := found - wanted:
        yield f"the library exports {', '.join(sorted(extra)[:9])}"
    required = [str(getattr(one, "name", one)) for one in binary.libraries]
    for name in required:
        if name != f"@rpath/{library.name}" and not re.fullmatch(platform.requires, name, re.IGNORECASE):
            yield f"the library requires {name}"
    if binary.format.name == "ELF":
        for needed in binary.symbols_version_requirement:
            for version in (one.name for one in needed.get_auxiliary_symbols()):
                if numbers(version) > numbers(platform.tag):
                    yield f"the library requires {version}"
    if binary.format.name == "MACHO":
        if tuple(binary.build_version.minos)[:2] > numbers(platform.tag):
            yield f"the library requires macOS {binary.build_version.minos}"
        if platform.machine == "ARM64" and not binary.has_code_signature:
            yield "the library is not signed, and macOS would not load it"


def numbers(version: str) -> tuple[int, ...]:
    """Return the two numbers of GLIBC_2.28, manylinux_2_28_x86_64 or macosx_11_0_arm64."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def pack(plain: Path, library: Path, platform: Platform, out: Path) -> Path:
    """Pack the wheel with this library, and return its path."""
    inside = plain / KERNELS / library.name
    shutil.copy(library, inside)
    (plain / f"{plain.name}.dist-info" / "WHEEL").write_text(
        f"Wheel-Version: 1.0\nGenerator: tools/wheels.py\nRoot-Is-Purelib: false\nTag: py3-none-{platform.tag}\n"
    )
    run("-m", "wheel", "pack", "--dest-dir", out, plain)
    inside.unlink()
    return out / f"{plain.name}-py3-none-{platform.tag}.whl"


def run(*arguments: str | Path, env: dict[str, str] | None = None) -> None:
    """Run Python with these arguments; end with its error if it fails."""
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, arguments[:4]))} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


if __name__ == "__main__":
    main()
