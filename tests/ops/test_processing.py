"""Truncation, biases and penalties of many requests at once: Triton's kernels and their equivalents in PyTorch.

Both are compared with `verify.logits`, which processes one request at a time. The kernels run in Triton's interpreter.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from interpreter import interpreted
from reference import processing as reference_processing
from reference import trees as reference_trees
from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TokenTree
from specinfer.engine.device.processing import write_adjustments, write_truncation
from specinfer.engine.device.state import DeviceState
from specinfer.ops import tree_ops
from specinfer.ops.logits import Adjustments, Paths, Truncation
from specinfer.ops.trees import NAN, NO_VALID_TOKEN, Candidates, ChanceTable, Frontier, Limits, Sampling
from specinfer.ops.triton import adjustment, truncation
from specinfer.ops.triton.candidates import add_candidates
from specinfer.ops.triton.choose import choose
from specinfer.verify import verify
from specinfer.verify.logits import adjust, truncate
from tiny import make_request

pytestmark = interpreted
CPU = torch.device("cpu")
LIMITS = [
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.7, temperature=0.8),
    SamplingParams(min_p=0.1, temperature=1.3),
    SamplingParams(top_k=20, top_p=0.95),
    SamplingParams(top_k=40, min_p=0.02, top_p=0.5, temperature=2.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=0.0, top_k=2, top_p=0.1),
    SamplingParams(top_k=10**12, top_p=1e-9),
]
RUNS = pytest.mark.parametrize("run", [reference_processing.least_kept, truncation.least_kept])
LeastKept = Callable[[Tensor, Truncation], Tensor]


def _truncation(params: Sequence[SamplingParams], vocab: int) -> Truncation:
    found = DeviceState.empty(len(params), 8, CPU).truncation
    for row, one in enumerate(params):
        write_truncation(found, row, one, vocab)
    return found


def _kept(logits: Tensor, params: Sequence[SamplingParams], least: Tensor) -> Tensor:
    """Which tokens of each row are kept."""
    heat = torch.tensor([1.0 if one.is_greedy else one.temperature for one in params])
    nodes = len(logits) // len(params)
    return logits.float() / heat.repeat_interleave(nodes).unsqueeze(1) >= least.unsqueeze(1)


def _wanted(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    nodes = len(logits) // len(params)
    rows = [truncate(part.float(), one) for part, one in zip(logits.split(nodes), params, strict=True)]
    return torch.cat(rows) > -torch.inf


@RUNS
def test_the_tokens_kept_are_those_of_one_request_at_a_time(run: LeastKept) -> None:
    vocab, params = 96, [LIMITS[i] for i in (0, 4, 5, 6, 7)]
    logits = 3.0 * torch.randn((2 * len(params), vocab), generator=torch.Generator().manual_seed(vocab))
    found = run(logits, _truncation(params, vocab))
    wanted = _wanted(logits, params)
    assert torch.equal(_kept(logits, params, found), wanted)
    assert (found == -torch.inf).tolist() == [False] * 4 + [True] * 4 + [False] * 2
    assert wanted.sum(dim=1)[[0, 1, 8, 9]].tolist() == [3, 3, 1, 1]


@RUNS
@pytest.mark.parametrize("params", [
    pytest.param([SamplingParams(top_k=100, top_p=0.9)], id="top-k"),
    pytest.param([SamplingParams(min_p=0.05, top_p=0.95), SamplingParams(top_p=0.99)], marks=pytest.mark.slow),
])  # fmt: skip
def test_more_tokens_are_kept_than_a_kernel_lists(run: LeastKept, params: list[SamplingParams]) -> None:
    """Of a row that is nearly flat, with likely tokens next to each other in the vocabulary."""
    vocab = 1100
    logits = 0.1 * torch.randn((len(params), vocab), generator=torch.Generator().manual_seed(5))
    logits[:, 32:80] += 2.0
    wanted = _wanted(logits, params)
    assert torch.equal(_kept(logits, params, run(logits, _truncation(params, vocab))), wanted)
    assert wanted.sum(dim=1).min() > 32


@RUNS
def test_equals_and_impossible_tokens_at_the_limit(run: LeastKept) -> None:
    vocab, params = 1100, LIMITS[:4]
    logits = torch.full((4, vocab), -torch.inf)
    logits[0, [5, 70, 900, 901, 1099]] = torch.tensor([1.0, 0.0, -0.0, 0.0, -1.0])  # the third best thrice
    logits[1, :1000] = 2.0  # all equal: none can be dropped
    logits[2, 17] = 4.0  # one alone
    logits[3, :7] = torch.arange(7) / 8  # fewer than top-k
    least = run(logits, _truncation(params, vocab))
    kept = _kept(logits, params, least) & (logits > -torch.inf)
    assert torch.equal(kept, _wanted(logits, params))
    assert kept.sum(dim=1).tolist() == [4, 1000, 1, 7]


@RUNS
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_that_name_no_token_stay_so(run: LeastKept) -> None:
    logits = torch.zeros((3, 40))
    logits[0, 39] = math.nan
    logits[1] = -math.inf
    logits[2, 7] = math.inf
    params = [SamplingParams(top_k=2, top_p=0.9)] * 3
    least = run(logits, _truncation(params, 40))
    rows = torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1]), torch.ones(3)
    assert tree_ops.choose(logits, *rows, least).tolist() == [NAN, NO_VALID_TOKEN, 7]


def test_tokens_chosen_are_those_of_truncated_requests() -> None:
    vocab = 1100
    logits = 2 * torch.randn((len(LIMITS), vocab), generator=torch.Generator().manual_seed(1))
    requests = [make_request(str(i), [1] * (i + 1), one, seed=i) for i, one in enumerate(LIMITS)]
    roots = [TokenTree.root(1)] * len(requests)
    wanted = [kept.next_token for kept in verify("coupled", list(logits.split(1)), requests, roots)]
    limits = _truncation(LIMITS, vocab)
    rows = (
        torch.tensor([r.seed for r in requests]),
        torch.tensor([len(r.token_ids) for r in requests]),
        limits.temperatures,
    )
    least = reference_processing.least_kept(logits, limits)
    for run in (reference_trees.choose, choose):
        assert run(logits, *rows, least).tolist() == wanted


# ---------------------------------------------------------------------------------- biases and penalties

PENALTIES = [
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(frequency_penalty=0.7, presence_penalty=-0.4),
    SamplingParams(logit_bias={3: 2.5, 90: -100.0}, repetition_penalty=0.7, frequency_penalty=1.1),
    SamplingParams(allowed_token_ids=[2, 5, 7, 40], presence_penalty=1.9),
    SamplingParams(),
    SamplingParams(min_tokens=7, stop_token_ids=[11, 60], repetition_penalty=1.2),
]


def _requests() -> list[Request]:
    found = []
    for i, params in enumerate(PENALTIES):
        request = make_request(str(i), [7, 40, 7, 91], params, seed=i)
        request.eos_token_ids = (2,)
        for token in (5, 3, 5, 5, 60)[: i + 1]:
            request.append(token, None)
        found.append(request)
    return found


@pytest.mark.parametrize("run", [reference_processing.mask_logits, adjustment.mask_logits])
def test_tokens_whose_bit_is_not_set_are_masked(run: Any) -> None:
    """Also the last token of a word; bits of further tokens, and those of other rows, are not read."""
    vocab, rows = 2100, 4
    logits, stored = torch.randn(rows, vocab + 7)[:, :vocab], torch.zeros(rows, 66, dtype=torch.int32)
    is_allowed = torch.rand(rows, vocab) < 0.4
    is_allowed[:, 31:33] = torch.tensor([True, False])
    for row, token in is_allowed.nonzero().tolist():
        stored[row, token // 32] |= torch.tensor(1).bitwise_left_shift(torch.tensor(token % 32)).int()
    is_masked = torch.tensor([1, 0, 1, 1], dtype=torch.int32)
    wanted = logits.masked_fill(~is_allowed & (is_masked > 0).unsqueeze(1), -torch.inf)
    run(logits, stored, is_masked)
    assert torch.equal(logits, wanted)
    roots = logits[::2].clone()
    run(roots, stored.new_zeros(rows, 66)[::2], is_masked[::2].contiguous())
    assert (roots == -torch.inf).all()


@pytest.mark.parametrize("run", [reference_processing.adjust_logits, adjustment.adjust_logits])
@pytest.mark.parametrize("of_trees", [True, False])
def test_adjusted_logits_are_those_of_one_request_at_a_time(run: Any, of_trees: bool) -> None:
    """Bit for bit: of the nodes of trees, and of candidates, whose root has no number."""
    vocab, requests = 96, _requests()
    tokens, parents = [0, 5, 5, 8, 3], [-1, 0, 1, 1, 0]
    nodes, shift = len(tokens), 0 if of_trees else 1
    adjustments = Adjustments.empty(len(requests), vocab, CPU)
    for row, request in enumerate(requests):
        write_adjustments(adjustments, row, request, lambda values: torch.from_numpy(values))
    logits = 3 * torch.randn((len(requests) * nodes, vocab + 5), generator=torch.Generator().manual_seed(2))
    logits = logits[:, :vocab] if run is not reference_processing.adjust_logits else logits[:, :vocab].contiguous()
    logits[3, 9] = -torch.inf
    tree = TokenTree(tuple(tokens), tuple(parents))
    paths = [tree.path_tokens(node) for node in range(nodes)]
    wanted = torch.cat([adjust(r, q, paths) for r, q in zip(logits.split(nodes), requests, strict=True)])
    count = len(requests)
    run(
        logits,
        adjustments,
        Paths(
            (torch.arange(nodes, dtype=torch.int32) - shift).expand(count, -1).contiguous(),
            torch.tensor([tokens[shift:]] * count, dtype=torch.int32 if of_trees else torch.int64),
            (torch.tensor([parents[shift:]] * count, dtype=torch.int32) - shift).clamp(min=-shift),
            first=1 - shift,
            max_depth=2,
        ),
    )
    assert torch.equal(logits, wanted)
    of_last = logits[-nodes:, [2, 11, 60]] == -torch.inf
    assert of_last.all(dim=1).tolist() == of_last.any(dim=1).tolist() == [True, True, False, False, True]


def test_rows_are_the_first_dimension_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU runs at most 65,535 programs in any other; 64 requests of 1,024 nodes have more rows."""
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *_args, **_kwargs: grids.append(self.grid))
    requests, nodes, vocab = 64, 1024, 9
    logits, numbers = torch.zeros(requests * nodes, vocab), torch.zeros(requests * nodes, dtype=torch.int64)
    table = torch.zeros(requests, nodes, dtype=torch.int32)
    choose(logits, numbers, numbers, numbers.float())
    truncation.least_kept(logits, DeviceState.empty(requests, 8, CPU).truncation)
    adjustment.adjust_logits(logits, Adjustments.empty(requests, vocab, CPU), Paths(table, table, table, 1, 8))
    adjustment.mask_logits(logits, table.view(-1, 1), table.flatten())
    limits = Limits(*torch.zeros(2, requests).int(), torch.zeros(requests), table)
    frontier = Frontier(0, table.long(), table.unsqueeze(2), table, table.float())
    sampling, chances = (
        Sampling(*numbers[: 3 * requests].view(3, -1)),
        ChanceTable(torch.zeros(1), *torch.zeros(2, 3, 2)),
    )
    add_candidates(logits, frontier, 0, 1, sampling, chances, limits, Candidates.empty(requests, nodes, CPU))
    assert [grid[0] for grid in grids] == 8 * [requests * nodes]
