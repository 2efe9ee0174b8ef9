"""Forms of settings about drafters: their names, how many are asked, and what they read and propose."""

import os
from collections.abc import Sequence
from pathlib import Path

from specinfer.core.errors import check_int, check_path
from specinfer.core.lookups import quoted_lookups, reserved_names
from specinfer.core.rules import AUTO
from specinfer.core.tree_shape import parse_count

TOKEN_MAP_AUTO, TOKEN_MAP_FULL = "auto", "full"
LEAST_TOKENS = 1024  # of a reduced vocabulary
USUAL_WINDOW, _LEAST_WINDOW = 1024, 64


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


def parse_window(window: str) -> int | None:
    """Return the tokens that `drafter_window` names, or None for "all" and "auto".

    Raises:
        ValueError: The option has none of the forms.
    """
    if window in ("all", AUTO):
        return None
    is_number = isinstance(window, str) and window.isascii() and window.isdecimal()
    if not is_number or parse_count(window) < _LEAST_WINDOW:
        raise ValueError(
            f'drafter_window: {window!r:.60} is not understood; use "all", "auto", or a number of tokens of at least '
            f"{_LEAST_WINDOW}"
        )
    return parse_count(window)


HEDGE = "hedge"
_HEDGE_ASKED = 2  # the generalist, and the drafter that suits the text best


def parse_select(select: str) -> int | None:
    """Return the number of model drafters that `select` allows for one request, or None for "all".

    Raises:
        ValueError: The option has none of the forms.
    """
    if select == "all":
        return None
    if select == HEDGE:
        return _HEDGE_ASKED
    count = select.removeprefix(f"{HEDGE}:") if isinstance(select, str) else ""
    if count == select or not (count.isascii() and count.isdecimal()) or not parse_count(count):
        raise ValueError(f'select: {select!r:.60} is not understood; use "all", "hedge", or "hedge:1" (models asked)')
    return parse_count(count)


_DRAFTER_FORMS = f'"auto", "none", or a list of folders, hub names, {quoted_lookups("and")}'


def parse_drafters(drafters: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the drafter names as a tuple, () for "none" and None for "auto".

    Raises:
        ValueError: A name is empty or not text, two names stand for the same drafter, or "auto" or "none" is given
            among names.
    """
    if drafters is None:
        return None
    given = (drafters,) if isinstance(drafters, str | os.PathLike) else drafters
    if not isinstance(given, Sequence) or not all(isinstance(name, str | os.PathLike) for name in given):
        raise ValueError(f"drafters: {drafters!r:.60} is not a list of names; give {_DRAFTER_FORMS}")
    names = tuple(map(str, given))
    if not all(names):
        raise ValueError(f"drafters: an empty name; give {_DRAFTER_FORMS}")
    for word, meaning in (("auto", None), ("none", ())):
        if names == (word,):
            return meaning
        if word in names:
            raise ValueError(f"drafters: {word} stands alone; leave it or the others out")
    # "ngram" is always the drafter of that name, even if there is a folder called "ngram".
    places = {name if name in reserved_names() or not os.path.isdir(name) else os.path.realpath(name) for name in names}
    if len(places) < len(names):
        raise ValueError(f"drafters: {', '.join(names)} names a drafter twice; leave one out")
    return names
