"""Rules by name: what a rule names must exist, and a rule that is not known is none."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from specinfer.core.rules import RULES, TRAVERSAL, Rule, is_random
from specinfer.engine.engine import Engine
from specinfer.ops import cpu
from specinfer.ops.cpu.stochastic_walk import NUM_WALKS
from specinfer.verify import check_rule


@pytest.mark.parametrize("rule", [*RULES, "auto"])
def test_what_rules_name_exists(rule: str) -> None:
    check_rule(rule)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cpu_walk": NUM_WALKS}, f"native code has no walk {NUM_WALKS} for 'mine'.*or leave cpu_walk out"),
        ({"cpu_walk": -1}, "native code has no walk -1"),
        ({"gpu_walk": "walk_travesal"}, "no operation 'walk_travesal' for 'mine'.*or leave gpu_walk out"),
        ({"algorithm": "specinfer.verify.algorithms:verify_travesal"}, "verify_travesal of 'mine' is not there"),
        ({"algorithm": "specinfer.verify.algorithm:verify_traversal"}, "is not there"),
        ({"algorithm": "verify_traversal"}, "is not there"),
    ],
)
def test_a_rule_that_names_what_does_not_exist_is_refused(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, "mine", replace(RULES[TRAVERSAL], **change))
    with pytest.raises(ValueError, match=f"^verification: .*{message}"):
        check_rule("mine")
    with pytest.raises(ValueError, match=f"^verification: .*{message}"):
        Engine(*[cast(Any, None)] * 4, verification="mine")


@pytest.mark.parametrize("walk", [{"cpu_walk": 0}, {"gpu_walk": "walk_traversal"}], ids=str)
def test_a_walk_needs_an_algorithm(walk: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs its algorithm"):
        Rule(("top-k",), algorithm=None, **walk)


def test_an_unknown_rule_is_not_plain_decoding() -> None:
    for check in (is_random, check_rule):
        with pytest.raises(ValueError, match="no verification rule 'nonsense'; use coupled"):
            check("nonsense")
    assert not is_random(None)


def test_the_native_code_has_so_many_walks() -> None:
    source = (Path(cpu.__file__).parent / "stochastic_walk.h").read_text()
    calls = re.findall(r"traverses\[i\] \? walk\.(\w+)\(\) : walk\.(\w+)\(\);", source)
    assert calls == [("traverse", "multi_step")], "walks 1 and 0"
    assert len(calls[0]) == NUM_WALKS
