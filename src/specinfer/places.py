"""Where files that are kept between runs lie."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """In the user's cache, which XDG_CACHE_HOME may move; the folder need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specinfer"
