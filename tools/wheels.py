"""Build a wheel for each platform, with native kernels inside, on one machine: `python tools/wheels.py [--out dist]`.

The kernels are plain C behind ctypes, so one wheel serves every version of Python on its platform. Zig's C++ compiler
(`pip install ziglang`) builds for all platforms, with its C++ library linked in.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "src" / "specinfer" / "kernels"
OPTIONS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-s")


@dataclass(frozen=True, slots=True)
class Platform:
    """A platform of wheels.

    Attributes:
        tag: Platform tag of the wheel.
        target: Zig's name of the platform.
        library: File name of the native library, with a suffix that Python loads there.
    """

    tag: str
    target: str
    library: str


PLATFORMS = (
    Platform("manylinux_2_28_x86_64", "x86_64-linux-gnu.2.28", "_native.so"),
    Platform("manylinux_2_28_aarch64", "aarch64-linux-gnu.2.28", "_native.so"),
    Platform("macosx_11_0_arm64", "aarch64-macos.11.0", "_native.so"),
    Platform("macosx_11_0_x86_64", "x86_64-macos.11.0", "_native.so"),
    Platform("win_amd64", "x86_64-windows-gnu", "_native.pyd"),
)


def main() -> None:
    """Build the wheels that are asked for, and the source distribution."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheels (default: dist)")
    parser.add_argument("--platform", action="append", choices=[p.tag for p in PLATFORMS], help="only this platform")
    parser.add_argument("--no-sdist", action="store_true", help="leave out the source distribution")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        plain = build_plain(Path(folder))
        for platform in PLATFORMS:
            if not options.platform or platform.tag in options.platform:
                print(add_library(plain, platform, options.out), flush=True)
    if not options.no_sdist:
        run("-m", "build", "--sdist", "--no-isolation", "--outdir", options.out, ROOT)


def build_plain(folder: Path) -> Path:
    """Return a wheel without a native library, unpacked: a compiler that always fails makes setuptools leave it out."""
    without = os.environ | {"CC": "false", "CXX": "false"}
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, env=without)
    (wheel,) = folder.glob("*.whl")
    run("-m", "wheel", "unpack", "--dest", folder / "plain", wheel)
    (unpacked,) = (folder / "plain").iterdir()
    left = [path.name for path in (unpacked / "specinfer" / "kernels").glob("_native*")]
    if left:
        sys.exit(f"the wheel holds {', '.join(left)}, built before: run `make clean`, or remove it")
    return unpacked


def add_library(plain: Path, platform: Platform, out: Path) -> Path:
    """Compile the kernels for a platform into a copy of the wheel, and return the packed wheel."""
    library = plain / "specinfer" / "kernels" / platform.library
    sources = sorted(KERNELS.glob("*.cpp"))
    run("-m", "ziglang", "c++", "-target", platform.target, *OPTIONS, *sources, "-o", library)
    for extra in library.parent.glob("_native.*"):  # a linker's import library and debug symbols
        if extra != library:
            extra.unlink()
    (plain / f"{plain.name}.dist-info" / "WHEEL").write_text(
        f"Wheel-Version: 1.0\nGenerator: tools/wheels.py\nRoot-Is-Purelib: false\nTag: py3-none-{platform.tag}\n"
    )
    run("-m", "wheel", "pack", "--dest-dir", out, plain)
    library.unlink()
    return out / f"{plain.name}-py3-none-{platform.tag}.whl"


def run(*arguments: str | Path, env: dict[str, str] | None = None) -> None:
    """Run Python with these arguments; end with its error if it fails."""
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, arguments[:4]))} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


if __name__ == "__main__":
    main()
