"""How well a drafter would have guessed the tokens that were said: its losses, from 0 to 1, token by token.

A guess that is chosen is right or wrong: 1 minus whether the drafter's best guess, with the noise that the target
uses, is the token. One that is drawn is right with some probability: 1 minus what its processed distribution gives the
token. What a drafter grew itself is known already; of other text that it reads the logits are asked for. Of grammars
only the present state is known, so text that was read is scored without them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from specinfer.drafters.drawing import CHOSEN, Candidates, Node, draw
from specinfer.drafters.vocabulary import Vocabulary
from specinfer.request import Request
from specinfer.sampling import SamplingParams
from specinfer.tree import TokenTree

MAX_SCORED = 64  # tokens of one reading: older ones hardly count, and logits take memory
_MAX_ROWS = 256  # of logits in one pass, for all requests together


class Losses(NamedTuple):
    """Of tokens of the prompt, and of the output."""

    prompt: list[float]
    output: list[float]


@dataclass(slots=True)
class _Account:
    """What is known of one request.

    Attributes:
        num_scored: Of the drafter's tokens, from the start, those that were scored or never will be.
        said: For each node that the drafter grew from, by path from the root: its candidates, and their row.
    """

    num_scored: int
    said: dict[tuple[int, ...], tuple[Candidates, int]] = field(default_factory=dict)
    losses: Losses = field(default_factory=lambda: Losses([], []))


class Scoring:
    """The losses of one small model.

    Args:
        drawing: How it draws its guesses.
        vocabulary: One that translates reads the text in tokens of its own, and the drafter is scored on them, without
            noise or processing; None: the target's tokens.
    """

    def __init__(self, drawing: str, vocabulary: Vocabulary | None = None) -> None:
        self._drawing = drawing
        self._translates = vocabulary is not None and vocabulary.translates
        self._token_map = None if vocabulary is None or self._translates else vocabulary.token_map
        self._accounts: dict[str, _Account] = {}

    def begin(self, request: Request, num_ids: int) -> int:
        """A reading of so many tokens begins, of which so many need no score; guesses never observed are dropped."""
        account = self._accounts.setdefault(request.request_id, _Account(1))
        account.num_scored = min(max(account.num_scored, num_ids - MAX_SCORED), num_ids)  # fewer if encoded anew
        account.said.clear()
        return account.num_scored

    def num_rows(self, request: Request, start: int, end: int, num_requests: int) -> int:
        """Of how many of the last tokens read, from `start` to `end`, the logits are wanted; at least the last."""
        most = 1 + min(MAX_SCORED, _MAX_ROWS // num_requests)
        return min(end - max(start, self._accounts[request.request_id].num_scored - 1), most)

    def read(self, request: Request, ids: Sequence[int], logits: Tensor) -> None:
        """Scores tokens that were read.

        Args:
            ids: All that the drafter has read, in its own tokens.
            logits: [rows, vocab] after the last tokens but the very last: row i is what comes before the
                `len(logits) - i`-th token from the end. As `Vocabulary.compact` has them, unless it translates.
        """
        account = self._accounts[request.request_id]
        account.num_scored = end = len(ids)
        first = end - len(logits)
        if first == end:
            return
        num_prompt = len(request.prompt_ids)
        middle = end if self._translates else min(max(num_prompt, first), end)
        # The target did not say the prompt: neither noise nor what processes logits had a part in it.
        plain = account.losses.output if self._translates and request.num_output else account.losses.prompt
        plain += self._score(_as_text(request, self._is_chosen(request)), ids, first, middle, logits[: middle - first])
        account.losses.output.extend(
            self._score(_as_output(request), ids, middle, end, logits[middle - first :]) if middle < end else ()
        )

    def _is_chosen(self, request: Request) -> bool:
        return self._drawing in CHOSEN or request.params.is_greedy

    def _score(self, view: Request, ids: Sequence[int], start: int, end: int, logits: Tensor) -> list[float]:
        """Losses on the tokens from `start` to `end`, which follow one another like the nodes of a path."""
        if start == end:
            return []
        view.token_ids = list(ids[:start])
        path = tuple(ids[start:end])
        nodes = [Node(view, path[:i], 1) for i in range(len(path))]
        candidates = draw(self._drawing, logits, nodes, self._token_map)
        return [_loss(view, candidates, row, token) for row, token in enumerate(path)]

    def note(self, nodes: Sequence[Node], candidates: Candidates) -> None:
        """What the drafter would guess at these nodes, whose rows are those of the candidates."""
        for row, node in enumerate(nodes):
            self._accounts[node.request.request_id].said[node.path] = (candidates, row)

    def settle(self, request: Request, tokens: Sequence[int]) -> None:
        """These target tokens were said after the root, as far as its own tree tells what it would have guessed."""
        account = self._accounts[request.request_id]
        for i, token in enumerate(tokens):
            said = account.said.get(tuple(tokens[:i]))
            if said is None:
                break
            account.losses.output.append(_loss(request, *said, token))
            account.num_scored += 1
        account.said.clear()

    def take(self, request_id: str) -> Losses:
        """The losses since the last call."""
        account = self._accounts.get(request_id)
        if account is None:
            return Losses([], [])
        losses, account.losses = account.losses, Losses([], [])
        return losses

    def forget(self, request_id: str) -> None:
        self._accounts.pop(request_id, None)


def lookup_losses(tree: TokenTree, tokens: Sequence[int]) -> list[float]:
    """Losses of a lookup's first guesses, as far as the tokens said stay in its tree; to say nothing is to be wrong."""
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


def _loss(request: Request, candidates: Candidates, row: int, token: int) -> float:
    if candidates.whole is None or request.params.is_greedy:
        return float(candidates.tokens[row, 0] != token)
    return 1.0 - float(candidates.whole[row][candidates.support[row] == token].sum())


def _as_text(request: Request, is_chosen: bool) -> Request:
    """A stand-in whose tokens are text that nobody processed."""
    return Request(
        request.request_id, [], SamplingParams(temperature=0.0 if is_chosen else request.params.temperature), 0
    )


def _as_output(request: Request) -> Request:
    """A stand-in that can be as far as the request was at some token."""
    view = Request(
        request.request_id, request.prompt_ids, request.params, request.seed, request.eos_token_ids,
        bad_words_ids=request.bad_words_ids,
    )  # fmt: skip
    view.forbidden = request.forbidden
    return view
