"""Features of requests, and what lookups would have proposed."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specinfer.core.request import FinishReason
from specinfer.core.tree import Draw, TokenTree, TreeBudget
from specinfer.drafters import MergedDrafter, NGramDrafter, SuffixDrafter
from specinfer.drafters.base import MAX_PROSPECT, Lookup
from specinfer.policy.features import FeatureTracker
from specinfer.verify import Acceptance
from tests.policy.simulated_machines import span_of
from tests.policy.untrained_network import SLOTS, Scripted
from tiny import make_request


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.sampled_from([SuffixDrafter, NGramDrafter]))
def test_a_prospect_is_the_first_path_that_the_lookup_guesses(tokens: list[int], kind: Callable[[], Any]) -> None:
    lookup = kind()
    assert isinstance(lookup, Lookup)
    spans = [span_of(make_request("a", tokens))]
    (prospect,) = lookup.prospects(spans)
    (tree,) = lookup.draft(spans, [TreeBudget(200, MAX_PROSPECT)])
    assert bool(prospect.tokens) == bool(tree.num_guessed)
    assert len(prospect.path_probs) == len(prospect.tokens) <= MAX_PROSPECT
    assert list(prospect.path_probs) == sorted(prospect.path_probs, reverse=True)
    assert all(0 < chance <= 1 for chance in prospect.path_probs)
    if prospect.tokens:
        assert prospect.match >= 1
        assert tree.tokens[1] == prospect.tokens[0]
        assert prospect.path_probs[0] == pytest.approx(tree.draws[0].confidence)
    lookup.forget("a")


def test_a_text_that_repeats_itself_has_a_long_prospect() -> None:
    for lookup in (SuffixDrafter(), NGramDrafter()):
        (prospect,) = lookup.prospects([span_of(make_request("a", [1, 2, 3, 4, 5, 6, 7, 8] * 6))])
        assert prospect.tokens[:10] == (1, 2, 3, 4, 5, 6, 7, 8, 1, 2)
        assert prospect.reach > 8
        (none,) = lookup.prospects([span_of(make_request("b", range(20)))])
        assert (none.match, none.tokens, none.reach) == (0, (), 0)


def test_features_follow_the_output_of_the_target() -> None:
    tracker = FeatureTracker(MergedDrafter([Scripted(), SuffixDrafter()]))
    assert tracker.slots == SLOTS
    request = make_request("a", [1, 2, 3, 1, 2])
    (row,) = tracker.features([span_of(request)])
    first = dict(zip(tracker.names, row.tolist(), strict=True))
    assert math.isnan(first["target.top"]), "nothing was said yet"
    assert (first["request.greedy"], first["request.temperature"]) == (1.0, 0.0)
    assert (first["model.hit_fast"], first["suffix.match"]) == (0.5, math.log2(3)), "two tokens stand here once more"
    # Guesses 3 and 1 came true, the next 9 did not; the lookup would have said 3, 1, 2.
    tree = TokenTree((2, 3, 1, 9), (-1, 0, 1, 2), tuple(Draw(node, "scripted", None, 0.8) for node in (1, 2, 3)))
    logits = torch.zeros(4, 10)
    logits[2, 5] = 3.0
    request.token_ids += [3, 1, 5]
    tracker.on_tokens(request, tree, Acceptance((1, 2), 5), logits, 3)
    (row,) = tracker.features([span_of(request)])
    then = dict(zip(tracker.names, row.tolist(), strict=True))
    distribution = torch.softmax(logits[2], -1)
    assert then["target.top"] == pytest.approx(float(distribution[5])) == then["target.said"]
    assert then["target.margin"] == pytest.approx(float(distribution[5] - distribution[0]))
    assert then["target.entropy"] == pytest.approx(float(-(distribution * distribution.log()).sum()), rel=1e-5)
    hits = 0.5
    for hit in (1, 1, 0):
        hits = 0.75 * hits + 0.25 * hit
    assert then["model.hit_fast"] == then["suffix.hit_fast"] == pytest.approx(hits)
    assert then["model.streak"] == then["suffix.streak"] == 0
    assert then["model.sure"] == pytest.approx(0.8 - 0.3 * 0.75**3)
    assert then["suffix.reach"] == 0, "5 was never said before"


def test_a_lookup_that_is_not_asked_is_judged_all_the_same() -> None:
    tracker = FeatureTracker(SuffixDrafter())
    request = make_request("a", [1, 2, 3, 4] * 4)
    for token in (1, 2, 3, 4, 1, 2):
        tracker.features([span_of(request)])
        root = TokenTree.root(request.token_ids[-1])
        request.token_ids.append(token)
        tracker.on_tokens(request, root, Acceptance((), token), torch.zeros(1, 10), 1)
    (row,) = tracker.features([span_of(request)])
    known = dict(zip(tracker.names, row.tolist(), strict=True))
    assert known["suffix.hit_fast"] > 0.9
    assert known["suffix.streak"] == pytest.approx(math.log2(7))


def test_requests_that_are_gone_are_forgotten() -> None:
    tracker = FeatureTracker(SuffixDrafter())
    for i in range(500):
        request = make_request(str(i), [1, 2, 3])
        tracker.features([span_of(request)])
        request.finish(FinishReason.ABORT)
    assert len(tracker._states) < 100
