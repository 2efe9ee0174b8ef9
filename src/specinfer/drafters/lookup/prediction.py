"""Drafts from a prediction that the user supplies: text that the output resembles, such as a file before an edit.

As long as the output agrees with the prediction, the drafted tokens are the next ones in it. Where they diverge, the
position to continue from is found by the longest suffix of the output that the prediction contains.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specinfer.core.lookups import PREDICTION
from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.verify import Acceptance

MAX_MATCH = 32  # number of last output tokens that are looked up
TRUSTED = 2  # tokens that must agree before a position counts as found
_NUM_CHARACTERS = 0x110000


@dataclass(slots=True)
class _Alignment:
    """The position of one output in its prediction.

    Attributes:
        text: The prediction with one character per token, so that Python's string search can be used.
        num_read: The number of output tokens that are accounted for.
        place: The index of the predicted token that should come next, or None if no position is known.
        agreed: The number of tokens before `place` that agree, as far as is known.
        trusted: The last position that was more than a chance match. Searches start from here.
    """

    request: Request
    text: str
    num_read: int = 0
    place: int | None = 0
    agreed: int = TRUSTED  # the prediction is assumed to agree at its beginning
    trusted: int = 0

    def read(self) -> None:
        """Take the output's new tokens into account."""
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
        """Find the longest suffix of the output in the prediction, preferably the first one after the trusted place."""
        # If a suffix is found, each shorter one is found too, so bisection finds the longest.
        low, high = 0, len(end)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if end[-middle:] in self.text else (low, middle - 1)
        if low == 0:
            return
        # The match ends at or after the trusted position, so it may begin before it.
        at = self.text.find(end[-low:], max(self.trusted - low, 0))
        if at < 0:
            at = self.text.rfind(end[-low:])
        self.place, self.agreed = at + low, low
        if low >= TRUSTED:
            self.trusted = self.place


class PredictionDrafter:
    """A drafter that proposes the tokens of the user's prediction."""

    name = PREDICTION

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
        confidence = [_confidence(alignment.agreed + i) for i in range(len(guesses))]
        return TokenTree.chosen((root, *guesses), range(-1, len(guesses)), self.name, confidence)

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        pass  # the output is read when drafting

    def forget(self, request_id: str) -> None:
        self._alignments.pop(request_id, None)


def _confidence(agreed: int) -> float:
    """Return the confidence after `agreed` matching tokens.

    About a third of the drafts come true after one matching token, nine tenths after four.
    """
    return agreed * agreed / (agreed * agreed + 1.5)


def _as_text(tokens: Sequence[int]) -> str:
    """Return one character per token.

    Two distant token ids may share a character, which costs at worst a wrong draft.
    """
    return "".join([chr(token % _NUM_CHARACTERS) for token in tokens])
