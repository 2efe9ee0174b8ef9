"""Drafts of host steps by one program: the trees of steps on the device, and one wait for all levels."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heads import save_tiny_block, save_tiny_head
from on_device import (
    CPU,
    MIXED_PARAMS,
    WAYS,
    Pair,
    check_left,
    come_and_go,
    in_each_way,
    load_plain,
    make_device_engine,
    plain_tokens,
    repeating_requests,
)
from specinfer import StructuredOutputsParams
from specinfer.core.grammar.compiler import GrammarCompiler
from specinfer.core.lookups import GRAMMAR
from specinfer.core.request import FinishReason, Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TreeBudget
from specinfer.drafters.drafter_cache import DrafterCache
from specinfer.drafters.growth.calibration import Calibration
from specinfer.drafters.small_model import SmallModelDrafter
from specinfer.drafters.tree_grower import GrownTree, Wanted
from specinfer.engine.device import processing
from specinfer.engine.device.draft_programs import DraftPrograms
from specinfer.engine.device.launch_size import LaunchSize
from specinfer.engine.device.processing import AdjustedRows, Processing
from specinfer.engine.engine import Engine
from specinfer.engine.executor import StepResult
from specinfer.engine.host_executor import HostExecutor
from specinfer.model.graphs.capture import CaptureError, Graphs
from specinfer.model.heads.load import load_head
from specinfer.model.runner import ModelRunner
from specinfer.ops.cpu import transfers
from specinfer.ops.logits import Adjustments
from specinfer.verify import device_batch
from tests.engine.device.late_stream import LateStream, make_executor_late
from tiny import EOS, VOCAB, make_request, make_tokenizer, random_prompts, run

COMPILER = GrammarCompiler(make_tokenizer(), VOCAB, (EOS,))
TREES = {
    "best first": TreeBudget(12, 4),
    "wide": TreeBudget.expansion((3, 2, 1)),
    "chain": TreeBudget.expansion((1,) * 5),
    "one": TreeBudget(1, 1),
}


@pytest.fixture(scope="module")
def pair(model_folder: Callable[..., Path]) -> Pair:
    return load_plain(model_folder("llama")), load_plain(model_folder("llama", 0, 0.1))


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[list[int]]:
    return come_and_go(make_device_engine(pair[0], has_device_executor=False), 3)


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Return the number of trees of each draft by a program, or None where it could not grow them."""
    found, draft = list[int | None](), DraftPrograms.draft

    def counted(programs: DraftPrograms, wanted: Sequence[Wanted]) -> list[GrownTree] | None:
        grown = draft(programs, wanted)
        found.append(None if grown is None else len(grown))
        return grown

    monkeypatch.setattr(DraftPrograms, "draft", counted)
    return found


def constrain(request: Request, regex: str) -> None:
    request.eos_token_ids = (EOS,)
    request.grammar = COMPILER.compile(StructuredOutputsParams(regex=regex))


def _outcomes(requests: Sequence[Request]) -> list[tuple[Any, ...]]:
    return [(one.output_ids, one.speculation.as_dict()) for one in requests]


def _engine(pair: Pair, tree: TreeBudget, **options: Any) -> Engine:
    return make_device_engine(*pair, tree, **WAYS[1], **options)


def _small_model(engine: Engine) -> SmallModelDrafter:
    (found,) = [one for one in engine.drafter.drafters if isinstance(one, SmallModelDrafter)]
    return found


@pytest.mark.parametrize("tree", TREES)
def test_trees_are_those_of_steps_on_the_device(
    tree: str, pair: Pair, drafts: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is learned meanwhile: steps on the device take over what is learned every few steps."""
    monkeypatch.setattr(Calibration, "observe", lambda *_: None)
    found = []
    repeating = partial(repeating_requests, MIXED_PARAMS[:3], (6, 9, 5))
    for _, requests in in_each_way(pair, TREES[tree], repeating, WAYS[1:]):
        found.append(_outcomes(requests))
    assert found[0] == found[1]
    assert len(drafts) > 5
    assert None not in drafts


@pytest.mark.parametrize("tree", ["best first", "wide"])
@pytest.mark.parametrize("stagger", [1, 3])
def test_requests_that_come_and_go_on_a_late_device(
    tree: str, stagger: int, pair: Pair, plain: list[list[int]], drafts: list[int | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Prompts are read while others draft, and a draft waits for the device once."""
    stream = LateStream()
    make_executor_late(stream, monkeypatch)
    engine = _engine(pair, TREES[tree], keeps_prefixes=True)
    assert come_and_go(engine, stagger) == plain
    assert stream.longest >= 3, "nothing was late"
    assert 5 < stream.num_waits == len(drafts)


@pytest.mark.parametrize("asked", [None, 2])
@pytest.mark.parametrize("rule", ["coupled", "traversal"])
def test_a_host_step_waits_for_the_device_twice(
    rule: str, asked: int | None, pair: Pair, drafts: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its trees, and for what is accepted; whatever the rule, the levels and the number of requests.

    Where log-probabilities are asked for it waits for these once more.
    """
    stream, fetched, steps = LateStream(), list[int](), list[int]()
    make_executor_late(stream, monkeypatch)
    fetch, finish = transfers.fetch, HostExecutor.verify

    def counted(tensors: Sequence[Tensor]) -> list[Any]:
        fetched.append(len(tensors))
        return fetch(tensors)

    def noted(executor: HostExecutor) -> StepResult:
        steps.append(len(executor.spans))
        return finish(executor)

    monkeypatch.setattr(transfers, "is_apart", lambda _: True)
    for module in (transfers, device_batch):
        monkeypatch.setattr(module, "fetch", counted)
    monkeypatch.setattr(HostExecutor, "verify", noted)
    params = [replace(one, max_tokens=18, logprobs=asked) for one in MIXED_PARAMS[:3]]
    run(_engine(pair, TREES["wide"], verification=rule), repeating_requests(params, (6, 9, 5)))
    assert 5 < stream.num_waits == len(drafts) <= len(steps)
    assert len(fetched) == (1 if asked is None else 2) * len(steps)
    assert None not in drafts


@pytest.mark.parametrize("tree", ["wide", "best first"])
@pytest.mark.parametrize("rule", ["multi-step", "traversal"])
def test_tokens_are_drawn_as_in_steps_on_the_device(
    rule: str, tree: str, pair: Pair, drafts: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same random numbers; fixed expansions as level by level, too."""
    monkeypatch.setattr(Calibration, "observe", lambda *_: None)
    found = []
    for way in WAYS:
        engine = make_device_engine(*pair, TREES[tree], verification=rule, **way)
        requests = repeating_requests(MIXED_PARAMS[:3], (6, 9, 5))
        run(engine, requests)
        found.append(
            [(*one, request.uniforms.state) for one, request in zip(_outcomes(requests), requests, strict=True)]
        )
    assert found[1] == found[2]
    assert found[0] == found[1] or not TREES[tree].widths
    assert len(drafts) > 5
    assert None not in drafts


ADJUSTED = [
    SamplingParams(temperature=0.0, max_tokens=25, repetition_penalty=1.2),
    SamplingParams(max_tokens=18, presence_penalty=0.8, logit_bias={3: 4.0, 9: -100.0}, top_k=9),
    SamplingParams(temperature=0.0, max_tokens=22, frequency_penalty=0.6, min_tokens=9),
    SamplingParams(temperature=0.0, max_tokens=30),
    SamplingParams(max_tokens=20, temperature=0.7, allowed_token_ids=range(60)),
]


@pytest.mark.parametrize("rule", ["coupled", "traversal"])
def test_biases_and_penalties_are_those_of_growth_level_by_level(
    rule: str, pair: Pair, drafts: list[int | None]
) -> None:
    """Requests come and go; each keeps its row, to which the tokens that it emits are added."""
    found = []
    repeating = partial(repeating_requests, ADJUSTED, (6, 9, 5, 7, 4))
    for _, requests in in_each_way(pair, TREES["wide"], repeating, WAYS[:2], verification=rule, max_num_seqs=3):
        found.append((_outcomes(requests), [one.uniforms.state for one in requests]))
    assert found[0] == found[1]
    assert sum(one["num_accepted_draft_tokens"] for _, one in found[0][0]) > 20
    assert len(drafts) > 5
    assert None not in drafts


def test_rows_of_penalties_are_taken_over_by_other_requests() -> None:
    rows = AdjustedRows(2, VOCAB, CPU)
    assert rows.can_adjust()
    requests = [make_request(str(i), [1, 2, i + 3], ADJUSTED[0], seed=i) for i in range(3)]
    plain = make_request("plain", [5], ADJUSTED[3])
    for request in requests:
        assert rows.update([plain]) == [2]
        request.append(7, None)
        [row] = rows.update([request])
        request.append(7, None)
        request.append(8, None)
        assert rows.update([plain, request]) == [2, row]
        seen = rows._adjustments.seen[row]
        assert seen.nonzero().flatten().tolist() == [*request.prompt_ids, 7, 8]
        assert seen[[*request.prompt_ids, 7, 8]].tolist() == [1, 1, 1, 4, 2]
        assert not rows._adjustments.is_adjusted[2]
    requests[1].finish(FinishReason.ABORT)
    assert rows.update([requests[0], requests[2]]) in ([0, 1], [1, 0])


@pytest.mark.parametrize("num_sent", [2, 5, 7])
def test_rows_of_penalties_are_written_anew_after_an_interrupt(
    num_sent: int, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may come when tokens were counted and not yet sent, or in the middle of a new row."""
    engine, [request] = _engine(pair, TREES["chain"]), repeating_requests([ADJUSTED[0]], (6,))
    programs, send, num_left = _small_model(engine)._loop, transfers.send, [num_sent]
    assert isinstance(programs, DraftPrograms)

    def interrupted(*args: Any) -> Tensor:
        num_left[0] -= 1
        if not num_left[0]:
            raise KeyboardInterrupt
        return send(*args)

    monkeypatch.setattr(processing, "send", interrupted)
    engine.add(request)
    while engine.has_work:
        with suppress(KeyboardInterrupt):
            engine.step()
        for row, num_counted in programs._adjusted._rows.values():
            counts = np.bincount(request.output_ids[:num_counted], minlength=VOCAB) * 2
            counts[request.prompt_ids] += 1
            assert programs._adjusted._adjustments.seen[row].tolist() == counts.tolist()
    assert num_left[0] < 0
    assert len(programs._adjusted._free) + len(programs._adjusted._rows) == programs._num_rows


def test_without_memory_for_penalties_trees_grow_level_by_level(
    pair: Pair, drafts: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of requests with penalties, next to others, whose trees a program grows in the same step."""
    wanted = plain_tokens(pair[0], repeating_requests(MIXED_PARAMS))
    engine, requests = _engine(pair, TREES["best first"]), repeating_requests(MIXED_PARAMS)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Adjustments, "empty", full)
    assert run(engine, requests) == wanted
    assert max(count or 0 for count in drafts) == len(MIXED_PARAMS) - 1
    assert all(one.speculation.num_accepted_draft_tokens for one in requests)


@pytest.mark.parametrize("tree", ["wide", "best first"])
def test_grammars_mask_the_tokens_after_the_root(tree: str, pair: Pair, drafts: list[int | None]) -> None:
    """With masks, deeper tokens that are not allowed are rejected; others are as in growth level by level."""
    found = []
    for way in WAYS[:2]:
        requests = repeating_requests([replace(one, max_tokens=24) for one in MIXED_PARAMS[:3]], (6, 9, 5))
        for request in requests[:2]:
            constrain(request, "[a-m]+( [n-z]+)*")
        requests[2].bad_words_ids = [(token,) for token in range(20)]
        engine = make_device_engine(*pair, TREES[tree], **way)
        run(engine, requests)
        assert not any(request.error for request in requests)
        found.append([request.output_ids for request in requests])
        check_left(engine)
        accepted = [request.speculation.num_accepted_draft_tokens for request in requests]
        assert all(accepted)
    assert found[0] == found[1]
    assert len(drafts) > 5
    assert None not in drafts


def test_a_grammar_that_fails_fails_its_request_alone(pair: Pair, drafts: list[int | None]) -> None:
    requests = repeating_requests([replace(MIXED_PARAMS[0], max_tokens=24)] * 3, (6, 9, 5))
    constrain(requests[1], "[a-z ]+")
    grammar, num_left = requests[1].grammar, [6]
    assert grammar is not None

    def fail(*_: Any) -> Any:
        num_left[0] -= 1
        if num_left[0] < 0:
            raise ValueError("no mask")
        return type(grammar).bits(grammar, *_)

    grammar.bits = fail  # type: ignore[method-assign]
    engine = _engine(pair, TREES["wide"])
    run(engine, requests)
    assert [request.is_finished for request in requests] == [True] * 3
    assert [bool(request.error) for request in requests] in ([False] * 3, [False, True, False])
    assert engine.drafter is not None
    assert set(engine.drafter.num_failures) <= {GRAMMAR}  # what it forces is not known, either
    check_left(engine)


def test_with_few_slots_trees_grow_level_by_level(pair: Pair, drafts: list[int | None]) -> None:
    """A program computes as many tokens for each request as its size has."""
    prompts = random_prompts([9, 12, 7])
    requests, again = ([make_request(str(i), one, MIXED_PARAMS[0]) for i, one in enumerate(prompts)] for _ in range(2))
    engine = _engine(pair, TREES["best first"], num_draft_slots=90)
    assert run(engine, requests) == plain_tokens(pair[0], again)
    assert None in drafts
    check_left(engine)


def test_a_loop_that_cannot_be_captured_grows_level_by_level(
    pair: Pair, drafts: list[int | None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, [request, again] = _engine(pair, TREES["wide"]), repeating_requests([MIXED_PARAMS[0]] * 2, (6, 9))

    def fail(*_: Any) -> None:
        raise CaptureError("no capture today")

    monkeypatch.setattr(Graphs, "captured", fail)
    run(engine, [request])
    run(engine, [again])
    assert drafts == [None], "it is tried once"
    assert caplog.text.count("the draft loop of small cannot be captured") == 1
    assert request.speculation.num_accepted_draft_tokens > 5


def test_loops_that_there_is_no_memory_for_grow_level_by_level(
    pair: Pair, plain: list[list[int]], drafts: list[int | None], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """And those of fewer requests are captured all the same."""
    make = DraftPrograms._made

    def made(self: DraftPrograms, size: LaunchSize) -> Any:
        if size.num_rows > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(self, size)

    monkeypatch.setattr(DraftPrograms, "_made", made)
    engine = _engine(pair, TREES["wide"])
    assert come_and_go(engine, 3) == plain
    assert {None, 1} == set(drafts)
    assert caplog.text.count("the draft loop of small cannot be captured for 2 requests") == 1
    check_left(engine)


def test_new_weights_are_drafted_with(pair: Pair, drafts: list[int | None]) -> None:
    engine = _engine(pair, TREES["chain"])
    [first, second] = repeating_requests([replace(MIXED_PARAMS[0], max_tokens=60)] * 2, (6, 9))
    run(engine, [first])
    _small_model(engine).replace(pair[0])  # the target itself, which is always right
    run(engine, [second])
    assert second.speculation.num_accepted_draft_tokens == second.speculation.num_draft_tokens
    assert first.speculation.num_accepted_draft_tokens < first.speculation.num_draft_tokens
    assert None not in drafts


def test_a_draft_that_fails_leaves_nothing_behind(
    pair: Pair, drafts: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not written to the tables of slots is written later."""
    [request], [wanted] = ([make_request("a", [5, 6, 7] * 5, MIXED_PARAMS[0])] for _ in range(2))
    engine, write, num_left = _engine(pair, TREES["chain"]), DraftPrograms._write, [4]

    def failing(programs: DraftPrograms, *args: Any) -> None:
        write(programs, *args)
        num_left[0] -= 1
        if not num_left[0]:
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(DraftPrograms, "_write", failing)
    assert run(engine, [request]) == run(_engine(pair, TREES["chain"]), [wanted])
    check_left(engine)
    accepted = [one.speculation.num_accepted_draft_tokens for one in (request, wanted)]
    assert accepted[0] == pytest.approx(accepted[1], abs=3)


def test_the_cache_is_that_of_growth_level_by_level(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step it has computed the same known tokens."""
    found, note = [], DrafterCache.note_read
    for way in WAYS[:2]:
        sizes = list[int]()

        def noted(cache: DrafterCache, request: Request, *args: Any, sizes: list[int] = sizes, **options: Any) -> None:
            note(cache, request, *args, **options)
            sizes.append(len(cache._cache.slots(request.request_id)))

        monkeypatch.setattr(DrafterCache, "note_read", noted)
        run(make_device_engine(*pair, TREES["wide"], **way), repeating_requests(MIXED_PARAMS[:1], (6,)))
        found.append(sizes)
    assert found[0] == found[1]


def test_best_tokens_of_sampled_requests_grow_level_by_level(pair: Pair, drafts: list[int | None]) -> None:
    """Under the target-only rule; a program adds noise to the scores of all sampled requests."""
    found = []
    for way in WAYS[:2]:
        requests = repeating_requests(MIXED_PARAMS[:3], (6, 9, 5))
        run(make_device_engine(*pair, TREES["wide"], verification="target-only", **way), requests)
        found.append(_outcomes(requests))
    assert found[0] == found[1]
    assert set(drafts) == {1}, "the greedy request"


@pytest.mark.parametrize("num_slots", [70, 80])
def test_with_few_slots_a_larger_size_is_not_taken(
    num_slots: int, pair: Pair, drafts: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is captured, and its own size is not."""
    monkeypatch.setattr(Graphs, "median_seconds", 1e9)
    engine, [request] = (
        _engine(pair, TREES["one"], num_draft_slots=num_slots),
        repeating_requests(MIXED_PARAMS[:1], (6,)),
    )
    programs = _small_model(engine)._loop
    assert isinstance(programs, DraftPrograms)
    programs.prepare([TreeBudget(63, 8)], Processing.NONE, None)
    run(engine, [request])
    assert None not in drafts
    assert request.speculation.num_accepted_draft_tokens


def test_a_program_without_requests_changes_nothing(pair: Pair) -> None:
    """As captures run it, between steps of requests whose slots are in the tables."""
    drafter = _small_model(_engine(pair, TREES["chain"]))
    programs = drafter._loop
    assert isinstance(programs, DraftPrograms)
    table = programs._tables.own
    assert table is not None
    table.cells.copy_(torch.arange(1, len(table.cells) + 1))
    for keys in drafter.runner.tensors.keys:
        keys.zero_()
    with torch.inference_mode():
        programs._made(LaunchSize(4, programs._shape_of([TREES["wide"]], 4)))()
    assert table.rows.flatten().tolist() == list(range(1, len(table.cells)))
    assert not any(keys.any() for keys in drafter.runner.tensors.keys)


@pytest.mark.parametrize("rule", ["coupled", "multi-step"])
@pytest.mark.parametrize("tree", ["wide", "best first"])
def test_what_another_drafter_proposed_is_read_later(
    tree: str, rule: str, pair: Pair, model_folder: Callable[..., Path], drafts: list[int | None]
) -> None:
    """Of an accepted path a drafter keeps what it computed, and the slots that it did not use are free."""
    several, found = [pair[1], load_plain(model_folder("llama", 0, 0.3))], list[Any]()
    budget = TreeBudget.expansion((3, 2, 1), num_drafters=3) if tree == "wide" else TREES[tree]
    for way in WAYS[:2]:
        engine = make_device_engine(pair[0], several, budget, verification=rule, lookups=("suffix",), **way)
        requests = repeating_requests([replace(one, max_tokens=40) for one in MIXED_PARAMS[:3]], (6, 9, 5))
        run(engine, requests)
        found.append(_outcomes(requests))
        check_left(engine)
    assert None not in drafts
    assert found[0] == found[1] or tree == "best first"


class Elsewhere:
    """A target of which a head sees only what it sees of one on several ranks."""

    def __init__(self, runner: ModelRunner) -> None:
        self.cache, self.loaded, self.taps, self.read_taps = runner.cache, runner.loaded, runner.taps, runner.read_taps


@pytest.mark.parametrize("tree", ["chain", "wide"])
@pytest.mark.parametrize("kind", ["EAGLE-3", "DSpark"])
def test_heads_of_a_target_on_several_ranks(
    kind: str, tree: str, pair: Pair, drafts: list[int | None], tmp_path: Path
) -> None:
    head = load_head(save_tiny_head(tmp_path) if kind == "EAGLE-3" else save_tiny_block(tmp_path), pair[0])
    found = []
    for way, is_elsewhere in ((WAYS[0], False), (WAYS[1], True)):
        engine = make_device_engine(pair[0], head, TREES[tree], **way)
        if is_elsewhere:
            assert isinstance(engine.target, ModelRunner)
            _small_model(engine).runner.target = Elsewhere(engine.target)
        requests = repeating_requests(MIXED_PARAMS[:3], (6, 9, 5))
        run(engine, requests)
        found.append(_outcomes(requests))
        check_left(engine)
    assert found[0] == found[1]
    assert len(drafts) > 5
    assert None not in drafts


def test_trees_of_heads_that_compute_blocks_may_be_wide(
    pair: Pair, plain: list[list[int]], drafts: list[int | None], tmp_path: Path
) -> None:
    """With more nodes at a level than the pass over a block has columns."""
    head = load_head(save_tiny_block(tmp_path), pair[0])
    engine = make_device_engine(pair[0], head, TreeBudget(100, 3), **WAYS[1])
    assert come_and_go(engine, 3) == plain
    assert engine.drafter is not None
    assert not engine.drafter.num_failures
    assert len(drafts) > 5
    assert None not in drafts
    check_left(engine)


def test_an_engine_is_free_at_once(pair: Pair) -> None:
    engine = _engine(pair, TREES["chain"])
    run(engine, repeating_requests(MIXED_PARAMS[:1], (6,)))
    runner = weakref.ref(_small_model(engine).runner)
    del engine
    assert runner() is None


def test_usual_sizes_are_captured_at_the_start(
    pair: Pair, drafts: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With them no draft waits for a capture, which takes long, whatever the number of requests."""
    monkeypatch.setattr(Graphs, "median_seconds", 1e9)
    engine, reports = _engine(pair, TREES["best first"]), list[tuple[str, int, int]]()
    programs = _small_model(engine)._loop
    assert isinstance(programs, DraftPrograms)
    programs.prepare([TreeBudget(15, 6)], Processing.ADJUSTMENT, lambda *report: reports.append(report))
    sizes = set(programs._sizes.found)
    assert {size.num_rows for size in sizes} == {1, 2, 4, 8, 16, 32}
    assert reports[-1] == ("capturing passes of the draft loop of small", len(sizes), len(sizes))
    run(engine, repeating_requests(MIXED_PARAMS))
    assert len(drafts) > 5
    assert set(programs._sizes.found) == sizes
