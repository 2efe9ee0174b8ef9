"""Scores of the sources of a lookup on the text of one request: how often each was right, against what it promised.

A source is scored whether its tokens became nodes or not. So one that never hits in a request soon costs it no nodes,
and is believed again as soon as it does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specinfer.core.request import Request
from specinfer.drafters.lookup.suffix_growth import Match, first_tokens

_MEMORY = 0.9  # factor of earlier results for each new one: some ten are remembered
_PRIOR = 1.0  # right tokens that are assumed at first, of as many promised


@dataclass(slots=True)
class SourceScores:
    """Promises of each source for the next token of a request, and how often they were right.

    Attributes:
        hits, promised: Results of each source by name, decayed.
    """

    hits: dict[str, float] = field(default_factory=dict)
    promised: dict[str, float] = field(default_factory=dict)
    _next: dict[str, dict[int, float]] = field(default_factory=dict)  # what is promised for the next token
    _num_known: int = 0  # tokens before it

    def trusted(self, request: Request, matches: Sequence[Match], min_match: int) -> list[Match]:
        """Return the matches with the trust in their sources, once the last ones are scored."""
        self._settle(request)
        self._num_known = len(request.token_ids)
        for match in matches:
            if match.name not in self._next and (tokens := first_tokens(match, min_match)):
                self._next[match.name] = tokens
        return [match._replace(trust=self.trust(match.name)) for match in matches]

    def trust(self, name: str) -> float:
        """Return right tokens over promised ones, at most 1."""
        return min((self.hits.get(name, 0.0) + _PRIOR) / (self.promised.get(name, 0.0) + _PRIOR), 1.0)

    def _settle(self, request: Request) -> None:
        if len(request.token_ids) == self._num_known:
            return  # asked again for the same token
        for name, tokens in self._next.items() if self._num_known else ():
            likeliest = max(tokens, key=lambda token: tokens[token])
            is_right = request.token_ids[self._num_known] == likeliest
            self.hits[name] = _MEMORY * self.hits.get(name, 0.0) + is_right
            self.promised[name] = _MEMORY * self.promised.get(name, 0.0) + tokens[likeliest]
        self._next.clear()
