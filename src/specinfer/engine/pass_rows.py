"""Rows of a target pass: what its step gives to the model, and whose logits come back.

For each span the model gets the known tokens, the last of which is the root of the tree, and then the draft tokens.
Each node has logits, and so have the known tokens before it if log-probabilities of the prompt are asked for.

    rows of logits    [known tokens before the tree, if asked for | root, draft tokens]
"""

from dataclasses import replace

from torch import Tensor

from specinfer.engine.emission import note_prompt
from specinfer.engine.in_flight_step import InFlightStep
from specinfer.model.batch import Piece
from specinfer.model.kv_cache import KVCache


def pieces_of(step: InFlightStep, cache: KVCache) -> list[Piece]:
    """Reserve slots for the new tokens of a step, and return what the model gets for each span."""
    pieces = []
    for span, tree, reads in zip(step.spans, step.trees, step.reads_prompt, strict=True):
        request_id = span.request.request_id
        num_new = span.end - span.start + (tree.num_guessed if tree else 0)
        slots = cache.reserve(request_id, num_new)
        piece = Piece.of_span(span.tokens, tree, cache.slots(request_id), slots)
        if reads:
            piece = replace(piece, num_logits=num_new)
        if span.request.adapter is not None:
            piece = replace(piece, adapter=span.request.adapter.table)
        pieces.append(piece)
    return pieces


def logits_by_tree(step: InFlightStep, logits: Tensor) -> list[Tensor]:
    """Return the logits of each tree: [nodes, vocab]. Rows for prompt log-probabilities go to their requests.

    Requests that ended while the pass was in flight are left out.
    """
    rows, start = [], 0
    for span, tree, reads in zip(step.spans, step.trees, step.reads_prompt, strict=True):
        num_tree = len(tree) if tree else 0
        if reads:
            num_before = span.end - span.start - (1 if tree else 0)
            if not span.request.is_finished:
                note_prompt(span, logits[start : start + num_before + (1 if tree else 0)])
            start += num_before
        if tree and not span.request.is_finished:
            rows.append(logits[start : start + num_tree])
        start += num_tree
    return rows
