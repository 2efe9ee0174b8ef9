"""Attack a server with ordinary keys, and measure what an honest key notices: python tools/attack.py demo-chat.

Each attack alone, then all together, by eight clients with two keys; see tests/server/pressure/steady.py.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "support"), str(Path(__file__).parents[1])]

from tests.server.pressure.steady import ATTACKS, TOGETHER, attack_in_turn, table  # noqa: E402 - after the paths


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo-chat")
    parser.add_argument("--attack", action="append", choices=[*ATTACKS, TOGETHER], help="Only this; may be repeated.")
    parser.add_argument("--minutes", type=float, default=2.0, help="Of all attacks.")
    parser.add_argument("--port", type=int, default=8392)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="File for all times.")
    given, options = parser.parse_known_args()
    names = given.attack or [*ATTACKS, TOGETHER]
    reports = attack_in_turn(given.model, 60 * given.minutes, names, port=given.port, seed=given.seed, options=options)
    if given.json:
        given.json.write_text(json.dumps({name: asdict(report) for name, report in reports.items()}) + "\n")
    print("\n".join(table(reports)))
    for name, report in reports.items():
        print(f"{name}: {report.statuses}", *report.wrong[:2], *report.failed[:2], sep="\n  ")
    sys.exit(0 if all(report.is_sound for report in reports.values()) else 1)


if __name__ == "__main__":
    main()
