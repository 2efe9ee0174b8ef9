"""Make a checkout run on a machine that has PyTorch and a compiler, but neither our other packages nor an index.

    python tools/gpu_install.py                                 # say what is missing; compile native code if it is
    python tools/gpu_install.py --wheels WHEELS --site SITE     # install what is missing from a folder of wheels

Packages go into SITE, not into the environment: name it in PYTHONPATH.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FOR_TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")


def missing_packages(site: Path) -> list[str]:
    """Return the names of packages that the library and its tests for GPUs import, and neither path has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [re.split(r"[<>=! ]", line, maxsplit=1)[0] for line in project["dependencies"]]
    known = metadata.MetadataPathFinder()
    paths = [str(site), *sys.path]
    context = metadata.DistributionFinder.Context
    return [
        name for name in (*needed, *_FOR_TESTS) if not any(known.find_distributions(context(name=name, path=paths)))
    ]


def wheels_of(names: Sequence[str], folder: Path) -> tuple[list[Path], list[str]]:
    """Return the wheels of these packages in a folder, and the packages that have none."""

    def key(name: str) -> str:
        return re.sub(r"[-_.]+", "_", name).lower()

    files = {key(path.name.split("-")[0]): path for path in sorted(folder.glob("*.whl"))}
    return [files[key(name)] for name in names if key(name) in files], [n for n in names if key(n) not in files]


def build_native_code() -> None:
    """Compile the code for CPUs where it is missing, for this processor.

    Raises:
        CalledProcessError: It cannot be compiled.
    """
    folder = ROOT / "src" / "specinfer" / "ops" / "cpu"
    if any((folder / f"_native{suffix}").is_file() for suffix in EXTENSION_SUFFIXES):
        print("native code: there")
        return
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, check=True)
    print("native code: compiled")


def main() -> int:
    """Return 0 if nothing is missing in the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="folder of wheels; without it, packages are only looked for")
    parser.add_argument("--site", type=Path, default=Path("site"), help="folder to install packages into")
    asked = parser.parse_args()
    missing = missing_packages(asked.site)
    if missing and asked.wheels is not None:
        wheels, missing = wheels_of(missing, asked.wheels)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        if wheels:
            subprocess.run([*pip, "--target", str(asked.site), *map(str, wheels)], check=True)
    for name in missing:
        print(f"missing: {name}; put a wheel of it into the folder of --wheels")
    print("packages: there" if not missing else f"packages: {len(missing)} missing")
    build_native_code()
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
