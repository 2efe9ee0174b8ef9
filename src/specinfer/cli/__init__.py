"""The command line: parses and checks the options, and calls the library.

Modules that need torch are imported where they are used: importing them takes seconds, and `--help` and `version`
should be fast.
"""

from specinfer.cli.app import main

__all__ = ["main"]
