"""What pruning learns of drafters that err together; `tests/ops/test_merge.py` has what it keeps."""

from dataclasses import replace

from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.growth.calibration import Calibration
from specinfer.drafters.merge.pruning import Pruning
from specinfer.verify import Acceptance
from tiny import make_request, paths_of


def _request(number: int, temperature: float) -> Request:
    return make_request(str(number), [7], SamplingParams(temperature=temperature), seed=number)


def _pruned(pruning: Pruning, request: Request, tree: TokenTree, budget: TreeBudget) -> TokenTree:
    (pruned,) = pruning.merge([request], [[tree]], [budget], [True])
    return pruned


def test_rivals_that_err_together_are_found_out() -> None:
    """Two drafters sure of different tokens: the one that is kept each time wins the place."""
    request, pruning = _request(0, 0.0), Pruning(Calibration())
    chains = [TokenTree.chain(7, [token], name, sure) for token, name, sure in ((1, "a", 0.93), (2, "b", 0.75))]
    tree, budget = TokenTree.merge(chains), TreeBudget(2, 1, min_path_prob=0.25)
    first = _pruned(pruning, request, tree, budget)
    assert paths_of(first) == [(), (1,), (2,)]
    for _ in range(50):
        kept = _pruned(pruning, request, tree, replace(budget, min_path_prob=0.0))
        pruning.observe(request, kept, Acceptance((1,), 0))
    last = _pruned(pruning, request, tree, budget)
    assert paths_of(last) == [(), (1,)], "beside the better guess the other one is worth little"


def test_what_was_not_walked_teaches_nothing() -> None:
    request, pruning = _request(0, 0.0), Pruning(Calibration())
    tree = TokenTree.chain(7, [1, 2], "a", 0.5)
    kept = _pruned(pruning, request, tree, TreeBudget(2, 2))
    pruning.observe(request, TokenTree.root(7), Acceptance((), 1))  # another tree, cut to fit
    pruning.observe(request, kept, Acceptance((1,), 1))  # seen already
    _pruned(pruning, request, tree, TreeBudget(2, 2))
    pruning.forget(request.request_id)
    pruning.observe(request, kept, Acceptance((1,), 1))
    assert pruning.rivals.by_rank("all")[0] == Calibration().by_rank("all")[0]


# The second row of a pass costs 0.8 tokens, and each further row 0.05.
DEAR_START = TreeBudget(16, 16, row_prices=tuple(0.75 + 0.05 * count for count in range(1, 33)))


def _bought(pruning: Pruning, trees: dict[Request, TokenTree], budget: TreeBudget) -> list[TokenTree]:
    requests, budgets = list(trees), [budget] * len(trees)
    merged = pruning.merge(requests, [[tree] for tree in trees.values()], budgets, [True] * len(trees))
    return pruning.buy(requests, merged, budgets)


def test_a_tree_is_bought_only_if_it_repays_the_first_row() -> None:
    pruning = Pruning(Calibration())
    for tokens, sure, num_bought in (([1], 0.6, 0), ([1, 2, 3, 4], 0.93, 4), ([1, 2, 3, 4], 0.05, 0)):
        (tree,) = _bought(pruning, {_request(0, 0.0): TokenTree.chain(7, tokens, "a", sure)}, DEAR_START)
        assert tree.num_guessed == num_bought


def test_requests_of_a_batch_repay_the_first_row_together() -> None:
    pruning = Pruning(Calibration())
    trees = {_request(number, 0.0): TokenTree.chain(7, [1], "a", 0.6) for number in range(3)}
    assert [tree.num_guessed for tree in _bought(pruning, trees, DEAR_START)] == [1, 1, 1]


def test_only_likely_nodes_are_bought_where_each_row_costs_most_of_a_token() -> None:
    pruning = Pruning(Calibration())
    linear = TreeBudget(16, 16, row_prices=tuple(0.8 * count for count in range(1, 33)))
    trees = {_request(number, 0.0): TokenTree.chain(7, [1, 2], "a", sure) for number, sure in enumerate((0.97, 0.6))}
    assert [tree.num_guessed for tree in _bought(pruning, trees, linear)] == [2, 0]


def test_what_was_not_bought_is_learned_from_the_tokens_that_came() -> None:
    """Else draft tokens that were once thought wrong would be thought so for ever."""
    pruning, calibration, request = Pruning(Calibration()), Calibration(), _request(0, 0.0)
    tree = TokenTree.chain(7, [1, 2], "a", 0.3)
    for _ in range(40):
        request.token_ids = [7]
        (bought,) = _bought(pruning, {request: tree}, DEAR_START)
        if bought.num_guessed:
            break
        request.token_ids = [7, 1]
        offered = pruning.offered(request, bought, Acceptance((), 1))
        assert paths_of(offered[0]) == [(), (1,)], "nothing is known of what would have followed"
        assert offered[1].path == (1,)
        calibration.observe(request, *offered)
        pruning.observe(request, *offered)
    assert bought.num_guessed == 2
    assert calibration.acceptance_prob("a", 0, 0.3) > 0.5


def test_an_offer_counts_for_the_next_tokens_only() -> None:
    pruning, request = Pruning(Calibration()), _request(0, 0.0)
    request.token_ids = [7]
    _bought(pruning, {request: TokenTree.chain(7, [1], "a", 0.3)}, DEAR_START)
    request.token_ids = [7, 1, 1]  # a step failed, and another came
    root = TokenTree.root(7), Acceptance((), 1)
    assert pruning.offered(request, *root) == root
