"""Prompts from the user's data: text files, JSON lines of prompts or chats, and traces of a running server."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specinfer.core.errors import RequestError
from specinfer.inputs.chat.template import ChatTemplate

_HELD_OUT_ONE_IN = 10
_TEXT_NAMES = ("text", "prompt", "content")
_JSON_LINES = (".jsonl", ".ndjson")
LEAST_PROMPTS = 4  # two to train on, one held out, and no drafter is trained on fewer


class CorpusError(ValueError):
    """Data that cannot be used; the message names the file and the remedy."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of prompts for training, and of held-out ones.

    Attributes:
        texts: Parts of plain texts that are to be read.
        num_cut: The number of prompts longer than the limit, of which only the end is used.
    """

    training: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]
    texts: tuple[tuple[int, ...], ...] = ()
    num_cut: int = 0

    @property
    def digest(self) -> str:
        """A hash of all prompts and texts."""
        return hashlib.sha256(repr((self.training, self.held_out, self.texts)).encode()).hexdigest()


def read_prompts(
    paths: Sequence[str | Path],
    tokenizer: Any,
    *,
    count: int,
    num_held_out: int,
    length: int,
    most: int,
    vocab_size: int,
    num_texts: int = 0,
    text_length: int = 0,
    held_out_paths: Sequence[str | Path] = (),
) -> Prompts:
    """Return the prompts of all files; those of one document are either all held out or not.

    A plain text is cut into prompts at evenly spread positions; a JSON line is one prompt.

    Args:
        count: The number of prompts to train on: this many are cut from plain text, at most this many JSON lines are
            taken.
        num_held_out: The same for held-out prompts.
        length: The length of a prompt that is cut from a plain text, in tokens.
        num_texts: The largest number of parts of plain texts that are to be read.
        text_length: The length of each, in tokens.
        most: The limit of a prompt; of longer ones only the end is used.
        held_out_paths: Files to hold out. If empty, a tenth of the documents is held out, by a hash of their content.

    Raises:
        CorpusError: A file cannot be read or is not text, or there is too little data in all of them.
    """
    reader = _Reader(tokenizer, most, vocab_size)
    documents = [document for path in paths for document in reader.documents(Path(path))]
    if held_out_paths:
        held_out = [document for path in held_out_paths for document in reader.documents(Path(path))]
        excluded = {tuple(document.ids) for document in held_out}
        training = [document for document in documents if tuple(document.ids) not in excluded]
    else:
        training, held_out = _split(documents, length)
    tested = _take(held_out, num_held_out, length)
    known = set(tested)
    # Different texts may begin alike, for example with a license.
    prompts = [ids for ids in _take(training, count, length) if ids not in known]
    if len(prompts) + len(tested) < LEAST_PROMPTS or not prompts or not tested:
        raise CorpusError(
            f"data: {', '.join(map(str, paths))} give {len(prompts) + len(tested)} prompts, and {LEAST_PROMPTS} are "
            f"needed at least ({length} tokens each are cut from plain text); give more text"
        )
    plain = [document for document in training if not document.is_prompt]
    texts = [ids for ids in _take(plain, num_texts, text_length) if ids[:length] not in known] if num_texts else []
    return Prompts(tuple(prompts), tuple(tested), tuple(texts), reader.num_cut)


class _Document(NamedTuple):
    ids: list[int]
    is_prompt: bool  # a whole prompt, not a text to be cut


def _split(documents: Sequence[_Document], length: int) -> tuple[list[_Document], list[_Document]]:
    """Hold out a tenth of the documents by their content, so that a copy is never on both sides."""

    def is_held_out(document: _Document) -> bool:
        digest = hashlib.sha256(repr(document.ids).encode()).digest()
        return int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN == 0

    # Of few documents the shortest is held out.
    shortest = min((document.ids for document in documents), key=len, default=[])
    for chooses in (is_held_out, lambda document: document.ids == shortest):
        training = [document for document in documents if not chooses(document)]
        held_out = [document for document in documents if chooses(document)]
        if held_out and training:
            return training, held_out
    for ids, is_prompt in documents[:1]:  # one long text, or copies of it: its end is held out
        if not is_prompt and len(ids) >= 2 * length:
            place = max(len(ids) - max(len(ids) // _HELD_OUT_ONE_IN, length), length)
            return [_Document(ids[:place], is_prompt)], [_Document(ids[place:], is_prompt)]
    return list(documents), []


def _take(documents: Sequence[_Document], count: int, length: int) -> list[tuple[int, ...]]:
    """Return this many prompts, evenly spread over the documents: whole ones first, and then cuts from texts."""
    whole = [tuple(document.ids) for document in documents if document.is_prompt]
    texts = [document.ids for document in documents if not document.is_prompt]
    total = sum(map(len, texts))
    num_cut = max(count - len(whole), 0)
    cuts = []
    for ids in texts:
        # Each text contributes in proportion; where the text is long enough, cuts are at least a prompt's length apart.
        share = min(max(round(num_cut * len(ids) / total), 1), max(len(ids) // length, 1))
        step = max(len(ids) - length, 0) / share
        cuts += [tuple(ids[round(i * step) : round(i * step) + length]) for i in range(share)]
    return _spread(whole, count) + _spread(cuts, num_cut)


def _spread(prompts: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """Return at most this many prompts, evenly spread."""
    step = max(len(prompts) / max(count, 1), 1.0)
    return [prompts[int(i * step)] for i in range(min(len(prompts), count))]


class _Reader:
    """A reader of documents."""

    def __init__(self, tokenizer: Any, most: int, vocab_size: int) -> None:
        self._tokenizer, self._most, self._vocab_size = tokenizer, most, vocab_size
        self._chat = ChatTemplate(tokenizer, most)
        self.num_cut = 0

    def documents(self, path: Path) -> Iterator[_Document]:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
            if not files:
                raise CorpusError(f"data: the folder {path} has no files")
            for file in files:
                yield from self.documents(file)
            return
        try:
            text = path.read_bytes().decode("utf-8-sig")  # some editors begin a file with a byte order mark
        except FileNotFoundError as error:
            raise CorpusError(f"data: no file {path}; name text files, JSON lines or folders of them") from error
        except OSError as error:
            raise CorpusError(f"data: {path} cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise CorpusError(f"data: {path} is not UTF-8 text (byte {error.start}); leave it out") from error
        if "\0" in text:
            raise CorpusError(f"data: {path} is binary, not text; leave it out")
        if path.suffix in _JSON_LINES:
            for number, line in enumerate(text.split("\n"), start=1):  # strings may contain other line separators
                if line.strip() and (ids := self._line(line, f"{path}, line {number}")):
                    yield _Document(self._end(ids), is_prompt=True)
        elif len(ids := self._encode(text, str(path)) if text.strip() else []) >= 2:  # one token to predict
            yield _Document(ids, is_prompt=False)

    def _end(self, ids: list[int]) -> list[int]:
        self.num_cut += len(ids) > self._most
        return ids[-self._most :]

    def _encode(self, text: str, place: str) -> list[int]:
        if self._tokenizer is None:
            raise CorpusError(f"data: {place}: the target has no tokenizer; give JSON lines with prompt_token_ids")
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        except (TypeError, UnicodeError) as error:  # JSON may contain half of a surrogate pair
            raise CorpusError(f"data: {place} holds a character that cannot be encoded; leave it out") from error
        return ids

    def _line(self, line: str, place: str) -> list[int] | None:
        """Return the prompt of a JSON line, or None for a line of a trace without one."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"data: {place} is not valid JSON; mend or delete the line") from error
        if isinstance(record, str):
            return self._encode(record, place)
        if not isinstance(record, dict):
            raise CorpusError(f"data: {place} is neither an object nor text")
        if record.get("type") in ("trace", "step", "end", "left_out"):  # in a server's trace only requests have prompts
            return None
        body = record.get("body")  # in a batch file
        record = body if isinstance(body, dict) else record
        ids = record.get("prompt_token_ids")
        if ids is None and isinstance(record.get("prompt"), list):  # in a batch file
            ids = record["prompt"]
        if ids is not None:
            if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < self._vocab_size for i in ids):
                raise CorpusError(f"data: {place}: prompt_token_ids must be a list of ids below {self._vocab_size}")
            return ids
        if isinstance(record.get("messages"), list):
            try:
                return self._chat.read(record["messages"])
            except RequestError as error:
                raise CorpusError(f"data: {place}: {error}") from error
        for name in _TEXT_NAMES:
            if isinstance(record.get(name), str):
                return self._encode(record[name], place)
        raise CorpusError(f"data: {place} has none of prompt, prompt_token_ids, messages and text")
