"""The command line: parses and checks the options, and calls the library.

Modules that need torch are imported where they are used: importing them takes seconds, and `--help` and `version`
should be fast.
"""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the `specinfer` program."""
    try:
        from specinfer.cli.app import main as run  # half a second, in which Ctrl-C is no fault either

        run()
    except KeyboardInterrupt:
        sys.exit(130)
