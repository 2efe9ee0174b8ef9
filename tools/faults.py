"""Kill, fault and stop a server's engine under load, fill its disk, and more: python tools/faults.py demo-chat.

See tests/server/pressure/faults.py. The exit code is 1 if a request was left without an answer or an error, a text was
wrong, the server came back late, or the process that stays grew.
"""

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

_BEGUN = time.monotonic()  # before the imports that take seconds
sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "support"), str(Path(__file__).parents[1])]

from tests.server.pressure.faults import FAULTS, hurt  # noqa: E402 - after the paths


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo-chat")
    parser.add_argument("--minutes", type=float, default=60.0, help="Of the whole run.")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="Only this; may be repeated.")
    parser.add_argument("--pause", type=float, default=20.0, help="Seconds from a recovery to the next fault.")
    parser.add_argument("--ranks", type=int, default=1, help="Ranks of the engine (-tp): with two, one is lost.")
    parser.add_argument("--port", type=int, default=8393)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="File for all that was seen.")
    given, options = parser.parse_known_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl+C does
    report = hurt(
        given.model, _BEGUN + 60 * given.minutes, port=given.port, pause=given.pause,
        faults=given.fault or FAULTS, num_ranks=given.ranks,
        seed=given.seed, options=options,
    )  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps(asdict(report)) + "\n")
    print("\n".join(report.lines()))
    sys.exit(1 if report.faults() else 0)


if __name__ == "__main__":
    main()
