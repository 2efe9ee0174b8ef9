"""Options of an engine and of its speculation: every form that is understood, and every refusal by name."""

from pathlib import Path
from typing import Any

import pytest

from specinfer.core.config import (
    BEST_FIRST_DEPTH,
    DRAFT_SAMPLINGS,
    MAX_TREE_NODES,
    EngineConfig,
    OffloadConfig,
    SpeculativeConfig,
    TreeShape,
    parse_drafters,
    parse_select,
    parse_tree,
)
from specinfer.core.sampling import SamplingParams
from specinfer.verify import RANDOM_RULES

# ---------------------------------------------------------------------------------------------- trees


@pytest.mark.parametrize(
    ("tree", "shape"),
    [
        ("auto", TreeShape(is_auto=True)),
        ("off", TreeShape()),
        ("1", TreeShape((1,), 1, 1)),
        ("1,1,3,1", TreeShape((1, 1, 3, 1), 8, 4)),
        ("< 2, 2 >", TreeShape((2, 2), 6, 2)),
        ("1024", TreeShape((1024,), 1024, 1)),
        (",".join(["1"] * 1024), TreeShape((1,) * 1024, 1024, 1024)),
        ("best-first:32", TreeShape((), 32, BEST_FIRST_DEPTH)),
        ("best-first:1", TreeShape((), 1, 1)),
        ("best-first:5", TreeShape((), 5, 5)),
        ("best-first:32:3", TreeShape((), 32, 3)),
        ("best-first:4:9", TreeShape((), 4, 4)),
        ("best-first:1024:1024", TreeShape((), 1024, 1024)),
    ],
)
def test_forms_of_a_tree(tree: str, shape: TreeShape) -> None:
    assert parse_tree(tree) == shape
    assert shape.is_off == (tree == "off")
    assert SpeculativeConfig(tree=tree).shape == shape
    assert SamplingParams(tree=tree).tree == tree


UNREADABLE = [
    *("", " ", "Off", "AUTO", "1,,2", "1,", ",", "1;2", "a", "1.0", "1e3", "-1", "+1", "0x4", "\u0661", "<", "auto,1"),
    *("best-first", "best-first:", "best-first:x", "best-first:-1", "best-first:1.5", "best-first:4:5:6"),
    *("best-first::4", "best-first:4:", "best-first32", "best-first-4", "best-firsts:4", "bestfirst:4"),
    *("best-first:\u0664", "9" * 5000 + "x"),
]


@pytest.mark.parametrize("tree", UNREADABLE, ids=lambda tree: repr(tree)[:20])
def test_trees_that_are_not_understood(tree: str) -> None:
    """The message names every form there is, and does not repeat a text without end."""
    with pytest.raises(ValueError, match=r'^tree: .* is not understood; use "auto", "off", .*"best-first:32"') as error:
        parse_tree(tree)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("tree", ["best-first:0", "best-first:1000000", "best-first:1025", "best-first:0:4"])
def test_best_first_of_no_or_too_many_nodes(tree: str) -> None:
    with pytest.raises(ValueError, match=rf'^tree: {tree!r} must have from 1 to {MAX_TREE_NODES} nodes, or use "off"'):
        parse_tree(tree)


def test_best_first_of_a_number_without_end() -> None:
    with pytest.raises(ValueError, match=rf"^tree: .* must have from 1 to {MAX_TREE_NODES} nodes") as error:
        parse_tree("best-first:" + "9" * 5000)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("tree", ["best-first:8:0", "best-first:8:1025"])
def test_best_first_of_an_impossible_depth(tree: str) -> None:
    with pytest.raises(ValueError, match=rf"^tree: the depth of {tree!r} must be from 1 to {MAX_TREE_NODES}"):
        parse_tree(tree)


@pytest.mark.parametrize(
    "tree",
    [
        *("1025", "10,10,10", "999999", "1000000", "2000001", "9" * 9, "1" + "0" * 5000),
        *(",".join(["1"] * 1025), ",".join(["99"] * 5000)),
    ],
    ids=lambda tree: tree[:20],
)
def test_expansions_that_are_too_large(tree: str) -> None:
    with pytest.raises(ValueError, match=rf"^tree: .* has more than {MAX_TREE_NODES} nodes; make it smaller"):
        parse_tree(tree)


def test_noughts_before_a_number_change_nothing() -> None:
    assert parse_tree("0000000002,01") == parse_tree("2,1")


@pytest.mark.parametrize("tree", ["0", "1,0", "0,5", "00", "0" * 5000], ids=lambda tree: tree[:20])
def test_levels_without_children(tree: str) -> None:
    with pytest.raises(ValueError, match=r'^tree: a level of .* has no children; .* use "off"'):
        parse_tree(tree)


@pytest.mark.parametrize("tree", [3, None, [1, 2], (1,), True, b"1", 1.0], ids=repr)
def test_trees_that_are_no_text(tree: Any) -> None:
    with pytest.raises(ValueError, match=r"^tree: .* is no string"):
        parse_tree(tree)


# ------------------------------------------------------------------------------- rules and drawings


def test_every_rule_there_is_can_be_asked_for() -> None:
    assert set(DRAFT_SAMPLINGS) == {"coupled", "target-only", *RANDOM_RULES}
    for rule, drawings in DRAFT_SAMPLINGS.items():
        assert SpeculativeConfig(verification=rule).draft_sampling == drawings[0], "a rule's own way of drawing"
        for drawing in drawings:
            assert SpeculativeConfig(verification=rule, draft_sampling=drawing).draft_sampling == drawing


def test_the_rules_own_drawings() -> None:
    assert {rule: drawings[0] for rule, drawings in DRAFT_SAMPLINGS.items()} == {
        "coupled": "shared-noise",
        "multi-step": "without-replacement",
        "traversal": "without-replacement",
        "target-only": "top-k",
    }


@pytest.mark.parametrize("rule", ["multi-step", "traversal", "target-only"])
def test_shared_noise_is_for_coupled_verification_only(rule: str) -> None:
    """A tree that knows the target's noise is a biased one to every other rule."""
    with pytest.raises(ValueError, match=r"^draft_sampling: 'shared-noise'") as error:
        SpeculativeConfig(verification=rule, draft_sampling="shared-noise")
    assert repr(rule) in str(error.value)
    assert ", ".join(DRAFT_SAMPLINGS[rule]) in str(error.value), "the message names what is allowed"


@pytest.mark.parametrize("drawing", DRAFT_SAMPLINGS["coupled"])
def test_a_named_drawing_is_refused_where_the_rule_is_chosen_later(drawing: str) -> None:
    with pytest.raises(ValueError, match=rf"^draft_sampling: '{drawing}' is for one rule.*; leave draft_sampling out"):
        SpeculativeConfig(verification="auto", draft_sampling=drawing)


@pytest.mark.parametrize("rule", ["", "Coupled", "typical", None, 3, ["coupled"]], ids=repr)
def test_unknown_rules(rule: Any) -> None:
    with pytest.raises(ValueError, match=r"^verification must be one of coupled, multi-step, traversal, target-only"):
        SpeculativeConfig(verification=rule)


@pytest.mark.parametrize("drawing", ["", "noise", "Top-k", None, 3], ids=repr)
@pytest.mark.parametrize("rule", DRAFT_SAMPLINGS)
def test_unknown_drawings(rule: str, drawing: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^draft_sampling must be one of auto, shared-noise, top-k, without-replacement, "
    ):
        SpeculativeConfig(verification=rule, draft_sampling=drawing)


@pytest.mark.parametrize("tree", ["1,1", "best-first:4"])
def test_a_tree_needs_a_drafter(tree: str) -> None:
    with pytest.raises(ValueError, match="needs a drafter and drafters is empty"):
        SpeculativeConfig(drafters=(), tree=tree)
    for fine in ("off", "auto"):
        assert SpeculativeConfig(drafters=(), tree=fine).tree == fine


def test_drafters() -> None:
    assert parse_drafters("auto") is None
    assert parse_drafters(None) is None
    assert parse_drafters("ngram") == ("ngram",)
    assert parse_drafters(["a", "b"]) == ("a", "b")
    assert parse_drafters([]) == ()
    assert parse_drafters([Path("a"), "b"]) == parse_drafters(("a", "b"))  # type: ignore[list-item]


@pytest.mark.parametrize("names", [5, [None], ["a", 3], b"ab", {"a"}, {"a": 1}, True, [["a"]]], ids=repr)
def test_drafters_that_are_no_names(names: Any) -> None:
    with pytest.raises(ValueError, match=r'^drafters: .* is no list of names; give "auto", .* and "suffix"$'):
        parse_drafters(names)


@pytest.mark.parametrize(
    ("names", "part"),
    [
        ([""], 'an empty name; .*"suffix"'),
        ("", "an empty name"),
        (["a", "a"], "a, a names a drafter twice"),
        (["ngram", "auto"], '"auto" stands alone'),
        (["none", "ngram"], '"none" is no drafter; give an empty list'),
        ("none", '"none" is no drafter; give an empty list'),
    ],
)
def test_drafters_that_do_not_go_together(names: Any, part: str) -> None:
    with pytest.raises(ValueError, match=f"^drafters: {part}"):
        parse_drafters(names)


def test_two_names_of_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "D"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    for other in (f"{folder}/", str(tmp_path / "." / "link"), str(folder / ".." / "D")):
        with pytest.raises(ValueError, match=r"^drafters: .* names a drafter twice; leave one out"):
            parse_drafters([str(folder), other])
    assert parse_drafters([str(folder), str(tmp_path)]) == (str(folder), str(tmp_path))
    (tmp_path / "ngram").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_drafters(["ngram", "./ngram"]) == ("ngram", "./ngram"), "the lookup drafter, and a model in a folder"
    assert parse_drafters(["a/b", "a/b/"]) == ("a/b", "a/b/"), "not folders: whoever loads them knows"


# --------------------------------------------------------------------------------------------- engine


@pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"], ids=repr)
def test_limits_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be a whole number of at least 1, not "):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("value", [-1, 2**63, 1.0, None, True], ids=repr)
def test_seeds_are_whole_numbers(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^seed must be a whole number from 0 to"):
        EngineConfig(seed=value)


# ------------------------------------------------------------------------------- choice of drafters


def test_how_many_models_are_asked() -> None:
    forms = {"all": None, "hedge": 2, "hedge:1": 1, "hedge:07": 7}
    assert {select: parse_select(select) for select in forms} == forms
    assert SpeculativeConfig(select="hedge:3").max_asked == 3
    assert SpeculativeConfig().max_asked is None


@pytest.mark.parametrize(
    "select",
    ["", "none", "Hedge", "hedge:", "hedge:0", "hedge:-1", "hedge:1.5", "hedge: 1", "1", None, 2, ["all"]],
    ids=repr,
)
def test_choices_that_are_not_understood(select: Any) -> None:
    with pytest.raises(ValueError, match=r'^select: .* is not understood; use "all", "hedge", or "hedge:1"'):
        SpeculativeConfig(select=select)


@pytest.mark.parametrize("given", [{"memory_budget": "4GiB"}, {"offload_folder": "packed"}])
def test_a_budget_or_folder_without_offloading_is_refused(given: dict[str, str]) -> None:
    assert OffloadConfig().offload is None
    assert OffloadConfig("disk", **given).offload == "disk"  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{next(iter(given))}: it is for targets that are streamed"):
        OffloadConfig(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"])
def test_the_smallest_engine_is_allowed(name: str) -> None:
    assert getattr(EngineConfig(**{name: 1}), name) == 1  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=name):
        EngineConfig(**{name: 0})  # type: ignore[arg-type]
