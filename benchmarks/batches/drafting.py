"""Trees of a simulated drafter, grown by the engine's own code from what the embedded drafter proposed for texts."""

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.batches.texts import WRONG, Text
from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.growth.calibration import Calibration
from specinfer.drafters.growth.draft_sampling import Candidates
from specinfer.drafters.growth.tree_batch import BEST_FIRST_WIDTH, GrowingTree, TreeBatch
from specinfer.verify import Acceptance

RIGHT_TOKEN = 1  # of a text's own token; other tokens have other numbers
_OTHERS = np.arange(2, 2 + BEST_FIRST_WIDTH)


class TextDrafting:
    """Grows trees and accepts paths of requests whose outputs are known texts.

    Below the text's own tokens a node has the candidates of its place; elsewhere, those of some place, all wrong.

    Args:
        places: Text of each request, by its id, and the position in it at which the output begins.
        others: Texts from which candidates below wrong tokens are taken.
    """

    def __init__(self, places: Mapping[str, tuple[Text, int]], others: Sequence[Text], seed: int = 0) -> None:
        self.calibration = Calibration()
        self._places, self._random = places, np.random.default_rng(seed)
        self._wrong = np.concatenate([text.confidence for text in others])

    def grow(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> tuple[list[TokenTree], int]:
        """Return a tree for each span, and the number of levels drafted."""
        pairs = zip(spans, budgets, strict=True)
        growing = [GrowingTree(span.request, budget, "draft") for span, budget in pairs if budget.max_nodes]
        num_levels = 0
        if growing:
            tree_batch = TreeBatch(growing, self.calibration)
            while level := tree_batch.level():
                nodes = [(one.request, one.path_of(i)) for one in level.frontiers for i in range(len(one.depths))]
                tree_batch.extend(self._candidates(nodes))
                num_levels += 1
        grown = iter(growing)
        roots = [TokenTree.root(span.request.token_ids[-1]) for span in spans]
        return [
            next(grown).tree() if budget.max_nodes else root for root, budget in zip(roots, budgets, strict=True)
        ], num_levels

    def _candidates(self, nodes: Sequence[tuple[Request, tuple[int, ...]]]) -> Candidates:
        picked = self._random.integers(len(self._wrong), size=len(nodes))
        confidence, tokens = self._wrong[picked], np.tile(_OTHERS, (len(nodes), 1))
        for i, (request, path) in enumerate(nodes):
            if all(token == RIGHT_TOKEN for token in path):
                text, place = self._at(request, len(path))
                confidence[i] = text.confidence[place]
                if (rank := text.right[place]) != WRONG:
                    tokens[i, rank] = RIGHT_TOKEN
        return Candidates(tokens, confidence)

    def _at(self, request: Request, depth: int) -> tuple[Text, int]:
        text, start = self._places[request.request_id]
        return text, (start + request.num_output + depth) % len(text.right)

    def accepted(self, tree: TokenTree) -> Acceptance:
        """Return what is accepted of a tree: the text's own tokens."""
        node, path = 0, list[int]()
        if tree.num_guessed:
            while (child := tree.children[node].get(RIGHT_TOKEN)) is not None:
                node = child
                path.append(node)
        return Acceptance(tuple(path), RIGHT_TOKEN)
