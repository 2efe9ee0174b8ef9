"""The programs as commands: PYTHONPATH=tests/support python -m tests.server.pressure soak|attack|crowd."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from tests.server.pressure.attack import attack
from tests.server.pressure.crowd import press
from tests.server.pressure.soak import soak

_MINUTES = {"soak": 20.0, "attack": 10.0, "crowd": 2.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program", choices=_MINUTES)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--port", type=int, default=8391)
    parser.add_argument("--seed", type=int, default=0, help="Of soak and attack.")
    parser.add_argument("--clients", type=int, default=12, help="Of soak.")
    parser.add_argument("--tls", action="store_true", help="Of crowd.")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    seconds = 60 * (given.minutes or _MINUTES[given.program])
    if given.program == "soak":
        report = soak(seconds, given.clients, port=given.port, seed=given.seed)
    elif given.program == "attack":
        report = attack(seconds, port=given.port, seed=given.seed)
    else:
        report = press(seconds, given.port, tls=given.tls)
    if given.json:
        given.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    print("\n".join(report.lines()))
    sys.exit(0 if report.is_sound else 1)


if __name__ == "__main__":
    main()
