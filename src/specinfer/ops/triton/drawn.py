"""DeviceDraws of a level's candidates without replacement, one program per node, with the distribution of each draw."""

import triton
import triton.language as tl
from torch import Tensor

from specinfer.ops.trees import DRAWN, Candidates, ChanceTable, DeviceDraws, DrawnRows, Frontier, Limits
from specinfer.ops.triton.candidates import assert_contiguous, chance_of
from specinfer.ops.triton.choose import noise_bits, precise_noise

_DRAWN = tl.constexpr(DRAWN)


@triton.jit(do_not_specialize=["level", "first", "width", "count", "num_levels", "num_points"])
def draws_program(
    values, ids, least, is_drawn, streams, numbers, temperatures,
    points, heights, slopes, max_depth, min_path_prob, widths, above, accepted,
    out_tokens, out_confidence, out_path_prob, draw_tokens, draw_probs,
    level, first, width, count, num_levels, support, num_points, num_ranks,
    BLOCK: tl.constexpr, BLOCK_POINTS: tl.constexpr, IS_PREDICTED: tl.constexpr,
):  # fmt: skip
    """Draw the candidates of a node. Grid: [nodes, requests]."""
    node, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(is_drawn + request).to(tl.int32) == 0:
        return
    row = request * tl.num_programs(0) + node
    places = tl.arange(0, BLOCK)
    valid = places < support
    tokens = tl.load(ids + row * support + places, valid, other=-1)
    scores = tl.load(values + row * support + places, valid, other=float("-inf"))
    scores = tl.div_rn(scores, tl.zeros_like(scores) + tl.load(temperatures + request))
    has_nan = tl.max((scores != scores).to(tl.int32), 0) > 0
    scores = tl.where((scores >= tl.load(least + row)) & (has_nan == 0), scores, float("-inf"))
    best = tl.max(scores, 0)
    left = tl.exp(scores.to(tl.float64) - tl.where(best == float("-inf"), 0.0, best).to(tl.float64))
    total = tl.sum(left, 0)
    left = left / tl.where(total > 0, total, 1.0)
    sure = tl.load(accepted + row)
    if not IS_PREDICTED:
        sure = tl.sum(tl.where(places == 0, left, 0.0), 0).to(tl.float32)
    bits = noise_bits(tl.load(streams + request), tl.load(numbers + request) + node, tokens)
    race = tl.where(scores > float("-inf"), scores + precise_noise(bits), float("-inf"))
    num_wanted = tl.load(widths + request * num_levels + level)
    is_fixed = tl.load(widths + request * num_levels) > 0
    above_prob = tl.load(above + row)
    goes_on = (above_prob >= 0) & (level < tl.load(max_depth + request))
    least_path_prob = tl.load(min_path_prob + request)
    lowest = tl.full((), 1.0, tl.float32)
    numbers_of_points = tl.arange(0, BLOCK_POINTS)
    meets = tl.load(points + numbers_of_points, numbers_of_points < num_points, other=float("inf"))
    place = request * count + first + node * width
    for rank in range(width):
        winner = tl.min(tl.where(race == tl.max(race, 0), places, BLOCK), 0)
        is_winner = places == winner
        is_token = tl.sum(tl.where(is_winner, left, 0.0), 0) > 0
        token = tl.sum(tl.where(is_winner, tokens, 0), 0)
        total = tl.sum(left, 0)
        tl.store(out_tokens + place + rank, tl.where(is_token, token, 0))
        tl.store(out_confidence + place + rank, sure)
        chance = chance_of(_DRAWN, rank, sure, meets, heights, slopes, num_points, num_ranks)
        # A later candidate of a node is never taken before an earlier one.
        lowest = tl.minimum(lowest, tl.where(is_fixed, 1.0, chance))
        path_prob = lowest * above_prob
        usable = goes_on & is_token & (path_prob >= least_path_prob) & ((rank < num_wanted) | (is_fixed == 0))
        tl.store(out_path_prob + place + rank, tl.where(usable, path_prob, -1.0))
        of_draw = (place + rank) * support + places
        tl.store(draw_tokens + of_draw, tokens.to(tl.int32), valid)
        tl.store(draw_probs + of_draw, left / tl.where(total > 0, total, 1.0), valid)
        left = tl.where(is_winner, 0.0, left)
        race = tl.where(is_winner, float("-inf"), race)


def draw_candidates(
    values: Tensor,
    ids: Tensor,
    least: Tensor,
    drawn: DrawnRows,
    frontier: Frontier,
    first: int,
    width: int,
    table: ChanceTable,
    limits: Limits,
    candidates: Candidates,
    out: DeviceDraws,
    accepted: Tensor | None = None,
) -> None:
    """Draw the candidates of a level, in place of those that were chosen.

    For other requests nothing is written.

    The confidence in each is that in the most probable token, drawn or not, so it reveals no draw.

    Args:
        values: [requests * frontier, support] float32 the greatest logits of each node, in descending order.
        ids: [requests * frontier, support] int64 their tokens.
        least: [requests * frontier] float32 as `least_kept` returns it.
        drawn: The requests.
        first: Number of the level's first candidate.
        width: Candidates of each node.
        candidates: Written to, from `first` on, for the requests whose tokens are drawn.
        out: A draw for each candidate, written to but for its nodes.
        accepted: [requests * frontier] float32 confidence in the most probable token; None for that of the values.
    """
    (requests, nodes), support = frontier.tokens.shape, values.shape[1]
    outputs = (candidates.tokens, candidates.confidence, candidates.path_prob, out.tokens, out.probs)
    predicted = least if accepted is None else accepted  # not used if there are none
    inputs = (
        values, ids, least, *drawn, table.points, table.heights, table.slopes,
        limits.max_depth, limits.min_path_prob, limits.widths, frontier.path_prob, predicted,
    )  # fmt: skip
    assert_contiguous(*inputs, *outputs)
    assert out.probs.shape == (*candidates.tokens.shape, support)
    # Without fused operations, so that sums are rounded as in PyTorch.
    draws_program[(nodes, requests)](
        *inputs, *outputs,
        frontier.level, first, width, candidates.tokens.shape[1], limits.widths.shape[1], support,
        len(table.points), table.num_ranks,
        BLOCK=triton.next_power_of_2(support), BLOCK_POINTS=triton.next_power_of_2(len(table.points)),
        IS_PREDICTED=accepted is not None, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
