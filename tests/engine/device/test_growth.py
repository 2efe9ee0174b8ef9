"""Trees that grow on a device: the same as by the slow rule, node by node."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from interpreter import interpreted
from reference.slow_growth import F32, Guess, Wish, slow_tree
from specinfer.core.noise import gumbel
from specinfer.drafters.growth.calibration import MIDDLE, RANKS, Calibration
from specinfer.engine.device.draft_shape import DraftShape
from specinfer.engine.device.growth import Drawing, grow
from specinfer.engine.device.state import empty_table
from specinfer.ops import tree_ops
from specinfer.ops.logits import Truncation
from specinfer.ops.tree_layout import unpack_bits
from specinfer.ops.trees import Candidates, ChanceTable, DeviceDraws, DeviceTrees, Frontier, Limits, Sampling

KERNELS = ("add_candidates", "draw_candidates", "next_frontier", "best_tree")
VOCAB = 40


class Toy:
    """Logits that tell every path from every other: sums of whole numbers, so that their order does not matter."""

    def __init__(self, seed: int, requests: int, spread: int = 40) -> None:
        source = torch.Generator().manual_seed(seed)
        self._rows = torch.randint(-spread, spread, (VOCAB, VOCAB), generator=source)
        self._own = torch.randint(-spread, spread, (requests, VOCAB), generator=source)
        self.scale = 0.06

    def of_path(self, request: int, path: list[int]) -> Tensor:
        """[vocab]; the path begins with the known tokens that the drafter computes."""
        total = self._own[request].clone()
        for i, token in enumerate(path):
            total += self._rows[token].roll(i)
        return total.float() * self.scale + torch.arange(VOCAB) * 1e-3  # no two are equal


@dataclass
class ToyPass:
    """Scores frontiers as a drafter does: by what each node sees."""

    toy: Toy
    roots: list[int]
    twos: list[int | None]  # the known token before the root, if that is computed too
    first_columns: tuple[int, ...]
    tokens: dict[tuple[int, int], int] = field(default_factory=dict)  # (request, column)

    def __call__(self, frontier: Frontier, _candidates: Candidates) -> tuple[Tensor, None, None]:
        requests, nodes = frontier.tokens.shape
        if frontier.level == 0:
            for r, (root, before) in enumerate(zip(self.roots, self.twos, strict=True)):
                self.tokens[r, 0] = root if before is None else before
                self.tokens[r, 1] = root if before is not None else -1  # nobody may look there
        else:
            first = self.first_columns[frontier.level]
            for r in range(requests):
                for j in range(nodes):
                    self.tokens[r, first + j] = int(frontier.tokens[r, j])
        return torch.stack([self._row(frontier, r, j) for r in range(requests) for j in range(nodes)]), None, None

    def _row(self, frontier: Frontier, r: int, j: int) -> Tensor:
        columns = unpack_bits(frontier.sees[r, j], 32 * frontier.sees.shape[2]).nonzero()[:, 0].tolist()
        return self.toy.of_path(r, [self.tokens[r, c] for c in columns])


# ------------------------------------------------------------------------------------- the slow rule


class Race:
    """The draws of a request: their noise, and what each node's were drawn from."""

    def __init__(self, request: int) -> None:
        self.stream, self.first = 1000 + request, 2**20 * request
        self.whole: dict[tuple[int, ...], Tensor] = {}  # [vocab] of each node that has children

    def draw(self, path: tuple[int, ...], scores: Tensor, width: int) -> list[tuple[int, np.float32]]:
        """Tokens in draw order, with the confidence in the most probable one; nodes are asked for in order."""
        noise = gumbel(torch.tensor([self.stream]), torch.tensor([self.first + len(self.whole)]), torch.arange(VOCAB))
        self.whole[path] = scores.double().softmax(dim=0)
        return [(t, F32(self.whole[path].max())) for t in (scores + noise[0]).topk(width).indices.tolist()]


def slow_chance(calibration: Calibration, source: str, rank: int, confidence: np.float32) -> np.float32:
    heights, slopes = calibration.lines(source)
    points = len(heights) // RANKS - 1

    line = int(np.searchsorted(MIDDLE.astype(F32), confidence)) + min(rank, RANKS - 1) * (points + 1)
    return max(F32(F32(heights[line]) + F32(F32(slopes[line]) * confidence)), F32(0))


def slow_tree_of(
    toy: Toy, request: int, known: list[int], shape: DraftShape, wish: Wish, seed: int, temperature: float,
    position: int, calibration: Calibration, race: Race | None = None,
) -> tuple[list[Guess], set[tuple[int, ...]]]:  # fmt: skip
    """The guesses taken, and the paths that the drafter computed. With a race, tokens are drawn."""
    source = "drawn" if race else "sampled" if temperature > 0 else "greedy"

    def best_after(path: tuple[int, ...], _place: int) -> list[tuple[int, np.float32]]:
        scores = toy.of_path(request, [*known, *path])
        if race is not None:
            return race.draw(path, scores / temperature, shape.children[len(path)])
        if temperature > 0:
            noise = gumbel(torch.tensor([seed]), torch.tensor([position + 1 + len(path)]), torch.arange(VOCAB))
            scores = scores / temperature + noise[0]
        confidences = scores.softmax(dim=0)
        return [(token, F32(confidences[token])) for token in scores.topk(shape.children[len(path)]).indices.tolist()]

    def chance(rank: int, confidence: np.float32) -> np.float32:
        return slow_chance(calibration, source, rank, confidence)

    return slow_tree(best_after, chance, shape.frontiers, shape.children, shape.num_nodes, wish)


# --------------------------------------------------------------------------------------------- tests


@st.composite
def shapes(draw: st.DrawFn) -> DraftShape:
    frontiers, children = [1], [draw(st.integers(1, 5))]
    for _ in range(draw(st.integers(0, 3))):
        frontiers.append(draw(st.integers(1, min(6, frontiers[-1] * children[-1]))))
        children.append(draw(st.integers(1, 4)))
    total = sum(w * c for w, c in zip(frontiers, children, strict=True))
    return DraftShape(tuple(frontiers), tuple(children), draw(st.integers(1, total)))


def wishes(levels: int) -> st.SearchStrategy[Wish]:
    widths = st.just(()) | st.lists(st.integers(1, 4), min_size=levels, max_size=levels).map(tuple)
    return st.builds(Wish, st.integers(0, 30), st.integers(0, levels + 1), st.sampled_from([0.0, 0.05, 0.4]), widths)


def _table(calibration: Calibration) -> ChanceTable:
    table = empty_table(torch.device("cpu"))
    for i, source in enumerate(["greedy", "sampled", "drawn"]):
        for tensor, values in zip((table.heights, table.slopes), calibration.lines(source), strict=True):
            tensor[i] = torch.from_numpy(values)
    return table


def _calibration(seed: int) -> Calibration:
    """One that has seen something, so that no two tables and ranks are alike."""
    calibration, source = Calibration(), np.random.default_rng(seed)
    for name, skill in (("greedy", 0.8), ("sampled", 0.3), ("drawn", 0.5)):
        for _ in range(400):
            rank, confidence = int(source.integers(9)), float(source.random())
            calibration.count(name, rank, confidence, kept=bool(source.random() < skill * confidence / (1 + rank)))
    return calibration


def _grown(
    toy: Toy, shape: DraftShape, wanted: list[Wish], seed: int, temperatures: list[float], calibration: Calibration,
    races: list[Race | None] | None = None, draws: DeviceDraws | None = None,
) -> tuple[DeviceTrees, list[list[int]], Tensor]:  # fmt: skip
    source = np.random.default_rng(seed)
    roots = source.integers(VOCAB, size=len(wanted)).tolist()
    twos = [int(source.integers(VOCAB)) if source.random() < 0.5 else None for _ in wanted]
    positions = torch.from_numpy(source.integers(1, 50, size=len(wanted)))
    limits = Limits(
        torch.tensor([wish.max_nodes for wish in wanted]),
        torch.tensor([wish.max_depth for wish in wanted]),
        torch.tensor([wish.min_path_prob for wish in wanted]),
        torch.tensor([wish.widths or [0] * shape.num_levels for wish in wanted]),
    )
    distribution = Sampling(torch.arange(len(wanted)), torch.tensor(temperatures), positions)
    score = ToyPass(toy, roots, twos, shape.first_columns)
    has_two = torch.tensor([two is not None for two in twos])
    grown = empty_trees(shape, len(wanted))
    drawing = None
    if races and draws is not None:
        noise = [torch.tensor([0 if race is None else getattr(race, name) for race in races])
                 for name in ("stream", "first")]  # fmt: skip
        is_drawn, count = torch.tensor([race is not None for race in races]), len(wanted)
        truncation = Truncation(
            distribution.temperatures, torch.full((count,), -torch.inf), torch.zeros(count, dtype=torch.int32),
            torch.ones(count, dtype=torch.float64),
        )  # fmt: skip
        drawing = Drawing(is_drawn, noise[0], noise[1], truncation, shape.num_candidates, draws)
    table = _table(calibration)
    grow(shape, torch.tensor(roots), has_two, score, distribution, table, limits, grown, drawing=drawing)
    known = [[root] if two is None else [two, root] for root, two in zip(roots, twos, strict=True)]
    return grown, known, positions


def empty_trees(shape: DraftShape, requests: int) -> DeviceTrees:
    """Room for trees, with values that nobody should find there."""
    tokens, parents, columns = torch.full((3, requests, 1 + shape.num_nodes), -7, dtype=torch.int32)
    path_prob = torch.full((requests, shape.num_levels), torch.nan)
    return DeviceTrees(
        tokens, parents, torch.full((requests,), -7, dtype=torch.int32), tokens.float(), columns, path_prob
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[DraftShape, list[Wish]]:
    shape = draw(shapes())
    return shape, draw(st.lists(wishes(shape.num_levels), min_size=1, max_size=4))


@given(cases(), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_trees_are_those_of_the_slow_rule(case: tuple[DraftShape, list[Wish]], seed: int) -> None:
    check_trees(*case, seed)


@given(cases(), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_trees_of_drawn_tokens_are_those_of_the_slow_rule(case: tuple[DraftShape, list[Wish]], seed: int) -> None:
    check_trees(*case, seed, are_drawn=True)


@interpreted
@pytest.mark.parametrize("are_drawn", [False, True])
@given(case=cases(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=4)  # the interpreter takes a third of a second for each
def test_trees_of_kernels_are_those_of_the_slow_rule(
    are_drawn: bool, case: tuple[DraftShape, list[Wish]], seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        use_kernels(patch)
        check_trees(*case, seed, tolerance=4e-4, are_drawn=are_drawn)


def use_kernels(patch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter run the draft loop."""
    from specinfer.ops.triton import candidates, draft, drawn

    modules = {"add_candidates": candidates, "draw_candidates": drawn}
    for name in KERNELS:
        patch.setattr(tree_ops, name, getattr(modules.get(name, draft), name))


def check_trees(
    shape: DraftShape, wanted: list[Wish], seed: int, tolerance: float = 1e-5, *, are_drawn: bool = False
) -> None:
    """Grow trees, and compare them with those of the slow rule; tokens may be drawn for some of the requests."""
    toy, calibration = Toy(seed, len(wanted)), _calibration(seed)
    temperatures = [[0.0, 1.0, 0.7, 1.6][i % 4] for i in range(seed % 4, seed % 4 + len(wanted))]
    races = [Race(r) if are_drawn and t not in (0.0, 0.7) else None for r, t in enumerate(temperatures)]
    draws = DeviceDraws.empty(len(wanted), shape.num_nodes, VOCAB, torch.device("cpu"))
    grown, known, positions = _grown(toy, shape, wanted, seed, temperatures, calibration, races, draws)
    assert grown.tokens.shape == (len(wanted), 1 + shape.num_nodes)
    for r, wish in enumerate(wanted):
        guesses, computed = slow_tree_of(
            toy, r, known[r], shape, wish, r, temperatures[r], int(positions[r]), calibration, races[r]
        )
        size = int(grown.sizes[r])
        parents, tokens = grown.parents[r].tolist(), grown.tokens[r].tolist()
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, size):
            assert parents[node] < node
            paths.append((*paths[parents[node]], tokens[node]))
        assert paths[1:] == [guess.path for guess in guesses]
        confidence = [guess.confidence for guess in guesses]
        assert grown.confidence[r, 1:size].tolist() == pytest.approx(confidence, rel=tolerance)
        assert not any(parents[size:])
        columns = grown.columns[r].tolist()
        assert columns[0] == len(known[r]) - 1
        assert {path for path, column in zip(paths, columns, strict=False) if column >= 0} - {()} == computed & set(
            paths
        )
        assert len({column for column in columns if column >= 0}) == sum(column >= 0 for column in columns)
        assert all(column == -1 for column in columns[size:])
        check_draws(draws, r, races[r], guesses)


def check_draws(draws: DeviceDraws, request: int, race: Race | None, guesses: list[Guess]) -> None:
    """Each node was drawn from the distribution without the tokens of the siblings before it."""
    size = len(guesses) if race else 0
    nodes = draws.nodes[request].tolist()
    assert nodes == [*range(1, 1 + size), *[-1] * (len(nodes) - size)]
    paths = [guess.path for guess in guesses]
    for node, path in enumerate(paths if race else ()):
        left = race.whole[path[:-1]].clone() if race else torch.empty(0)
        left[[other[-1] for other in paths[:node] if other[:-1] == path[:-1]]] = 0.0
        ids, probs = draws.tokens[request, node].long(), draws.probs[request, node]
        assert torch.allclose(probs, (left / left.sum())[ids], rtol=1e-9, atol=1e-15)
        assert len(set(ids.tolist())) == VOCAB


def test_a_fixed_expansion_is_whole() -> None:
    shape = DraftShape((1, 3, 6), (3, 2, 1), 15)
    grown, _, _ = _grown(Toy(1, 2), shape, [Wish(15, 3, 0.0, (3, 2, 1))] * 2, 5, [0.0, 1.0], Calibration())
    for parents in grown.parents.tolist():
        assert [parents.count(node) for node in range(1, 16)] == [2] * 3 + [1] * 6 + [0] * 6
        assert parents[1:4] == [0, 0, 0]


def test_the_gain_of_a_level_is_that_of_its_frontier() -> None:
    shape = DraftShape((1, 2), (3, 2), 4)
    grown, _, _ = _grown(Toy(1, 1), shape, [Wish(7, 2, 0.0, (2, 1))], 5, [0.0], Calibration())
    assert grown.path_prob.tolist() == [[1.0, 2.0]]
    assert grown.sizes.tolist() == [5]


def test_nan_of_a_drafter_is_no_guess() -> None:
    def score(frontier: Frontier, _candidates: Candidates) -> tuple[Tensor, None, None]:
        logits = torch.zeros(*frontier.tokens.shape, VOCAB)
        logits[1] = torch.nan
        return logits.flatten(0, 1), None, None

    limits = Limits(torch.tensor([4, 4]), torch.tensor([2, 2]), torch.zeros(2), torch.zeros(2, 2, dtype=torch.int64))
    distribution = Sampling(torch.arange(2), torch.tensor([1.0, 1.0]), torch.tensor([3, 3]))
    shape = DraftShape((1, 2), (2, 2), 4)
    grown, has_two = empty_trees(shape, 2), torch.tensor([False, True])
    grow(shape, torch.tensor([1, 2]), has_two, score, distribution, _table(Calibration()), limits, grown)
    assert int(grown.sizes[0]) == 5
    assert ((grown.tokens >= 0) & (grown.tokens < VOCAB)).all(), "what is not a number never leaves the vocabulary"
