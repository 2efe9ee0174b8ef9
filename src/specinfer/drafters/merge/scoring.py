"""Scores of how well a drafter would have drafted the emitted tokens: losses from 0 to 1, token by token.

A chosen token is right or wrong: the loss is 1 unless the drafter's best token, with the noise that the target uses, is
the emitted one. A drawn token is right with some probability: the loss is 1 minus the probability of the token in the
drafter's processed distribution. What a drafter grew itself is known already; for other text that it reads, the logits
are requested. A head's logits for text that it reads are better than for its own drafts, so it drafts again from a few
places of that text. Of grammars only the present state is known, so text that was only read is scored without them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TokenTree
from specinfer.drafters.growth.draft_sampling import Candidates, chooses_for, draw
from specinfer.drafters.growth.frontier import Frontier, Level
from specinfer.drafters.vocabulary.token_map import Vocabulary

MAX_SCORED = 64  # tokens scored at a time: older ones hardly count, and logits take memory
_MAX_ROWS = 256  # rows of logits in one pass, for all requests together


class Losses(NamedTuple):
    """Losses on tokens of the prompt and of the output."""

    prompt: list[float]
    output: list[float]


@dataclass(slots=True)
class _Account:
    """The scoring state of one request.

    Attributes:
        num_scored: The number of the drafter's tokens, from the start, that were scored or never will be.
        drafted: For each node that the drafter grew from, by path from the root, its candidates and its row in them.
    """

    num_scored: int
    drafted: dict[tuple[int, ...], tuple[Candidates, int]] = field(default_factory=dict)
    losses: Losses = field(default_factory=lambda: Losses([], []))


class PastText(NamedTuple):
    """A place of a text that is known, to draft from again.

    Attributes:
        view: The request as it was there, of which no grammar is known.
        tokens: The tokens that follow, all of the prompt or all of the output.
    """

    view: Request
    tokens: list[int]

    @property
    def is_prompt(self) -> bool:
        return len(self.view.token_ids) < len(self.view.prompt_ids)


class Scoring:
    """The losses of one small model.

    Args:
        draft_sampling: Its kind of draft sampling.
        vocabulary: The drafter's vocabulary, or None for the target's tokens. With one that translates, the drafter
            reads the text in its own tokens and is scored on them, without noise or processing.
    """

    def __init__(self, draft_sampling: str, vocabulary: Vocabulary | None = None) -> None:
        self._draft_sampling = draft_sampling
        self._translates = vocabulary is not None and vocabulary.translates
        self._token_map = None if vocabulary is None or self._translates else vocabulary.token_map
        self._accounts: dict[str, _Account] = {}

    def begin(self, request: Request, num_ids: int) -> int:
        """Start a reading of `num_ids` tokens and return how many need no score; drafts never observed are dropped."""
        account = self._accounts.setdefault(request.request_id, _Account(1))
        account.num_scored = min(max(account.num_scored, num_ids - MAX_SCORED), num_ids)  # fewer if encoded again
        account.drafted.clear()
        return account.num_scored

    def num_rows(self, request: Request, start: int, end: int, num_requests: int) -> int:
        """Return how many of the last tokens read, from `start` to `end`, need logits; at least the last one does."""
        most = 1 + min(MAX_SCORED, _MAX_ROWS // num_requests)
        return min(end - max(start, self._accounts[request.request_id].num_scored - 1), most)

    def read(self, request: Request, ids: Sequence[int], logits: Tensor) -> None:
        """Score tokens that were read.

        Args:
            ids: All tokens that the drafter has read, in its own ids.
            logits: [rows, vocab] of the last tokens without the very last one: the last row predicts the last token.
                The columns are those of `Vocabulary.compact`, unless the vocabulary translates.
        """
        account = self._accounts[request.request_id]
        account.num_scored = end = len(ids)
        first = end - len(logits)
        if first == end:
            return
        num_prompt = len(request.prompt_ids)
        middle = end if self._translates else min(max(num_prompt, first), end)
        # The target did not generate the prompt: it has neither noise nor logits processing.
        plain = account.losses.output if self._translates and request.num_output else account.losses.prompt
        plain += self._score(_as_text(request, self._is_chosen(request)), ids, first, middle, logits[: middle - first])
        account.losses.output.extend(
            self._score(_as_output(request), ids, middle, end, logits[middle - first :]) if middle < end else ()
        )

    def _is_chosen(self, request: Request) -> bool:
        return chooses_for(self._draft_sampling, request)

    def _score(self, view: Request, ids: Sequence[int], start: int, end: int, logits: Tensor) -> list[float]:
        """Return losses on the tokens from `start` to `end`, which follow one another like the nodes of a path."""
        if start == end:
            return []
        view.token_ids = list(ids[:start])
        path = tuple(ids[start:end])
        level = Level([Frontier(view, range(len(path)), lambda i: path[:i], 1)])
        candidates = draw(self._draft_sampling, logits, level, self._token_map)
        return [_loss(view, candidates, row, token) for row, token in enumerate(path)]

    def note(self, level: Level, candidates: Candidates) -> None:
        """Record what the drafter would draft at these nodes, whose rows are those of the candidates."""
        for frontier, start in zip(level.frontiers, level.starts, strict=False):
            drafted = self._accounts[frontier.request.request_id].drafted
            for i in range(len(frontier.depths)):
                drafted[frontier.path_of(i)] = (candidates, start + i)

    def settle(self, request: Request, tokens: Sequence[int]) -> None:
        """Score the target tokens emitted after the root, as far as its own tree shows what it would have drafted."""
        account = self._accounts[request.request_id]
        losses = _losses_along(request, tokens, account)
        account.losses.output.extend(losses)
        account.num_scored += len(losses)

    def settle_past(self, past: PastText) -> None:
        """Score what was drafted from a place of known text."""
        account = self._accounts[past.view.request_id]
        (account.losses.prompt if past.is_prompt else account.losses.output).extend(
            _losses_along(past.view, past.tokens, account)
        )

    def past(self, request: Request, num_places: int, num_tokens: int) -> list[PastText]:
        """Return places to draft from again, at even distances in the text that was not scored, the first one first.

        Args:
            num_places: The largest number of places.
            num_tokens: The largest number of tokens to draft at each; none is drafted at two.
        """
        account = self._accounts.setdefault(request.request_id, _Account(1))
        ids, num_prompt, end = request.token_ids, len(request.prompt_ids), len(request.token_ids)
        start = max(account.num_scored, end - MAX_SCORED, 2)  # a head's first feature is that of the first token
        account.num_scored = end
        places = []
        step = max(-(-(end - start) // num_places), num_tokens)
        for place in range(start, end, step):
            is_prompt = place < num_prompt
            view = _as_text(request, self._is_chosen(request)) if is_prompt else _as_output(request)
            # Its drafts read the request's cache, and no noise is used twice.
            view.prompt_ids, view.cache_salt = request.prompt_ids, request.cache_salt
            view.drafting.num_draws = request.drafting.num_draws
            view.token_ids, view.adapter = ids[:place], request.adapter
            places.append(PastText(view, ids[place : min(place + num_tokens, num_prompt if is_prompt else end)]))
        return places

    def skip(self, request: Request) -> None:
        """Leave the known tokens that were not scored without a score, and drop drafts that were never observed."""
        account = self._accounts.setdefault(request.request_id, _Account(1))
        account.num_scored = max(account.num_scored, len(request.token_ids))
        account.drafted.clear()

    def take(self, request_id: str) -> Losses:
        """Return the losses since the last call."""
        account = self._accounts.get(request_id)
        if account is None:
            return Losses([], [])
        losses, account.losses = account.losses, Losses([], [])
        return losses

    def forget(self, request_id: str) -> None:
        self._accounts.pop(request_id, None)


def lookup_losses(tree: TokenTree, tokens: Sequence[int]) -> list[float]:
    """Return losses of a lookup's first drafted tokens, as far as the emitted tokens stay in its tree.

    A lookup that drafts nothing counts as wrong.
    """
    node, losses = 0, list[float]()
    for token in tokens:
        children = tree.children[node]
        if node and not children:
            break  # its budget ended here
        losses.append(float(next(iter(children), None) != token))
        if token not in children:
            break
        node = children[token]
    return losses


def _losses_along(request: Request, tokens: Sequence[int], account: _Account) -> list[float]:
    """Return losses on the tokens after the root, as far as a drafter's own tree shows them, and drop that tree."""
    losses = []
    for i, token in enumerate(tokens):
        drafted = account.drafted.get(tuple(tokens[:i]))
        if drafted is None:
            break
        losses.append(_loss(request, *drafted, token))
    account.drafted.clear()
    return losses


def _loss(request: Request, candidates: Candidates, row: int, token: int) -> float:
    drawn = candidates.drawn_from
    if candidates.whole is None or drawn is None or drawn.places[row, 0] < 0:
        return float(candidates.tokens[row, 0] != token)
    return 1.0 - float(candidates.whole[row][drawn.token_ids[row] == token].sum())


def _as_text(request: Request, is_chosen: bool) -> Request:
    """Return a request whose tokens are unprocessed text."""
    return Request(
        request.request_id, [], SamplingParams(temperature=0.0 if is_chosen else request.params.temperature), 0
    )


def _as_output(request: Request) -> Request:
    """Return a copy of the request that can be at any of its tokens."""
    view = Request(
        request.request_id, request.prompt_ids, request.params, request.seed, request.eos_token_ids,
        bad_words_ids=request.bad_words_ids,
    )  # fmt: skip
    view.logits_state.forbidden, view.verification = request.logits_state.forbidden, request.verification
    return view
