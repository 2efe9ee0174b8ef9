"""Versions of Triton beside the one of the environment, each in a folder of its own: builds of PyTorch bring others."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "triton"


def installed(version: str) -> Path:
    """Return the folder of a version, which pip fills with 650 MB if it is not there."""
    folder = _FOLDER / version
    if not folder.exists():
        _FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_FOLDER) as whole:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", f"{whole}/new"]
            run = subprocess.run([*pip, f"triton=={version}"], capture_output=True, text=True)
            if run.returncode:
                raise RuntimeError(f"pip cannot install Triton {version}: {run.stderr.strip()}")
            Path(whole, "new").rename(folder)
    return folder


def run_with(version: str) -> int:
    """Run this process's command with a version, and return its exit status."""
    path = os.pathsep.join(filter(None, (str(installed(version)), os.environ.get("PYTHONPATH"))))
    return subprocess.run([sys.executable, *sys.argv], env=os.environ | {"PYTHONPATH": path}).returncode
