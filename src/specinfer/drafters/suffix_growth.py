"""How guesses grow from what followed the same words before: trees, the likeliest guess first, and single paths.

Each guess is worth the share of sightings it has of what followed, less a doubt that falls with the length of the
stretch. Sources: SuffixDecoding (Oliaro et al., arXiv 2411.04975); doubt as in prediction by partial matching.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import TypeAlias

from specinfer.drafters.base import MAX_PROSPECT, Prospect
from specinfer.drafters.suffix_automaton import SuffixAutomaton
from specinfer.tree import Draw, TokenTree, TreeBudget

MAX_CHILDREN = 32  # continuations of one stretch that are looked at, the ones seen first
LEAST_CHANCE = 0.002  # guesses less likely than this are not worth a place in any tree

# How many doubts are added to what a stretch of this length was seen to be followed by: one sighting after
# L tokens came true in 1 / (1 + 2 / L**0.8) of the cases in held-out Python files (24 % after one token,
# 45 % after two, 60 % after four, 79 % after twelve, 91 % after thirty).
_DOUBT: tuple[float, ...] = tuple(2.0 / max(length, 1) ** 0.8 for length in range(257))

Match: TypeAlias = tuple[SuffixAutomaton, int, int]  # a text, a state of it, and how long the match is


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
