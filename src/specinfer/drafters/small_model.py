"""A small language model (the paper's SSM) that grows a tree level by level, with its own cache.

Expansion-based construction: SpecInfer (arXiv 2305.09781), section 3, <k1, ..., km>. At each level one
pass scores all nodes of all requests; each node gets the k best children by logit plus the noise it
shares with the target, so the guesses are the tokens the target is likely to say for this very seed.
"""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor
from torch.nn.functional import pad

from specinfer.drafters.expansion import Growth
from specinfer.model.batch import Piece
from specinfer.model.kv_cache import OutOfSlotsError
from specinfer.model.runner import ModelRunner
from specinfer.request import Request, Span
from specinfer.tree import TokenTree, TreeBudget
from specinfer.verify import perturb

# Longest piece of known text a drafter reads in one pass.
MAX_CHUNK = 512


class SmallModelDrafter:
    """Grows a fixed expansion with a small model's best next tokens.

    Args:
        vocab_size: The target's; tokens beyond it are never guessed.
    """

    def __init__(self, runner: ModelRunner, vocab_size: int, name: str = "draft") -> None:
        self.runner = runner
        self._name = name
        self._vocab_size = vocab_size
        self._growths: dict[str, Growth] = {}

    @property
    def name(self) -> str:
        return self._name

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        trees = [TokenTree.root(span.request.token_ids[-1]) for span in spans]
        growing = {}
        for i, (span, budget) in enumerate(zip(spans, budgets, strict=True)):
            request = span.request
            room = self.runner.loaded.max_position - len(request.token_ids)
            if budget.widths and room > 0 and self._can_read(request):
                widths = budget.cut(room, budget.num_nodes).widths
                growing[i] = Growth(request, widths, [request.token_ids[-1]])
        if not growing:
            return trees
        try:
            self._grow(list(growing.values()))
        except OutOfSlotsError:
            # Fewer guesses this time; caches are rebuilt when there is room.
            for growth in growing.values():
                self.forget(growth.request.request_id)
            return trees
        for i, growth in growing.items():
            trees[i] = growth.tree(self._name)
            self._growths[growth.request.request_id] = growth
        return trees

    def _can_read(self, request: Request) -> bool:
        """Whether its vocabulary, which may be padded less than the target's, has all tokens it is to read."""
        unread = request.token_ids[len(self.runner.cache.slots(request.request_id)) :]
        return not unread or max(unread) < self.runner.loaded.vocab_size

    def _grow(self, growths: list[Growth]) -> None:
        logits = self._catch_up([growth.request for growth in growths])
        while True:
            self._extend(growths, logits)
            growths = [growth for growth in growths if growth.width]
            if not growths:
                return
            logits = self.runner.forward([self._frontier_piece(growth) for growth in growths])

    def _catch_up(self, requests: Sequence[Request]) -> Tensor:
        """Reads the known tokens the cache lacks; [requests, vocab] logits after the last of each."""
        cache = self.runner.cache
        for request in requests:
            cache.commit(request.request_id, ())  # guesses that were never observed
            # The root is always computed, since its logits are wanted.
            cache.truncate(request.request_id, len(request.token_ids) - 1)
            cached = len(cache.slots(request.request_id))
            while len(request.token_ids) - cached > MAX_CHUNK:
                self.runner.forward([self._chain_piece(request, cached, cached + MAX_CHUNK, None)])
                cached += MAX_CHUNK
                cache.commit(request.request_id, range(MAX_CHUNK))
        pieces = []
        for request in requests:
            start, end = len(cache.slots(request.request_id)), len(request.token_ids)
            pieces.append(self._chain_piece(request, start, end, TokenTree.root(request.token_ids[-1])))
        logits = self.runner.forward(pieces)
        for request, piece in zip(requests, pieces, strict=True):
            cache.commit(request.request_id, range(len(piece.tokens)))
        return logits

    def _chain_piece(self, request: Request, start: int, end: int, tree: TokenTree | None) -> Piece:
        cache = self.runner.cache
        slots = cache.reserve(request.request_id, end - start)
        return Piece.of_span(request.token_ids[start:end], tree, cache.slots(request.request_id), slots)

    def _frontier_piece(self, growth: Growth) -> Piece:
        """The frontier's nodes; they see the known tokens, their ancestors and themselves."""
        cache, request_id = self.runner.cache, growth.request.request_id
        new, root = growth.frontier, len(growth.request.token_ids) - 1
        earlier = cache.reserved(request_id)
        slots = cache.reserve(request_id, len(new))
        positions = [root + depth for depth in growth.depths]
        growth.num_computed = new.stop
        return Piece(
            tokens=growth.tokens[new.start : new.stop],
            positions=positions[new.start : new.stop],
            prefix_slots=cache.slots(request_id),
            slots=slots,
            visible=growth.ancestry[new.start : new.stop, 1 : new.stop],
            num_logits=len(new),
            earlier_slots=earlier,
            earlier_positions=positions[1 : new.start],
        )

    def _extend(self, growths: Sequence[Growth], logits: Tensor) -> None:
        missing = self._vocab_size - logits.shape[-1]  # vocabularies may be padded to different sizes
        logits = pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, : self._vocab_size]
        sizes = [len(growth.frontier) for growth in growths]
        widest = min(max(growth.width for growth in growths), self._vocab_size)
        if all(growth.request.params.is_plain_greedy for growth in growths):
            scores = logits
        else:
            scores = torch.cat(
                [
                    perturb(rows, growth.request, [growth.paths[node] for node in growth.frontier])
                    for growth, rows in zip(growths, logits.split(sizes), strict=True)
                ]
            )
        best = scores.topk(widest, dim=-1)
        impossible = best.values == -torch.inf
        ranked = iter(best.indices.masked_fill(impossible, -1).tolist())
        for growth, size in zip(growths, sizes, strict=True):
            growth.extend([[token for token in row[: growth.width] if token >= 0] for row in islice(ranked, size)])

    def observe(self, request: Request) -> None:
        growth = self._growths.pop(request.request_id, None)
        if growth is None or growth.request is not request:
            return
        known = len(self.runner.cache.slots(request.request_id))
        said = request.token_ids[known:]
        children = growth.tree(self._name).children()
        node, kept = 0, []
        for token in said:
            child = children[node].get(token)
            if child is None or child >= growth.num_computed:
                break
            kept.append(child - 1)  # reserved slots begin with node 1
            node = child
        self.runner.cache.commit(request.request_id, kept)

    def forget(self, request_id: str) -> None:
        self._growths.pop(request_id, None)
        self.runner.cache.free(request_id)
