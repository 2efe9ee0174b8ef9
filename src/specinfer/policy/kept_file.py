"""Measurements that are kept between runs, in the user's cache, each with the situation that it was made in.

A file only saves time: if it cannot be read or written, things are measured again.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from specinfer.core.files import cache_folder, write_atomically

MAX_AGE = 30 * 24 * 3600  # seconds: drivers and machines change without a change of name
logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class KeptFile:
    """The file of one measurement.

    Args:
        name: What is kept, in the plural.
        situation: Everything that it depends on.
    """

    def __init__(self, name: str, situation: dict[str, Any]) -> None:
        key = hashlib.sha256(json.dumps(situation, sort_keys=True).encode()).hexdigest()[:16]
        self._name, self._situation = name, situation
        self.path = cache_folder() / f"{name}-{key}.json"

    def read(self, parse: Callable[[Any], _T]) -> _T | None:
        """Return what was written in the last 30 days, or None.

        Args:
            parse: Function that makes the value of its plain numbers; it may raise KeyError, TypeError or ValueError.
        """
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            age = time.time() - float(stored["time"])
            value = parse(stored[self._name])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("%s are measured again: %s cannot be used (%s)", self._name, self.path, type(error).__name__)
            return None
        if not 0 <= age < MAX_AGE or stored.get("situation") != self._situation:
            logger.info("%s are measured again: those in %s are old", self._name, self.path)
            return None
        return value

    def write(self, numbers: object) -> None:
        """Keep the plain numbers of a value."""
        text = json.dumps({"situation": self._situation, "time": time.time(), self._name: numbers}, indent=2)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, lambda partial: partial.write_text(text, encoding="utf-8"), is_shared=True)
        except OSError as error:
            logger.info("measured %s are not kept: %s cannot be written (%s)", self._name, self.path, error.strerror)
