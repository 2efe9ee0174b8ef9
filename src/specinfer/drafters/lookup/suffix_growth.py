"""Growth of drafts from what followed the same tokens before: trees, the likeliest token first, and single paths.

A drafted token gets its share of the occurrences of all that followed a stretch. Part of the probability is left to
doubt, which falls with the length of the stretch. Sources: SuffixDecoding (Oliaro et al., arXiv 2411.04975); doubt as
in prediction by partial matching.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple, Protocol, TypeAlias

from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.base import MAX_PROSPECT, Prospect

MAX_CHILDREN = 32  # the largest number of continuations of one stretch, the ones seen first
MIN_PATH_PROB = 0.002  # less likely tokens are not worth a place in any tree

# The pseudo-count of doubt, added to the occurrences of what followed a stretch of this length. In held-out Python
# files one occurrence after L tokens came true in 1 / (1 + 2 / L**0.8) of the cases (24 % after one token, 45 % after
# two, 60 % after four, 79 % after twelve, 91 % after thirty).
_DOUBT: tuple[float, ...] = tuple(2.0 / max(length, 1) ** 0.8 for length in range(257))


class Column(Protocol):
    """A number of each state."""

    def __getitem__(self, state: int, /) -> int: ...


class Text(Protocol):
    """A text that was read, as a graph of states; attributes as those of `SuffixAutomaton`."""

    @property
    def only_tokens(self) -> Column: ...

    @property
    def only_targets(self) -> Column: ...

    @property
    def counts(self) -> Column: ...

    @property
    def links(self) -> Column: ...

    @property
    def lengths(self) -> Column: ...

    def follow(self, state: int, token: int) -> int: ...

    def continuations(self, state: int, limit: int) -> Sequence[tuple[int, int]]: ...


class Match(NamedTuple):
    """A stretch at the end of a text that also occurs in a text that was read.

    Attributes:
        text: What was read.
        state: The state of the stretch in it.
        length: The length of the stretch.
        name: The name of draft tokens from there: that of the drafter, with the source.
        trust: Factor of the probability that the text goes on from there, by how often it did in this request.
    """

    text: Text
    state: int
    length: int
    name: str
    trust: float = 1.0


def grow(root: int, matches: Sequence[Match], budget: TreeBudget, min_match: int = 1) -> TokenTree:
    """Return a tree of the likeliest paths that follow the matches, within the nodes and the depth of the budget.

    The continuations of a stretch share its occurrences. The probability left to doubt goes to what else followed its
    longest suffix seen before, and so on. Each match is followed in its own text; a token that both propose is one
    node, and both continue from it. `min_path_prob` of the budget is not applied here but where confidences are
    calibrated: on a text that is copied, long chains come true more often than their confidences say.
    """
    tokens, parents, depths, path_probs = [root], [-1], [0], [1.0]
    names = list[str]()
    children: dict[tuple[int, int], int] = {}
    front = _Front(min_match)
    # The surest match comes first, the own text on a tie; the next one gets the probability that the first leaves to
    # doubt.
    path_prob = 1.0
    doubts = [front.doubt(match) for match in matches]
    for doubt, match in sorted(zip(doubts, matches, strict=True), key=lambda item: item[0]):
        front.push(match.text, match.state, match.length, -1, 0, path_prob * match.trust, match.name)
        path_prob *= doubt
    heap = front.heap
    while heap:
        negated, _, text, state, length, node, token, name = heappop(heap)
        if token < 0:
            if (shorter := text.links[state]) >= 0:  # a corpus has no suffix that is too short
                front.push(text, shorter, text.lengths[shorter], state, node, -negated, name)
            continue
        while True:
            child = children.get((node, token))
            if child is None:
                if len(tokens) > budget.max_nodes:
                    return _tree(tokens, parents, path_probs, names)
                child = children[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
                depths.append(depths[node] + 1)
                path_probs.append(-negated)
                names.append(name)
            if depths[child] == budget.max_depth:
                break
            token = text.only_tokens[state]
            if token < 0:
                front.push(text, state, length, -1, child, -negated, name)
                break
            # Only one token ever followed: the chain bypasses the heap as long as nothing else is likelier.
            node, before, state = child, state, text.only_targets[state]
            doubt = _DOUBT[length] if length < len(_DOUBT) else _DOUBT[-1]
            share = text.counts[state] / (text.counts[state] + doubt)
            if length > min_match and negated * (1.0 - share) < -MIN_PATH_PROB:
                front.add(negated * (1.0 - share), text, before, length, node, -1, name)
            negated *= share
            length += 1
            if negated > -MIN_PATH_PROB:
                break
            if heap and heap[0][0] < negated:
                front.add(negated, text, state, length, node, token, name)
                break
    return _tree(tokens, parents, path_probs, names)


def first_tokens(match: Match, min_match: int = 1) -> dict[int, float]:
    """Return what followed a match, or the longest of its suffixes that anything followed, and the probability of each.

    They add up to less than 1, the rest of which is left to doubt; the trust in the match is not counted.
    """
    text, state, length, *_ = match
    while length >= min_match:
        seen = text.continuations(state, MAX_CHILDREN)
        if seen:
            counts = [text.counts[target] for _, target in seen]
            total = len(seen) * _DOUBT[min(length, len(_DOUBT) - 1)] + sum(counts)
            return {token: times / total for (token, _), times in zip(seen, counts, strict=True)}
        state = text.links[state]
        length = text.lengths[state] if state >= 0 else 0
    return {}


def follow(matches: Sequence[Match], min_match: int = 1) -> Prospect:
    """Return the likeliest path of the surest match: at each token the most frequent one, the last seen on a tie."""
    front = _Front(min_match)
    text, state, length, *_ = min(matches, key=front.doubt)
    match, path_prob = 0, 1.0
    tokens, path_probs = list[int](), list[float]()
    while len(tokens) < MAX_PROSPECT and length >= min_match:
        seen = text.continuations(state, MAX_CHILDREN)
        if not seen:  # the text ends here: use what followed the next shorter suffix
            state = text.links[state]
            length = text.lengths[state] if state >= 0 else 0
            continue
        match = match or length
        token, target = max(reversed(seen), key=lambda item: text.counts[item[1]])
        doubt = len(seen) * _DOUBT[min(length, len(_DOUBT) - 1)]
        path_prob *= text.counts[target] / (doubt + sum([text.counts[other] for _, other in seen]))
        if path_prob < MIN_PATH_PROB:
            break
        tokens.append(token)
        path_probs.append(path_prob)
        state, length = target, length + 1
    return Prospect(match, tuple(tokens), tuple(path_probs))


# -path_prob, order, text, state, match length, node, token, name: `token` drafted after `node`, leading to `state`.
# With token -1: what else followed the suffixes of `state`, at this node. A named tuple would take a third longer.
_Guess: TypeAlias = tuple[float, int, Text, int, int, int, int, str]


class _Front:
    """The tokens that could be drafted next, the likeliest first."""

    def __init__(self, min_match: int) -> None:
        self.min_match = min_match
        self.order = count()  # breaks ties: the first found comes first
        self.heap: list[_Guess] = []

    def add(self, negated: float, text: Text, state: int, length: int, node: int, token: int, name: str) -> None:
        heappush(self.heap, (negated, next(self.order), text, state, length, node, token, name))

    def push(self, text: Text, state: int, length: int, longer: int, node: int, path_prob: float, name: str) -> None:
        """Add what followed a stretch, except what also followed the state `longer`.

        If there is nothing, the next shorter suffix is used. On a tie the tokens first seen last come first, since
        recent tokens are more likely to occur again.
        """
        counts = text.counts
        while length >= self.min_match:
            seen = text.continuations(state, MAX_CHILDREN)
            if longer >= 0:
                seen = [(token, target) for token, target in seen if text.follow(longer, token) < 0]
            if seen:
                doubt = len(seen) * _DOUBT[min(length, len(_DOUBT) - 1)]
                part = path_prob / (doubt + sum([counts[target] for _, target in seen]))
                for token, target in reversed(seen):
                    if counts[target] * part >= MIN_PATH_PROB:
                        self.add(-counts[target] * part, text, target, length + 1, node, token, name)
                if length > self.min_match and doubt * part >= MIN_PATH_PROB:
                    self.add(-doubt * part, text, state, length, node, -1, name)
                return
            longer, state = state, text.links[state]
            length = text.lengths[state] if state >= 0 else 0

    def doubt(self, match: Match) -> float:
        """Return the share of the probability that a match leaves to doubt, rounded: equal ones compare equal."""
        return round(1.0 - match.trust * sum(first_tokens(match, self.min_match).values()), 9)


def _tree(tokens: list[int], parents: list[int], path_probs: list[float], names: list[str]) -> TokenTree:
    if len(tokens) == 1:
        return TokenTree.root(tokens[0])
    confidence = [path_probs[node] / path_probs[parents[node]] for node in range(1, len(tokens))]
    return TokenTree.chosen(tokens, parents, names, confidence)
