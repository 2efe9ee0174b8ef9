"""Attack a server with ordinary keys, and measure what an honest key notices: python tools/attack.py demo-chat.

The exit code is 1 if a time is longer than an attack may make it: the first token three times the quiet one's or half a
second more, a gap three times, both at p95. Each attack alone, then all together, by eight clients with two keys; see
tests/server/pressure/steady.py.
"""

import argparse
import json
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

_BEGUN = time.monotonic()  # before the imports that take seconds
sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "support"), str(Path(__file__).parents[1])]

from tests.server.pressure.attack import Report  # noqa: E402 - after the paths
from tests.server.pressure.steady import ATTACKS, TOGETHER, attack_in_turn, over_bounds, table  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo-chat")
    parser.add_argument("--attack", action="append", choices=[*ATTACKS, TOGETHER], help="Only this; may be repeated.")
    parser.add_argument("--minutes", type=float, default=2.0, help="Of the whole run: loading, all attacks, the end.")
    parser.add_argument("--port", type=int, default=8392)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="File for all times.")
    given, options = parser.parse_known_args()
    names, reports = given.attack or [*ATTACKS, TOGETHER], dict[str, Report]()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl+C does
    with suppress(KeyboardInterrupt):
        end = _BEGUN + 60 * given.minutes
        attack_in_turn(given.model, end, names, reports, port=given.port, seed=given.seed, options=options)
    if given.json:
        given.json.write_text(json.dumps({name: asdict(report) for name, report in reports.items()}) + "\n")
    print("\n".join(table(reports)))
    late = {name: over_bounds(report) for name, report in reports.items()}
    for name, report in reports.items():
        print(f"{name}: {report.statuses}", *late[name], *report.wrong[:2], *report.failed[:2], sep="\n  ")
    is_complete = len(reports) == len(names) and not any(late.values())
    sys.exit(0 if is_complete and all(report.is_sound for report in reports.values()) else 1)


if __name__ == "__main__":
    main()
