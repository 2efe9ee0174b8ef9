"""Candidates that are drawn on a device: those of ordinary drafting, and Triton's kernel against its equivalent."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from interpreter import interpreted
from levels import Node, draw
from reference import draft as reference_draft
from reference.processing import least_kept
from specinfer.core.noise import derive_seed, draws_of
from specinfer.core.sampling import SamplingParams
from specinfer.ops.logits import Truncation
from specinfer.ops.trees import DRAWN, Candidates, ChanceTable, DeviceDraws, DrawnRows, Frontier, Limits
from specinfer.ops.triton import drawn
from specinfer.verify.logits import log_min_p
from tiny import make_request

pytestmark = interpreted
CPU = torch.device("cpu")
# Lines that differ for each table and rank, some of them above 1.
TABLE = ChanceTable(
    torch.tensor([0.2, 0.5, 0.9]), torch.rand((3, 3 * 4), generator=torch.Generator().manual_seed(5)),
    torch.rand((3, 3 * 4), generator=torch.Generator().manual_seed(6)) - 0.3,
)  # fmt: skip
RUNS = pytest.mark.parametrize("run", [reference_draft.draw_candidates, drawn.draw_candidates], ids=["twin", "kernel"])


def _drawn(
    run: Any, logits: Tensor, rows: DrawnRows, truncation: Truncation, path_prob: Tensor, limits: Limits, width: int,
    accepted: Tensor | None = None,
) -> tuple[Candidates, DeviceDraws]:  # fmt: skip
    """Candidates of a level that begins with number 2; what is not written to is 7."""
    (requests, nodes), first, support = path_prob.shape, 2, min(128, logits.shape[1])
    candidates = Candidates.empty(requests, first + nodes * width, CPU)
    for tensor in (candidates.tokens, candidates.confidence, candidates.path_prob):
        tensor.fill_(7)
    draws = DeviceDraws.empty(requests, first + nodes * width, support, CPU)
    values, ids = logits.topk(support, dim=1)
    ints = torch.zeros((requests, nodes), dtype=torch.int32)
    frontier = Frontier(1, ints.long(), ints.unsqueeze(2), ints, path_prob)
    least = least_kept(values, truncation)
    run(values, ids, least, rows, frontier, first, width, TABLE, limits, candidates, draws, accepted)
    return candidates, draws


@RUNS
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "top_p": 0.7}, {"min_p": 0.1}, {"top_k": 5}], ids=str)
def test_draws_and_their_distributions_are_those_of_ordinary_drafting(options: dict[str, Any], run: Any) -> None:
    logits = 3 * torch.randn((5, 300), generator=torch.Generator().manual_seed(1))
    logits[3, 2:] = -torch.inf
    request = make_request("a", [1, 2], SamplingParams(**options), seed=3)
    number = request.drafting.begin_draws("small")
    wanted = draw("without-replacement", logits, [Node(request, (), 4, drafter="small")] * 5)
    truncation = Truncation(
        torch.tensor([request.params.temperature]), torch.tensor([log_min_p(request.params)]),
        torch.tensor([request.params.top_k], dtype=torch.int32), torch.tensor([request.params.top_p]).double(),
    )  # fmt: skip
    streams = torch.tensor([derive_seed(request.seed, draws_of("small"))])
    rows = DrawnRows(torch.tensor([True]), streams, torch.tensor([number]), truncation.temperatures)
    limits = Limits(torch.tensor([30]), torch.tensor([4]), torch.zeros(1), torch.full((1, 4), 4, dtype=torch.int32))
    candidates, draws = _drawn(run, logits, rows, truncation, torch.ones((1, 5)), limits, 4)
    tokens, is_token = candidates.tokens[0, 2:].view(5, 4), candidates.path_prob[0, 2:].view(5, 4) == 1
    assert torch.where(is_token, tokens, -1).tolist() == wanted.tokens.tolist()
    np.testing.assert_allclose(candidates.confidence[0, 2:].view(5, 4), wanted.confidence, rtol=1e-6)
    for row in range(5):
        for rank in range(4):
            if is_token[row, rank]:
                of_draw = 2 + 4 * row + rank
                found = dict(zip(draws.tokens[0, of_draw].tolist(), draws.probs[0, of_draw].tolist(), strict=True))
                distribution = wanted.distribution(row, rank)
                assert distribution is not None
                expected = dict(zip(distribution.token_ids.tolist(), distribution.weights().tolist(), strict=True))
                assert found == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert is_token[3].sum() <= 2


@pytest.mark.filterwarnings("ignore:All-NaN slice|invalid value:RuntimeWarning")
@pytest.mark.parametrize("is_predicted", [False, True])
@pytest.mark.parametrize("is_fixed", [True, False])
@pytest.mark.parametrize(("vocab", "width"), [(5, 3), (50, 2), (400, 4)])
def test_the_kernel_draws_what_its_equivalent_does(vocab: int, width: int, is_fixed: bool, is_predicted: bool) -> None:
    requests, nodes, source = 4, 3, torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn((requests * nodes, vocab), generator=source)
    logits[1], logits[2], logits[9, 1:] = torch.nan, -torch.inf, -torch.inf
    rows = DrawnRows(
        torch.tensor([True, False, True, True]), torch.tensor([3, 2**62 + 1, 4, -5]), torch.tensor([9, 4, 10**12, 0]),
        torch.tensor([0.7, 0.0, 1.0, 1.4]),
    )  # fmt: skip
    truncation = Truncation(
        rows.temperatures, torch.tensor([-torch.inf, -torch.inf, -1.0, -torch.inf]),
        torch.tensor([0, 0, 0, 3], dtype=torch.int32), torch.tensor([1.0, 1.0, 1.0, 0.9]).double(),
    )  # fmt: skip
    path_prob = torch.tensor([[1.0, 1.0, 1.0]] * 3 + [[1.0, 1.0, -1.0]])
    widths = torch.tensor([[1, width], [1, 1], [1, width - 1], [1, width]], dtype=torch.int32)
    if not is_fixed:
        path_prob, widths = path_prob * torch.rand((4, 3), generator=source), torch.zeros_like(widths)
        path_prob[3, 2] = -1.0
    accepted = torch.rand(requests * nodes, generator=source) if is_predicted else None
    min_path_prob = torch.tensor([0.0, 0.0, 0.0, 0.1])
    for max_depth in (5, 1):
        limits = Limits(torch.full((4,), 30), torch.tensor([5, 5, max_depth, 5]), min_path_prob, widths)
        found, wanted = (
            _drawn(run, logits, rows, truncation, path_prob, limits, width, accepted)
            for run in (drawn.draw_candidates, reference_draft.draw_candidates)
        )
        assert found[0].tokens.tolist() == wanted[0].tokens.tolist()
        assert torch.allclose(found[0].path_prob, wanted[0].path_prob, rtol=1e-5)
        assert torch.allclose(found[0].confidence, wanted[0].confidence, rtol=1e-6)
        assert (found[0].path_prob[2, 2:] >= 0).any() == (max_depth > 1)
        if is_fixed:
            assert set(found[0].path_prob[0, 2:].tolist()) <= {1.0, -1.0}
        for i in (0, 2, 3):
            assert torch.equal(found[1].tokens[i, 2:], wanted[1].tokens[i, 2:])
            assert torch.allclose(found[1].probs[i, 2:], wanted[1].probs[i, 2:], rtol=1e-12, atol=1e-15)


@RUNS
@pytest.mark.parametrize("is_predicted", [False, True])
def test_no_path_probability_depends_on_what_is_drawn_or_is_above_the_parents(run: Any, is_predicted: bool) -> None:
    requests, nodes, width = 40, 2, 4
    logits = torch.randn((nodes, 12), generator=torch.Generator().manual_seed(2)).repeat(requests, 1)
    truncation = Truncation(
        torch.ones(requests), torch.full((requests,), -torch.inf), torch.zeros(requests, dtype=torch.int32),
        torch.ones(requests).double(),
    )  # fmt: skip
    rows = DrawnRows(
        torch.ones(requests, dtype=torch.bool), torch.arange(requests), torch.arange(requests), truncation.temperatures
    )
    limits = Limits(
        torch.full((requests,), 9), torch.full((requests,), 4), torch.zeros(requests),
        torch.zeros((requests, 4), dtype=torch.int32),
    )  # fmt: skip
    above, accepted = torch.tensor([[0.5, 0.25]]).repeat(requests, 1), torch.tensor([0.95, 0.4]).repeat(requests)
    candidates, _ = _drawn(run, logits, rows, truncation, above, limits, width, accepted if is_predicted else None)
    tokens, path_prob = (found[:, 2:].view(-1, nodes, width) for found in (candidates.tokens, candidates.path_prob))
    assert len(tokens.unique(dim=0)) > requests // 2
    assert len(path_prob.unique(dim=0)) == 1
    sure = accepted[:2].tolist() if is_predicted else logits[:2].softmax(dim=1).max(dim=1).values.tolist()
    for node in range(nodes):
        chance = reference_draft.chance(TABLE, torch.tensor([DRAWN]), torch.full((1, 1, width), sure[node]))
        assert torch.allclose(path_prob[0, node], chance[0, 0].cummin(dim=0).values * above[0, node], rtol=1e-5)
    assert (TABLE.heights + TABLE.slopes * 0.95).max() > 1
    assert (path_prob <= above.unsqueeze(2)).all()
