"""A suffix automaton: an index of all substrings of the texts read so far, in time and memory linear in their length.

A state stands for all substrings ("stretches") that end at the same places. Its link leads to the longest suffix of
them that also ends at another place, and its count is how often they occurred.
Source: Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985. Several texts share one
automaton when each is read from the initial state.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice

MAX_COUNT = 127  # the largest count; also the largest number of links to follow for one token
NONE = -1


class SuffixAutomaton:
    """A suffix automaton that is read one token at a time and can be queried at any moment.

    A token of source code takes about 125 bytes and 2 microseconds, a random one 180 bytes. If the text is one token
    over and over, a token takes 10 microseconds. States are numbers; 0 is the empty stretch. Token ids are from 0 to
    2**31 - 1.

    Attributes:
        lengths: The length of the longest stretch of each state.
        links: The state of the longest suffix that occurred at more places; -1 for state 0.
        counts: The number of places at which a state's stretches ended, up to MAX_COUNT; always 0 for state 0.
        last: The state of the whole text read since `start_text`.
        num_tokens: The number of tokens read so far, over all texts.
        only_tokens: The token that followed each state if it was always the same one, else -1.
        only_targets: The state after that token.
    """

    __slots__ = ("_branches", "counts", "last", "lengths", "links", "num_tokens", "only_targets", "only_tokens")

    def __init__(self) -> None:
        self.lengths = array("i", [0])
        self.links = array("i", [NONE])
        self.counts = array("i", [0])
        self.last = 0
        self.num_tokens = 0
        # Most states have one continuation. Only states with several have a dictionary; one per state would take
        # several times the memory.
        self.only_tokens = array("i", [NONE])
        self.only_targets = array("i", [NONE])
        self._branches: dict[int, dict[int, int]] = {}

    def __len__(self) -> int:
        """Return the number of states, which is less than twice the number of tokens."""
        return len(self.lengths)

    def start_text(self) -> None:
        """Start a new text: what is read next does not follow what was read before."""
        self.last = 0

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Extend the text by this token."""
        lengths, links, counts = self.lengths, self.links, self.counts
        before = self.last
        length = lengths[before] + 1
        known = self.follow(before, token)
        if known >= 0:  # another text continued the same way
            state = known if lengths[known] == length else self._split(before, token, known)
        else:
            state = self._add(length, 0, 0)
            source = before
            while source >= 0 and (known := self.follow(source, token)) < 0:
                self._connect(source, token, state)
                source = links[source]
            if source >= 0:
                links[state] = known if lengths[known] == lengths[source] + 1 else self._split(source, token, known)
        self.last = state
        self.num_tokens += 1
        # Each link leads to a strictly larger count. So where a count is full, all further ones are too, and at most
        # MAX_COUNT are raised, even if the text is one token over and over.
        while state and counts[state] < MAX_COUNT:
            counts[state] += 1
            state = links[state]

    def follow(self, state: int, token: int) -> int:
        """Return the state after one more token, or -1 if the stretch was never followed by it."""
        if self.only_tokens[state] == token:
            return self.only_targets[state]
        branches = self._branches.get(state)
        return NONE if branches is None else branches.get(token, NONE)

    def continuations(self, state: int, limit: int) -> Sequence[tuple[int, int]]:
        """Return (token, state after it) of up to `limit` tokens that followed, in the order first seen."""
        branches = self._branches.get(state)
        if branches is not None:
            return tuple(islice(branches.items(), limit))
        token = self.only_tokens[state]
        return () if token < 0 else ((token, self.only_targets[state]),)

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the state and length of the longest known suffix of a known stretch plus one more token."""
        while (target := self.follow(state, token)) < 0:
            state = self.links[state]
            if state < 0:
                return 0, 0
            length = self.lengths[state]
        return target, length + 1

    def match(self, tokens: Iterable[int]) -> tuple[int, int]:
        """Return the state and length of the longest suffix of `tokens` that occurred in a text."""
        state = length = 0
        for token in tokens:
            state, length = self.advance(state, length, token)
        return state, length

    def _add(self, length: int, link: int, count: int) -> int:
        self.lengths.append(length)
        self.links.append(link)
        self.counts.append(count)
        self.only_tokens.append(NONE)
        self.only_targets.append(NONE)
        return len(self.lengths) - 1

    def _connect(self, state: int, token: int, target: int) -> None:
        only = self.only_tokens[state]
        if only == token or (only == NONE and state not in self._branches):
            self.only_tokens[state], self.only_targets[state] = token, target
        elif only == NONE:
            self._branches[state][token] = target
        else:
            self._branches[state] = {only: self.only_targets[state], token: target}
            self.only_tokens[state] = NONE

    def _split(self, source: int, token: int, target: int) -> int:
        """Return a new state for the shorter stretches of `target`, which now ended at one place more."""
        state = self._add(self.lengths[source] + 1, self.links[target], self.counts[target])
        branches = self._branches.get(target)
        if branches is not None:
            self._branches[state] = branches.copy()
        else:
            self.only_tokens[state], self.only_targets[state] = self.only_tokens[target], self.only_targets[target]
        self.links[target] = state
        while source >= 0 and self.follow(source, token) == target:
            self._connect(source, token, state)
            source = self.links[source]
        return state
