"""Log-probabilities that steps on the device return: those of host steps, for the requests that ask."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from on_device import Pair, executor_of, make_device_engine, run_on_device
from specinfer.core.logprob import Logprob
from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.speculation import StepTrace
from specinfer.core.tree import TreeBudget
from specinfer.engine.device.draft_shape import PLAIN
from specinfer.engine.device.launch_size import LaunchSize
from specinfer.engine.device.logprobs import Asked, read_logprobs, result_shapes, write_logprobs
from specinfer.engine.device.rows import DeviceRows
from specinfer.engine.device.state import Exchange
from specinfer.engine.emission import AskedLogprobs, top_logprobs
from specinfer.engine.engine import Engine
from specinfer.ops import token_scores
from tiny import VOCAB, make_request, random_prompts, run

CPU = torch.device("cpu")
TREES = {
    "off": None,
    "2,2,1": TreeBudget.expansion((2, 2, 1)),
    "best-first": TreeBudget(max_nodes=12, max_depth=4),
}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=14, logprobs=0),
    SamplingParams(max_tokens=9, logprobs=3, prompt_logprobs=1),
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=12, temperature=0.7, logprobs=30, logprob_token_ids=[4, 5, 90], top_k=9),
    SamplingParams(temperature=0.0, max_tokens=16, logprobs=5, repetition_penalty=1.5, logit_bias={7: 4.0}),
    SamplingParams(max_tokens=26, temperature=1.2, presence_penalty=0.8, logprob_token_ids=[90, 7]),  # in the last row
]
PROMPTS = random_prompts([3, 26, 12, 40, 7, 9], seed=4)


def serve(engine: Engine, params: Sequence[SamplingParams]) -> tuple[list[Request], set[Request]]:
    """Serve a request for each of these; return them, and those that were served on the device."""
    requests = [make_request(str(i), PROMPTS[i], one, seed=i) for i, one in enumerate(params)]
    on_device = set[Request]()
    for request in requests:
        request.decode = str
        engine.add(request)
    while engine.has_work:
        engine.step()
        if len(engine.executors) > 1:
            on_device |= set(executor_of(engine).requests)
    return requests, on_device


def check_equal(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    assert [list(one) for one in found] == [list(one) for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert [(e.rank, e.decoded_token) for e in one.values()] == [(e.rank, e.decoded_token) for e in other.values()]
        assert [e.logprob for e in one.values()] == pytest.approx([e.logprob for e in other.values()], abs=2e-5)


@pytest.mark.parametrize("tree", TREES)
def test_they_are_those_of_host_steps_token_for_token(tree: str, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before penalties and truncation, next to requests that do not ask, in steps that return as many as are asked."""
    sizes: list[tuple[Asked | None, Asked | None]] = []
    launch = DeviceRows.launch

    def launched(self: DeviceRows, one: Any) -> None:
        sizes.append((one.size.asked, Asked.from_params([r.request.params for r in one.device_requests], VOCAB)))
        launch(self, one)

    monkeypatch.setattr(DeviceRows, "launch", launched)
    small = pair[1] if TREES[tree] else None
    wanted, _ = serve(make_device_engine(pair[0], small, TREES[tree], has_device_executor=False), PARAMS)
    found, on_device = serve(make_device_engine(pair[0], small, TREES[tree]), PARAMS)
    assert on_device == set(found)
    for one, other in zip(found, wanted, strict=True):
        assert one.output_ids == other.output_ids
        check_equal(one.prompt_logprobs[1:], other.prompt_logprobs[1:])
        assert len(one.logprobs) == (0 if one.params.logprobs is None else one.num_output)
        check_equal(one.logprobs, other.logprobs)
    if small is not None:
        assert sum(one.speculation.num_accepted_draft_tokens for one in found) > 10
    assert all(size == asked for size, asked in sizes)
    assert {size for size, _ in sizes} >= {None, Asked(VOCAB, 16)}, "nothing is computed when no request asks any more"


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("lookups", [(), ("ngram",)])
def test_traces_are_those_of_host_steps(tree: str, lookups: tuple[str, ...], pair: Pair) -> None:
    """Every second request is traced; some have masks, penalties or log-probabilities, before which p is taken."""
    told = []
    for has_device_executor in (False, True):
        small = pair[1] if TREES[tree] else None
        engine = make_device_engine(
            pair[0], small, TREES[tree], lookups=lookups, has_device_executor=has_device_executor
        )
        requests = [make_request(str(i), PROMPTS[i], one, seed=i) for i, one in enumerate(PARAMS)]
        for request in requests[::2]:
            request.trace = []
        requests[2].bad_words_ids = [(token,) for token in range(30)]
        if has_device_executor:
            assert run_on_device(engine, requests) == set(requests)
        else:
            run(engine, requests)
        told.append([request.trace for request in requests])
    for number, (ordinary, found) in enumerate(zip(*told, strict=True)):
        if ordinary is None:
            assert found is None
            continue
        if tree == "2,2,1" and not lookups and number != 2:  # others have other nodes, on which no output depends
            assert [_described(step) for step in found] == [_described(step) for step in ordinary]
        wanted, emitted = ([one for step in steps for one in _emitted(step)] for steps in (ordinary, found))
        assert [token for token, _ in emitted] == [token for token, _ in wanted]
        assert [p for _, p in emitted] == pytest.approx([p for _, p in wanted], rel=1e-3)
        assert all(0.0 <= node.p <= 1.0 for step in found for node in step.nodes)


def _described(step: StepTrace) -> tuple[Any, ...]:
    nodes = [(n.token, n.parent, n.drafters, round(n.q, 3), round(n.p, 4), n.accepted) for n in step.nodes]
    return step.position, step.root, nodes, step.path, step.next_token


def _emitted(step: StepTrace) -> list[tuple[int, float]]:
    accepted = [(node.token, node.p) for node in step.nodes if node.accepted]
    return accepted if step.next_token is None else [*accepted, (step.next_token, step.next_p or 0.0)]


def ranked(logits: Tensor, token: int, count: int, others: Sequence[int] = ()) -> dict[int, Logprob]:
    """The log-probabilities after one place, as slowly as they can be found."""
    values = torch.log_softmax(logits, dim=-1).tolist()
    order = sorted(range(len(values)), key=lambda each: (-values[each], each))[:count]
    return {
        each: Logprob(values[each], 1 + (order.index(each) if each in order else sum(v > values[each] for v in values)))
        for each in dict.fromkeys([token, *order, *others])
    }


@pytest.mark.parametrize("at_once", [1, 32])
@pytest.mark.parametrize("count", [0, 3, 20])
def test_equal_logits_are_ranked_alike_on_the_device_and_by_host_steps(
    count: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of half precision many are equal. The rows are more than are computed at once."""
    monkeypatch.setattr(token_scores, "_AT_ONCE_ON_CPU", at_once)
    num, nodes, depth, vocab = 12, 4, 2, 50
    logits = (torch.randn(num * nodes, vocab, generator=torch.Generator().manual_seed(1)) * 3).round()
    results = Exchange(result_shapes(num, depth + 1, Asked(count, 16)), CPU)
    path = torch.tensor([[1, 3], [2, -1], [-1, -1]] * 4, dtype=torch.int32)
    lengths = torch.tensor([2, 1, 0] * 4, dtype=torch.int32)
    lengths[11] = -1  # a row without a request
    drafted = torch.arange(num * depth).view(num, depth) + 5
    following = torch.tensor([40, 41, 42] * 3 + [43, 44, -2])
    roots = torch.arange(0, num * nodes, nodes)
    named = torch.arange(num * 128).view(num, 128) % vocab
    write_logprobs(logits, roots, (path, lengths, following), drafted, named, results.on_device)
    results.fetch(0)
    for row in range(11):
        kept = path[row, : lengths[row]].tolist()
        tokens = [*drafted[row, : lengths[row]].tolist(), int(following[row])]
        places = [int(roots[row]) + node for node in (0, *kept)]
        for others in ([], named[row, :3].tolist()):
            params = SamplingParams(logprobs=count, logprob_token_ids=others)
            found = read_logprobs(results.on_host(0), row, tokens, params)
            wanted = [ranked(logits[place], token, count, others) for place, token in zip(places, tokens, strict=True)]
            assert found == top_logprobs([AskedLogprobs(logits, places, tokens, count, others)])[0] == wanted
            assert [list(one) for one in found] == [list(one) for one in wanted]


def test_a_step_returns_as_much_as_its_requests_ask_for() -> None:
    def asked(*counts: int | None, named: int = 0) -> Asked | None:
        ids = list(range(named)) or None
        return Asked.from_params([SamplingParams(logprobs=one, logprob_token_ids=ids) for one in counts], 1000)

    assert asked(None, None) is None
    counted = [asked(*counts) for counts in ((None, 0), (0, 1), (20,), (21, 1), (100,))]
    assert counted == [Asked(0), Asked(20), Asked(20), Asked(100), Asked(100)]
    assert [asked(None, named=n) for n in (1, 16, 17, 128)] == [
        Asked(0, 16),
        Asked(0, 16),
        Asked(0, 128),
        Asked(0, 128),
    ]
    assert Asked.from_params([SamplingParams(logprobs=5)], 12) == Asked(12)
    sizes = [LaunchSize(4, PLAIN, asked=one) for one in (None, Asked(0), Asked(20), Asked(20, 16), Asked(100, 128))]
    assert [[one.holds(other) for other in sizes] for one in sizes] == [[i >= j for j in range(5)] for i in range(5)]
    assert not LaunchSize(4, PLAIN, asked=Asked(100)).holds(sizes[3])
