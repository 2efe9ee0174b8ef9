"""How trees grow: fixed expansions exactly, best first as well as a heap that knows everything beforehand."""

import heapq
import itertools
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levels import Node, nodes_of
from reference import growth
from specinfer.core.draws import DrawnFrom
from specinfer.core.noise import derive_seed
from specinfer.core.request import Request
from specinfer.core.tree import TokenTree, TreeBudget, expansion_nodes
from specinfer.drafters.growth.calibration import MIDDLE, RANKS, Calibration
from specinfer.drafters.growth.draft_sampling import Candidates
from specinfer.drafters.growth.tree_batch import BEST_FIRST_WIDTH, GrowingTree, TreeBatch
from specinfer.ops.cpu.growth import BIN_EDGES, bins_of
from tiny import make_request, paths_of

Path = tuple[int, ...]
World = Callable[[Path], Sequence[tuple[int, float]]]  # the guesses after a path, in draw order, with their chances
BY_RANK = np.array([0.6, 0.15, 0.08, 0.05, 0.03, 0.02, 0.01, 0.01])


class Known(Calibration):
    """A calibration to which a confidence is a chance, and which expects `by_rank` of nodes not seen yet."""

    def __init__(self, by_rank: npt.NDArray[np.float64] = BY_RANK) -> None:
        super().__init__()
        self._by_rank = np.concatenate([by_rank, np.zeros(RANKS - len(by_rank))])

    def lines(self, source: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        num_lines = RANKS * (len(MIDDLE) + 1)
        return np.zeros(num_lines), np.ones(num_lines)

    def by_rank(self, source: str) -> npt.NDArray[np.float64]:
        return self._by_rank


def _candidates(
    nodes: Sequence[Node], world: Callable[[Node], Sequence[tuple[int, float]]], *, is_repeated: bool
) -> Candidates:
    width = max(node.width for node in nodes)
    tokens, sure = np.full((len(nodes), width), -1), np.zeros((len(nodes), width), dtype=np.float32)
    for i, node in enumerate(nodes):
        for rank, (token, chance) in enumerate(world(node)[:width]):
            tokens[i, rank], sure[i, rank] = token, chance
    nothing = np.empty((len(nodes), 0))
    drawn = DrawnFrom(nothing.astype(np.int64), nothing, np.full(tokens.shape, -1), is_replaced=True)
    return Candidates(tokens, sure, drawn if is_repeated else None)


def _grow(
    budgets: Sequence[TreeBudget],
    worlds: Sequence[World],
    calibration: Calibration | None = None,
    *,
    is_repeated: bool = False,
) -> tuple[list[TokenTree], int]:
    """The trees of several requests, grown together, and how many levels that took."""
    requests = [make_request(str(i), [7]) for i in range(len(budgets))]
    growing_trees = [GrowingTree(request, budget, "x") for request, budget in zip(requests, budgets, strict=True)]
    tree_batch, levels = TreeBatch(growing_trees, calibration or Known()), 0
    world_of: dict[str, World] = {request.request_id: world for request, world in zip(requests, worlds, strict=True)}
    while level := tree_batch.level():
        nodes = nodes_of(level)
        tree_batch.extend(
            _candidates(nodes, lambda node: world_of[node.request.request_id](node.path), is_repeated=is_repeated)
        )
        levels += 1
    return [growing_tree.tree() for growing_tree in growing_trees], levels


def _random_world(seed: int, spread: float = 1.0, width: int = BEST_FIRST_WIDTH, num_tokens: int = 50) -> World:
    """Chances around `BY_RANK`, some nodes far surer than others; a function of the path."""

    @cache
    def world(path: Path) -> list[tuple[int, float]]:
        number = seed
        for token in path:
            number = derive_seed(number, token)
        generator = np.random.default_rng(number)
        weights = BY_RANK[:width] * np.exp(spread * generator.normal(size=width))
        chances = np.sort(weights / max(1.0, weights.sum() / 0.98))[::-1]
        tokens = generator.permutation(max(num_tokens, width))[:width] % num_tokens
        return list(zip(tokens.tolist(), chances.tolist(), strict=True))

    return world


def _constant_world(path: Path) -> list[tuple[int, float]]:
    """Every node is as the outlook says."""
    return list(enumerate(BY_RANK.tolist()))


def _path_prob(world: World, path: Path) -> float:
    """The product of the chances on the way, none of a later guess above an earlier one's."""
    path_prob = 1.0
    for depth, token in enumerate(path):
        chance = 1.0
        for guess, sure in world(path[:depth]):
            chance = min(chance, sure)
            if guess == token:
                break
        path_prob *= chance
    return path_prob


def _total_path_prob(world: World, tree: TokenTree) -> float:
    return sum(_path_prob(world, path) for path in paths_of(tree)[1:])


def _heap(world: World, max_nodes: int, max_depth: int) -> float:
    """Worth of the best tree there is: always the most promising guess next, all of them known beforehand."""
    total, heap = 0.0, [(-1.0, ())]
    for _ in range(max_nodes + 1):
        if not heap:
            break
        negated, path = heapq.heappop(heap)
        total -= negated
        if len(path) < max_depth:
            chances = itertools.accumulate((chance for _, chance in world(path)), min)
            for (token, _), chance in zip(world(path), chances, strict=True):
                heapq.heappush(heap, (negated * chance, (*path, token)))
    return total - 1.0


# ---------------------------------------------------------------------------------- fixed expansions


@pytest.mark.parametrize("widths", [(1,), (1, 1, 1), (3,), (3, 2), (1, 1, 3, 1), (2, 2, 2), (4, 1, 2), (12, 3)])
def test_a_fixed_expansion_is_exactly_what_was_asked(widths: tuple[int, ...]) -> None:
    world = _random_world(1, width=BEST_FIRST_WIDTH)

    def wide(path: Path) -> list[tuple[int, float]]:
        return [(token, 0.01) for token in range(20)] if max(widths) > BEST_FIRST_WIDTH else list(world(path))

    (tree,), levels = _grow([TreeBudget.expansion(widths)], [wide])
    wanted: set[Path] = {()}
    level: list[Path] = [()]
    for width in widths:
        level = [(*path, token) for path in level for token, _ in wide(path)[:width]]
        wanted |= set(level)
    assert set(paths_of(tree)) == wanted
    assert tree.num_guessed == expansion_nodes(widths) == len(tree.draws)
    assert levels == tree.max_depth == len(widths)
    for node, path in enumerate(paths_of(tree)):
        drawn = [(tree.tokens[draw.node], draw.confidence) for draw in tree.candidates[node]]
        wide_enough = wide(path)[: widths[len(path)]] if len(path) < len(widths) else []
        assert drawn == [(token, pytest.approx(sure)) for token, sure in wide_enough]


def test_an_expansion_ends_where_no_token_is_valid() -> None:
    def world(path: Path) -> list[tuple[int, float]]:
        return [] if 3 in path else [(3, 0.5), (4, 0.4)]

    (tree,), _ = _grow([TreeBudget.expansion((3, 3, 1))], [world])
    assert set(paths_of(tree)) == {(), (3,), (4,), (4, 3), (4, 4), (4, 4, 3)}


def test_a_guess_drawn_twice_is_one_node_with_two_draws() -> None:
    def world(path: Path) -> list[tuple[int, float]]:
        return [(3, 0.5), (3, 0.5), (4, 0.5)]

    for budget in (TreeBudget.expansion((3, 3)), TreeBudget(20, 2)):
        (tree,), _ = _grow([budget], [world], is_repeated=True)
        assert set(paths_of(tree)) == {(), (3,), (4,), (3, 3), (3, 4), (4, 3), (4, 4)}
        assert len(tree.draws) == 9
        for node in (0, 1):
            assert [tree.tokens[draw.node] for draw in tree.candidates[node]] == [3, 3, 4]


# ----------------------------------------------------------------------------------------- best first

NODES, DEPTHS = st.integers(1, 80), st.integers(1, 9)


@settings(max_examples=60)
@given(NODES, DEPTHS, st.integers(0, 99), st.floats(0, 2))
def test_best_first_fills_its_budget_and_never_exceeds_it(
    max_nodes: int, max_depth: int, seed: int, spread: float
) -> None:
    world = _random_world(seed, spread)
    (tree,), levels = _grow([TreeBudget(max_nodes, max_depth)], [world])
    there_are = sum(BEST_FIRST_WIDTH**depth for depth in range(1, max_depth + 1))
    if max_nodes <= BEST_FIRST_WIDTH or max_depth >= 4:
        assert tree.num_guessed == min(max_nodes, there_are), "no guess is given away"
    assert tree.num_guessed <= max_nodes
    assert tree.max_depth <= levels <= max_depth
    for node, path in enumerate(paths_of(tree)):
        drawn = [tree.tokens[draw.node] for draw in tree.candidates[node]]
        assert drawn == [token for token, _ in world(path)][: len(drawn)], "siblings in the order they were drawn"


@pytest.mark.parametrize("max_depth", [1, 3, 8])
@pytest.mark.parametrize("max_nodes", [1, 2, 5, 16, 40, 64])
def test_best_first_is_as_good_as_a_heap_if_the_expected_subtree_size_is_right(max_nodes: int, max_depth: int) -> None:
    (tree,), _ = _grow([TreeBudget(max_nodes, max_depth)], [_constant_world])
    assert _total_path_prob(_constant_world, tree) >= 0.97 * _heap(_constant_world, max_nodes, max_depth)


@pytest.mark.parametrize("spread", [0.5, 1.0])
@pytest.mark.parametrize("max_nodes", [4, 16, 48])
def test_best_first_is_nearly_as_good_when_nodes_differ(max_nodes: int, spread: float) -> None:
    """On average over many texts: what is to come can only be expected."""
    # The outlook is right on average.
    seen = [[chance for _, chance in _random_world(seed, spread)(())] for seed in range(1000, 1400)]
    calibration = Known(np.mean(seen, axis=0))
    mine = best = naive = 0.0
    for seed in range(40):
        world = _random_world(seed, spread)
        (tree,), _ = _grow([TreeBudget(max_nodes, 8)], [world], calibration)
        (chain,), _ = _grow([TreeBudget.expansion((1,) * min(max_nodes, 8))], [world])
        mine += _total_path_prob(world, tree)
        best += _heap(world, max_nodes, 8)
        naive += _total_path_prob(world, chain)
    assert 0.93 * best < mine <= best + 1e-6
    assert max_nodes <= 8 or naive < 0.9 * mine, "and far better than a chain"


def test_trees_that_grow_together_are_those_that_grow_alone() -> None:
    """Best first and fixed side by side, of different sizes."""
    budgets = [
        TreeBudget(12, 5),
        TreeBudget.expansion((2, 1, 2)),
        TreeBudget(3, 2),
        TreeBudget(40, 8),
        TreeBudget(1, 1),
    ]
    worlds = [_random_world(seed) for seed in range(len(budgets))]
    together, _ = _grow(budgets, worlds)
    for tree, budget, world in zip(together, budgets, worlds, strict=True):
        (alone,), _ = _grow([budget], [world])
        assert paths_of(tree) == paths_of(alone)


@pytest.mark.parametrize(("best_of_a", "tree"), [(0.9, {(), (1,), (1, 3)}), (0.2, {(), (1,), (2,)})])
def test_the_example_of_the_module_is_true(best_of_a: float, tree: set[Path]) -> None:
    a, b, c, d = 1, 2, 3, 4
    after = {(): [(a, 0.6), (b, 0.3)], (a,): [(c, best_of_a), (d, 0.05)]}
    (grown,), levels = _grow([TreeBudget(2, 2)], [lambda path: after[path]], Known(np.array([0.5, 0.25])))
    assert set(paths_of(grown)) == tree
    assert levels == 2, "only a is taken at the first"


def test_a_batch_without_trees_wants_no_candidates() -> None:
    assert not TreeBatch([], Known()).level()


def test_the_arrays_of_a_growing_tree_cannot_be_written() -> None:
    growing_tree = GrowingTree(make_request("0", [7]), TreeBudget(3, 3), "x")
    TreeBatch([growing_tree], Known())
    for view in (growing_tree.tokens, growing_tree.parents, growing_tree.path_prob, growing_tree.ancestry):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1


def test_few_candidates_are_all_taken() -> None:
    def world(path: Path) -> list[tuple[int, float]]:
        return [(5, 0.4), (6, 0.2)][: 2 - len(path)]

    (tree,), _ = _grow([TreeBudget(50, 6)], [world])
    assert set(paths_of(tree)) == {(), (5,), (6,), (5, 5), (6, 5)}
    (nothing,), levels = _grow([TreeBudget(50, 6)], [lambda path: []])
    assert (nothing, levels) == (TokenTree.root(7), 1)


@pytest.mark.parametrize("least", [0.02, 0.1, 0.3, 0.7])
def test_guesses_below_the_least_chance_are_left_out(least: float) -> None:
    for seed in range(10):
        world = _random_world(seed)
        (tree,), _ = _grow([TreeBudget(1000, 4, min_path_prob=least)], [world])
        wanted: set[Path] = {()}
        for path in itertools.chain.from_iterable(_all_paths(world, 4, least)):
            wanted.add(path)
        assert set(paths_of(tree)) == wanted, "all that are above it, and no other"


def _all_paths(world: World, depth: int, least: float) -> list[list[Path]]:
    """Level by level the paths worth at least this."""
    levels: list[list[Path]] = [[()]]
    for _ in range(depth):
        below = [(*path, token) for path in levels[-1] for token, _ in world(path)]
        levels.append([path for path in below if _path_prob(world, path) >= least])
    return levels


def test_growth_stops_when_a_level_yields_less_than_it_costs() -> None:
    """What is left of the budget then goes to guesses that are there already."""
    depths = []
    for min_gain in (0.0, 0.1, 0.3, 0.5, 0.7):
        (tree,), levels = _grow([TreeBudget(8, 8, min_gain=min_gain)], [_constant_world])
        assert tree.num_guessed == 8
        assert tree.max_depth <= levels
        depths.append(levels)
    assert depths == sorted(depths, reverse=True)
    assert depths[-1] == 1, "one guess is expected to yield 0.6 tokens"
    assert depths[0] >= 4
    # A level serves all requests at once: together they go on where one alone would not.
    alone = TreeBudget(8, 8, min_gain=0.5)
    assert _grow([alone] * 6, [_constant_world] * 6)[1] > _grow([alone], [_constant_world])[1]


def test_a_level_that_pays_for_one_tree_is_grown_for_all() -> None:
    def num_levels(*least: float) -> int:
        return _grow([TreeBudget(8, 8, min_gain=gain) for gain in least], [_constant_world] * len(least))[1]

    assert num_levels(0.1, 5.0) == num_levels(5.0, 0.1) == num_levels(0.1, 0.1) > num_levels(5.0, 5.0)


# ---------------------------------------------------------------------------------------- native code


@settings(max_examples=80)
@given(
    st.lists(
        st.one_of(
            st.builds(
                TreeBudget,
                max_nodes=st.integers(1, 64),
                max_depth=st.integers(1, 9),
                min_path_prob=st.sampled_from([0.0, 0.03, 0.2]),
                min_gain=st.sampled_from([0.0, 0.2, 0.6]),
            ),
            st.lists(st.integers(1, 3), min_size=1, max_size=4).map(TreeBudget.expansion),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 99),
    st.sampled_from([0.0, 1.0, 3.0]),
    st.booleans(),
    st.sampled_from([50, 5]),
)
def test_growth_is_that_of_the_plain_code(
    budgets: list[TreeBudget], seed: int, spread: float, is_learned: bool, num_tokens: int
) -> None:
    """All of it to the bit. With a spread of 0 many path probabilities are equal, with few tokens many draws."""
    calibration: Calibration = Calibration() if is_learned else Known()
    for i in range(300 if is_learned else 0):
        calibration.count("x", i % 5, (i * 7 % 100) / 100, kept=i % 3 == 0)
    worlds = [_random_world(seed + i, spread, num_tokens=num_tokens) for i in range(len(budgets))]
    trees, levels = _grow(budgets, worlds, calibration, is_repeated=num_tokens < BEST_FIRST_WIDTH)
    lines, by_rank = calibration.lines("x"), calibration.by_rank("x")
    slow, slow_levels = growth.grow(budgets, worlds, lines, by_rank, BEST_FIRST_WIDTH)
    assert levels == slow_levels
    for tree, wanted in zip(trees, slow, strict=True):
        assert paths_of(tree) == wanted.paths
        assert [(draw.node, draw.confidence) for draw in tree.draws] == wanted.draws


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=50))
def test_edges_divide_path_probabilities_into_bins(values: list[float]) -> None:
    """Also right at the edges, and just above them."""
    path_prob = np.concatenate([values, BIN_EDGES, np.nextafter(BIN_EDGES, 2.0)])
    assert bins_of(path_prob).tolist() == (path_prob[:, None] <= BIN_EDGES).sum(axis=1).tolist()


# ---------------------------------------------------------------------------------------- the outlook


def test_bins_halve_the_path_probability_every_few() -> None:
    assert bins_of(np.array([1.0, 0.5, 0.25, 2.0**-15])).tolist() == [0, 4, 8, 60]
    assert bins_of(np.array([0.0, 1e-30])).tolist() == [len(BIN_EDGES)] * 2


def test_a_request_is_not_drawn_for_more_than_it_can_use() -> None:
    request: Request = make_request("0", [7])
    for budget, node in (
        (TreeBudget(3, 4), Node(request, (), 3, drafter="x")),
        (TreeBudget(30, 4), Node(request, (), BEST_FIRST_WIDTH, drafter="x")),
        (TreeBudget.expansion((12, 1)), Node(request, (), 12, group=12, drafter="x")),
    ):
        assert nodes_of(TreeBatch([GrowingTree(request, budget, "x")], Known()).level()) == [node]
