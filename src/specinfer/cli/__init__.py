"""The command line: reads what is asked for, checks it, and hands it to the library.

Modules that need torch are imported where they are used: they take seconds, and `--help` and `version`
should not.
"""

from specinfer.cli.app import main

__all__ = ["main"]
