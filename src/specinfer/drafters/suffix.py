"""Suffix decoding: how texts went on after the words that stand last, weighed by how often they did.

Two texts are asked: the request's own, and what finished requests with the same cache salt said. In each
the longest stretch is found that ends the text now, and a tree of what followed it grows, the likeliest
guess first. What a long stretch says is hardly doubted, so a text that repeats itself gets one long chain.
Source: SuffixDecoding (Oliaro et al., arXiv 2411.04975); doubt as in prediction by partial matching.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import TypeAlias

from specinfer.drafters.base import MAX_PROSPECT, Prospect
from specinfer.drafters.suffix_automaton import SuffixAutomaton
from specinfer.request import FinishReason, Request, Span
from specinfer.tree import Draw, TokenTree, TreeBudget
from specinfer.verify import Acceptance

MAX_MATCH = 32  # last tokens looked up in a text that does not end with them; more of them tell little more
STEP_TOKENS = 2048  # read in one step at most, so that a long prompt delays no step: 4 ms of ordinary text
PIECE_TOKENS = 512  # of an answer, read into the store at once
# What is charged for a salt and for each of its generations beside their tokens: an automaton takes as much as
# that before it has read anything.
SALT_TOKENS = 16
GENERATION_TOKENS = 16
SALT_CHARACTERS = 32  # of a salt's name, charged as one token
MAX_CHILDREN = 32  # continuations of one stretch that are looked at, the ones seen first
LEAST_CHANCE = 0.002  # guesses less likely than this are not worth a place in any tree

# How many doubts are added to what a stretch of this length was seen to be followed by: one sighting after
# L tokens came true in 1 / (1 + 2 / L**0.8) of the cases in held-out Python files (24 % after one token,
# 45 % after two, 60 % after four, 79 % after twelve, 91 % after thirty).
_DOUBT: tuple[float, ...] = tuple(2.0 / max(length, 1) ** 0.8 for length in range(257))

Match: TypeAlias = tuple[SuffixAutomaton, int, int]  # a text, a state of it, and how long the match is


class SuffixStore:
    """What finished requests said, by salt, within a limit of tokens for all of them together.

    Each salt has two generations; when the younger is full the older is dropped. To keep to the limit the
    salts used least recently are dropped. Salts and generations are charged as tokens, too, so that many
    salts with little text stay within the same memory. Any number of threads and engines may share one store.
    """

    def __init__(self, max_tokens: int) -> None:
        if max_tokens < 0:
            raise ValueError(f"max_tokens must be at least 0, not {max_tokens}")
        self.lock = threading.RLock()  # held as long as a match from here is used
        self._max_tokens = max_tokens
        self._charged = 0  # what all salts are charged together
        self._salts: OrderedDict[str, list[SuffixAutomaton]] = OrderedDict()  # the younger generation first

    @property
    def num_tokens(self) -> int:
        """Of all texts, without what salts are charged."""
        with self.lock:
            return sum(text.num_tokens for texts in self._salts.values() for text in texts)

    @property
    def salts(self) -> tuple[str, ...]:
        """Those with something stored, the least recently used first."""
        with self.lock:
            return tuple(self._salts)

    def add(self, salt: str, tokens: Sequence[int]) -> None:
        """Reads a text; of one longer than a generation its end."""
        half = (self._max_tokens - _charge(salt, ())) // 2 - GENERATION_TOKENS
        tokens = tokens[-half:] if half > 0 else ()
        if not tokens:
            return
        with self.lock:
            texts = self._salts.pop(salt, None)
            if texts is None:
                texts = [SuffixAutomaton()]
            else:
                self._charged -= _charge(salt, texts)
            if texts[0].num_tokens + len(tokens) > half:
                texts = [SuffixAutomaton(), texts[0]]
            texts[0].start_text()
            texts[0].extend(tokens)
            self._salts[salt] = texts
            self._charged += _charge(salt, texts)
            while self._charged > self._max_tokens:  # ends before this salt, whose two halves are within it
                self._charged -= _charge(*self._salts.popitem(last=False))

    def match(self, salt: str, tokens: Sequence[int]) -> Match | None:
        """The longest suffix of `tokens` that was said before; in the younger generation if both have it."""
        with self.lock:
            texts = self._salts.get(salt)
            if texts is None:
                return None
            self._salts.move_to_end(salt)
            return max(((text, *text.match(tokens)) for text in texts), key=lambda match: match[2])


def _charge(salt: str, texts: Sequence[SuffixAutomaton]) -> int:
    """What a salt with these generations counts for in a store, in tokens."""
    fixed = SALT_TOKENS + len(salt) // SALT_CHARACTERS
    return fixed + sum(GENERATION_TOKENS + text.num_tokens for text in texts)


@dataclass(slots=True)
class _Reading:
    """A request and as much of its text as has been read."""

    request: Request
    text: SuffixAutomaton = field(default_factory=SuffixAutomaton)


class SuffixDrafter:
    """Guesses what followed the same words before, in this text or in an earlier answer."""

    name = "suffix"

    def __init__(self, max_tokens: int = 200_000, store: SuffixStore | None = None, min_match: int = 1) -> None:
        """A drafter with a store of its own, or with one that others use, too.

        Args:
            max_tokens: Of earlier answers: some 125 bytes each of source code, 200 of random tokens, and 300 at
                worst. A given `store` has its own limit.
            min_match: Shorter matches say nothing. One token is worth asking: on held-out Python files it
                gives 1.80 tokens a pass for 16 nodes, and matches of two or more 1.52.
        """
        if min_match < 1:
            raise ValueError(f"min_match must be at least 1, not {min_match}")
        self.store = SuffixStore(max_tokens) if store is None else store
        self._min_match = min_match
        self._readings: dict[str, _Reading] = {}
        # Salts and pieces of answers that are not in the store yet; if they come too fast the oldest are lost.
        self._unread: deque[tuple[str, list[int]]] = deque(maxlen=256)

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        room = STEP_TOKENS - self._store_answers(STEP_TOKENS // 2)
        trees = []
        for span, budget in zip(spans, budgets, strict=True):
            if not (budget.max_nodes and budget.max_depth):
                trees.append(TokenTree.root(span.request.token_ids[-1]))
                continue
            room -= self._read(span.request, room)
            trees.append(self._draft_one(span.request, budget))
        return trees

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        pass  # the text is read when drafting

    def forget(self, request_id: str) -> None:
        reading = self._readings.pop(request_id, None)
        if reading is None or reading.request.cache_salt is None:
            return
        if reading.request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            salt, answer = reading.request.cache_salt, reading.request.output_ids
            # A piece begins with the end of the one before, so that a match finds its way across.
            for start in range(0, len(answer), PIECE_TOKENS):
                self._unread.append((salt, answer[max(start - MAX_MATCH, 0) : start + PIECE_TOKENS]))

    def _store_answers(self, room: int) -> int:
        """Reads answers that ended into the store; how many tokens."""
        num_read = 0
        while self._unread and num_read < room:
            salt, piece = self._unread.popleft()
            self.store.add(salt, piece)
            num_read += len(piece)
        return num_read

    def _read(self, request: Request, room: int) -> int:
        """Reads on in the request's text; how many tokens."""
        reading = self._readings.get(request.request_id)
        if reading is None or reading.request is not request:
            reading = self._readings[request.request_id] = _Reading(request)
        start = reading.text.num_tokens
        unread = request.token_ids[start : start + max(room, MAX_MATCH)]
        reading.text.extend(unread)
        return len(unread)

    def prospects(self, spans: Sequence[Span]) -> list[Prospect]:
        room = STEP_TOKENS - self._store_answers(STEP_TOKENS // 2)
        found = []
        for span in spans:
            room -= self._read(span.request, room)
            with self.store.lock:
                found.append(follow(self._matches(span.request), self._min_match))
        return found

    def _draft_one(self, request: Request, budget: TreeBudget) -> TokenTree:
        with self.store.lock:
            return grow(request.token_ids[-1], self._matches(request), budget, self.name, self._min_match)

    def _matches(self, request: Request) -> list[Match]:
        """In its own text, then in the store, whose lock is held."""
        tail = request.token_ids[-MAX_MATCH:]
        text = self._readings[request.request_id].text
        own: Match
        if text.num_tokens == len(request.token_ids):
            state = text.links[text.last]  # the longest suffix that also stands elsewhere
            own = (text, state, text.lengths[state])
        else:  # a long prompt, still being read
            own = (text, *text.match(tail))
        stored = None if request.cache_salt is None else self.store.match(request.cache_salt, tail)
        return [own, stored] if stored else [own]


def grow(root: int, matches: Sequence[Match], budget: TreeBudget, name: str, min_match: int = 1) -> TokenTree:
    """The likeliest paths that follow the matches, at most as many and as deep as the budget says.

    What followed a stretch shares its sightings; what they leave to doubt goes to what else followed its
    longest suffix seen elsewhere, and so on. Each match is followed in its own text; a guess of both is one
    node, and both go on from it. The budget's least chance is left to those who know what confidences are
    worth: on a text that is copied, long chains come true more often than their confidences say.
    """
    tokens, parents, depths, chances = [root], [-1], [0], [1.0]
    children: dict[tuple[int, int], int] = {}
    front = _Front(min_match)
    # The surest match first, on a tie the own text; the next has what the first leaves to doubt.
    chance = 1.0
    doubts = [round(front.doubt(*match), 9) for match in matches]  # rounded, for a tie to be one
    for doubt, (text, state, length) in sorted(zip(doubts, matches, strict=True), key=lambda item: item[0]):
        front.push(text, state, length, -1, 0, chance)
        chance *= doubt
    heap = front.heap
    while heap:
        negated, _, text, state, length, node, token = heappop(heap)
        if token < 0:
            front.push(text, text.links[state], text.lengths[text.links[state]], state, node, -negated)
            continue
        while True:
            child = children.get((node, token))
            if child is None:
                if len(tokens) > budget.max_nodes:
                    return _tree(tokens, parents, chances, name)
                child = children[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
                depths.append(depths[node] + 1)
                chances.append(-negated)
            if depths[child] == budget.max_depth:
                break
            token = text.only_tokens[state]
            if token < 0:
                front.push(text, state, length, -1, child, -negated)
                break
            # One token always followed: as long as nothing else is likelier the chain goes past the heap.
            node, before, state = child, state, text.only_targets[state]
            doubt = _DOUBT[length] if length < len(_DOUBT) else _DOUBT[-1]
            share = text.counts[state] / (text.counts[state] + doubt)
            if length > min_match and negated * (1.0 - share) < -LEAST_CHANCE:
                front.add(negated * (1.0 - share), text, before, length, node, -1)
            negated *= share
            length += 1
            if negated > -LEAST_CHANCE:
                break
            if heap and heap[0][0] < negated:
                front.add(negated, text, state, length, node, token)
                break
    return _tree(tokens, parents, chances, name)


def follow(matches: Sequence[Match], min_match: int = 1) -> Prospect:
    """The likeliest path by the surest match: at each token what followed most often, of a tie what came last."""
    front = _Front(min_match)
    doubts = [round(front.doubt(*match), 9) for match in matches]
    text, state, length = matches[doubts.index(min(doubts))]
    match, chance = 0, 1.0
    tokens, chances = list[int](), list[float]()
    while len(tokens) < MAX_PROSPECT and length >= min_match:
        seen = text.continuations(state, MAX_CHILDREN)
        if not seen:  # the text ends here: what followed the next shorter suffix
            state = text.links[state]
            length = text.lengths[state] if state >= 0 else 0
            continue
        match = match or length
        token, target = max(reversed(seen), key=lambda item: text.counts[item[1]])
        doubt = len(seen) * _DOUBT[min(length, len(_DOUBT) - 1)]
        chance *= text.counts[target] / (doubt + sum([text.counts[other] for _, other in seen]))
        if chance < LEAST_CHANCE:
            break
        tokens.append(token)
        chances.append(chance)
        state, length = target, length + 1
    return Prospect(match, tuple(tokens), tuple(chances))


# -chance, order, text, state, match length, node, token: a guess of `token` after `node`, which leads to `state`; or
# with token -1, what else followed the suffixes of `state`, at this node. A named tuple would make drafting a third
# slower.
_Guess: TypeAlias = tuple[float, int, SuffixAutomaton, int, int, int, int]


class _Front:
    """What could be guessed next, the likeliest first."""

    def __init__(self, min_match: int) -> None:
        self.min_match = min_match
        self.order = count()  # breaks ties: what was found first
        self.heap: list[_Guess] = []

    def add(self, negated: float, text: SuffixAutomaton, state: int, length: int, node: int, token: int) -> None:
        heappush(self.heap, (negated, next(self.order), text, state, length, node, token))

    def push(self, text: SuffixAutomaton, state: int, length: int, longer: int, node: int, chance: float) -> None:
        """Adds what followed a stretch, but not what also followed the state `longer`.

        If that is nothing the next shorter suffix is asked. Tokens seen first last are the first of a tie,
        for what was said lately is likelier said again.
        """
        counts = text.counts
        while length >= self.min_match:
            seen = text.continuations(state, MAX_CHILDREN)
            if longer >= 0:
                seen = [(token, target) for token, target in seen if text.follow(longer, token) < 0]
            if seen:
                doubt = len(seen) * _DOUBT[min(length, len(_DOUBT) - 1)]
                part = chance / (doubt + sum([counts[target] for _, target in seen]))
                for token, target in reversed(seen):
                    if counts[target] * part >= LEAST_CHANCE:
                        self.add(-counts[target] * part, text, target, length + 1, node, token)
                if length > self.min_match and doubt * part >= LEAST_CHANCE:
                    self.add(-doubt * part, text, state, length, node, -1)
                return
            longer, state = state, text.links[state]
            length = text.lengths[state] if state >= 0 else 0

    def doubt(self, text: SuffixAutomaton, state: int, length: int) -> float:
        """The share of chance that a match leaves to others."""
        while length >= self.min_match:
            seen = text.continuations(state, MAX_CHILDREN)
            if seen:
                doubt = len(seen) * _DOUBT[min(length, len(_DOUBT) - 1)]
                return doubt / (doubt + sum([text.counts[target] for _, target in seen]))
            state = text.links[state]
            length = text.lengths[state] if state >= 0 else 0
        return 1.0


def _tree(tokens: list[int], parents: list[int], chances: list[float], name: str) -> TokenTree:
    nodes = range(1, len(tokens))
    draws = [Draw(node, name, None, chances[node] / chances[parents[node]]) for node in nodes]
    return TokenTree(tuple(tokens), tuple(parents), tuple(draws))
