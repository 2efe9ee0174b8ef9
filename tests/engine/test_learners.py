"""Why a request had no draft tokens: what is said of a request that has ended."""

import pytest

from specinfer.core.request import Request
from specinfer.engine.learners import Learners
from specinfer.policy.base import FixedPolicy
from tiny import make_request


class _Policy(FixedPolicy):
    """A policy that always has this reason."""

    def __init__(self, reason: str | None) -> None:
        super().__init__()
        self._reason = reason

    def reason(self, request: Request) -> str | None:
        return self._reason


def _reason(
    of_policy: str | None = "trees do not pay", *, plain: int = 8, spec: int = 2, cut: int = 0, crowded: int = 0,
    unread: int = 0,
) -> str | None:  # fmt: skip
    request: Request = make_request("a", range(4))
    request.token_ids += [1] * 10
    stats, drafting = request.speculation, request.drafting
    stats.num_plain_steps, stats.num_spec_steps, stats.num_cut_steps = plain, spec, cut
    drafting.num_crowded_steps, drafting.num_unread_steps = crowded, unread
    Learners(_Policy(of_policy)).explain(request)
    return stats.reason


def test_a_single_cut_tree_does_not_hide_why_most_passes_had_none() -> None:
    assert _reason(cut=1) == "trees do not pay; trees were cut in 1 pass beside requests of other API keys"


@pytest.mark.parametrize("of_policy", [None, "trees do not pay"])
def test_passes_without_trees_for_the_sake_of_others_are_named_so(of_policy: str | None) -> None:
    assert _reason(of_policy, crowded=6) == "requests of other API keys left no time for draft tokens"
    unread = _reason(of_policy, crowded=6, unread=6)
    assert unread == "a drafter takes too long to read the tokens so far beside requests of other API keys"
    assert "other API keys" not in str(_reason(of_policy, crowded=3, unread=3))


def test_trees_in_most_passes_need_no_reason_unless_they_were_cut() -> None:
    assert _reason(plain=2, spec=8) is None
    assert _reason(plain=2, spec=8, cut=3) == "trees were cut in 3 passes beside requests of other API keys"
    assert _reason(None) == "the drafters proposed no tokens for most passes"
