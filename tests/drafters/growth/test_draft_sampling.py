"""Candidates of a node: the right tokens in the right order, and on record the distribution that each was drawn
from."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from levels import Node, draw
from specinfer.core.request import Request
from specinfer.core.rules import DRAFT_SAMPLINGS
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import Distribution
from specinfer.drafters.growth.draft_sampling import CHOSEN, Candidates
from specinfer.drafters.vocabulary.token_map import TokenMap
from specinfer.ops.cpu import transfers
from specinfer.ops.cpu.choice import SUPPORT
from tiny import make_request

VOCAB = 30
WAYS = DRAFT_SAMPLINGS
DRAWN = [way for way in WAYS if way not in CHOSEN]
PARAMS = {
    "sampled": SamplingParams(temperature=1.0),
    "warm": SamplingParams(temperature=0.6),
    "truncated": SamplingParams(temperature=1.3, top_k=6, top_p=0.95, min_p=0.01),
    "penalised": SamplingParams(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5),
    "constrained": SamplingParams(temperature=1.0, allowed_token_ids=range(2, 9), logit_bias={3: 2.0}),
}


def _request(params: SamplingParams | None = None, name: str = "0", seed: int = 5) -> Request:
    request = make_request(name, [1, 2, 3], params or PARAMS["sampled"], seed)
    request.append(4, None)
    return request


def _logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def _processed(row: Tensor, request: Request, path: Sequence[int]) -> list[float]:
    """Log-weights of the target's distribution if the target's logits were these."""
    return reference.process(row.tolist(), request.params, request.prompt_ids, [*request.output_ids, *path])


def _tokens(candidates: Candidates, row: int) -> list[int]:
    return [token for token in candidates.tokens[row].tolist() if token >= 0]


def _arrays(candidates: Candidates) -> list[np.ndarray]:
    drawn = candidates.drawn_from
    return [candidates.tokens, candidates.confidence, *([drawn.token_ids, drawn.probs, drawn.places] if drawn else [])]


@pytest.mark.parametrize("way", WAYS)
def test_candidates_come_from_a_device_in_one_transfer(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with token ids of a large vocabulary."""
    copied, found, cpu = list[Tensor](), list[Candidates](), Tensor.cpu

    def counted(self: Tensor) -> Tensor:
        copied.append(self)
        return cpu(self)

    for is_apart in (False, True):
        requests = [_request(name=str(i), seed=i) for i in range(3)]
        nodes = [Node(request, (), 3, drafter="small") for request in requests]
        with monkeypatch.context() as patch:
            patch.setattr(transfers, "is_apart", lambda _, value=is_apart: value)
            patch.setattr(Tensor, "cpu", counted)
            found.append(draw(way, _logits(3, 260_000), nodes))
        assert len(copied) == int(is_apart)
    for on_host, on_device in zip(*map(_arrays, found), strict=True):
        assert on_host.dtype == on_device.dtype
        np.testing.assert_array_equal(on_host, on_device)


# ----------------------------------------------------------------------------------------------- chosen


def _mapped(logits: Tensor, ids: Sequence[int]) -> tuple[Tensor, TokenMap]:
    token_map = TokenMap(torch.tensor(ids), logits.shape[1])
    return logits[:, token_map.ids], token_map


@pytest.mark.parametrize("name", [*PARAMS, "greedy"])
@pytest.mark.parametrize("way", WAYS)
def test_with_a_token_map_it_is_as_if_no_other_token_were_possible(way: str, name: str) -> None:
    params = PARAMS.get(name, SamplingParams(temperature=0.0))
    logits, paths = _logits(20), [(), *((token,) for token in range(19))]
    short, token_map = _mapped(logits, [0, 2, 3, 7, 8, 11, 12, 20, 28, 29])
    nodes = [[Node(request, path, 4, 2) for path in paths] for request in (_request(params), _request(params))]
    found, wanted = draw(way, short, nodes[0], token_map), draw(way, token_map.expand(short), nodes[1])
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert found.confidence == pytest.approx(wanted.confidence, abs=1e-6)
    for row in range(20):
        for rank in range(4):
            if found.tokens[row, rank] < 0:
                continue
            distribution, other = found.distribution(row, rank), wanted.distribution(row, rank)
            assert (distribution is None) == (other is None)
            if distribution is not None and other is not None:
                assert _dense(distribution) == pytest.approx(_dense(other), abs=1e-12)


def _dense(distribution: Distribution) -> list[float]:
    dense = np.zeros(VOCAB)
    dense[distribution.token_ids] = distribution.weights()
    return list(dense.tolist())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_greedy_requests_get_the_best_tokens_in_any_case(way: str, penalty: float) -> None:
    request = _request(SamplingParams(temperature=0.0, repetition_penalty=penalty))
    paths, logits = [(), (4,), (4, 7)], _logits(3)
    found = draw(way, logits, [Node(request, path, 5, group=5) for path in paths])
    for row, path in enumerate(paths):
        scores = _processed(logits[row], request, path)
        assert _tokens(found, row) == sorted(range(VOCAB), key=lambda t: -scores[t])[:5]
        assert [found.distribution(row, rank) for rank in range(5)] == [None] * 5
        probs = reference.probabilities(scores)
        assert found.confidence[row].tolist() == pytest.approx([probs[t] for t in _tokens(found, row)], abs=1e-4)


@pytest.mark.parametrize("name", PARAMS)
def test_chosen_guesses_are_the_best_with_the_targets_noise_or_without(name: str) -> None:
    request, paths, logits = _request(PARAMS[name]), [(), (7,), (8, 9)], _logits(3, seed=1)
    nodes = [Node(request, path, 6) for path in paths]
    for way in CHOSEN:
        found = draw(way, logits, nodes)
        for row, path in enumerate(paths):
            scores = _processed(logits[row], request, path)
            if way == "shared-noise":
                position = len(request.token_ids) + len(path)
                scores = [x + reference.gumbel(request.seed, position, token) for token, x in enumerate(scores)]
            possible = [token for token in range(VOCAB) if scores[token] > -math.inf]
            assert _tokens(found, row) == sorted(possible, key=lambda token: -scores[token])[:6]
            assert all(found.distribution(row, rank) is None for rank in range(6))
    assert not request.drafting.num_draws


# ------------------------------------------------------------------------------------------------ drawn


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("way", DRAWN)
def test_recorded_distributions_are_those_of_the_processed_logits(way: str, name: str) -> None:
    request, paths, logits = _request(PARAMS[name]), [(), (7,), (8, 9)], _logits(3, seed=2)
    found = draw(way, logits, [Node(request, path, 6, group=3) for path in paths])
    for row, path in enumerate(paths):
        whole = np.array(reference.probabilities(_processed(logits[row], request, path)))
        best = np.argsort(-whole, kind="stable")
        tail = whole.copy()
        tail[best[:2]] = 0
        for rank, token in enumerate(found.tokens[row].tolist()):
            distribution = found.distribution(row, rank)
            if way == "hybrid" and rank > 0:
                assert distribution is None
                continue
            if token < 0:
                assert whole[whole > 0].size <= rank, "no token is left"
                continue
            assert distribution is not None
            before = found.tokens[row, :rank].tolist()
            wanted = {"hybrid": tail / tail.sum(), "iid": whole, "without-replacement": whole}[way].copy()
            if way == "without-replacement":
                wanted[before] = 0
                wanted /= wanted.sum()
                assert [int(distribution.token_ids[place]) for place in distribution.removed] == before
            else:
                assert not distribution.removed
            dense = np.zeros(VOCAB)
            dense[distribution.token_ids] = distribution.weights()
            assert dense == pytest.approx(wanted, abs=1e-5)
            assert dense.sum() == pytest.approx(1.0)
            assert len(set(distribution.token_ids.tolist())) == len(distribution.token_ids)
            assert dense[token] > 0, "what was drawn could be drawn"


def test_without_replacement_no_token_comes_twice() -> None:
    request, logits = _request(), _logits(200)
    found = draw("without-replacement", logits, [Node(request, (), 8)] * 200)
    assert all(len(set(row)) == 8 for row in found.tokens.tolist())
    twice = draw("iid", logits, [Node(request, (), 8)] * 200)
    assert any(len(set(row)) < 8 for row in twice.tokens.tolist())


@pytest.mark.parametrize("group", [1, 2, 4])
def test_hybrid_is_one_draw_from_the_tail_and_then_the_best(group: int) -> None:
    request, logits = _request(), _logits(100, seed=3)
    found = draw("hybrid", logits, [Node(request, (), 4, group=group)] * 100)
    from_tail = 0
    for row in range(100):
        best = logits[row].argsort(descending=True).tolist()
        first, *others = found.tokens[row].tolist()
        assert first not in best[: group - 1]
        assert others == [token for token in best if token != first][:3]
        from_tail += first != best[group - 1]
    assert from_tail > 5, "it is drawn, not chosen"


def test_a_truncated_distribution_is_drawn_from_as_a_whole() -> None:
    request = _request(SamplingParams(temperature=1.0, top_k=2))
    found = draw("hybrid", _logits(20), [Node(request, (), 4, group=4)] * 20)
    for row, scores in enumerate(_logits(20)):
        best = scores.argsort(descending=True).tolist()
        assert sorted(_tokens(found, row)) == sorted(best[:2])
        distribution = found.distribution(row, 0)
        assert distribution is not None
        assert sorted(distribution.token_ids[distribution.weights() > 0].tolist()) == sorted(best[:2])


@pytest.mark.parametrize("way", DRAWN)
def test_the_confidence_of_a_draw_does_not_depend_on_the_token_drawn(way: str) -> None:
    """Guesses are taken by their confidence: one that knew its token would bias what is taken."""
    request, row = _request(), _logits(1)
    found = draw(way, row.expand(50, -1), [Node(request, (), 4)] * 50)
    assert found.drawn_from is not None
    drawn = found.drawn_from.places >= 0
    assert len(set(found.tokens[drawn].tolist())) > 1
    assert len(set(found.confidence[drawn].tolist())) == 1


# ------------------------------------------------------------------------------------------------- noise


@pytest.mark.parametrize("way", DRAWN)
def test_no_noise_is_used_twice(way: str) -> None:
    """The same logits again and again: each draw is another one, and none is the target's."""
    request, row = _request(), torch.zeros(1, VOCAB)
    seen, numbers = [], []
    for _ in range(40):
        seen.append(tuple(draw(way, row, [Node(request, (), 2)]).tokens[0].tolist()))
        numbers.append(request.drafting.num_draws[""])
    assert numbers == [(2 if way == "iid" else 1) * i for i in range(1, 41)]
    firsts = [first for first, _ in seen]
    assert len(set(firsts)) > 10
    position = len(request.token_ids)
    noise = [reference.gumbel(request.seed, position, token) for token in range(VOCAB)]
    assert firsts.count(noise.index(max(noise))) < 10


@pytest.mark.parametrize("way", WAYS)
def test_drawn_alone_or_with_others_it_is_the_same(way: str) -> None:
    """A request's guesses are a function of its own state, whoever else is served."""
    kinds = [PARAMS["sampled"], SamplingParams(temperature=0.0), PARAMS["truncated"], PARAMS["penalised"]]
    logits, paths = _logits(8, seed=4), [(), (6,)]
    together_requests = [_request(params, str(i), seed=i) for i, params in enumerate(kinds)]
    nodes = [Node(request, path, 3, group=2) for request in together_requests for path in paths]
    together = draw(way, logits, nodes)
    for i, params in enumerate(kinds):
        request = _request(params, str(i), seed=i)
        rows = slice(2 * i, 2 * i + 2)
        alone = draw(way, logits[rows], [Node(request, path, 3, group=2) for path in paths])
        assert np.array_equal(alone.tokens, together.tokens[rows])
        assert alone.confidence == pytest.approx(together.confidence[rows], abs=1e-6)
        for row, rank in np.ndindex(2, 3):
            ours, theirs = alone.distribution(row, rank), together.distribution(2 * i + row, rank)
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert ours.weights() == pytest.approx(theirs.weights())


# ---------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("vocab", "width"), [(3, 8), (8, 8), (SUPPORT + 50, 4), (SUPPORT + 200, SUPPORT + 20)])
def test_any_size_of_vocabulary_and_width(way: str, vocab: int, width: int) -> None:
    logits, request = _logits(2, vocab), _request()
    found = draw(way, logits, [Node(request, (), width), Node(request, (1,), 1)])
    tokens = _tokens(found, 0)
    assert len(tokens) == min(width, vocab)
    assert all(0 <= token < vocab for token in tokens)
    distribution = found.distribution(0, 0)
    if distribution is not None:
        assert len(distribution.token_ids) == min(vocab, max(SUPPORT, width))
        assert distribution.weights().sum() == pytest.approx(1.0)
        kept = set(logits[0].topk(len(distribution.token_ids)).indices.tolist())
        assert set(distribution.token_ids.tolist()) == kept, "the most probable ones"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_that_cannot_be_emitted_are_no_candidates(way: str, temperature: float) -> None:
    logits = _logits(3)
    logits[:, 20:] = -math.inf  # a drafter of a smaller vocabulary
    logits[1, 2:] = -math.inf
    logits[2] = -math.inf
    request = _request(SamplingParams(temperature=temperature))
    found = draw(way, logits, [Node(request, (), 25)] * 3)
    assert set(found.tokens[0].tolist()) - {-1} <= set(range(20))
    if way != "iid" or temperature == 0:
        assert sorted(_tokens(found, 0)) == list(range(20))
        assert sorted(_tokens(found, 1)) == [0, 1]
    assert _tokens(found, 2) == []
    assert np.isfinite(found.confidence).all()


# ------------------------------------------------------------------------------------- a rule each


def test_in_one_batch_each_request_gets_what_its_own_rule_needs() -> None:
    """Draws with their distributions for traversal, and the best tokens of the shared noise for coupled."""

    def requests() -> list[Request]:
        made = [_request(seed=5, name="0"), _request(seed=6, name="1"), _request(SamplingParams(temperature=0), "2")]
        made[0].verification, made[1].verification = "coupled", "traversal"
        return made

    def nodes() -> list[Node]:
        return [Node(request, path, 3) for request in requests() for path in ((), (7,))]

    logits = _logits(6)
    mixed = draw("auto", logits, nodes())
    for rows, way in (((0, 1, 4, 5), "shared-noise"), ((2, 3), "without-replacement")):
        alone = draw(way, logits, nodes())
        for row in rows:
            assert _tokens(mixed, row) == _tokens(alone, row)
            assert mixed.confidence[row].tolist() == alone.confidence[row].tolist()
            for rank in range(3):
                found, wanted = mixed.distribution(row, rank), alone.distribution(row, rank)
                assert (found is None) == (wanted is None) == (way == "shared-noise")
                if found is not None and wanted is not None:
                    assert found.weights().tolist() == wanted.weights().tolist()
