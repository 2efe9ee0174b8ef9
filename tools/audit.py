"""Compare the locked packages with the known vulnerabilities of the OSV database, in one request.

    python tools/audit.py

Exits with 1 if one is known and not accepted below. Where the database cannot be reached within seconds, its last
answer is used; without one, the check passes and says that nothing was compared.
"""

import json
import re
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import lock

ROOT = Path(__file__).resolve().parent.parent
URL = "https://api.osv.dev/v1/querybatch"
LAST = ROOT / "build" / "audit.json"
SECONDS = 5.0
ACCEPTED: dict[str, str] = {}  # ids of vulnerabilities that do not concern this package, each with the reason


def locked_packages() -> list[str]:
    """Return all locked packages and PyTorch, as name==version."""
    entries = [entry for file in sorted(lock.LOCKS.glob("*.txt")) for entry in lock.packages(file.read_text())]
    entries += re.findall(r"^torch==.*", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return sorted({re.split(r"[\s;]", entry)[0] for entry in entries})


def ask(packages: list[str], url: str = URL, seconds: float = SECONDS) -> dict[str, list[str]] | None:
    """Return the ids of the known vulnerabilities of each package, or None if the database cannot be reached."""
    named = [package.split("==") for package in packages]
    queries = [{"package": {"name": name, "ecosystem": "PyPI"}, "version": version} for name, version in named]
    request = urllib.request.Request(
        url, json.dumps({"queries": queries}).encode(), {"Content-Type": "application/json"}
    )
    found: list[Any] = []

    def send() -> None:
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                found.extend(json.load(answer)["results"])
        except (OSError, ValueError, LookupError, TypeError):
            pass

    asking = threading.Thread(target=send, daemon=True)  # the time to find an address has no limit of its own
    asking.start()
    asking.join(seconds)
    if asking.is_alive() or len(found) != len(packages):
        return None
    return {
        package: [one["id"] for one in result.get("vulns", ())] for package, result in zip(packages, found, strict=True)
    }


def main(url: str = URL, last: Path = LAST) -> int:
    packages = locked_packages()
    known = ask(packages, url)
    if known is not None:
        last.parent.mkdir(exist_ok=True)
        last.write_text(json.dumps(known))
        about = f"{len(packages)} packages compared"
    elif last.is_file():
        known = json.loads(last.read_text())
        num_known = sum(package in known for package in packages)
        day = time.strftime("%Y-%m-%d", time.localtime(last.stat().st_mtime))
        about = f"no network; {num_known} of {len(packages)} packages compared with the answer of {day}"
    else:
        known, about = {}, "no network, and no earlier answer: nothing was compared"
    bad = [f"{package}: {one}" for package in packages for one in known.get(package, ()) if one not in ACCEPTED]
    print("\n".join([*bad, f"audit: {about}, {len(bad)} known vulnerabilities"]))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
