"""The kernels around a device's passes: Triton's, in its interpreter, and their equivalents in PyTorch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from interpreter import interpreted
from reference import draft as reference_draft
from specinfer.core.tree import TokenTree
from specinfer.ops.tree_layout import pack_bits, unpack_bits
from specinfer.ops.trees import Candidates, ChanceTable, DeviceTrees, Frontier, Guesses, Limits, Sampling
from specinfer.ops.triton import candidates as of_levels
from specinfer.ops.triton import draft
from tiny import trees

pytestmark = interpreted
CPU = torch.device("cpu")


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _table(seed: int, num_points: int = 9, ranks: int = 3) -> ChanceTable:
    lines = torch.rand((2, 2, ranks * (num_points + 1)), generator=_random(seed))
    return ChanceTable(torch.linspace(0.05, 0.95, num_points), lines[0], lines[1] - 0.3)


def _frontier(requests: int, nodes: int, level: int, seed: int, words: int = 1) -> Frontier:
    sees = torch.randint(-(2**31), 2**31 - 1, (requests, nodes, words), generator=_random(seed)).int()
    path_prob = torch.rand((requests, nodes), generator=_random(seed))
    path_prob[-1, -1] = -1.0
    numbers = torch.arange(requests * nodes, dtype=torch.int32).view(requests, nodes)
    return Frontier(level, torch.zeros((requests, nodes), dtype=torch.int64), sees, numbers, path_prob)


SIZES = [(7, 7, torch.float32), (5000, 3, torch.float32), (2049, 8, torch.bfloat16)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_predicted", [False, True])
@pytest.mark.parametrize(("vocab", "width", "dtype"), SIZES)
def test_candidates_are_those_of_the_plain_version(
    vocab: int, width: int, dtype: torch.dtype, is_predicted: bool
) -> None:
    requests, nodes, level, first = 4, 3, 1, 5
    logits = 4 * torch.randn((requests * nodes, vocab + 3), generator=_random(vocab))
    if dtype == torch.bfloat16:  # no two are equal but those of -inf, since of equals PyTorch takes any
        logits.fill_(-torch.inf)
        for i, row in enumerate(logits):
            row[torch.randperm(vocab, generator=_random(i))[:256]] = torch.randperm(256, generator=_random(i)) / 16
    logits = logits.to(dtype)[:, :vocab]  # rows that do not follow each other
    logits[4], logits[7, : vocab // 2], logits[8] = torch.nan, -torch.inf, -torch.inf
    sampling = Sampling(
        torch.tensor([3, 2**62 + 1, 4, 5]), torch.tensor([0.0, 1.0, 0.7, 1.4]), torch.tensor([9, 4, 100, 0])
    )
    limits = Limits(
        torch.tensor([4, 4, 4, 4]),
        torch.tensor([8, 8, 8, 1]),
        torch.tensor([0.0, 0.05, 0.0, 0.0]),
        torch.tensor([[0, 0], [0, 0], [2, 2], [0, 0]]),
    )
    accepted = torch.rand(requests * nodes, generator=_random(3)) if is_predicted else None
    found = []
    for run in (reference_draft.add_candidates, of_levels.add_candidates):
        found.append(Candidates.empty(requests, 20 + nodes * width, CPU))
        for room in _parts(found[-1]):
            room.fill_(77)
        frontier = _frontier(requests, nodes, level, 1)
        run(logits, frontier, first, width, sampling, _table(2), limits, found[-1], accepted=accepted)
    for other in found[1:]:
        for name, wanted, given_ in zip(Candidates.__slots__, _parts(found[0]), _parts(other), strict=True):
            assert torch.allclose(wanted.double(), given_.double(), rtol=4e-4, atol=1e-7), name
    if accepted is not None:
        best = found[0].confidence[:, first : first + nodes * width : width].flatten()
        places = [0, 1, 2, 3, 5, 6, 7, 9, 10, 11]  # where there are tokens
        assert torch.allclose(best[places], accepted[places])
    path_prob = found[0].path_prob[:, first : first + nodes * width].unflatten(1, (nodes, width))
    assert (path_prob[0] >= 0).any()
    assert (path_prob[1, 1] == -1).all(), "no candidates follow from logits that are not numbers"
    assert (path_prob[3] == -1).all(), "the request's limit is one level"
    assert (path_prob[2, 0, :2] >= 0).all()
    assert (path_prob[2, 0, 2:] == -1).all(), "a fixed expansion has its own width"


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_infinite_logits_have_no_confidence() -> None:
    """As in a softmax: half precision overflows before a NaN appears."""
    logits = torch.tensor([[0.0, torch.inf, 1.0, -torch.inf]])
    found = []
    for run in (reference_draft.add_candidates, of_levels.add_candidates):
        found.append(Candidates.empty(1, 3, CPU))
        sampling = Sampling(torch.tensor([1]), torch.tensor([0.0]), torch.tensor([0]))
        limits = Limits(torch.tensor([3]), torch.tensor([8]), torch.tensor([0.0]), torch.tensor([[0, 0]]))
        run(logits, _frontier(1, 1, 1, 1), 0, 3, sampling, _table(2), limits, found[-1])
    assert [one.tokens[0].tolist() for one in found] == 2 * [[1, 2, 0]]
    assert [one.confidence[0].tolist() for one in found] == 2 * [[0.0, 0.0, 0.0]]


def _parts(candidates: Candidates) -> list[Tensor]:
    return [getattr(candidates, name) for name in Candidates.__slots__]


@pytest.mark.parametrize(("nodes", "children", "width", "first_column"), [(1, 1, 1, 2), (4, 8, 16, 30), (3, 4, 12, 60)])
def test_the_next_frontier_is_that_of_the_plain_version(
    nodes: int, children: int, width: int, first_column: int
) -> None:
    """With equals, with fewer than there is room for, and over several words of the mask."""
    requests, first, level = 3, 6, 2
    total, words = first + nodes * children + 4, 3
    everything = Candidates.empty(requests, total, CPU)
    everything.tokens.copy_(torch.arange(requests * total).view(requests, total))
    steps = torch.randint(0, 6, (requests, total), generator=_random(nodes))
    everything.path_prob.copy_(torch.where(steps == 5, -1.0, steps / 4))
    everything.path_prob[1] = -1.0
    found: list[list[Tensor]] = []
    for run in (reference_draft.next_frontier, draft.next_frontier):
        everything.columns.fill_(-1)
        out = _frontier(requests, width, level, 5, words)
        level_probs = torch.zeros((requests, 4))
        path_prob = everything.path_prob[:, first : first + nodes * children]
        above = _frontier(requests, nodes, level - 1, 6, words)
        run(path_prob, above, first, first_column, everything, level_probs, out)
        found.append([out.tokens, out.sees, out.numbers, out.path_prob, level_probs, everything.columns.clone()])
    for other in found[1:]:
        for wanted, given_ in zip(found[0], other, strict=True):
            assert torch.equal(wanted, given_)
    tokens, sees, numbers, path_prob, _, columns = found[0]
    for request in range(requests):
        offered = everything.path_prob[request, first : first + nodes * children].tolist()
        best = sorted((i for i, prob in enumerate(offered) if prob >= 0), key=lambda i: (-offered[i], i))[:width]
        chosen = [first + i for i in sorted(best)]
        assert numbers[request].tolist() == chosen + [-1] * (width - len(chosen))
        assert tokens[request, : len(chosen)].tolist() == [request * total + i for i in chosen]
        assert {i: c for i, c in enumerate(columns[request].tolist()) if c >= 0} == {
            i: first_column + place for place, i in enumerate(chosen)
        }
        bits = unpack_bits(sees[request], 32 * words)
        parents = unpack_bits(_frontier(requests, nodes, level - 1, 6, words).sees[request], 32 * words)
        for place in range(width):
            own = torch.arange(32 * words) == first_column + place
            above_bits = parents[(chosen[place] - first) // children] if place < len(chosen) else own
            assert torch.equal(bits[place], own | above_bits)
        assert (path_prob[request, len(chosen) :] == -1).all()


@pytest.mark.parametrize("run", [reference_draft.merge_guesses, draft.merge_guesses])
def test_guesses_are_merged_by_the_tokens_of_their_paths(run: Any) -> None:
    """Some are candidates already, whose path probability they may raise, some follow those, and some are new."""
    everything = Candidates.empty(2, 8, CPU)
    everything.tokens.copy_(torch.tensor([[5, 6, 7, 5, 0, 99, 99, 99], [5, 6, 0, 8, 9, 99, 99, 99]]))
    everything.parents.copy_(torch.tensor([[-1, -1, 0, 0, 1, 9, 9, 9], [-1, -1, -1, 1, 1, 9, 9, 9]]))
    everything.path_prob.copy_(
        torch.tensor([[0.5, 0.4, 0.2, -1.0, -1.0, 9, 9, 9], [0.5, 0.4, -1.0, 0.3, 0.2, 9, 9, 9]])
    )
    everything.confidence.fill_(0.25)
    everything.columns.fill_(3)
    guesses = Guesses(
        torch.tensor([[5, 5, 4], [7, 0, 0]], dtype=torch.int32),
        torch.tensor([[-1, 0, 1], [-1, -1, -1]], dtype=torch.int32),
        torch.tensor([[0.9, 0.6, 0.6], [0.1, -1.0, -1.0]]),
    )
    run(guesses, everything, 5)
    none = -1.0
    wanted = [[0.9, 0.4, 0.2, 0.6, none, none, none, 0.6], [0.5, 0.4, none, 0.3, 0.2, 0.1, none, none]]
    assert torch.equal(everything.path_prob, torch.tensor(wanted))
    assert everything.tokens[0].tolist() == [5, 6, 7, 5, 0, 5, 5, 4]
    assert everything.tokens[1, 5] == 7
    assert everything.parents[0].tolist() == [-1, -1, 0, 0, 1, -1, 0, 3]
    assert everything.parents[1, 5] == -1
    assert everything.confidence.tolist() == [[0.25] * 5 + [none] * 3] * 2
    assert everything.columns.tolist() == [[3] * 5 + [-1] * 3] * 2


@pytest.mark.parametrize("num_nodes", [1, 7, 40, 50])
def test_the_best_tree_is_that_of_the_plain_version(num_nodes: int) -> None:
    """Of candidates of which many are equal, with limits of none, some and more than there is room for."""
    requests, total = 5, 50
    source = _random(num_nodes)
    everything = Candidates.empty(requests, total, CPU)
    everything.tokens.copy_(torch.randint(0, 99, (requests, total), generator=source))
    everything.confidence.copy_(torch.rand((requests, total), generator=source))
    everything.columns.copy_(torch.randint(-1, 30, (requests, total), generator=source))
    for request in range(requests):
        for i in range(total):
            parent = int(torch.randint(-1, i, (), generator=source)) if i else -1
            above = 1.0 if parent < 0 else float(everything.path_prob[request, parent])
            share = [1.0, 0.5, 0.0, -1.0][int(torch.randint(0, 4, (), generator=source))]
            everything.parents[request, i] = parent
            everything.path_prob[request, i] = -1.0 if above < 0 or share < 0 else above * share
    limits = Limits(torch.tensor([0, 1, 9, 40, 99]), *torch.zeros((3, requests)))
    roots = torch.arange(requests) + 500
    root_columns = torch.tensor([0, 6, 2, 1, 0], dtype=torch.int32) if num_nodes > 7 else roots % 2 == 0
    found: list[list[Tensor]] = []
    for run in (reference_draft.best_tree, draft.best_tree):
        ints = torch.full((3, requests, 1 + num_nodes), -9, dtype=torch.int32)
        out = DeviceTrees(ints[0], ints[1], ints[2, :, 0].clone(), ints[0].float(), ints[2], torch.zeros(5, 1))
        run(everything.path_prob, everything, roots, root_columns, limits, out)
        found.append([out.tokens, out.parents, out.sizes, out.confidence, out.columns])
    for other in found[1:]:
        for wanted, given_ in zip(found[0], other, strict=True):
            assert torch.equal(wanted, given_)
    sizes = found[0][2].tolist()
    assert sizes[:2] == [1, 2]
    assert sizes[3] == 1 + min(num_nodes, int((everything.path_prob[3] >= 0).sum()), 40)
    assert found[0][0][:, 0].tolist() == roots.tolist()


@pytest.mark.parametrize("run", [reference_draft.mark_ancestors, draft.mark_ancestors])
def test_nodes_see_their_ancestors_and_themselves(run: Any) -> None:
    @given(st.lists(trees(max_nodes=40), min_size=1, max_size=3), st.integers(0, 4))
    @settings(max_examples=10)
    def check(several: list[TokenTree], unused: int) -> None:
        nodes, depth = unused + max(len(tree.tokens) for tree in several), max(max(tree.depths) for tree in several)
        parents = torch.zeros((len(several), nodes), dtype=torch.int32)
        for row, tree in enumerate(several):
            parents[row, 1 : len(tree.tokens)] = torch.tensor(tree.parents[1:], dtype=torch.int32)
        first = torch.arange(len(several), dtype=torch.int32) * 10 + 7
        visible, positions = run(parents, first, max_depth=max(depth, 1), last=18)
        for row, tree in enumerate(several):
            size = len(tree.tokens)
            mine = slice(row * nodes, row * nodes + size)
            assert torch.equal(visible[mine], pack_bits(torch.nn.functional.pad(
                torch.from_numpy(tree.ancestry()), (0, nodes - size))))  # fmt: skip
            assert positions[row, :size].tolist() == [min(10 * row + 7 + d, 18) for d in tree.depths]

    check()


@pytest.mark.parametrize("run", [reference_draft.keep_drafted, draft.keep_drafted])
def test_what_the_drafter_computed_of_a_path_is_kept(run: Any) -> None:
    """Requests with a known token more, with a last node that was not computed, without a path, draft or tree."""
    path = torch.tensor([[1, 3, -1], [2, 4, 5], [-1, -1, -1], [1, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    lengths = torch.tensor([2, 3, 0, 1, -1], dtype=torch.int32)
    tokens = torch.arange(30, dtype=torch.int32).view(5, 6)
    columns = torch.tensor([[0, 2, 3, 4, -1, -1], [1, 2, 3, 4, 5, -1], *[[0, 2, -1, -1, -1, -1]] * 3]).int()
    drafts = torch.tensor([1, 1, 1, 0, 1], dtype=torch.int32)
    before, has_two = torch.tensor([90, 91, 92, 93, 94]), torch.tensor([False, True, True, True, False])
    kept, num_kept = torch.zeros((5, 4), dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    run(path, lengths, tokens, columns, drafts, before, has_two, (kept, num_kept))
    assert num_kept.tolist() == [2, 3, 1, -1, -1]
    assert [row[: max(n, 0)] for row, n in zip(kept.tolist(), num_kept.tolist(), strict=True)] == [
        [2, 4], [1, 3, 5], [1], [], [],
    ]  # fmt: skip
    assert before.tolist() == [3, 11, 12, 93, 94]
    assert has_two.tolist() == [False, True, False, True, False]
