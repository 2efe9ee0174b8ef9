"""Kernels around a device's passes: the next frontier of a draft loop, the best tree, its mask, and what is kept."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specinfer.ops.tree_layout import num_words
from specinfer.ops.trees import Candidates, DeviceTrees, Frontier, Guesses, Limits
from specinfer.ops.triton.candidates import assert_contiguous


@triton.jit
def _best(path_prob, count):
    """Return which are the best `count` that may be taken; of equals, the earlier ones.

    Probabilities of 0 and more have the order of their bits, so the least one taken is found bit by bit.
    """
    bits = path_prob.to(tl.int32, bitcast=True)
    bits = tl.where(path_prob > 0, bits, tl.where(path_prob == 0, 0, -1))  # 0 has two signs
    least = tl.full((), 0, tl.int32)
    for i in tl.static_range(31):
        more = least | (1 << (30 - i))
        least = tl.where(tl.sum((bits >= more).to(tl.int32), 0) >= count, more, least)
    is_better = bits > least
    num_equal = count - tl.sum(is_better.to(tl.int32), 0)
    is_equal = bits == least
    return is_better | (is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= num_equal))


@triton.jit(
    do_not_specialize=[
        "stride",
        "num_children",
        "count",
        "first",
        "first_column",
        "above_width",
        "width",
        "num_levels",
        "level",
    ]
)
def frontier_program(
    path_prob, above_sees, tokens, columns, level_probs, out_tokens, out_sees, out_numbers, out_path_prob,
    stride, num_children, count, first, first_column, above_width, width, num_levels, level,
    WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the next frontier of a request. Grid: [requests]."""
    request = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, BLOCK)
    valid = numbers < count
    mine = request * stride + first + numbers
    probs = tl.load(path_prob + request * stride + numbers, valid, other=-1.0)
    is_taken = _best(probs, width)
    place = tl.cumsum(is_taken.to(tl.int32), 0) - 1
    num_taken = tl.sum(is_taken.to(tl.int32), 0)
    padding = (numbers >= num_taken) & (numbers < width)
    # A lane writes the candidate that it holds, and another lane's place if that stays empty.
    at, empty = request * width + place, request * width + numbers
    tl.store(columns + mine, first_column + place, is_taken)
    tl.store(out_tokens + at, tl.load(tokens + mine, is_taken, other=0), is_taken)
    tl.store(out_tokens + empty, tl.zeros_like(numbers).to(tl.int64), padding)
    tl.store(out_numbers + at, first + numbers, is_taken)
    tl.store(out_numbers + empty, tl.zeros_like(numbers) - 1, padding)
    tl.store(out_path_prob + at, probs, is_taken)
    tl.store(out_path_prob + empty, tl.zeros_like(probs) - 1.0, padding)
    tl.store(level_probs + request * num_levels + level, tl.sum(tl.where(is_taken, probs, 0.0), 0))
    parent = request * above_width + numbers // num_children
    for word in tl.static_range(WORDS):
        seen = tl.load(above_sees + parent * WORDS + word, is_taken, other=0)
        own = first_column + place
        seen = tl.where(own // 32 == word, seen | (1 << (own % 32)), seen)
        tl.store(out_sees + at * WORDS + word, seen, is_taken)
        own = first_column + numbers
        tl.store(out_sees + empty * WORDS + word, tl.where(own // 32 == word, 1 << (own % 32), 0), padding)


def next_frontier(
    path_prob: Tensor,
    frontier: Frontier,
    first: int,
    first_column: int,
    candidates: Candidates,
    level_probs: Tensor,
    out: Frontier,
) -> None:
    """Choose the most promising candidates of a level as the next frontier; of equals, the earlier one.

    Args:
        path_prob: [requests, of level] float32 of the level's candidates, -1 for what may not be taken.
        frontier: The frontier that these are children of.
        first: Number of the level's first candidate.
        first_column: The drafter's column of the new frontier's first node.
        candidates: Its `columns` are written to.
        level_probs: [requests, levels] float32; the column of the new frontier is written to.
        out: The new frontier, written to.
    """
    (requests, count), (above_width, width) = path_prob.shape, (frontier.tokens.shape[1], out.tokens.shape[1])
    assert path_prob.stride(1) == 1
    assert path_prob.stride(0) == candidates.tokens.shape[1]
    outputs = (out.tokens, out.sees, out.numbers, out.path_prob)
    assert_contiguous(frontier.sees, candidates.tokens, candidates.columns, level_probs, *outputs)
    block = triton.next_power_of_2(max(count, width))
    frontier_program[(requests,)](
        path_prob, frontier.sees, candidates.tokens, candidates.columns, level_probs, *outputs,
        path_prob.stride(0), count // above_width, count, first, first_column, above_width, width,
        level_probs.shape[1], out.level,
        WORDS=out.sees.shape[2], BLOCK=block, num_warps=_num_warps(block), enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "first", "num_guesses"])
def guesses_program(
    guess_tokens, guess_parents, guess_path_prob, tokens, confidence, path_prob, parents, columns,
    count, first, num_guesses, BLOCK: tl.constexpr, BLOCK_GUESSES: tl.constexpr,
):  # fmt: skip
    """Merge the guesses of a request. Grid: [requests]."""
    request = tl.program_id(0).to(tl.int64)
    mine, theirs = request * count, request * num_guesses
    places, guesses = tl.arange(0, BLOCK), tl.arange(0, BLOCK_GUESSES)
    valid = places < first
    token_of = tl.load(tokens + mine + places, valid, other=-1)
    parent_of = tl.load(parents + mine + places, valid, other=-2)
    probs = tl.load(path_prob + mine + places, valid, other=-1.0)
    numbers = tl.full((BLOCK_GUESSES,), -1, tl.int32)
    for guess in range(num_guesses):
        above = tl.load(guess_parents + theirs + guess)
        token = tl.load(guess_tokens + theirs + guess).to(tl.int64)
        prob = tl.load(guess_path_prob + theirs + guess)
        parent = tl.where(above >= 0, tl.sum(tl.where(guesses == above, numbers, 0), 0), -1)
        place = tl.min(tl.where(valid & (parent_of == parent) & (token_of == token), places, BLOCK), 0)
        is_known = place < BLOCK
        probs = tl.where(places == place, tl.maximum(probs, prob), probs)
        number = first + guess
        numbers = tl.where(guesses == guess, tl.where(is_known, place, number), numbers)
        tl.store(tokens + mine + number, token)
        tl.store(parents + mine + number, parent)
        tl.store(path_prob + mine + number, tl.where(is_known, -1.0, prob))
        tl.store(confidence + mine + number, -1.0)
        tl.store(columns + mine + number, -1)
    tl.store(path_prob + mine + places, probs, valid)


def merge_guesses(guesses: Guesses, candidates: Candidates, first: int) -> None:
    """Add the guesses of lookups to the candidates; one that is a candidate already raises its path probability.

    Args:
        candidates: Written to, from `first` on, and path probabilities before it.
        first: Number of the first guess among the candidates; no candidate before it is a guess.
    """
    requests, num_guesses = guesses.tokens.shape
    count = candidates.tokens.shape[1]
    inputs = (guesses.tokens, guesses.parents, guesses.path_prob)
    outputs = (
        candidates.tokens, candidates.confidence, candidates.path_prob, candidates.parents, candidates.columns
    )  # fmt: skip
    assert first + num_guesses == count
    assert_contiguous(*inputs, *outputs)
    block = triton.next_power_of_2(first)
    guesses_program[(requests,)](
        *inputs, *outputs, count, first, num_guesses,
        BLOCK=block, BLOCK_GUESSES=triton.next_power_of_2(num_guesses), num_warps=_num_warps(2 * block),
        enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "num_nodes"])
def tree_program(
    path_prob, tokens, confidence, parents, columns, roots, root_columns, max_nodes,
    out_tokens, out_parents, out_sizes, out_confidence, out_columns, count, num_nodes,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Form the tree of a request. Grid: [requests]."""
    request = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, BLOCK)
    mine = request * count + numbers
    probs = tl.load(path_prob + mine, numbers < count, other=-1.0)
    limit = tl.minimum(tl.load(max_nodes + request), num_nodes).to(tl.int32)
    is_taken = _best(probs, limit)
    node = tl.cumsum(is_taken.to(tl.int32), 0)
    size = 1 + tl.sum(is_taken.to(tl.int32), 0)
    above = tl.load(parents + mine, is_taken, other=-1)
    parent = tl.where(above >= 0, tl.gather(node, tl.maximum(above, 0), 0), 0)
    at = request * (num_nodes + 1) + node
    tl.store(out_tokens + at, tl.load(tokens + mine, is_taken, other=0).to(tl.int32), is_taken)
    tl.store(out_parents + at, parent, is_taken)
    tl.store(out_confidence + at, tl.load(confidence + mine, is_taken, other=0.0), is_taken)
    tl.store(out_columns + at, tl.load(columns + mine, is_taken, other=-1), is_taken)
    tl.store(out_sizes + request, size)
    # The root, and nodes that are not in use.
    is_root = numbers == 0
    others = is_root | ((numbers >= size) & (numbers <= num_nodes))
    empty = request * (num_nodes + 1) + numbers
    tl.store(out_tokens + empty, tl.where(is_root, tl.load(roots + request).to(tl.int32), 0), others)
    tl.store(out_parents + empty, tl.zeros_like(numbers), others)
    tl.store(out_confidence + empty, tl.zeros_like(probs), others)
    tl.store(out_columns + empty, tl.where(is_root, tl.load(root_columns + request).to(tl.int32), -1), others)


def best_tree(
    path_prob: Tensor, candidates: Candidates, roots: Tensor, root_columns: Tensor, limits: Limits, out: DeviceTrees
) -> None:
    """Form the trees of the best candidates; these are closed under ancestors, since ties go to the earlier one.

    Args:
        path_prob: [requests, candidates] float32, that of `candidates`.
        roots: [requests] int64 tokens of the roots.
        root_columns: [requests] int32, or bool if all are below 2.
        out: The trees, written to; `path_prob` is not.
    """
    requests, count = path_prob.shape
    num_nodes = out.tokens.shape[1] - 1
    of_nodes = (path_prob, candidates.tokens, candidates.confidence, candidates.parents, candidates.columns)
    inputs = (*of_nodes, roots, root_columns, limits.max_nodes)
    outputs = (out.tokens, out.parents, out.sizes, out.confidence, out.columns)
    assert_contiguous(*inputs, *outputs)
    block = triton.next_power_of_2(max(count, num_nodes + 1))
    tree_program[(requests,)](
        *inputs, *outputs, count, num_nodes, BLOCK=block, num_warps=_num_warps(block), enable_fp_fusion=False
    )


@triton.jit(do_not_specialize=["num_nodes", "max_depth", "last"])
def ancestors_program(
    parents, first, out_visible, out_positions, num_nodes, max_depth, last,
    WORDS: tl.constexpr, BLOCK_NODES: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Mark the ancestors of a request's nodes. Grid: [requests]."""
    request = tl.program_id(0).to(tl.int64)
    nodes, words = tl.arange(0, BLOCK_NODES), tl.arange(0, BLOCK_WORDS)
    in_tree = nodes < num_nodes
    parent = tl.load(parents + request * num_nodes + nodes, in_tree, other=0)
    node = nodes
    depth = tl.zeros_like(nodes)
    bits = tl.where((node // 32)[:, None] == words[None, :], (1 << (node % 32))[:, None], 0)
    for _ in range(max_depth):
        depth += (node > 0).to(tl.int32)
        node = tl.gather(parent, node, 0)
        bits |= tl.where((node // 32)[:, None] == words[None, :], (1 << (node % 32))[:, None], 0)
    place = (request * num_nodes + nodes)[:, None] * WORDS + words[None, :]
    tl.store(out_visible + place, bits, in_tree[:, None] & (words < WORDS)[None, :])
    position = tl.minimum(tl.load(first + request) + depth, last)
    tl.store(out_positions + request * num_nodes + nodes, position, in_tree)


def mark_ancestors(parents: Tensor, first: Tensor, *, max_depth: int, last: int) -> tuple[Tensor, Tensor]:
    """Compute the tree attention mask and the positions of trees.

    Args:
        parents: [requests, nodes] int32 of the trees, the root first; nodes that are not in use have parent 0.
        first: [requests] int32 positions of the roots.
        max_depth: Longest possible path.
        last: Highest position. Nodes of a request that may emit no more may lie beyond it.

    Returns:
        visible: [requests * nodes, words] int32 bits, as in `TreeLayout`.
        positions: [requests, nodes] int32.
    """
    requests, nodes = parents.shape
    assert_contiguous(parents, first)
    words = num_words(nodes)
    visible = torch.empty((requests * nodes, words), dtype=torch.int32, device=parents.device)
    positions = torch.empty((requests, nodes), dtype=torch.int32, device=parents.device)
    block = triton.next_power_of_2(nodes)
    ancestors_program[(requests,)](
        parents, first, visible, positions, nodes, max_depth if nodes > 1 else 0, last,
        WORDS=words, BLOCK_NODES=block, BLOCK_WORDS=triton.next_power_of_2(words), num_warps=_num_warps(block * words),
        enable_fp_fusion=False,
    )  # fmt: skip
    return visible, positions


@triton.jit(do_not_specialize=["num_nodes", "max_depth"])
def kept_program(
    path, lengths, tokens, columns, drafts, before, has_two, out_columns, out_lengths, num_nodes, max_depth,
    BLOCK_DEPTH: tl.constexpr,
):  # fmt: skip
    """List what the drafter computed of a request's path. Grid: [requests]."""
    request = tl.program_id(0).to(tl.int64)
    two = tl.load(has_two + request).to(tl.int32)
    length = tl.load(lengths + request)
    places = tl.arange(0, BLOCK_DEPTH)
    on_path = places < max_depth
    node = tl.load(path + request * max_depth + places, on_path, other=-1)
    column = tl.load(columns + request * num_nodes + node, node >= 0, other=-1)
    num_computed = tl.sum((column >= 0).to(tl.int32), 0)
    out_columns += request * (max_depth + 1)
    tl.store(out_columns + places + two, column, on_path)
    tl.store(out_columns + tl.where(two > 0, 0, max_depth), tl.where(two > 0, 1, -1))
    is_drafted = (length >= 0) & (tl.load(drafts + request) > 0)
    tl.store(out_lengths + request, tl.where(is_drafted, num_computed + two, -1))
    last = tl.load(path + request * max_depth + tl.maximum(length - 1, 0))
    token = tl.load(tokens + request * num_nodes + tl.maximum(last, 0)).to(tl.int64)
    tl.store(before + request, token, is_drafted)
    tl.store(has_two + request, num_computed < length, is_drafted)


def keep_drafted(
    path: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    columns: Tensor,
    drafts: Tensor,
    before: Tensor,
    has_two: Tensor,
    out: tuple[Tensor, Tensor],
) -> None:
    """List what the drafter computed of each accepted path: all of it, or all but the last node.

    Args:
        path, lengths: As `walk` returns them.
        tokens, columns: [requests, nodes] of the trees.
        drafts: [requests] int32, 1 if the drafter has read the request.
        before: [requests] int64 the token before the next root, written to.
        has_two: [requests] bool, True if the drafter had two known tokens to compute; written to: it will have.
        out: [requests, max_depth + 1] int32 columns kept, after the first one, and [requests] int32 their number, -1
            for requests without drafts; written to.
    """
    requests, max_depth = path.shape
    tensors = (path, lengths, tokens, columns, drafts, before, has_two, *out)
    assert_contiguous(*tensors)
    kept_program[(requests,)](
        *tensors, tokens.shape[1], max_depth,
        BLOCK_DEPTH=triton.next_power_of_2(max_depth), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def _num_warps(block: int) -> int:
    return min(max(block // 256, 1), 8)
