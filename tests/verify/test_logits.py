"""Processed logits, against the plainest way to write them and against sums done by hand."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import reference
from specinfer.core.grammar.state import Bits
from specinfer.core.logprob import with_texts
from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.thought import Reasoning, Thought
from specinfer.engine.emission import AskedLogprobs, top_logprobs
from specinfer.verify.logits import adjust, process_logits, truncate

VOCAB = 12
EOS = (1, 4)
END, END_IDS = "cd", (2, 7, 2, 3, 4)  # one of them ends texts; what ends a thought may have begun when it must


def _letters(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


def _forced(output: Sequence[int], budget: int | None) -> int | None:
    return None if budget is None else reference.forced_token(output, budget, END, END_IDS, _letters)


def _obeying(output: Sequence[int], tokens: Sequence[int], budget: int | None) -> list[int]:
    """The tokens, or those that are forced in their places."""
    found = list(output)
    for token in tokens:
        forced = _forced(found, budget)
        found.append(token if forced is None else forced)
    return found[len(output) :]


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    def maybe(values: st.SearchStrategy[Any], default: Any) -> Any:
        return draw(st.one_of(st.just(default), values))

    token = st.integers(0, VOCAB - 1)
    return SamplingParams(
        temperature=maybe(st.floats(0.05, 5.0), 1.0),
        top_p=maybe(st.floats(0.01, 0.99), 1.0),  # nearer to 1 rounding decides
        top_k=maybe(st.integers(1, VOCAB + 3), 0),
        min_p=maybe(st.floats(0.001, 0.9), 0.0),
        presence_penalty=maybe(st.floats(-2.0, 2.0), 0.0),
        frequency_penalty=maybe(st.floats(-2.0, 2.0), 0.0),
        repetition_penalty=maybe(st.floats(0.3, 3.0), 1.0),
        logit_bias=maybe(st.dictionaries(token, st.floats(-100, 100), max_size=4), {}),
        # Never only tokens that min_tokens forbids: nothing would be left.
        allowed_token_ids=maybe(st.lists(token, max_size=6).map(lambda ids: [0, *ids]), None),
        stop_token_ids=maybe(st.lists(st.integers(2, VOCAB - 1), max_size=2), ()),
        min_tokens=maybe(st.integers(0, 6), 0),
    )


class _Grammar:
    """Any rule of legal tokens, in place of a grammar."""

    def __init__(self, output: Sequence[int], legal: Callable[[Sequence[int]], Collection[int]]) -> None:
        self._output, self._legal = output, legal

    def bits(self, path: Sequence[int]) -> Bits:
        legal = self._legal([*self._output, *path])
        return np.packbits([token in legal for token in range(VOCAB)], bitorder="little")


def _request(
    params: SamplingParams, prompt: Sequence[int], output: Sequence[int], eos: Sequence[int] = (), **fields: Any
) -> Request:
    request = Request("r", list(prompt), params, 0, eos_token_ids=tuple(eos), **fields)
    request.token_ids += output
    return request


def _process(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    paths: Sequence[Sequence[int]],
    eos: Sequence[int] = (),
) -> torch.Tensor:
    return process_logits(logits, _request(params, prompt, output, eos), paths)


def _rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=300)
@given(
    params=parameters(),
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=5),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=5),
    paths=st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=4), min_size=1, max_size=4),
    bad_words=st.lists(st.lists(st.integers(0, 3) | st.integers(0, VOCAB - 1), min_size=1, max_size=3), max_size=3),
    modulus=st.sampled_from([None, None, 2, 5]),
    budget=st.sampled_from([None, None, 0, 1, 3, 6]),
    seed=st.integers(0, 2**20),
)
def test_each_node_is_the_plain_loop_on_its_own_path(
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    paths: list[list[int]],
    bad_words: list[list[int]],
    modulus: int | None,
    budget: int | None,
    seed: int,
) -> None:
    def by_sum(said: Sequence[int]) -> list[int]:
        return [token for token in range(VOCAB) if (token + sum(said)) % modulus == 1]

    legal = None if modulus is None else by_sum
    if legal is None:
        output = _obeying([], output, budget)
        paths = [_obeying(output, path, budget) for path in paths]
    elif budget is not None:  # a grammar may forbid what is forced: then the thought goes on
        output, paths = output[:budget], [path[: max(budget - len(output), 0)] for path in paths]
    logits = _rows(len(paths), seed)
    before = logits.clone()
    request = _request(params, prompt, output, EOS, bad_words_ids=tuple(map(tuple, bad_words)))
    request.grammar = None if legal is None else _Grammar(output, legal)
    request.thought = Thought(Reasoning("", END, END_IDS, is_open=True), _letters, budget)
    for token in output:
        request.thought.advance(token)
    rows = process_logits(logits, request, paths)
    assert torch.equal(logits, before), "the logits given are not changed"
    for row, path, given_row in zip(rows, paths, before, strict=True):
        history = [*output, *path]
        forced = _forced(history, budget)
        wanted = reference.process(given_row.tolist(), params, prompt, history, EOS, bad_words, legal, forced)
        torch.testing.assert_close(row, torch.tensor(wanted), rtol=1e-4, atol=1e-4)


@given(params=parameters(), seed=st.integers(0, 2**20), temperature=st.floats(0.0, 100.0, exclude_min=True))
@example(params=SamplingParams(), seed=0, temperature=1e-30)
@example(params=SamplingParams(top_p=0.5), seed=0, temperature=1e-39)
@example(params=SamplingParams(min_p=0.5, top_k=3), seed=0, temperature=1e-300)
def test_there_is_always_a_valid_token(params: SamplingParams, seed: int, temperature: float) -> None:
    """Every temperature that is accepted gives a distribution: near 0 all of it is on the greedy token."""
    fields = {name: getattr(params, name) for name in params.__slots__} | {"temperature": temperature}
    (row,) = _process(_rows(1, seed), SamplingParams(**fields), [3], [5], [[]], EOS)
    distribution = row.softmax(dim=-1)
    assert bool(distribution.isfinite().all())
    assert distribution.sum().item() == pytest.approx(1.0, abs=1e-4)
    if temperature < 1e-20:
        (greedy,) = _process(_rows(1, seed), SamplingParams(**fields | {"temperature": 0.0}), [3], [5], [[]], EOS)
        assert int(row.argmax()) == int(greedy.argmax())


def _distribution(logits: list[float], **fields: Any) -> list[float]:
    (row,) = _process(torch.tensor([logits]), SamplingParams(**fields), [], [], [[]])
    return [round(p, 4) for p in row.softmax(dim=-1).tolist()]


FOUR = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]


def test_by_hand() -> None:
    assert _distribution(FOUR) == [0.1, 0.4, 0.2, 0.3]
    assert _distribution(FOUR, temperature=0.5) == [0.0333, 0.5333, 0.1333, 0.3]  # squares, over 0.3
    assert _distribution(FOUR, top_k=2) == [0.0, 0.5714, 0.0, 0.4286]
    assert _distribution(FOUR, top_k=1) == [0.0, 1.0, 0.0, 0.0]
    assert _distribution(FOUR, top_p=0.6) == [0.0, 0.5714, 0.0, 0.4286]  # 0.4 is too little, 0.7 is enough
    assert _distribution(FOUR, top_p=0.75) == [0.0, 0.4444, 0.2222, 0.3333]
    assert _distribution(FOUR, top_p=1e-9) == [0.0, 1.0, 0.0, 0.0]
    assert _distribution(FOUR, min_p=0.6) == [0.0, 0.5714, 0.0, 0.4286]  # at least 0.24
    assert _distribution(FOUR, min_p=1.0) == [0.0, 1.0, 0.0, 0.0]
    assert _distribution(FOUR, allowed_token_ids=[0, 3]) == [0.25, 0.0, 0.0, 0.75]
    assert _distribution(FOUR, logit_bias={0: math.log(4.0)}) == [0.3077, 0.3077, 0.1538, 0.2308]


@pytest.mark.parametrize("top_k", [0, 40])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99])
def test_top_p_of_a_large_vocabulary_is_the_plain_loop(top_p: float, top_k: int) -> None:
    """Rows that are flat and peaked, together and each by itself."""
    spreads = torch.tensor([[0.0], [0.01], [1.0], [4.0], [30.0]])
    logits = torch.randn(5, 1500, generator=torch.Generator().manual_seed(1)) * spreads
    params = SamplingParams(top_p=top_p, top_k=top_k)
    rows = truncate(logits, params)
    for row, given_row in zip(rows[1:], logits[1:], strict=True):
        wanted = torch.tensor(reference.process(given_row.tolist(), params, [], []))
        assert abs(int((row > -torch.inf).sum()) - int((wanted > -torch.inf).sum())) <= 1, "rounding decides on one"
        assert float(row.softmax(dim=-1).sub(wanted.softmax(dim=-1)).abs().sum()) < 0.002
        assert torch.equal(truncate(given_row.unsqueeze(0), params)[0], row)
    assert bool((rows[0] > -torch.inf).all()), "tokens of equal probability are kept together"


def test_top_p_counts_what_top_k_left() -> None:
    # Of 0.4 and 0.3 the first is 0.5714: enough for 0.55, where 0.4 alone would not be.
    assert _distribution(FOUR, top_k=2, top_p=0.55) == [0.0, 1.0, 0.0, 0.0]


def test_min_p_comes_after_temperature() -> None:
    # Squared, 0.3 is 0.5625 of 0.4; plainly it would be 0.75.
    assert _distribution(FOUR, temperature=0.5, min_p=0.6) == [0.0, 1.0, 0.0, 0.0]


def test_penalties_by_hand() -> None:
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    (row,) = _process(torch.tensor([[4.0, -4.0, 4.0, 4.0]]), params, [0, 1], [2], [[2]])
    assert row.tolist() == [2.0, -8.0, 2.0 - 2 * 0.5 - 0.25, 4.0]


def test_a_node_counts_its_own_path_only() -> None:
    params = SamplingParams(frequency_penalty=1.0)
    rows = _process(torch.zeros(3, 4), params, [0], [1], [[], [2], [2, 2]])
    assert rows.tolist() == [[0, -1, 0, 0], [0, -1, -1, 0], [0, -1, -2, 0]]


def test_ends_are_forbidden_up_to_min_tokens_along_each_path() -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=[2])
    rows = _process(torch.zeros(3, 4), params, [0], [3], [[], [3], [3, 3]], (1,))
    never = -math.inf
    assert rows.tolist() == [[0, never, never, 0], [0, never, never, 0], [0, 0, 0, 0]]


def test_plain_greedy_is_left_alone() -> None:
    logits = _rows(2, 0)
    assert _process(logits, SamplingParams(temperature=0.0), [1], [2], [[], [1]], EOS) is logits


def test_greedy_obeys_constraints() -> None:
    params = SamplingParams(temperature=0.0, allowed_token_ids=[0, 2])
    (row,) = _process(torch.tensor([[1.0, 9.0, 2.0]]), params, [], [], [[]])
    assert int(row.argmax()) == 2


def test_without_a_cause_the_input_itself_comes_back() -> None:
    logits = _rows(2, 0)
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.5, top_k=2)):
        assert adjust(logits, _request(params, [1], [2]), [[], [1]]) is logits
    assert truncate(logits, SamplingParams(temperature=0.0, top_k=2, top_p=0.1)) is logits


def test_truncation_knows_nothing_of_the_vocabulary() -> None:
    """A drafter truncates its best tokens only."""
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.01)
    logits = _rows(3, 4)
    best = logits.topk(6, dim=-1)
    whole = truncate(logits, params)
    torch.testing.assert_close(truncate(best.values, params), whole.gather(1, best.indices))


def test_a_row_without_a_valid_token_harms_no_other() -> None:
    params = SamplingParams(allowed_token_ids=[1], min_tokens=1, top_p=0.5, top_k=2, min_p=0.1)
    dead, alive = _process(torch.zeros(2, 4), params, [0], [], [[], [1]], (1,))
    assert (dead == -torch.inf).all()
    assert not (alive == -torch.inf).all()


def test_logprobs_have_the_emitted_token_and_the_best() -> None:
    row = torch.tensor([FOUR])
    found = with_texts(top_logprobs([AskedLogprobs(row, [0], [0], 2)])[0][0], str)
    assert {token: one.logprob for token, one in found.items()} == pytest.approx({0: FOUR[0], 1: FOUR[1], 3: FOUR[3]})
    assert [(token, one.decoded_token) for token, one in found.items()] == [(0, "0"), (1, "1"), (3, "3")]
    assert {token: one.rank for token, one in found.items()} == {
        token: 1 + sum(other > FOUR[token] for other in FOUR) for token in found
    }
    assert top_logprobs([AskedLogprobs(row, [0], [1], 0)])[0][0][1].logprob == pytest.approx(FOUR[1])
    assert len(top_logprobs([AskedLogprobs(row, [0], [1], 9)])[0][0]) == 4


def test_a_bad_word_is_forbidden_where_the_output_ends_with_its_start() -> None:
    never = -math.inf
    request = _request(SamplingParams(), [1, 2], [0], bad_words_ids=((3,), (1, 2), (0, 1, 0)))
    rows = adjust(torch.zeros(4, 4), request, [[], [1], [1, 0], [2]])
    assert rows[0].tolist() == [0, 0, 0, never], "the prompt is no output"
    assert rows[1].tolist() == [never, 0, never, never]
    assert rows[2].tolist() == [0, 0, 0, never]
    assert rows[3].tolist() == [0, 0, 0, never]


def test_a_bad_word_of_two_tokens_is_found_where_none_is_longer() -> None:
    request = _request(SamplingParams(), [1], [1], bad_words_ids=((1, 2),))
    ends, starts, other = adjust(torch.zeros(3, 4), request, [[], [1], [3]]).tolist()
    assert ends == starts == [0, 0, -math.inf, 0], "the first token is in the output, or on the path"
    assert other == [0, 0, 0, 0]


def test_a_grammar_that_must_end_ends_before_min_tokens() -> None:
    request = _request(SamplingParams(min_tokens=9), [0], [2], (1,))
    request.grammar = _Grammar([2], lambda said: {1, 3} if len(said) == 1 else {1})
    free, ending = adjust(torch.zeros(2, VOCAB), request, [[], [3]])
    assert (free > -math.inf).nonzero().flatten().tolist() == [3]
    assert (ending > -math.inf).nonzero().flatten().tolist() == [1]
