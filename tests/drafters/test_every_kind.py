"""Every kind of drafter that is a model: with it text is the target's own, and nothing is left of a request."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import reference
from assistants import save_assistant
from heads import llm_of, outputs_beside_an_abort, save_block, save_eagle3, texts_of
from pair_heads import save_eagle, save_mtp
from reference.texts import assert_first_tokens_are_distributed_as_the_models
from specinfer import LLM, SamplingParams
from specinfer.core.rules import RULES
from specinfer.drafters import sparse_context
from tiny import make_model, random_prompts, save_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = random_prompts([5, 40, 1, 17])
SAMPLED_PROMPTS = random_prompts([7, 9, 7, 70, 12])
SAMPLED = [
    SamplingParams(temperature=temperature, seed=i, max_tokens=40, presence_penalty=i % 2)
    for i, temperature in enumerate((1.0, 1.0, 0.8, 1.0, 0.0))
]
slow, distributed = pytest.mark.slow, pytest.mark.distributed

# The target, and a function that writes a drafter into a folder, or the drafter's name.
KINDS: dict[str, tuple[str, Callable[[Path], Path] | str]] = {
    "small": ("llama", lambda at: save_model(at, noise=0.5)),
    "deep small": ("deep", lambda at: save_model(at, noise=0.5, num_hidden_layers=8)),
    "EAGLE-3": ("deep", lambda at: save_eagle3(at, draft_ids=range(2, 90))),
    "another EAGLE-3": ("deep", lambda at: save_eagle3(at, seed=1)),
    "EAGLE": ("llama", save_eagle),
    "MTP": ("mimo", "mtp"),
    "P-EAGLE": ("deep", lambda at: save_eagle3(at, parallel=True, mask_token_id=90)),
    "DFlash": ("deep", save_block),
    "JetSpec": ("deep", lambda at: save_block(at, "jetspec")),
    "DSpark": ("deep", lambda at: save_block(at, "dspark")),
    **{
        f"assistant of {target}": (target, lambda at: save_assistant(at, clusters=8))
        for target in ("gemma4_text", "gemma4_text-shared", "gemma4_text-alike", "gemma4_text-moe")
    },
    "copy": ("llama", "self:int4"),
    "sparse": ("llama", "self:sparse"),
    "sparse copy": ("llama", "self:int4-sparse"),
}
ASSISTANT = "assistant of gemma4_text"


class Pair(NamedTuple):
    """A target and a drafter, and transformers' definition of the target."""

    target: Path
    drafter: str
    model: Any

    def llm(self, *more: str, **options: Any) -> LLM:
        return llm_of(self.target, self.drafter, *more, **options)


@pytest.fixture(scope="module")
def pair_of(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    @cache
    def target(family: str) -> tuple[Path, Any]:
        if family == "mimo":
            folder = tmp_path_factory.mktemp("mimo")
            return folder, save_mtp(folder, "mimo")[0]
        changes = {"num_hidden_layers": 8} if family == "deep" else {}
        family = "llama" if family == "deep" else family
        return model_folder(family, **changes), make_model(family, **changes)

    @cache
    def pair(kind: str) -> Pair:
        family, save = KINDS[kind]
        folder, model = target(family)
        return Pair(folder, save if isinstance(save, str) else str(save(tmp_path_factory.mktemp("drafter"))), model)

    return pair


@pytest.fixture(scope="module")
def greedy_text(pair_of: Callable[[str], Pair]) -> Callable[[str, Sequence[Sequence[int]]], list[list[int]]]:
    @cache
    def text(family: str, prompt: tuple[int, ...]) -> list[int]:
        kind = next(kind for kind, (target, _) in KINDS.items() if target == family)
        return reference.greedy(pair_of(kind).model, prompt, 24)

    return lambda kind, prompts: [text(KINDS[kind][0], tuple(prompt)) for prompt in prompts]


@pytest.fixture(autouse=True)
def _small_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out much of contexts that tiny models can have, where drafts are over a part of them."""
    monkeypatch.setattr(sparse_context, "_LEAST", 12)
    monkeypatch.setattr(sparse_context, "_PAGE", 1)


def _check_nothing_is_left(llm: LLM) -> None:
    assert llm.drafter is not None
    for slots in (llm.target.cache, *(drafter.runner.cache for drafter in llm.drafter.models)):
        assert slots.is_balanced()
        assert slots.num_owned == 0
    assert not any(drafter.cache.known for drafter in llm.drafter.models)


@pytest.mark.parametrize(
    ("kind", "tree", "more", "options"),
    [
        *((kind, tree, (), {}) for kind in ("EAGLE-3", "EAGLE", "copy") for tree in ("3,2,2", "best-first:24:6")),
        ("EAGLE-3", "auto", (), {}),
        ("EAGLE-3", "2,2,1", (), {"offload": "disk"}),
        ("MTP", "3,2,2", (), {"drafter_quantization": "int8"}),
        ("MTP", "3,2,2", (), {"offload": "disk"}),
        ("MTP", "best-first:16:4", ("suffix",), {}),
        pytest.param("MTP", "3,2,2", (), {"tensor_parallel_size": 2}, marks=distributed),
        pytest.param("MTP", "3,2,2", (), {"pipeline_parallel_size": 2}, marks=distributed),
        ("DFlash", "1,1,1,1", (), {}),
        ("DFlash", "best-first:24:6", (), {}),
        ("JetSpec", "3,2,2", (), {}),
        ("DSpark", "best-first:24:6", (), {}),
        ("P-EAGLE", "auto", (), {}),
        (ASSISTANT, "1,1,1,1", ("suffix",), {}),
        ("assistant of gemma4_text-shared", "3,2,2", ("suffix",), {}),
        ("assistant of gemma4_text-shared", "2,2,1", (), {"offload": "disk"}),
        ("assistant of gemma4_text-alike", "best-first:24:6", ("suffix",), {}),
        ("assistant of gemma4_text-moe", "2,1,1", ("suffix",), {}),
        ("copy", "1,1,1,1", ("suffix",), {}),
        ("copy", "auto", ("suffix",), {}),
        ("sparse", "3,2,2", (), {}),
        ("sparse", "auto", (), {}),
        ("sparse copy", "best-first:24:6", ("suffix",), {}),
    ],
    ids=str,
)
def test_greedy_text_is_that_of_transformers(
    kind: str,
    tree: str,
    more: Sequence[str],
    options: dict[str, Any],
    pair_of: Callable[[str], Pair],
    greedy_text: Callable[..., list[list[int]]],
    tmp_path: Path,
) -> None:
    if "offload" in options:
        options = options | {"offload_folder": tmp_path}
    with pair_of(kind).llm(*more, tree=tree, **options) as llm:
        for prompts in (PROMPTS, PROMPTS[1:2]):  # the second time from a cached prefix
            assert texts_of(llm, prompts, GREEDY) == greedy_text(kind, prompts)
        _check_nothing_is_left(llm)


@pytest.fixture(scope="module")
def sampled_text(pair_of: Callable[[str], Pair]) -> Callable[[str], list[list[int]]]:
    """Text without a drafter, by the target's folder."""

    @cache
    def text(target: Path) -> list[list[int]]:
        with llm_of(target, tree="off") as llm:
            return texts_of(llm, SAMPLED_PROMPTS, SAMPLED)

    return lambda kind: text(pair_of(kind).target)


@pytest.mark.parametrize("tree", ["2,2,1", "best-first:16:5"])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("EAGLE-3", ()),
        ("EAGLE-3", ("suffix",)),
        ("DSpark", ("suffix",)),
        ("P-EAGLE", ("suffix",)),
        *(pytest.param(kind, ("suffix",), marks=slow) for kind in ("DFlash", "JetSpec")),
        (ASSISTANT, ("suffix",)),
        ("sparse", ()),
    ],
    ids=str,
)
def test_sampled_text_does_not_depend_on_the_drafter(
    tree: str,
    kind: str,
    more: Sequence[str],
    pair_of: Callable[[str], Pair],
    sampled_text: Callable[[str], list[list[int]]],
) -> None:
    with pair_of(kind).llm(*more, tree=tree) as llm:
        assert texts_of(llm, SAMPLED_PROMPTS, SAMPLED) == sampled_text(kind)


HEADS, COPIES = ("EAGLE-3", "DFlash", "DSpark", "deep small"), ("small", "copy", "sparse")


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        (HEADS, {"tree": "2,1,1", "select": "hedge:1"}),
        (HEADS, {"tree": "best-first:8", "select": "hedge", "verification": "target-only"}),
        (COPIES, {"tree": "2,1,1", "select": "hedge:1"}),
        (COPIES, {"tree": "2,1,1", "select": "hedge:1", "verification": "target-only"}),
        ((ASSISTANT, "small"), {"tree": "2,2,1", "select": "hedge:1"}),
        ((ASSISTANT, "small"), {"tree": "best-first:16:5"}),
    ],
    ids=str,
)
def test_drafters_that_are_chosen_or_not_change_no_text(
    kinds: Sequence[str],
    options: dict[str, Any],
    pair_of: Callable[[str], Pair],
    sampled_text: Callable[[str], list[list[int]]],
) -> None:
    first, *others = kinds
    with pair_of(first).llm(*(pair_of(kind).drafter for kind in others), "suffix", **options) as llm:
        assert texts_of(llm, SAMPLED_PROMPTS, SAMPLED) == sampled_text(first)
        _check_nothing_is_left(llm)
        assert llm.drafter is not None
        assert llm.drafter.num_failures == {}
        if llm.drafter.selection is not None:
            traffic = llm.drafter.selection.hedge._traffic
            assert all(losses.denominator for losses in traffic.values()), "each is scored, asked or not"


@pytest.mark.parametrize(
    ("kind", "rule", "more"),
    [
        ("EAGLE-3", "multi-step", ("another EAGLE-3",)),  # one of the two is chosen
        ("EAGLE-3", "target-only", ()),
        *(pytest.param("EAGLE-3", rule, (), marks=slow) for rule in ("traversal", "coupled")),
        ("DFlash", "multi-step", ()),
        ("DSpark", "traversal", ()),
        (ASSISTANT, "multi-step", ()),
        *(("copy", rule, ()) for rule in RULES),
        *(("sparse", rule, ()) for rule in ("multi-step", "traversal")),
    ],
    ids=str,
)
def test_every_rule_draws_from_the_targets_distribution(
    kind: str, rule: str, more: Sequence[str], pair_of: Callable[[str], Pair]
) -> None:
    drafters, select = [pair_of(name).drafter for name in more], "hedge:1" if more else "all"
    options = {"tree": "3,2", "verification": rule, "select": select, "max_num_seqs": 64, "seed": 3}
    with pair_of(kind).llm(*drafters, **options) as llm:
        prompt = random_prompts([20 if kind == "sparse" else 6])[0]  # longer than the part that is attended to
        assert_first_tokens_are_distributed_as_the_models(llm, pair_of(kind).model, prompt)


@pytest.mark.parametrize(
    ("kind", "num_copies", "memory"),
    [("EAGLE-3", 4, 700_000), ("assistant of gemma4_text-shared", 1, 70_000), ("copy", 1, 33_000)],
)
def test_preempted_and_aborted_requests_leave_nothing(
    kind: str,
    num_copies: int,
    memory: int,
    pair_of: Callable[[str], Pair],
    greedy_text: Callable[..., list[list[int]]],
) -> None:
    prompts = random_prompts([30, 12, 25, 9])
    wanted = greedy_text(kind, prompts)
    limits = {"max_num_seqs": 4 * num_copies, "max_model_len": 64, "kv_cache_memory_bytes": memory}
    with pair_of(kind).llm(tree="2,2,1", **limits) as llm:
        assert texts_of(llm, prompts * num_copies, GREEDY) == wanted * num_copies
        assert llm.engine.metrics.num_preempted > 0
        assert outputs_beside_an_abort(llm, prompts, GREEDY) == wanted[1:]
        _check_nothing_is_left(llm)
