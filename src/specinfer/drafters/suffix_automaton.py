"""A suffix automaton: every stretch of the texts read so far, in time and memory proportional to their length.

A state stands for all stretches that end at the same places; its link leads to the longest suffix of them
that also ends elsewhere, and its count says how often they occurred.
Source: Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985; several texts
share one automaton when each is read from the initial state on.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice

MAX_COUNT = 127  # counts stop here; it is also the most links that one token can have to follow
NONE = -1


class SuffixAutomaton:
    """Read one token at a time, at any moment ready to be asked.

    A token of source code takes about 125 bytes and 2 microseconds, a random one 180 bytes; if it is the same
    one over and over, 10 microseconds. States are numbers, 0 the empty stretch. Token ids are from 0 to 2**31 - 1.

    Attributes:
        lengths: Of the longest stretch of each state.
        links: The state of the longest suffix that occurred at more places; of state 0, -1.
        counts: At how many places a state's stretches ended, up to MAX_COUNT; of state 0, always 0.
        last: The state of the whole text read since `start_text`.
        num_tokens: Read so far, over all texts.
        only_tokens: What followed each state if that was always the same token, else -1.
        only_targets: The state after that token.
    """

    __slots__ = ("_branches", "counts", "last", "lengths", "links", "num_tokens", "only_targets", "only_tokens")

    def __init__(self) -> None:
        self.lengths = array("i", [0])
        self.links = array("i", [NONE])
        self.counts = array("i", [0])
        self.last = 0
        self.num_tokens = 0
        # Most states go on with one token only. Those with several have a dictionary of all of them; one for
        # each state would take several times the memory.
        self.only_tokens = array("i", [NONE])
        self.only_targets = array("i", [NONE])
        self._branches: dict[int, dict[int, int]] = {}

    def __len__(self) -> int:
        """How many states there are: fewer than twice the tokens."""
        return len(self.lengths)

    def start_text(self) -> None:
        """What is read next does not follow what was read before."""
        self.last = 0

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """The text goes on with this token."""
        lengths, links, counts = self.lengths, self.links, self.counts
        before = self.last
        length = lengths[before] + 1
        known = self.follow(before, token)
        if known >= 0:  # another text went on like this
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
        # Each link leads to a strictly larger count. So where a count is full all further ones are, and
        # there are at most MAX_COUNT to raise, even if the text is one token over and over.
        while state and counts[state] < MAX_COUNT:
            counts[state] += 1
            state = links[state]

    def follow(self, state: int, token: int) -> int:
        """The state after one more token, or -1 where the stretch never went on with it."""
        if self.only_tokens[state] == token:
            return self.only_targets[state]
        branches = self._branches.get(state)
        return NONE if branches is None else branches.get(token, NONE)

    def continuations(self, state: int, limit: int) -> Sequence[tuple[int, int]]:
        """(token, state after it) of up to `limit` tokens that followed, the ones seen first first."""
        branches = self._branches.get(state)
        if branches is not None:
            return tuple(islice(branches.items(), limit))
        token = self.only_tokens[state]
        return () if token < 0 else ((token, self.only_targets[state]),)

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest known suffix of a known stretch and one more token: its state and its length."""
        while (target := self.follow(state, token)) < 0:
            state = self.links[state]
            if state < 0:
                return 0, 0
            length = self.lengths[state]
        return target, length + 1

    def match(self, tokens: Iterable[int]) -> tuple[int, int]:
        """The longest suffix of `tokens` that occurred in a text: its state and its length."""
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
        """A state for the shorter stretches of `target`, those that now ended at one place more."""
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
