"""Heads on hidden states that draft on the device: the tokens of plain decoding, and the trees of host steps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from assistants import save_assistant
from heads import save_block, save_cycle, save_cycle_block, save_eagle3
from on_device import (
    MIXED_PARAMS,
    WAYS,
    Pair,
    check_left,
    check_same_tokens,
    executor_of,
    in_each_way,
    load_device_head,
    load_plain,
    make_device_engine,
    plain_tokens,
    repeating_requests,
    run_on_device,
)
from pair_heads import save_eagle, save_mtp
from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import OFF, TreeBudget
from specinfer.demo.corpus import heldout_prompts
from specinfer.demo.pair import demo_folders, head_folder
from specinfer.drafters import FeatureDrafter
from specinfer.engine.commit import Committer
from specinfer.engine.executor import Outcome
from specinfer.model.definition import load_tokenizer
from specinfer.model.heads.assistant import AssistantHead
from specinfer.model.heads.load import load_head
from specinfer.policy.base import FixedPolicy
from tiny import make_request, quick, random_prompts, requests_of, run, save_model

KINDS = ["EAGLE-3", "reduced vocabulary", "EAGLE", "MTP"]
WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "sliding_window_non_causal": False}
WINDOW |= {"layer_types": ["full_attention", "sliding_attention"]}
BLOCKS: dict[str, dict[str, Any]] = {
    "dflash": WINDOW,
    "dflash, from the anchor": {"layout": "speculators", "sample_from_anchor": True, "draft_ids": range(3, 90, 2)},
    "jetspec": {"block_size": 3},  # trees have more levels
    "dspark": {},
    "dspark, reduced vocabulary": {"layout": "speculators", "sample_from_anchor": False, "draft_ids": range(2, 90, 3)},
}
P_EAGLE = {"P-EAGLE": 4, "P-EAGLE of one": 1}
# What heads read of a target with so few layers, in each format.
EAGLE_READS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
BLOCK_READS = {"target_layer_ids": [0, 2], "aux_hidden_state_layer_ids": [1, 3]}
ASSISTANTS = {"assistant": ("gemma4_text", 0), "assistant, clusters": ("gemma4_text-shared", 8)}
KINDS += [*BLOCKS, *P_EAGLE, *ASSISTANTS]
DRAWN = ["EAGLE-3", "reduced vocabulary", "dspark", "assistant"]
TREES = {
    "1,1,1": TreeBudget.expansion((1, 1, 1), num_drafters=3),
    "3,2,1": TreeBudget.expansion((3, 2, 1), num_drafters=3),
    "best-first": TreeBudget(max_nodes=12, max_depth=4),
}
CYCLE = SamplingParams(temperature=0.0, max_tokens=43)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("heads")
    target = load_plain(save_model(folder / "target", num_hidden_layers=4))
    save_mtp(folder / "mtp", "mimo")
    own, draft_ids = load_plain(folder / "mtp"), range(2, 90, 3)
    blocks = {kind: save_block(folder / kind, kind.partition(",")[0], **BLOCKS[kind], **BLOCK_READS) for kind in BLOCKS}
    for kind, size in P_EAGLE.items():
        blocks[kind] = save_eagle3(
            folder / kind, parallel=True, mask_token_id=90, num_speculative_tokens=size, **EAGLE_READS
        )  # fmt: skip
    assistants: dict[str, Pair] = {}
    for kind, (family, clusters) in ASSISTANTS.items():
        loaded = load_plain(save_model(folder / family, family))
        assistants[kind] = loaded, load_head(save_assistant(folder / kind, clusters=clusters), loaded)
        head = assistants[kind][1].model
        assert isinstance(head, AssistantHead)
        head.speak(head.dialects[clusters > 0])
    return {
        **assistants,
        **{kind: (target, load_device_head(path, target)) for kind, path in blocks.items()},
        "EAGLE-3": (
            target,
            load_head(save_eagle3(folder / "whole", **EAGLE_READS), target),
        ),  # with the modules of transformers
        "reduced vocabulary": (
            target,
            load_device_head(save_eagle3(folder / "part", draft_ids=draft_ids, **EAGLE_READS), target),
        ),
        "EAGLE": (target, load_device_head(save_eagle(folder / "first"), target)),
        "MTP": (own, load_device_head(folder / "mtp", own)),
    }


@pytest.fixture(scope="module")
def plain(pairs: dict[str, Pair]) -> dict[str, list[list[int]]]:
    """Return the tokens of plain decoding by the target of each kind."""
    targets = {id(target): target for target, _ in pairs.values()}
    found = {key: plain_tokens(target, _requests()) for key, target in targets.items()}
    return {kind: found[id(target)] for kind, (target, _) in pairs.items()}


@pytest.fixture(scope="module", params=["EAGLE-3", "DSpark"])
def cycle(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Pair:
    """Return a target, and a head that is always right: an error of pairing, position or level is a wrong token."""
    folder = tmp_path_factory.mktemp("cycle")
    target, head = save_cycle(folder)
    loaded = load_plain(target)
    if request.param == "DSpark":
        return loaded, load_device_head(save_cycle_block(folder / "block"), loaded)
    return loaded, load_device_head(head, loaded)


def _requests() -> list[Request]:
    return repeating_requests(MIXED_PARAMS, [6, 9, 15, 7])


def _cycle(first: int, length: int) -> list[int]:
    found = [first]
    while len(found) < length:
        found.append((found[-1] * 5 + 3) % 64)
    return found


# -------------------------------------------------------------------------------------------- tokens


@pytest.mark.covering(1)
@pytest.mark.parametrize("lookups", [(), ("suffix",)])
@pytest.mark.parametrize("tree", quick(TREES, "best-first"))  # below, fixed trees have the tokens of host steps
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_plain_decoding(
    kind: str, tree: str, lookups: tuple[str, ...], pairs: dict[str, Pair], plain: dict[str, list[list[int]]]
) -> None:
    check_same_tokens(pairs[kind], TREES[tree], _requests, plain[kind], all_on_device=True, lookups=lookups)


@pytest.mark.covering(1)
@pytest.mark.parametrize("lookups", [("suffix",), ()])
@pytest.mark.parametrize("tree", ["3,2,1", "1,1,1"])  # the first with most kinds
@pytest.mark.parametrize("kind", KINDS)
def test_fixed_trees_are_those_of_host_steps(
    kind: str, tree: str, lookups: tuple[str, ...], pairs: dict[str, Pair], trees: dict[str, list[Any]]
) -> None:
    told, tables = [], []
    for engine, _ in in_each_way(pairs[kind], TREES[tree], _requests, lookups=lookups):
        told.append(dict(trees))
        trees.clear()
        tables.append(engine.drafter.calibration.state("small"))
    assert told[0] == told[1] == told[2]
    assert sum(map(len, told[0].values())) > 30
    assert tables[1:] == [pytest.approx(tables[0], rel=1e-4)] * 2


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", ["multi-step", "traversal"])
@pytest.mark.parametrize(
    "kind",
    quick([*DRAWN, "dflash", "P-EAGLE"], *DRAWN),
)
def test_tokens_are_drawn_as_in_host_steps(
    kind: str, rule: str, pairs: dict[str, Pair], trees: dict[str, list[Any]]
) -> None:
    told, tables = [], []
    for engine, requests in in_each_way(pairs[kind], TreeBudget.expansion((3, 2, 1)), _requests, verification=rule):
        told.append((dict(trees), [(request.output_ids, request.uniforms.state) for request in requests]))
        trees.clear()
        tables.append(engine.drafter.calibration.state("small sampled"))
    assert told[0] == told[1] == told[2]
    assert tables[1:] == [pytest.approx(tables[0], rel=1e-4)] * 2


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", ["multi-step", "traversal"])
@pytest.mark.parametrize("kind", quick([*DRAWN, "dflash", "P-EAGLE"], *DRAWN))
def test_no_confidence_of_a_head_tells_which_tokens_were_drawn(
    kind: str, rule: str, pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Siblings of best-first trees have the same, also where a head predicts it."""
    found, store = list[Outcome](), Committer.store

    def stored(self: Committer, outcomes: Sequence[Outcome]) -> int:
        found.extend(one for one in outcomes if not one.span.request.params.is_greedy)
        return store(self, outcomes)

    monkeypatch.setattr(Committer, "store", stored)
    engine, requests = make_device_engine(*pairs[kind], TREES["best-first"], verification=rule), _requests()
    assert run_on_device(engine, requests) == set(requests)
    num_siblings = 0
    for one in found:
        siblings: dict[int, list[float]] = {}
        for draw in one.tree.draws if one.tree else ():
            siblings.setdefault(one.tree.parents[draw.node], []).append(draw.confidence)
        assert all(len(set(confidence)) == 1 for confidence in siblings.values())
        num_siblings += sum(map(len, siblings.values())) - len(siblings)
    assert num_siblings > 20
    check_left(engine)


@pytest.mark.parametrize("kind", ["EAGLE-3", "jetspec"])
def test_a_head_drafts_beside_a_small_model(
    kind: str, pairs: dict[str, Pair], plain: dict[str, list[list[int]]], trees: dict[str, list[Any]]
) -> None:
    """In both orders, since the last one has the trees of both; also where it has fewer levels."""
    target, head = pairs[kind]
    for drafters in ([head, target], [target, head]):
        told = []
        for way in WAYS:
            engine = make_device_engine(target, drafters, TREES["3,2,1"], **way)
            requests = _requests()
            assert run(engine, requests) == plain[kind]
            told.append(dict(trees))
            trees.clear()
        assert told[0] == told[1] == told[2]
        assert executor_of(engine).num_launched > 3
        check_left(engine)


# ------------------------------------------------------------------------------------------ acceptance


@pytest.mark.parametrize("tree", [TreeBudget.expansion((1,) * 6), TreeBudget(max_nodes=12, max_depth=6)], ids=str)
def test_a_perfect_head_is_accepted_at_every_level(tree: TreeBudget, cycle: Pair) -> None:
    """Also of a prompt that is cached, and after the head has lost what it had computed of that."""
    engine = make_device_engine(*cycle, tree, keeps_prefixes=True)
    for turn in range(3):
        requests = [make_request(f"{turn} {i}", _cycle(i, 9 + 20 * i), CYCLE) for i in range(3)]
        served = run_on_device(engine, requests)
        assert served == set(requests)
        assert [one.output_ids for one in requests] == [_cycle(i, 52 + 20 * i)[9 + 20 * i :] for i in range(3)]
        assert [one.speculation.tokens_per_pass for one in requests] == [pytest.approx(43 / 7, abs=0.2)] * 3
        if turn == 1:
            cache = executor_of(engine)._drafts._drafters[0].runner.cache
            cache._free_slots(cache._prefixes.evict(10_000))
    check_left(engine)


class Turning(FixedPolicy):
    """Trees of another depth in each step, and now and then none."""

    def __init__(self, depths: Sequence[int]) -> None:
        super().__init__()
        self._depths, self._step = depths, 0

    def budgets(self, spans: Sequence[Span], reading: Sequence[Span] = ()) -> list[TreeBudget]:
        self._step += 1
        depth = self._depths[self._step % len(self._depths)]
        return [TreeBudget.expansion((1,) * depth) if depth else OFF] * len(spans)


@pytest.mark.parametrize(("depths", "least"), [((6, 1), 1.8), ((6, 2, 3), 2.4), ((4, 0), 2.0), ((3, 3, 0, 5, 1), 2.0)])
def test_a_head_reads_paths_that_are_longer_than_the_next_tree(
    depths: Sequence[int], least: float, cycle: Pair
) -> None:
    """It reads the rest in the steps after, and drafts when it has read all."""
    engine = make_device_engine(*cycle, Turning(depths))
    requests = [make_request(str(i), _cycle(i, 9 + 20 * i), CYCLE) for i in range(3)]
    run(engine, requests)
    assert [one.output_ids for one in requests] == [_cycle(i, 52 + 20 * i)[9 + 20 * i :] for i in range(3)]
    assert min(one.speculation.tokens_per_pass for one in requests) > least
    counts = [one.speculation for one in requests]
    assert all(one.num_accepted_draft_tokens >= one.num_draft_tokens - 6 for one in counts), "no draft token was wrong"
    check_left(engine)


@pytest.mark.parametrize("depths", [(6, 1, 3), (4, 0)])
def test_what_a_head_keeps_is_what_it_would_read_anew(depths: Sequence[int], cycle: Pair) -> None:
    engine = make_device_engine(*cycle, Turning(depths))
    requests = [make_request(str(i), _cycle(i, 9 + 20 * i), replace(CYCLE, max_tokens=90)) for i in range(2)]
    for request in requests:
        engine.add(request)
    for _ in range(14):
        engine.step()
    assert executor_of(engine).num_launched > 6
    engine._abandon()
    fresh = make_device_engine(*cycle, has_device_executor=False)
    again = [make_request(one.request_id, one.token_ids, CYCLE) for one in requests]
    for request in again:
        fresh.add(request)
    fresh.step()
    engines: list[Any] = [engine, fresh]
    drafters = [drafter for of in engines for drafter in of.drafter.drafters if isinstance(drafter, FeatureDrafter)]
    for request in again:
        assert drafters[1].read(request)
        kept, read = (one.runner.cache.slots(request.request_id) for one in drafters)
        assert len(kept) > len(request.prompt_ids) - 12
        stores = [one.runner.tensors for one in drafters]
        for pools in zip(*(store.keys for store in stores), strict=True):
            found, wanted = pools[0][kept], pools[1][read[: len(kept)]]
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.covering(1)
@pytest.mark.parametrize("tree", [TREES["3,2,1"], TreeBudget(max_nodes=16, max_depth=6)], ids=str)
@pytest.mark.parametrize("name", ["demo-eagle3", "demo-dspark"])
def test_a_trained_head_is_accepted_as_often_as_in_host_steps(name: str, tree: TreeBudget) -> None:
    target = load_plain(demo_folders().target)
    head = load_device_head(head_folder(name), target)
    tokenizer = load_tokenizer(target.folder)
    prompts = [tokenizer.encode(text) for text in heldout_prompts(2)]
    # Noise of fixed expansions is that of host steps only where no vocabulary is larger than their best tokens.
    params = [SamplingParams(temperature=0.0 if tree.widths else 0.8 * (i % 2), max_tokens=32) for i in range(2)]
    rates = []
    for _, requests in in_each_way((target, head), tree, requests_of(prompts, params)):
        counts = [one.speculation for one in requests]
        rates.append(sum(one.num_generated for one in counts) / sum(one.num_target_passes for one in counts))
    assert rates[0] > 1.5
    assert rates[1:] == [pytest.approx(rates[0], rel=1e-9 if tree.widths else 0.05)] * 2


@pytest.mark.parametrize("kind", ["EAGLE-3", "dflash"])
def test_at_the_end_of_the_context(
    kind: str, pairs: dict[str, Pair], trees: dict[str, list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    target, head = pairs[kind]
    target, head = replace(target, max_position=64), replace(head, max_position=64)

    def requests() -> list[Request]:
        params = SamplingParams(temperature=0.0, max_tokens=None)
        return [make_request(str(i), p, params, max_model_len=64) for i, p in enumerate(random_prompts([50, 42]))]

    plain = plain_tokens(target, requests())
    assert [len(tokens) for tokens in plain] == [14, 22]
    for tree in TREES.values():
        check_same_tokens((target, head), tree, requests, plain)
        assert "failed" not in caplog.text
        if tree.widths:
            on_device = dict(trees)
            trees.clear()
            run(make_device_engine(target, head, tree, has_device_executor=False), requests())
            assert on_device == dict(trees)
        trees.clear()


def test_policies_that_ask_now_and_then(pairs: dict[str, Pair], plain: dict[str, list[list[int]]]) -> None:
    kind, policy = "reduced vocabulary", Turning((3, 0, 1, 0, 0, 2))
    _, requests = check_same_tokens(pairs[kind], policy, _requests, plain[kind])
    assert sum(one.speculation.num_draft_tokens for one in requests) > 20
