"""Control tokens in clients' texts: they are found and broken in two, so that no tokenizer can join them.

They are broken by a character that is in none of the texts.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from specinfer.core.errors import RequestError

_BREAKS = range(0x10FFFD, 0x100000, -1)  # private use: these characters have no meaning in text


class ControlTokens:
    """The tokens that only a chat template may write.

    Args:
        tokens: A tokenizer's added tokens, with `content`, `special` and `normalized`.
        literals: The literal text of the template. A token in it steers the model, even if it is not special.
        normalize: The tokenizer's normalization of a text before it looks for tokens that are `normalized`.
    """

    def __init__(self, tokens: Iterable[Any], literals: str, normalize: Callable[[str], str] | None = None) -> None:
        # A token of one character cannot be broken, and is like any other text.
        breakable = [token for token in tokens if len(token.content) > 1 and not token.content.isspace()]
        special = {token.content for token in breakable if token.special}
        self._special = _Lookup(special)
        self._all = _Lookup(special | {token.content for token in breakable if token.content in literals})
        self._normalize = normalize if any(token.normalized for token in breakable) else None

    def broken(self, value: Any, mark: str, *, is_data: bool = True) -> Any:
        """Return the value with the mark after the first character of each control token in it.

        Args:
            is_data: Whether the value is data, as users' and tools' texts are. Texts of the model and of the system
                may have added tokens that are not special, such as those around thoughts.

        Raises:
            RequestError: The tokenizer would still find a token.
        """
        if isinstance(value, str):
            return self._broken_text(value, mark, self._all if is_data else self._special)
        if isinstance(value, Mapping):
            pairs = [(self.broken(one, mark, is_data=is_data) for one in pair) for pair in value.items()]
            return dict(pairs)  # type: ignore[arg-type]
        if isinstance(value, (list, tuple)):
            return [self.broken(one, mark, is_data=is_data) for one in value]
        return value

    def _broken_text(self, text: str, mark: str, lookup: "_Lookup") -> str:
        cuts = [0, *(start + 1 for start in lookup.starts(text)), len(text)]
        pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
        broken = mark.join(pieces)
        if self._normalize is not None and any(lookup.starts(self._normalize(broken))):
            raise RequestError("messages: a text would become one of the model's control tokens; leave it out")
        return broken


class _Lookup:
    """A search for texts of a set in another text, at a cost that does not depend on the size of the set."""

    def __init__(self, texts: set[str]) -> None:
        self._texts = texts
        self._lengths: dict[str, set[int]] = {}
        for text in texts:
            self._lengths.setdefault(text[0], set()).add(len(text))
        self._first = re.compile("|".join(map(re.escape, self._lengths)) or "(?!)")

    def starts(self, text: str) -> Iterator[int]:
        for match in self._first.finditer(text):
            start = match.start()
            if any(text[start : start + length] in self._texts for length in self._lengths[match[0]]):
                yield start


def breaks_for(texts: Sequence[str]) -> tuple[str, str]:
    """Return two characters that are in none of the texts."""
    used = set().union(*texts)
    unused = (char for char in map(chr, _BREAKS) if char not in used)
    try:
        return next(unused), next(unused)
    except StopIteration:
        raise RequestError("messages: hold every character of Unicode's private use; leave some out") from None


def has_in_order(text: str, wanted: Sequence[str]) -> bool:
    """Return whether texts are in another one, each after the one before it; all together it is read once."""
    at = 0
    for one in wanted:
        at = text.find(one, at)
        if at < 0:
            return False
        at += len(one)
    return True


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from (*texts_in(key), *texts_in(inner))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from texts_in(inner)
