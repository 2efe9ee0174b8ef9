"""Values of JSON that a prompt words: a tool's name, a member of an enum, and text and numbers that are copied.

Text inside of JSON strings is split into other tokens than in a sentence, so what was begun is looked up by its bytes:

    Ask Amina Diallo and Bo ...     the prompt
    {"people": ["Am                 the output
    ina   Diallo"                   texts that may follow, a word at a time
"""

import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

_MARKS = re.compile(rb"\xff\[\d+\]")
_WORD = re.compile(rb"[^\W_]+")
_REST = re.compile(rb"[^\x00-\x20\"\\<>{}\[\],;]*")  # of what is copied at once
_GAP = re.compile(rb"[.,;:!?]? (?=[^\s\"\\])")
_SENTENCE_START = re.compile(rb"(?:[.!?:][\s'\"]+|\n)$")
_STRINGS = re.compile(rb'"([^"\\]{3,96})"')
_NUMBER = re.compile(rb"(?<![\w.])-?\d+(?:\.\d+)?(?![\w-])")
_OPEN_NUMBER = re.compile(rb"[\[:,]\s*(-?\d*\.?\d*)$")
_END_OF_WORD = b".!?:'`"  # that belong to the sentence
_MAX_BYTES, _MAX_NAMES = 16384, 512  # of a prompt
_MAX_VALUE, _MAX_PLACES, _MAX_TRIES, _MAX_STRINGS = 96, 3, 128, 8
_LEAST_TAIL = 4  # bytes of the end of a value that was not copied as a whole
_NEXT_PLACE = 0.4  # weight of a place of the prompt, of that of the place before
_DOUBT = 0.7  # bytes
_PHRASE, _SENTENCE = 3, 6  # words that are copied, from which on a name, or a comma, hardly ends a value
_NAME = re.compile(rb'"([\w.\-/ ]{1,64})"')
_STEM = 5  # bytes
_KEY = 9  # bytes before a name
_PASSAGE = 240  # bytes behind a name that describe it
_NAMED = 3.0  # weight of a name that is asked for in so many words
_LEAST_ASKED = 12  # bytes of a message, without which it is the one before
_CLOSE = 0.85  # probability that a value ends where a name or a phrase of the prompt does


class Wording:
    """The words of a prompt, the last message first; its beginning is left out if it is long."""

    def __init__(self, prompt: bytes) -> None:
        messages = [part.strip() for part in _MARKS.split(prompt[-_MAX_BYTES:])]
        self._text = b"\n\n".join(messages)
        self._lower = self._text.lower()
        self._asked = next((part for part in reversed(messages) if len(part) >= _LEAST_ASKED), b"").lower()
        self._begin = max(self._lower.rfind(self._asked), 0)  # of the last message
        self._asked_words = _words_of(self._asked)

    # ------------------------------------------------------------------------------------------------------ choices

    def weights(self, known: bytes, nexts: Sequence[bytes]) -> list[float]:
        """Return the weight of each text that may follow in a string, by the names of the prompt that go on so."""
        value, weights = open_string(known), [1.0] * len(nexts)
        if value is None or len(nexts) < 2:
            return weights
        followers = [[name for name in self._names if name.startswith(value + each)] for each in nexts]
        rivals = [name for names in followers for name in names]
        shared = Counter(word for name in rivals for word in self._names[name])
        for place, names in enumerate(followers):
            weights[place] += sum(self._score(name, shared, len(rivals)) for name in names)
        return weights

    def _score(self, name: bytes, shared: Counter[bytes], num_rivals: int) -> float:
        """Return the weight of a name: of its words, and those that describe it, which are asked for and few have."""
        described = [word for word in self._names[name] & self._asked_words if shared[word] < num_rivals]
        of_name = _words_of(name.lower())
        asked = _NAMED * len(of_name & self._asked_words) / max(len(of_name), 1)
        return float(asked + sum(1.0 / shared[word] for word in described)) ** 2

    @cached_property
    def _names(self) -> dict[bytes, frozenset[bytes]]:
        """The quoted names of the prompt, each with the words behind it."""
        names: dict[bytes, frozenset[bytes]] = {}
        for match in _NAME.finditer(self._text):
            if len(names) == _MAX_NAMES:
                break
            if match[1] not in names:
                passage = self._lower[match.end() : match.end() + _PASSAGE].partition(b"\n\n")[0]
                key = self._lower[max(match.start() - _KEY, 0) : match.start()]  # that of the next name, too
                names[match[1]] = _words_of(passage.partition(key)[0] if key else passage)
        return names

    # ------------------------------------------------------------------------------------------------------- copies

    def copies(self, known: bytes) -> list[tuple[bytes, float]]:
        """Return what may follow in the value at the end of a text, as the prompt goes on after the same bytes."""
        if (value := open_string(known)) is not None:
            return self._words(value, known) if 0 < len(value) <= _MAX_VALUE else []
        number = _OPEN_NUMBER.search(known[-24:])
        return [] if number is None else self._numbers(number[1])

    def _words(self, value: bytes, known: bytes) -> list[tuple[bytes, float]]:
        tail = value
        while not (places := self._places(tail, known)):
            first = _WORD.match(tail)
            tail = tail[max(first.end() if first is not None else 0, 1) :].lstrip(b" ")
            if len(tail) < _LEAST_TAIL:
                return []
        sure, total = _sure(len(tail)), sum(weight for _, weight in places)
        weights: dict[bytes, float] = {}
        for place, weight in places:
            for text, prob in _goes_on(self._text, place, tail):
                weights[text] = weights.get(text, 0.0) + sure * prob * weight / total
        return sorted(weights.items(), key=lambda item: -item[1])

    def _places(self, tail: bytes, known: bytes) -> list[tuple[int, float]]:
        """Return where a text ends in the prompt, if it begins with a word there, and the weight of each place.

        Those in the last message come first, behind the last value that was copied from it; equal letters come first.
        """
        begins, lower = self._begin, tail.lower()
        places = _ends(self._lower, lower, begins, len(self._lower))
        if not places:
            begins, places = 0, _ends(self._lower, lower, 0, self._begin)[::-1]
        elif len(places) > 1 and begins:
            cursor = self._cursor(known)
            places = [place for place in places if place > cursor] + [place for place in places if place <= cursor]
        same = [place for place in places if self._text[place - len(tail) : place] == tail]
        ranked = same[:_MAX_PLACES] or places[:_MAX_PLACES]
        return [(place, _NEXT_PLACE**order) for order, place in enumerate(ranked)]

    def _cursor(self, known: bytes) -> int:
        """Return where the last value that was copied from the last message ends in it."""
        for value in _STRINGS.findall(known)[: -_MAX_STRINGS - 1 : -1]:
            if (start := self._text.find(value, self._begin)) >= 0:
                return start + len(value)
        return 0

    def _numbers(self, begun: bytes) -> list[tuple[bytes, float]]:
        """Return the rest of numbers of the last message that begin so."""
        numbers = {number[len(begun) :] for number in _NUMBER.findall(self._asked) if number.startswith(begun)}
        return [(rest, 0.8 / len(numbers)) for rest in sorted(numbers) if rest] if len(numbers) <= 3 else []


def _ends(text: bytes, part: bytes, start: int, stop: int) -> list[int]:
    """Return where a part ends in a text, if it begins with a word there."""
    ends, at = list[int](), text.find(part, start, stop)
    for _ in range(_MAX_TRIES):
        if at < 0:
            break
        if at == 0 or not (_is_word(text[at - 1]) and _is_word(part[0])):
            ends.append(at + len(part))
        at = text.find(part, at + 1, stop)
    return ends


def _sure(length: int) -> float:
    return length / (length + _DOUBT)


def _goes_on(text: bytes, place: int, tail: bytes) -> list[tuple[bytes, float]]:
    """Return what may follow at a place of a prompt: the rest of a word; behind it, the next word or the end."""
    if rest := _rest(text, place):
        return [(rest, 1.0)]
    gap = _GAP.match(text, place)
    following = b"" if gap is None else _rest(text, gap.end())
    if gap is None or not following:
        return [(b'"', _CLOSE)]
    words, stop = tail.split() or [tail], gap[0].rstrip()
    is_name = not words[-1].isalpha() or words[-1][:1].isupper()
    if stop:  # a list or another clause goes on behind a comma, if many words were copied
        close = 0.5 if stop in b",:;" and len(words) >= _SENTENCE else _CLOSE
    elif len(words) >= _PHRASE or is_name == (not following[:1].islower()):
        close = 1 - _CLOSE
    elif is_name and len(words) == 1 and _SENTENCE_START.search(text[: place - len(tail)][-4:]):
        close = 0.4
    else:
        close = _CLOSE if is_name else 0.4
    return [(b'"', close), (gap[0] + following, 1 - close)]


def open_string(known: bytes) -> bytes | None:
    """Return the part of a JSON string that was written at the end of a text, or None if no string is open there."""
    end = known.rfind(b'"')
    while end > 0 and known[end - 1] == ord("\\"):
        end = known.rfind(b'"', 0, end)
    if end < 0 or known[:end].rstrip()[-1:] not in (b"{", b"[", b":", b",", b"(", b""):
        return None
    return known[end + 1 :]


def _rest(text: bytes, place: int) -> bytes:
    match = _REST.match(text, place)
    rest = b"" if match is None else match[0].rstrip(_END_OF_WORD)
    return rest.rstrip(b")") if rest.count(b")") > rest.count(b"(") else rest


def _is_word(byte: int) -> bool:
    return bytes([byte]).isalnum() or byte == ord("_") or byte >= 0x80


def _words_of(text: bytes) -> frozenset[bytes]:
    """Return the beginnings of the words of a text, in which forms of a word agree."""
    return frozenset(word[:_STEM] for word in _WORD.findall(text))
