"""The cache of a small model, which follows the known tokens of each request."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specinfer.core.request import Request
from specinfer.core.tree import TokenTree
from specinfer.drafters.merge.scoring import MAX_SCORED, Scoring
from specinfer.drafters.sparse_context import places_to_read
from specinfer.drafters.vocabulary.token_map import Known, Vocabulary
from specinfer.model.batch import Piece
from specinfer.model.kv_cache import KVCache, OutOfSlotsError, Slots
from specinfer.model.runner import ModelRunner

MAX_CHUNK = 512  # the largest number of known tokens of a request that are read in one pass


class DrafterCache:
    """Keys and values of a prefix of each request's known tokens, and the passes that bring it up to date.

    With a window the known tokens of a long context are a shorter text: of what the request began with only the
    places to read. All else here, prefixes of other requests included, is about this text.

    Args:
        scoring: The record of how well the drafter does, or None for no record.
        window: As in `DraftKind`.

    Attributes:
        first_nodes: Nodes that are computed as drafts before those below the root: none, as the root is known.
    """

    first_nodes: tuple[int, ...] = ()

    def __init__(
        self, runner: ModelRunner, vocabulary: Vocabulary, scoring: Scoring | None, window: int | None = None
    ) -> None:
        self._runner, self._vocabulary, self._scoring, self._window = runner, vocabulary, scoring, window
        self.known: dict[str, Known] = {}  # the cache has a prefix of these ids, all while a tree grows
        self._places: dict[str, list[int]] = {}  # of what a request began with, those that it reads; none for all
        self._salts: dict[str, str | None] = {}  # salts of the requests with something in the cache

    @property
    def _cache(self) -> KVCache:
        return self._runner.cache  # another one after a change of the weights

    def sync(self, request: Request) -> Known | None:
        """Return the known tokens to draft from and drop all others from the cache; None if they cannot be read."""
        cache, request_id = self._cache, request.request_id
        num_cached = len(cache.slots(request_id))
        known = self._vocabulary.read(request, num_cached + (self.num_skipped(request_id) if num_cached else 0))
        if known is None:
            return None
        known = self.known[request_id] = self._shortened(request_id, known)
        num_scored = self._scoring.begin(request, len(known.ids)) if self._scoring else len(known.ids)
        cache.commit(request_id, ())  # drafts that were never observed
        if request_id not in self._salts:
            salt = self._salts[request_id] = self._salt(request)
            num_read = 1 + MAX_SCORED if self._scoring else 1  # tokens whose logits are needed
            cache.restore(salt, known.ids[:-num_read])
            cache.attach(request_id, salt, known.ids[:-num_read])
        else:
            # The root and the token before any token to score are always computed, since their logits are needed.
            cache.truncate(request_id, min(known.num_kept, len(known.ids) - 1, num_scored - 1))
        return known

    def _shortened(self, request_id: str, known: Known) -> Known:
        """Return known tokens without those that are skipped, which stay the same as long as the request lives."""
        if request_id not in self._places:
            places = places_to_read(len(known.ids), self._window)
            self._places[request_id] = [] if places is None else places.tolist()
        if not (read := self._places[request_id]):
            return known
        end = read[-1] + 1
        is_kept = known.num_kept >= end
        num_kept = known.num_kept - self.num_skipped(request_id) if is_kept else bisect_left(read, known.num_kept)
        return replace(known, ids=[*(known.ids[place] for place in read), *known.ids[end:]], num_kept=num_kept)

    def num_skipped(self, request_id: str) -> int:
        """Return the number of known tokens that are no part of what it reads of a request."""
        places = self._places.get(request_id)
        return places[-1] + 1 - len(places) if places else 0

    def _is_prompt(self, request: Request, start: int) -> bool:
        """Return whether the token at this place of what is read is one of the prompt."""
        return start < len(request.prompt_ids) - self.num_skipped(request.request_id)

    def reserve(self, request: Request, count: int) -> Slots:
        """Return [count] more slots for drafts.

        Raises:
            OutOfSlotsError: There are too few.
        """
        return self._cache.reserve(request.request_id, count)

    def reserved(self, request: Request) -> Slots:
        """Return the slots of drafts, those of `first_nodes` first."""
        return self._cache.reserved(request.request_id)

    def _salt(self, request: Request) -> str | None:
        """Return what must be the same, besides the tokens, for requests that share a prefix."""
        return request.cache_salt

    def prefill(self, request: Request) -> bool:
        """Compute all known tokens but the last; return False if there are too few slots."""
        try:
            self.read_known(request)
        except OutOfSlotsError:
            self.release(request.request_id)
            return False
        return True

    def read_known(self, request: Request) -> None:
        """Compute all known tokens but the last.

        Raises:
            OutOfSlotsError: There are too few slots.
        """
        request_id, ids = request.request_id, self.known[request.request_id].ids
        while (start := len(self._cache.slots(request_id))) < len(ids) - 1:
            self._compute(request, start, min(start + MAX_CHUNK, len(ids) - 1))
            if self._is_prompt(request, start):
                self._cache.share(request_id, self._salts[request_id], ids)

    def catch_up(self, requests: Sequence[Request]) -> Tensor:
        """Compute the known tokens that the cache lacks; return [requests, vocab] logits after the last of each."""
        cache = self._cache
        num_rows = {request.request_id: self._num_rows(request, len(requests)) for request in requests}
        for request in requests:
            start, end = len(cache.slots(request.request_id)), len(self.known[request.request_id].ids)
            while end - start > MAX_CHUNK:
                size = min(MAX_CHUNK, end - start - num_rows[request.request_id])
                self._compute(request, start, start + size)
                start += size
        pieces = []
        for request in requests:
            ids = self.known[request.request_id].ids
            piece = self._piece(request, len(cache.slots(request.request_id)), len(ids), TokenTree.root(ids[-1]))
            pieces.append(replace(piece, num_logits=num_rows[request.request_id]) if self._scoring else piece)
        logits = self._runner.forward(pieces)
        for request, piece in zip(requests, pieces, strict=True):
            self.note_read(request, len(piece.tokens))
        return self._score(requests, logits, list(num_rows.values())) if self._scoring else logits

    def note_read(self, request: Request, count: int, of: int | None = None) -> None:
        """Commit the first `count` reserved slots, whose known tokens were computed.

        Args:
            of: Reserved slots for known tokens, of which those that were not needed are freed; None for `count`. All
                others stay reserved.
        """
        cache, request_id = self._cache, request.request_id
        is_prompt = self._is_prompt(request, len(cache.slots(request_id)))  # it has just been read
        cache.commit(request_id, range(count), of=count if of is None else of)
        if is_prompt:
            cache.share(request_id, self._salts[request_id], self.known[request_id].ids)

    def _compute(self, request: Request, start: int, end: int) -> None:
        self._runner.forward([self._piece(request, start, end, None)])
        self._cache.commit(request.request_id, range(end - start))

    def _piece(self, request: Request, start: int, end: int, tree: TokenTree | None) -> Piece:
        slots = self._cache.reserve(request.request_id, end - start)
        ids = self.known[request.request_id].ids[start:end]
        return Piece.from_span(ids, tree, self._cache.slots(request.request_id), slots)

    def _num_rows(self, request: Request, num_requests: int) -> int:
        """Return how many of the last known tokens need logits."""
        if not self._scoring:
            return 1
        start, end = len(self._cache.slots(request.request_id)), len(self.known[request.request_id].ids)
        return min(self._scoring.num_rows(request, start, end, num_requests), MAX_CHUNK)

    def _score(self, requests: Sequence[Request], logits: Tensor, num_rows: Sequence[int]) -> Tensor:
        """Return the last row of each request, [requests, vocab]; the rows before it score what was read."""
        assert self._scoring is not None
        parts = logits.split(list(num_rows))
        for request, rows in zip(requests, parts, strict=True):
            if not self._vocabulary.translates:
                rows = self._vocabulary.compact(rows)
            self._scoring.read(request, self.known[request.request_id].ids, rows[:-1])
        return torch.stack([rows[-1] for rows in parts])

    def clear(self) -> None:
        """Drop what is known of every request, as after a change of the weights."""
        for request_id in self.known:
            self._vocabulary.forget(request_id)
        self.known.clear()
        self._places.clear()
        self._salts.clear()

    def forget(self, request_id: str) -> None:
        """Drop all state of the request."""
        self.release(request_id)
        self.known.pop(request_id, None)
        self._places.pop(request_id, None)
        self._vocabulary.forget(request_id)

    def release(self, request_id: str) -> None:
        """Free all slots; what was computed stays cached as long as there are free slots."""
        if request_id in self._salts:
            self._cache.release(request_id, self._salts.pop(request_id), self.known[request_id].ids)
