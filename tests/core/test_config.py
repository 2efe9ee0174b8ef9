"""Options of an engine and of its speculation: every form that is understood, and every refusal by name."""

from pathlib import Path
from typing import Any, get_args

import pytest

from specinfer.core.config import (
    KV_CACHE_DTYPES,
    DraftSampling,
    EngineConfig,
    KVCacheDType,
    OffloadConfig,
    SpeculativeConfig,
    VerificationRule,
)
from specinfer.core.drafter_forms import USUAL_WINDOW, parse_drafters, parse_select
from specinfer.core.lookups import quoted_lookups
from specinfer.core.rules import AUTO, DRAFT_SAMPLINGS, RULES

# ------------------------------------------------------------------------------- rules and drawings


def test_every_rule_there_is_can_be_asked_for() -> None:
    for rule, drawings in ((name, rule.draft_samplings) for name, rule in RULES.items()):
        assert SpeculativeConfig(verification=rule).draft_sampling == drawings[0], "a rule's own way of drawing"
        for drawing in drawings:
            assert SpeculativeConfig(verification=rule, draft_sampling=drawing).draft_sampling == drawing


def test_types_of_choices_have_every_choice() -> None:
    assert set(get_args(VerificationRule)) == {*RULES, AUTO}
    assert set(get_args(DraftSampling)) == {AUTO, *DRAFT_SAMPLINGS}
    assert get_args(KVCacheDType) == tuple(KV_CACHE_DTYPES)


def test_the_rules_own_drawings() -> None:
    drawings = {
        "coupled": "shared-noise",
        "multi-step": "without-replacement",
        "traversal": "without-replacement",
        "target-only": "top-k",
    }
    assert {name: RULES[name].draft_samplings[0] for name in drawings} == drawings


@pytest.mark.parametrize("rule", [name for name in RULES if name != "coupled"])
def test_shared_noise_is_for_coupled_verification_only(rule: str) -> None:
    """A tree that knows the target's noise is a biased one to every other rule."""
    with pytest.raises(ValueError, match=r"^draft_sampling: 'shared-noise'") as error:
        SpeculativeConfig(verification=rule, draft_sampling="shared-noise")
    assert repr(rule) in str(error.value)
    assert ", ".join(RULES[rule].draft_samplings) in str(error.value), "the message names what is allowed"


@pytest.mark.parametrize("drawing", DRAFT_SAMPLINGS)
def test_a_named_drawing_is_refused_where_the_rule_is_chosen_later(drawing: str) -> None:
    with pytest.raises(ValueError, match=rf"^draft_sampling: '{drawing}' is for one rule.*; leave draft_sampling out"):
        SpeculativeConfig(verification="auto", draft_sampling=drawing)


@pytest.mark.parametrize("rule", ["", "Coupled", "typical", None, 3, ["coupled"]], ids=repr)
def test_unknown_rules(rule: Any) -> None:
    with pytest.raises(ValueError, match=rf"^verification must be one of {', '.join(RULES)}, auto"):
        SpeculativeConfig(verification=rule)


@pytest.mark.parametrize("drawing", ["", "noise", "Top-k", None, 3], ids=repr)
@pytest.mark.parametrize("rule", RULES)
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


@pytest.mark.parametrize(("sizes", "name"), [((0, 4), "min"), ((2, 65), "max"), ((65, 65), "min"), ((1, 0), "max")])
def test_ngram_sizes_out_of_range(sizes: tuple[int, int], name: str) -> None:
    with pytest.raises(ValueError, match=rf"^prompt_lookup_{name} must be from 1 to 64, not "):
        SpeculativeConfig(prompt_lookup_min=sizes[0], prompt_lookup_max=sizes[1])


def test_drafters() -> None:
    assert parse_drafters("auto") is None
    assert parse_drafters(None) is None
    assert parse_drafters("none") == parse_drafters(["none"]) == ()
    assert parse_drafters("ngram") == ("ngram",)
    assert parse_drafters(["a", "b"]) == ("a", "b")
    assert parse_drafters([]) == ()
    assert parse_drafters([Path("a"), "b"]) == parse_drafters(("a", "b"))  # type: ignore[list-item]


@pytest.mark.parametrize("names", [5, [None], ["a", 3], b"ab", {"a"}, {"a": 1}, True, [["a"]]], ids=repr)
def test_drafters_that_are_no_names(names: Any) -> None:
    with pytest.raises(
        ValueError, match=rf'^drafters: .* is not a list of names; give "auto", .*{quoted_lookups("and")}$'
    ):
        parse_drafters(names)


@pytest.mark.parametrize(
    ("names", "part"),
    [
        ([""], f"an empty name; .*{quoted_lookups('and')}"),
        ("", "an empty name"),
        (["a", "a"], "a, a names a drafter twice"),
        (["ngram", "auto"], "auto stands alone"),
        (["none", "ngram"], "none stands alone"),
    ],
)
def test_drafters_that_do_not_go_together(names: Any, part: str) -> None:
    with pytest.raises(ValueError, match=f"^drafters: {part}"):
        parse_drafters(names)


def test_two_names_of_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "D"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    for alias in (f"{folder}/", str(tmp_path / "." / "link"), str(folder / ".." / "D")):
        with pytest.raises(ValueError, match=r"^drafters: .* names a drafter twice; leave one out"):
            parse_drafters([str(folder), alias])
    assert parse_drafters([str(folder), str(tmp_path)]) == (str(folder), str(tmp_path))
    (tmp_path / "ngram").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_drafters(["ngram", "./ngram"]) == ("ngram", "./ngram"), "the lookup drafter, and a model in a folder"
    assert parse_drafters(["a/b", "a/b/"]) == ("a/b", "a/b/"), "not folders: whoever loads them knows"


# --------------------------------------------------------------------------------------------- engine


@pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"], ids=repr)
def test_limits_are_whole_numbers(name: str, value: Any) -> None:
    assert getattr(EngineConfig(**{name: 1}), name) == 1  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"^{name} must be (a whole number|at least 1), not "):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("value", [-1, 2**63, 1.0, None, True], ids=repr)
def test_seeds_are_whole_numbers(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^seed must be (a whole number, not|from 0 to)"):
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


def test_what_draft_models_read_of_long_prompts() -> None:
    windows = {window: SpeculativeConfig(drafter_window=window) for window in ("auto", "all", "64", "02048")}
    assert [config.window(on_cpu=True) for config in windows.values()] == [USUAL_WINDOW, None, 64, 2048]
    assert [config.window(on_cpu=False) for config in windows.values()] == [None, None, 64, 2048]


@pytest.mark.parametrize("window", ["", "none", "63", "-64", "1e3", "²", "64.0", None, 1024], ids=repr)
def test_windows_that_are_not_understood(window: Any) -> None:
    with pytest.raises(ValueError, match=r'^drafter_window: .* is not understood; use "all", "auto", or a number'):
        SpeculativeConfig(drafter_window=window)


@pytest.mark.parametrize("given", [{"memory_budget": "4GiB"}, {"offload_folder": "packed"}])
def test_a_budget_or_folder_without_offloading_is_refused(given: dict[str, str]) -> None:
    assert OffloadConfig().offload is None
    assert OffloadConfig("disk", **given).offload == "disk"  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{next(iter(given))}: it is for targets that are streamed"):
        OffloadConfig(**given)  # type: ignore[arg-type]
