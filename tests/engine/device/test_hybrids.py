"""Steps on the device of models that have layers without attention: the tokens and the trees of host steps."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from interpreter import interpreted
from on_device import (
    MIXED_PARAMS,
    WAYS,
    Pair,
    check_left,
    check_same_tokens,
    come_and_go,
    executor_of,
    in_each_way,
    load_plain,
    make_device_engine,
    plain_tokens,
    repeating_requests,
    run_on_device,
)
from pair_heads import save_mtp
from reference import device
from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TreeBudget
from specinfer.engine.device.rows import DeviceRows
from specinfer.engine.device.step_programs import StepPrograms
from specinfer.model.heads.load import load_head
from specinfer.model.recurrent.layers import state_bytes
from specinfer.model.recurrent.states import RecurrentStates
from specinfer.ops import kernels
from tests.engine.device.late_stream import LateStream, make_executor_late
from tiny import HYBRIDS, KINDS_OF_HYBRIDS, make_request, quick, random_prompts, run

TREES = {
    "off": TreeBudget(),
    "5,1": TreeBudget.expansion((5, 1)),
    "3,2,1": TreeBudget.expansion((3, 2, 1)),
    "best-first": TreeBudget(max_nodes=12, max_depth=4),
}


@pytest.fixture(scope="module", params=quick(HYBRIDS, "lfm2", "qwen3_5_text"))
def pair(request: pytest.FixtureRequest, model_folder: Callable[..., Path]) -> Pair:
    """A target, and a small model with attention."""
    return load_plain(model_folder(request.param)), load_plain(model_folder("llama"))


@pytest.fixture(scope="module")
def pair_text(pair: Pair) -> list[list[int]]:
    """Return the tokens of plain decoding."""
    return plain_tokens(pair[0], _requests())


@pytest.fixture(scope="module")
def text(kind: Pair) -> list[list[int]]:
    """Return the tokens of plain decoding."""
    return plain_tokens(kind[0], _requests())


def _requests() -> list[Request]:
    return repeating_requests(MIXED_PARAMS)


@pytest.mark.covering(1)
@pytest.mark.parametrize("lookups", [(), ("suffix",)])
@pytest.mark.parametrize("tree", TREES)
def test_the_tokens_are_those_of_plain_decoding(
    tree: str, lookups: tuple[str, ...], pair: Pair, pair_text: list[list[int]]
) -> None:
    budget = None if tree == "off" else TREES[tree]
    engine, _ = check_same_tokens(
        pair, budget, _requests, pair_text, all_on_device=True, lookups=lookups if budget else ()
    )
    assert executor_of(engine).num_launched > 4


@pytest.fixture(scope="module", params=quick(KINDS_OF_HYBRIDS, "qwen3_next"))
def kind(request: pytest.FixtureRequest, model_folder: Callable[..., Path]) -> Pair:
    return load_plain(model_folder(request.param)), load_plain(model_folder("llama"))


def _predicted(text: Sequence[Sequence[int]], every: int) -> list[Request]:
    """Return requests whose predictions are wrong at every so many tokens."""
    requests = _requests()
    for request, tokens in zip(requests, text, strict=True):
        request.prediction_ids = tuple((t + 1) % 90 if i % every == every - 1 else t for i, t in enumerate(tokens))
    return requests


@pytest.mark.covering(1)
@pytest.mark.parametrize("every", [3, 5, 9])
@pytest.mark.parametrize("has_model", [False, True])
def test_accepted_paths_of_every_length_are_computed_once_more(
    every: int, has_model: bool, kind: Pair, text: list[list[int]]
) -> None:
    drafters = [kind[1]] if has_model else []
    _, requests = check_same_tokens(
        (kind[0], drafters), TreeBudget(max_nodes=16, max_depth=12), partial(_predicted, text, every), text,
        all_on_device=True, lookups=["suffix"],
    )  # fmt: skip
    assert sum(one.speculation.num_accepted_draft_tokens for one in requests) > 0.2 * sum(map(len, text))


@pytest.mark.covering(1)
@pytest.mark.parametrize("tree", ["off", "5,1", "best-first"])
def test_trees_and_states_of_steps_in_flight_are_not_mixed_up(
    tree: str, kind: Pair, trees: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, drafts = [], []
    for is_late in (False, True):
        stream = LateStream()
        with monkeypatch.context() as patch:
            if is_late:
                make_executor_late(stream, patch)
            small = None if tree == "off" else kind[1]
            engine = make_device_engine(kind[0], small, TREES[tree], has_device_executor=is_late, keeps_prefixes=True)
            found.append(come_and_go(engine, 3))
        drafts.append(dict(trees))
        trees.clear()
    assert found[0] == found[1]
    assert tree == "best-first" or drafts[0] == drafts[1]
    assert executor_of(engine).num_launched >= 10
    assert stream.longest >= 6, "two steps were never in flight"
    assert not engine.target.tensors.states._lent  # type: ignore[attr-defined]


@pytest.mark.covering(1)
@pytest.mark.parametrize("moment", [3, 4, 8])
def test_dropped_steps_leave_no_wrong_state(moment: int, kind: Pair, text: list[list[int]]) -> None:
    """What is in flight may have overwritten the last state that was read."""
    requests = _predicted(text, 4)
    engine = make_device_engine(kind[0], kind[1], TREES["3,2,1"], lookups=["suffix"], keeps_prefixes=True)
    for request in requests:
        engine.add(request)
    for number in range(100):
        if not engine.has_work:
            break
        if number % moment == moment - 1:
            executor_of(engine).abandon()
        if number == moment + 1:
            engine.abort(requests[1])
        engine.step()
    assert [one.output_ids for one in requests[:1] + requests[2:]] == text[:1] + text[2:]
    check_left(engine)


def test_requests_go_on_from_a_state_that_they_share(kind: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a request that is served, which goes on writing to its rows, late."""
    (first,), params = random_prompts([20]), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    (text,) = plain_tokens(kind[0], [make_request("0", first, params)])
    prompts = [first, [*first, *text[:9]], [*first, *text[:9], 5], [*first, *text[:4], 7], first]
    wanted = plain_tokens(kind[0], [make_request(str(i), prompt, params) for i, prompt in enumerate(prompts)])
    make_executor_late(LateStream(), monkeypatch)
    engine = make_device_engine(kind[0], kind[1], TREES["5,1"], keeps_prefixes=True)
    requests = [make_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    for i in range(200):
        if i % 7 == 0 and i // 7 < len(requests):
            engine.add(requests[i // 7])
        engine.step()
    assert [request.output_ids for request in requests] == wanted


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_states", [0, 1, 2, 5])
def test_few_states_cost_time_alone(num_states: int, kind: Pair, text: list[list[int]]) -> None:
    """Requests without two rows for their states take host steps."""
    requests = _predicted(text, 4)
    options = {"lookups": ["suffix"], "num_states": num_states, "max_num_seqs": 3}
    engine = make_device_engine(kind[0], kind[1], TREES["best-first"], **options)  # type: ignore[arg-type]
    served = run_on_device(engine, requests)
    assert [request.output_ids for request in requests] == text
    if engine.target.tensors.states.pools:  # type: ignore[attr-defined]
        assert bool(served) == (num_states >= 2)
    check_left(engine)


def _num_recomputed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of tokens that each request of an ordinary pass recomputes."""
    found, find = list[int](), RecurrentStates.find

    def noted(states: RecurrentStates, prefix: Any) -> tuple[int, int]:
        start, row = find(states, prefix)
        found.append(len(prefix) - start)
        return start, row

    monkeypatch.setattr(RecurrentStates, "find", noted)
    return found


def _many(count: int, length: int, max_tokens: int, temperature: float = 0.0) -> list[Request]:
    params = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens + i % 7, ignore_eos=True) for i in range(count)
    ]
    prompts = random_prompts([length] * count, seed=3)
    return [make_request(str(i), *one, seed=i) for i, one in enumerate(zip(prompts, params, strict=True))]


def test_requests_that_come_when_others_end_recompute_no_prompt(kind: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of a request that ended are free while a last step of it is in flight."""
    if not state_bytes(kind[0].model):
        pytest.skip("convolutions have no states")
    recomputed, requests = _num_recomputed(monkeypatch), _many(12, 100, 14)
    engine = make_device_engine(kind[0], max_num_seqs=4, num_states=8)
    assert run_on_device(engine, requests) == set(requests)
    assert sum(recomputed) == 0


@pytest.mark.parametrize("num_states", [8, 12])
def test_requests_with_few_states_leave_one_to_each_other(
    num_states: int, kind: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not state_bytes(kind[0].model):
        pytest.skip("convolutions have no states")
    recomputed, requests = _num_recomputed(monkeypatch), _many(8, 30, 30)
    run(make_device_engine(kind[0], max_num_seqs=8, num_states=num_states), requests)
    assert sum(recomputed) == 0


def test_requests_whose_trees_do_not_fit_do_not_come_and_go(kind: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    if not state_bytes(kind[0].model):
        pytest.skip("of convolutions alone trees are not limited")
    num_joins, write = 0, DeviceRows.write

    def counted(*args: Any, **options: Any) -> None:
        nonlocal num_joins
        num_joins += 1
        write(*args, **options)

    monkeypatch.setattr(DeviceRows, "write", counted)
    engine = make_device_engine(*kind, TREES["3,2,1"], max_num_seqs=8, num_states=16, verification="multi-step")
    requests = _many(8, 20, 20, temperature=0.8)
    run(engine, requests)
    assert all(request.is_finished and not request.error for request in requests)
    assert num_joins <= 3 * len(requests)


def test_a_later_turn_goes_on_from_the_state_of_the_last_step(kind: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    if not state_bytes(kind[0].model):
        pytest.skip("convolutions have no states")
    engine = make_device_engine(kind[0], kind[1], TREES["3,2,1"], keeps_prefixes=True)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    first = make_request("first", random_prompts([9])[0], params)
    assert run_on_device(engine, [first]) == {first}
    recomputed = _num_recomputed(monkeypatch)
    second = make_request("second", [*first.token_ids, 5, 6, 7], params)
    plain = make_request("second", [*first.token_ids, 5, 6, 7], params)
    run(engine, [second])
    assert recomputed[0] <= 4, "hardly any token is computed once more"
    assert [second.output_ids] == plain_tokens(kind[0], [plain])


@interpreted
def test_the_kernels_compute_as_their_counterparts(
    kind: Pair, text: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's interpreter, in steps on the device alone."""
    verify, are_on = StepPrograms.verify, False

    def verified(programs: StepPrograms) -> None:
        nonlocal are_on
        are_on = True
        verify(programs)
        are_on = False

    monkeypatch.setattr(kernels, "back_end", lambda name: (kernels.kernel if are_on else device.by_device)(name))
    monkeypatch.setattr(StepPrograms, "verify", verified)
    engine = make_device_engine(kind[0], None, TREES["best-first"], lookups=["suffix"])
    request = _predicted(text, 4)[0]
    request.params = replace(request.params, max_tokens=12)
    assert run_on_device(engine, [request]) == {request}
    assert request.output_ids == text[0][:12]
    assert request.speculation.num_accepted_draft_tokens > 2


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_its_own_layers_for_several_tokens_draft_on_the_device(
    family: str, tmp_path: Path, trees: dict[str, list[Any]]
) -> None:
    save_mtp(tmp_path, family)
    target = load_plain(tmp_path)
    head, found = load_head(tmp_path, target), []
    for _, requests in in_each_way((target, head), TREES["3,2,1"], _requests, WAYS[::2]):
        found.append(([request.output_ids for request in requests], dict(trees)))
        trees.clear()
    assert found[0] == found[1]
