"""Hedge: weights as computed by hand, regret within the bound whatever the losses, a shift of the text followed."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.drafters.merge.hedge import Hedge


def test_weights_are_those_computed_by_hand() -> None:
    hedge = Hedge(["a", "b"], decay=1.0, horizon=8.0 * math.log(2.0))
    assert hedge.rate == pytest.approx(1.0)
    assert hedge.weights("0") == {"a": 0.5, "b": 0.5}
    hedge.observe("0", {"a": [1.0, 1.0], "b": [1.0, 0.0]})
    assert hedge.weights("0")["a"] == pytest.approx(1 / (1 + math.e))
    hedge.observe("0", {"a": [0.5], "b": [1.0]})
    assert hedge.weights("0")["a"] == pytest.approx(1 / (1 + math.exp(0.5)))


def test_older_losses_count_less() -> None:
    hedge = Hedge(["a", "b"], decay=0.5)
    assert hedge.rate == pytest.approx(math.sqrt(8 * math.log(2) / 2))  # a decay of 0.5 leaves two tokens
    hedge.observe("0", {"a": [1.0, 0.0, 0.0], "b": [0.0, 0.0, 1.0]})
    weights = hedge.weights("0")
    assert weights["a"] / weights["b"] == pytest.approx(math.exp(hedge.rate * (1.0 - 0.25)))


def test_costs_are_losses_too() -> None:
    hedge = Hedge(["large", "small"], costs={"large": 0.3, "small": 0.01}, decay=1.0, horizon=100.0)
    hedge.observe("0", {"large": [0.4] * 10, "small": [0.6] * 10})
    assert hedge.choose("0", 1, hedge.names) == {"small"}
    hedge.observe("0", {"large": [0.0] * 10, "small": [0.6] * 10})
    assert hedge.choose("0", 1, hedge.names) == {"large"}


def test_a_drafter_scored_less_often_keeps_its_last_score() -> None:
    hedge = Hedge(["a", "b", "c"], decay=1.0, horizon=100.0)
    hedge.observe("0", {"a": [0.5] * 90, "b": [0.4] * 10})
    weights = hedge.weights("0")
    assert weights["b"] / weights["a"] == pytest.approx(math.exp(hedge.rate * 90 * 0.1))
    assert weights["b"] > weights["c"] > weights["a"], "of one that was never scored the usual is expected"


def test_the_generalist_is_kept_if_two_may_be_asked() -> None:
    hedge = Hedge(["general", "code", "prose"])
    hedge.observe("0", {"general": [0.5] * 9, "code": [0.2] * 9, "prose": [0.3] * 9})
    assert hedge.choose("0", 1, hedge.names) == {"code"}
    assert hedge.choose("0", 2, hedge.names) == {"general", "code"}
    assert hedge.choose("0", 3, hedge.names) == set(hedge.names)
    assert hedge.choose("0", 2, ["code", "prose"]) == {"code", "prose"}, "it may have failed"
    assert hedge.choose("0", 2, []) == set()
    other = Hedge(["general", "code", "prose"], generalist="prose")
    assert other.choose("0", 1, other.names) == {"general"}, "of equals the first"
    assert other.choose("0", 2, other.names) == {"general", "prose"}


def test_a_request_begins_with_what_traffic_showed_and_parts_from_it() -> None:
    hedge = Hedge(["code", "prose"])
    hedge.observe("0", {"code": [0.2] * 50, "prose": [0.6] * 50})
    assert hedge.choose("1", 1, hedge.names) == {"code"}
    hedge.observe("2", {"code": [0.8] * 40, "prose": [0.3] * 40}, of_prompt=True)
    assert hedge.choose("2", 1, hedge.names) == {"prose"}
    assert hedge.choose("3", 1, hedge.names) == {"code"}, "what a prompt says is of its own request"
    assert hedge.choose("0", 1, hedge.names) == {"code"}
    assert hedge.weights()["code"] > hedge.weights()["prose"]
    hedge.forget("2")
    assert hedge.choose("2", 1, hedge.names) == {"code"}


def test_what_traffic_showed_counts_as_several_tokens_of_a_new_request() -> None:
    hedge = Hedge(["a", "b"], decay=1.0, horizon=20.0)
    hedge.observe("0", {"a": [1.0] * 20, "b": [0.5] * 20})
    weights = hedge.weights("1")
    num_tokens = math.log(weights["b"] / weights["a"]) / (hedge.rate * 0.5)
    assert num_tokens == pytest.approx(round(num_tokens))
    assert num_tokens >= 4


@given(st.data(), st.integers(2, 5), st.integers(1, 60))
def test_regret_is_within_the_bound(data: st.DataObject, num_drafters: int, num_tokens: int) -> None:
    """Freund and Schapire: losses of draws by the weights exceed the best drafter's by sqrt(T ln N / 2) at most."""
    names = [f"drafter {i}" for i in range(num_drafters)]
    hedge = Hedge(names, decay=1.0, horizon=num_tokens)
    loss = st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1.0)
    total, own = 0.0, dict.fromkeys(names, 0.0)
    adversarial = data.draw(st.booleans())
    for _ in range(num_tokens):
        weights = hedge.weights("0")
        if adversarial:  # who is favoured errs
            favoured = max(names, key=weights.__getitem__)
            losses = {name: float(name == favoured) for name in names}
        else:
            losses = {name: data.draw(loss) for name in names}
        total += sum(weights[name] * losses[name] for name in names)
        own = {name: own[name] + losses[name] for name in names}
        hedge.observe("0", {name: [value] for name, value in losses.items()})
    assert total <= min(own.values()) + math.sqrt(num_tokens * math.log(num_drafters) / 2) + 1e-9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": []}, "names: none given"),
        ({"names": ["a", "a"]}, "names: a, a given"),
        ({"names": ["a"], "generalist": "b"}, "generalist: 'b' is none of a"),
        ({"names": ["a"], "decay": 0.0}, "decay must be above 0"),
        ({"names": ["a"], "decay": 1.5}, "decay must be above 0 and at most 1"),
        ({"names": ["a"], "decay": 1.0}, "horizon: with a decay of 1"),
        ({"names": ["a"], "horizon": 0.0}, "horizon must be above 0"),
    ],
)
def test_bad_values_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hedge(**options)  # type: ignore[arg-type]
