"""Translation for small models with their own tokenizer, so that they draft in the target's tokens.

Both models share the text. A drafter reads the request's text in its own encoding and drafts only tokens that both
vocabularies have, which is token-level intersection, Timor et al. (arXiv 2502.05202). Logits of all other tokens are
-inf before any draw. So the recorded distribution is over target ids and is the distribution drawn from. Every
verification rule stays exact, and a translation mistake costs only drafted tokens.
"""

import codecs
import copy
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specinfer.core.errors import ModelError
from specinfer.core.request import Request
from specinfer.drafters.vocabulary.token_map import Known, ReducedVocabulary, SharedVocabulary, TokenMap, Vocabulary
from specinfer.drafters.vocabulary.token_text import TokenText
from specinfer.model.folder import TOKEN_MAP

logger = logging.getLogger(__name__)
# The drafter's tokens that the target must also have, as a number and as a fraction: with fewer it could hardly draft
# anything.
MIN_SHARED = 10
MIN_SHARE = 0.01
# Tokens at the end of a text that are encoded again, since the next text may merge with them. A cut is searched for
# among as many tokens before, once the part behind it is three times as long.
_OVERLAP = 16
_MAX_TAIL = 1000  # characters; a longer tail, of very long tokens, is settled wherever it ends
# Some tokenizers add a space before a text; a text after this prefix, which merges with nothing, is read as a
# continuation.
_ANCHOR = "\n"


@dataclass(slots=True)
class _Reading:
    """The part of one request's text that has been read.

    The ids stand for all of the text. The last of them stand for the tail, the end of the text that is encoded again as
    it grows. The text before the tail is settled.
    """

    lead: Sequence[int]  # ids before the text
    ids: list[int] = field(default_factory=list)
    tail: str = ""
    num_settled: int = 0  # number of ids before the tail
    num_tokens: int = 0  # number of target tokens read
    has_begun: bool = False
    # Holds back an incomplete character.
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )


class _Piece(NamedTuple):
    """One of the drafter's tokens and its position in a text."""

    id: int
    start: int
    end: int


class TranslatedVocabulary:
    """A vocabulary for two tokenizers that share the text and the tokens that stand for the same part of it.

    Args:
        target_vocab_size, drafter_vocab_size: The sizes of the models' logits; tokens beyond are never drafted nor
            read.
    """

    translates, reduced = True, None

    def __init__(
        self, target_tokenizer: Any, drafter_tokenizer: Any, target_vocab_size: int, drafter_vocab_size: int
    ) -> None:
        target = self._target = TokenText(target_tokenizer, target_vocab_size)
        drafter = TokenText(drafter_tokenizer, drafter_vocab_size)
        self._drafter_vocab_size = drafter_vocab_size
        pairs = {target.by_text[text]: drafter.by_text[text] for text in target.by_text.keys() & drafter.by_text.keys()}
        if target.eos is not None and drafter.eos is not None:
            pairs[target.eos] = drafter.eos
        self._pairs = pairs
        self.num_shared = len(pairs)
        self.share = len(pairs) / max(len(drafter), 1)  # fraction of the drafter's tokens
        self.token_map = TokenMap(torch.tensor(list(pairs), dtype=torch.int64), target_vocab_size)
        self._drafter_ids = torch.tensor(list(pairs.values()), dtype=torch.int64)  # [shared]
        self._marks = _marks(target, drafter)
        self._readings: dict[str, _Reading] = {}
        backend = drafter_tokenizer.backend_tokenizer
        encoded = backend.encode("a", add_special_tokens=True)
        self._lead = list(takewhile(lambda i: i in drafter.marks, encoded.ids))
        self._first = [i for i in (drafter.bos, drafter.eos) if i is not None][:1]  # used in place of an empty text
        self._begin = drafter.bos
        self._tokenizer = copy.deepcopy(backend)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.post_processor = None  # some trim the spaces off a token's position in the text
        self._adds_space = self._encode("a", is_continuation=False) != self._encode_behind_anchor("a")

    def read(self, request: Request, num_cached: int) -> Known | None:
        reading = self._readings.setdefault(request.request_id, _Reading(self._lead))
        self._take(reading, request.token_ids[reading.num_tokens :])
        reading.num_tokens = len(request.token_ids)
        if reading.decoder.getstate()[0]:  # the text ends inside a character
            return None
        pieces = self._encode(reading.tail, is_continuation=reading.num_settled > 0)
        if not reading.num_settled:
            lead = reading.lead if reading.lead or pieces else self._first
            pieces = [*(_Piece(i, 0, 0) for i in lead), *pieces]
        new = [piece.id for piece in pieces]
        num_same = _common(reading.ids[reading.num_settled :], new)
        kept = reading.num_settled + num_same
        reading.ids[kept:] = new[num_same:]
        self._settle(reading, pieces)
        return Known(reading.ids, reading.num_tokens, kept) if reading.ids else None

    def keep(self, request_id: str, tokens: Sequence[int]) -> None:
        self._readings[request_id].ids += self.to_drafter(tokens)

    def forget(self, request_id: str) -> None:
        self._readings.pop(request_id, None)

    def to_drafter(self, tokens: Sequence[int]) -> Sequence[int]:
        return [self._pairs[token] for token in tokens]

    def compact(self, logits: Tensor) -> Tensor:
        if self._drafter_ids.device != logits.device:
            self._drafter_ids = self._drafter_ids.to(logits.device)
            self.token_map = replace(self.token_map, ids=self.token_map.ids.to(logits.device))
        return logits.index_select(1, self._drafter_ids)

    def to_target(self, logits: Tensor) -> Tensor:
        shared = self.compact(logits)
        return self.token_map.expand(shared)

    def _take(self, reading: _Reading, tokens: Sequence[int]) -> None:
        """Append the tokens' text to the tail."""
        texts = []
        for place, token in enumerate(tokens, start=reading.num_tokens):
            if place == 0 and token == self._target.bos and self._begin is not None:
                reading.lead = [self._begin]
                continue
            text = self._marks.get(token)
            if text is None:
                text = self._target.text(token)
                if not reading.has_begun and self._target.drops_first_space:
                    text = text.removeprefix(b" ")
                reading.has_begun = True
            texts.append(text)
        reading.tail += reading.decoder.decode(b"".join(texts))

    def _encode(self, text: str, *, is_continuation: bool) -> list[_Piece]:
        """Return the drafter's tokens of a text; `is_continuation` means that other text precedes it."""
        if is_continuation and self._adds_space:
            return self._encode_behind_anchor(text)
        return self._pieces(text)

    def _encode_behind_anchor(self, text: str) -> list[_Piece]:
        length = len(_ANCHOR)
        pieces = self._pieces(_ANCHOR + text)
        if any(piece.start < length < piece.end for piece in pieces):  # it did merge
            return self._pieces(text)
        return [_Piece(i, start - length, end - length) for i, start, end in pieces if end > length]

    def _pieces(self, text: str) -> list[_Piece]:
        """Return the tokens of a text, without tokens that the tokenizer has and the model lacks."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        places = zip(encoding.ids, encoding.offsets, strict=True)
        return [_Piece(i, start, end) for i, (start, end) in places if i < self._drafter_vocab_size]

    def _settle(self, reading: _Reading, pieces: Sequence[_Piece]) -> None:
        """Move the start of a long tail forward, so that the work per step does not grow with the text.

        The best cut is between words, where every tokenizer splits. Otherwise it is between two tokens, since merges on
        one side of such a position never depended on the other side.
        """
        cut = None
        if len(pieces) > 3 * _OVERLAP:
            last = len(pieces) - _OVERLAP
            # Several tokens of one character begin at its start; only the first of them is a position to cut.
            places = [i for i in range(last, last - _OVERLAP, -1) if pieces[i].start > pieces[i - 1].start]
            words = (i for i in places if _begins_word(reading.tail, pieces[i - 1].end, pieces[i].start))
            cut = next(words, next(iter(places), None))
        if cut is not None:
            reading.num_settled += cut
            reading.tail = reading.tail[pieces[cut].start :]
        elif len(reading.tail) > _MAX_TAIL:
            reading.num_settled += len(pieces)
            reading.tail = ""


def _begins_word(text: str, before: int, place: int) -> bool:
    """Return whether a token that begins at `place`, after one that ends at `before`, starts a word."""
    if before < place:  # the space between them belongs to neither
        return True
    around = text[place - 1 : place], text[place + 1 : place + 2]
    return text[place : place + 1] == " " and not any(character.isspace() for character in around)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _marks(target: TokenText, drafter: TokenText) -> dict[int, bytes]:
    """Map the target id of each special token to the text the drafter reads in its place, empty if it has none.

    The drafter's tokenizer knows its special tokens by their text. Mapped are the marks of a chat template that both
    have, and the begin and end tokens.
    """
    of_drafter = set(drafter.marks.values())
    marks = {i: mark.encode() if mark in of_drafter else b"" for i, mark in target.marks.items()}
    for theirs, its in ((target.bos, drafter.bos), (target.eos, drafter.eos)):
        if theirs is not None and its is not None:
            marks[theirs] = drafter.marks[its].encode()
    return marks


def find_vocabulary(
    name: str,
    target_tokenizer: Any,
    drafter_tokenizer: Any,
    target_vocab_size: int,
    drafter_vocab_size: int,
    token_ids: Tensor | None = None,
    reduced: ReducedVocabulary | None = None,
) -> Vocabulary:
    """Return the vocabulary of the drafter of this name; the tokenizers may be None.

    Args:
        token_ids: [map] the only tokens that it computes logits of, or None for all.
        reduced: The tokens that it proposes as a rule if its tokens are the target's, or None for all.

    Raises:
        ModelError: The vocabularies have too little in common.
    """
    if target_tokenizer is None or drafter_tokenizer is None:
        if drafter_vocab_size != target_vocab_size:
            raise ModelError(
                f"drafters: {name} has a vocabulary of {drafter_vocab_size} tokens, the target of {target_vocab_size}, "
                "and one of them has no tokenizer; use a drafter with the target's tokenizer"
            )
        return SharedVocabulary(target_vocab_size, drafter_vocab_size, token_ids, reduced)
    if same_tokenizer(target_tokenizer, drafter_tokenizer):
        return SharedVocabulary(target_vocab_size, drafter_vocab_size, token_ids, reduced)
    if token_ids is not None:
        raise ModelError(
            f"drafters: {name} has a token map, whose ids are the target's, but another tokenizer than the target; "
            f"use a drafter with the target's tokenizer, or remove {TOKEN_MAP}, or leave drafter_token_map out"
        )
    for owner, tokenizer in (("the target", target_tokenizer), (name, drafter_tokenizer)):
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ModelError(
                f"drafters: {name} has another tokenizer than the target, and that of {owner} comes without a "
                "tokenizer.json, which translating needs; use a drafter with the target's tokenizer"
            )
    vocabulary = TranslatedVocabulary(target_tokenizer, drafter_tokenizer, target_vocab_size, drafter_vocab_size)
    if vocabulary.num_shared < MIN_SHARED or vocabulary.share < MIN_SHARE:
        raise ModelError(
            f"drafters: {name} has another tokenizer than the target, and only {vocabulary.num_shared} of its tokens "
            "are the target's too; use a drafter with the target's tokenizer, or one more like it"
        )
    logger.info(
        "drafter %s has a tokenizer of its own: it guesses among the %d tokens, %.1f %% of its own, that the target "
        "has too", name, vocabulary.num_shared, 100 * vocabulary.share,
    )  # fmt: skip
    return vocabulary


def same_tokenizer(one: Any, other: Any) -> bool:
    """Return whether two tokenizers encode a text to the same ids: the same tokens, merged by the same rules."""
    if one.get_vocab() != other.get_vocab():
        return False
    return _rules(one) == _rules(other)


def _rules(tokenizer: Any) -> object:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str())["model"] if backend is not None else {}
    return {name: model.get(name) for name in ("type", "merges", "vocab")}
