"""A prediction by the user: what the output is likely to resemble, such as a file before a small edit.

As long as the output agrees with the prediction, the guesses are what comes next in it. Where they part, the
place to go on is found by the longest end of the output that the prediction contains.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specinfer.request import Request, Span
from specinfer.tree import Draw, TokenTree, TreeBudget
from specinfer.verify import Acceptance

MAX_MATCH = 32  # last output tokens that are looked up
TRUSTED = 2  # so many tokens must agree before a place counts as found
_NUM_CHARACTERS = 0x110000


@dataclass(slots=True)
class _Alignment:
    """Where in its prediction one output stands.

    Attributes:
        text: The prediction, a character for each token, so that Python's search of strings serves.
        num_read: Output tokens that are accounted for.
        place: The prediction's token that should come next; None: nowhere.
        agreed: How many tokens before the place agree, as far as is known.
        trusted: The last place that was more than a lucky hit; places are sought from here on.
    """

    request: Request
    text: str
    num_read: int = 0
    place: int | None = 0
    agreed: int = TRUSTED  # the user says that the beginning agrees
    trusted: int = 0

    def read(self) -> None:
        """Takes the output's new tokens into account."""
        prediction, tokens = self.request.prediction_ids, self.request.token_ids
        start = len(self.request.prompt_ids)
        parted = False
        for token in tokens[start + self.num_read :]:
            if self.place is not None and self.place < len(prediction) and prediction[self.place] == token:
                self.place += 1
                self.agreed += 1
                parted = False
            else:
                self.place, self.agreed, parted = None, 0, True
            if self.place is not None and self.agreed >= TRUSTED:
                self.trusted = self.place
        self.num_read = len(tokens) - start
        if parted:
            self._realign(_as_text(tokens[max(start, len(tokens) - MAX_MATCH) :]))

    def _realign(self, end: str) -> None:
        """Finds the longest end of the output in the prediction, nearest after the trusted place if it can."""
        # Of an end that is found each shorter one is found, too: halving finds the longest.
        low, high = 0, len(end)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if end[-middle:] in self.text else (low, middle - 1)
        if low == 0:
            return
        # The match ends at or after the trusted place, so it may begin before it.
        at = self.text.find(end[-low:], max(self.trusted - low, 0))
        if at < 0:
            at = self.text.rfind(end[-low:])
        self.place, self.agreed = at + low, low
        if low >= TRUSTED:
            self.trusted = self.place


class PredictionDrafter:
    """Guesses that the output goes on like the user's prediction."""

    name = "prediction"

    def __init__(self) -> None:
        self._alignments: dict[str, _Alignment] = {}

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        return [self._draft_one(span.request, budget) for span, budget in zip(spans, budgets, strict=True)]

    def _draft_one(self, request: Request, budget: TreeBudget) -> TokenTree:
        root, length = request.token_ids[-1], min(budget.max_nodes, budget.max_depth)
        if not (length and request.prediction_ids):
            return TokenTree.root(root)
        alignment = self._alignments.get(request.request_id)
        if alignment is None or alignment.request is not request:
            alignment = _Alignment(request, _as_text(request.prediction_ids))
            self._alignments[request.request_id] = alignment
        alignment.read()
        if alignment.place is None:
            return TokenTree.root(root)
        guesses = request.prediction_ids[alignment.place : alignment.place + length]
        draws = (Draw(i + 1, self.name, None, _confidence(alignment.agreed + i)) for i in range(len(guesses)))
        return TokenTree((root, *guesses), (-1, *range(len(guesses))), tuple(draws))

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        pass  # the output is read when drafting

    def forget(self, request_id: str) -> None:
        self._alignments.pop(request_id, None)


def _confidence(agreed: int) -> float:
    """One token in common is often chance (a third of the guesses come true), four hardly ever (nine tenths)."""
    return agreed * agreed / (agreed * agreed + 1.5)


def _as_text(tokens: Sequence[int]) -> str:
    """A character for each token. Two far apart may share one, which costs a wrong guess at worst."""
    return "".join([chr(token % _NUM_CHARACTERS) for token in tokens])
