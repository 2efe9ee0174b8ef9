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
