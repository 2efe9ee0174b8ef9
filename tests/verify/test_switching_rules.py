"""A rule may be chosen by anything that happened before, as long as no noise that is still to come was read by then.

Whole outputs of several steps, enumerated in fractions over two tokens. There a position's noise is one uniform
number u, and the race is won by the first token wherever u is below its probability: what matters is between which of
the probabilities of both models, after any context of this length, u lies.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise, product

import numpy as np
import pytest

from reference.enumeration import ROOT, ForkedSource, Forks, Model, Path, every, total_variation
from specinfer.core.tree import Distribution, Draw, TokenTree
from specinfer.verify import verify_coupled, verify_traversal

LENGTH = 3
MODELS = [(Model(seed, 2, (1, 2, 4, 9)), Model(seed + 50, 2, (1, 2, 4, 9))) for seed in (2, 6)]


@dataclass
class Request:
    """One output: its tokens so far, and the noise that was read for it."""

    forks: Forks
    target: Model
    q: Model
    noise: dict[int, Fraction] = field(default_factory=dict)  # by position: the lower end of the part that u is in
    tokens: Path = ()
    history: list[tuple[TokenTree, int]] = field(default_factory=list)  # tree and accepted tokens of each step

    def winner(self, model: Model, context: Path) -> int:
        """Return the token of a model after this context, with the noise of its position."""
        position = len(context)
        if position >= LENGTH:  # no token that is looked at depends on it
            return 0
        if position not in self.noise:
            models, later = (self.target, self.q), product(range(2), repeat=position - len(self.tokens))
            probs = {each.distribution(self.tokens + one)[0] for one in later for each in models}
            ends = sorted({Fraction(0), Fraction(1), *probs})
            self.noise[position] = ends[self.forks.choose([b - a for a, b in pairwise(ends)])]
        return int(self.noise[position] >= model.distribution(context)[0])

    @property
    def has_read_ahead(self) -> bool:
        """True if noise of tokens that are still to come was read."""
        return any(position >= len(self.tokens) for position in self.noise)

    def by_coupled(self) -> None:
        """Take a step with two nodes, best first: which token has the other place depends on noise one level down."""
        best = self.winner(self.q, self.tokens)
        below = self.winner(self.q, (*self.tokens, best))
        is_sure = below == 0
        tree = TokenTree((ROOT, best, below if is_sure else 1 - best), (-1, 0, 1 if is_sure else 0))
        (acceptance,) = verify_coupled(
            [tree],
            lambda places: [self.winner(self.target, self.tokens + tree.path_tokens(node)) for _, node in places],
        )
        self._emit(tree, acceptance.path, acceptance.next_token)

    def drawn(self) -> TokenTree:
        """Draw a chain of two tokens, or of one for the last."""
        tokens: Path = ()
        draws = []
        for node in range(1, min(2, LENGTH - len(self.tokens)) + 1):
            context = self.tokens + tokens
            tokens = (*tokens, self.forks.choose(self.q.distribution(context)))
            draws.append(Draw(node, "a", Distribution(np.arange(2), self.q.array(context))))
        return TokenTree((ROOT, *tokens), range(-1, len(tokens)), draws)

    def by_traversal(self, tree: TokenTree) -> None:
        source = ForkedSource(self.forks)
        acceptance = verify_traversal(
            tree, lambda node: self.target.array(self.tokens + tree.path_tokens(node)), source
        )
        assert source.sampled is not None
        self._emit(tree, acceptance.path, self.forks.choose(list(source.sampled)))

    def _emit(self, tree: TokenTree, path: Sequence[int], next_token: int) -> None:
        self.history.append((tree, len(path)))
        self.tokens = (*self.tokens, *(tree.tokens[node] for node in path), next_token)


def distances(generate: Callable[[Request], None]) -> list[Fraction]:
    """Return, for each pair of models, the distance between the target's first tokens and generated ones."""
    found = []
    for target, q in MODELS:

        def output(forks: Forks, target: Model = target, q: Model = q) -> Path:
            request = Request(forks, target, q)
            while len(request.tokens) < LENGTH:
                generate(request)
            return request.tokens[:LENGTH]

        joint: dict[Path, Fraction] = defaultdict(Fraction)
        for probability, tokens in every(output):
            joint[tokens] += probability
        assert sum(joint.values()) == 1
        found.append(total_variation(joint, target.joint(LENGTH)))
    return found


def _looks_good(request: Request) -> bool:
    """Return a decision from all that earlier steps did: the trees that they drafted, and what was accepted."""
    return bool(request.history) and (request.history[-1][0].max_depth == 2) == (request.history[-1][1] == 1)


def _until_noise_is_used_up(request: Request) -> None:
    """Coupled for as long as noise was read ahead; otherwise by what earlier steps did."""
    if request.has_read_ahead or _looks_good(request):
        request.by_coupled()
    else:
        request.by_traversal(request.drawn())


def _after_another(request: Request) -> None:
    """The rule of a request is that which suited another request, with noise of its own."""
    if not request.history:
        other = Request(request.forks, request.target, request.q, tokens=(0,))
        other.by_coupled()
        request.history = other.history * _looks_good(other)
    if request.history:
        request.by_coupled()
        request.history = request.history[:1]
    else:
        request.by_traversal(request.drawn())
        request.history = []


def test_a_rule_chosen_before_any_noise_of_its_tokens_was_read_is_exact() -> None:
    assert distances(_until_noise_is_used_up) == [0, 0]
    assert distances(_after_another) == [0, 0]
    assert distances(Request.by_coupled) == [0, 0]
    assert distances(lambda request: request.by_traversal(request.drawn())) == [0, 0]


def _by_the_draws(request: Request) -> None:
    tree = request.drawn()
    if tree.tokens[1] == 0:
        request.by_traversal(tree)
    else:
        request.by_coupled()


def _at_once(request: Request) -> None:
    """As soon as a step was coupled, although its drafter read noise of tokens to come."""
    if request.history:
        request.by_traversal(request.drawn())
    else:
        request.by_coupled()


def _after_one_of_the_same_seed(request: Request) -> None:
    """The rule that suited another request with the same noise."""
    if not request.history:
        other = Request(request.forks, request.target, request.q, request.noise)
        other.by_coupled()
        request.history = other.history
    if _looks_good(request):
        first = request.history
        request.by_coupled()
        request.history = first
    else:
        first = request.history
        request.by_traversal(request.drawn())
        request.history = first


@pytest.mark.parametrize("wrong", [_by_the_draws, _at_once, _after_one_of_the_same_seed])
def test_a_rule_chosen_by_draws_or_by_noise_to_come_is_detected(wrong: Callable[[Request], None]) -> None:
    assert max(distances(wrong)) > Fraction(1, 200)
