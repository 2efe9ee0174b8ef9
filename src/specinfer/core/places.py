"""Location of files that are kept between runs."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return SpecInfer's folder in the user's cache, which XDG_CACHE_HOME may move. It need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specinfer"
