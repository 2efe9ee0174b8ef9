"""The choice of the tokens that draft models propose."""

from pathlib import Path

from specinfer.core.errors import check_int, check_path

TOKEN_MAP_AUTO, TOKEN_MAP_FULL = "auto", "full"
LEAST_TOKENS = 1024  # of a reduced vocabulary


def parse_token_map(value: int | str | Path) -> int | str | Path:
    """Return the tokens that draft models propose: `TOKEN_MAP_AUTO`, `TOKEN_MAP_FULL`, a number of tokens or a file.

    Raises:
        ValueError: The value is none of these.
    """
    name, text = "drafter_token_map", str(value)
    if text in (TOKEN_MAP_AUTO, TOKEN_MAP_FULL):
        return text
    if isinstance(value, int) or text.isdecimal():
        count = int(text) if isinstance(value, str) else value
        check_int(name, count, LEAST_TOKENS, 10**7)
        return count
    check_path(name, value)
    if not Path(value).is_file():
        raise ValueError(f"{name}: {text!r:.80} is no file; give auto, full, a number of tokens or a JSON list of ids")
    return Path(value)
