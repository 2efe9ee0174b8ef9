"""Choosing drafters: scores are those of plain passes, shifts are followed, failures are harmless, outputs stay."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from drafting import span_of
from specinfer import LLM
from specinfer.bench.latency import run_latency
from specinfer.bench.options import LatencyConfig, ThroughputConfig
from specinfer.bench.throughput import run_throughput
from specinfer.cli.app import app
from specinfer.core.request import Request, Span
from specinfer.core.rules import DRAFT_SAMPLINGS
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.drafters import MergedDrafter, NGramDrafter, SmallModelDrafter, make_drafter
from specinfer.drafters.merge.scoring import MAX_SCORED, Losses, lookup_losses
from specinfer.drafters.merge.selection import Selection
from specinfer.model.runner import ModelRunner
from specinfer.policy.cost_cache import _situation
from specinfer.verify import Acceptance
from tiny import VOCAB, make_model, make_request, random_prompts, resized

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=200),
    "sampled": SamplingParams(temperature=0.9, max_tokens=200),
    "processed": SamplingParams(
        temperature=0.7, top_p=0.9, frequency_penalty=1.0, repetition_penalty=1.3, max_tokens=200
    ),
}
BUDGET = TreeBudget(8, 8)


def _expected(request: Request, drawing: str, start: int, model: Any = None) -> list[float]:
    return reference.guess_losses(
        model or make_model("llama"), request.token_ids, len(request.prompt_ids), start, request.params, request.seed,
        chosen=drawing in ("shared-noise", "top-k") or request.params.is_greedy, noisy=drawing == "shared-noise",
    )  # fmt: skip


def _plain(request: Request, count: int) -> list[int]:
    """The next tokens of plain decoding, if the drafter's model were the target."""
    drafted: list[int] = []
    for _ in range(count):
        logits = reference.last_logits(make_model("llama"), [*request.token_ids, *drafted]).tolist()
        row = reference.scores(logits, request.params, request.prompt_ids, drafted, request.seed)
        drafted.append(max(range(len(row)), key=row.__getitem__))
    return drafted


def _scored(runner: ModelRunner, drawing: str = "shared-noise") -> SmallModelDrafter:
    return SmallModelDrafter(runner, VOCAB, "small", drawing, is_scored=True)


def _say(request: Request, tokens: Sequence[int]) -> None:
    for token in tokens:
        request.append(token, None)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("drawing", DRAFT_SAMPLINGS)
def test_replayed_tokens_score_as_in_plain_passes(
    name: str, drawing: str, runner_of: Callable[..., ModelRunner]
) -> None:
    drafter = _scored(runner_of("llama"), drawing)
    request = make_request("0", random_prompts([9])[0], PARAMS[name], seed=4)
    drafter.replay([request])
    losses = drafter.take_losses("0")
    assert losses.output == []
    assert losses.prompt == pytest.approx(_expected(request, drawing, 1), abs=1e-5)
    assert drafter.take_losses("0") == ([], []), "each is told once"
    # Some tokens as the drafter itself would have it, some at random.
    drafted = [*_plain(request, 4), *random_prompts([5], seed=3)[0]]
    _say(request, drafted)
    drafter.replay([request])
    losses = drafter.take_losses("0")
    assert losses.prompt == []
    assert losses.output == pytest.approx(_expected(request, drawing, 9), abs=1e-5)
    if drawing == "shared-noise":
        assert losses.output[:4] == [0.0] * 4
    assert 0 < sum(losses.output) < len(drafted) or drawing == "top-k"
    drafter.forget("0")


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("drawing", DRAFT_SAMPLINGS)
@pytest.mark.parametrize("budget", [TreeBudget.expansion((2, 2, 1)), TreeBudget(7, 4)], ids=["fixed", "best first"])
def test_a_drafter_that_is_asked_is_scored_once_on_every_token(
    name: str, drawing: str, budget: TreeBudget, runner_of: Callable[..., ModelRunner]
) -> None:
    """On its own accepted nodes, on what it had not guessed, on steps it slept through, on discarded trees."""
    drafter, model = _scored(runner_of("llama"), drawing), make_model("llama")
    requests = [make_request(str(i), prompt, PARAMS[name], seed=i) for i, prompt in enumerate(random_prompts([5, 12]))]
    found: list[list[float]] = [[], []]
    generator = torch.Generator().manual_seed(1)
    for step in range(7):
        trees = drafter.draft([span_of(r) for r in requests], [budget] * 2)
        for request, tree, known in zip(requests, trees, found, strict=True):
            leaf = int(torch.randint(len(tree), (), generator=generator))
            _say(request, (*tree.path_tokens(leaf), 5 + step))
            if step != 3:
                drafter.observe(request, tree, Acceptance(tree.path(leaf), 5 + step))
            losses = drafter.take_losses(request.request_id)
            known += [*losses.prompt, *losses.output]
        if step == 4:
            _say(requests[0], [7, 8])
    for request, known in zip(requests, found, strict=True):
        drafter.replay([request])
        known += drafter.take_losses(request.request_id).output
        assert known == pytest.approx(_expected(request, drawing, 1, model), abs=1e-5)
        drafter.forget(request.request_id)


def test_only_the_end_of_a_long_text_is_scored(
    runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is read in chunks, or found in the prefix cache."""
    runner = resized(runner_of("llama"), 1024, keeps_prefixes=True)
    prompt = random_prompts([100])[0]
    for chunk in (512, 80):
        monkeypatch.setattr("specinfer.drafters.drafter_cache.MAX_CHUNK", chunk)
        drafter = _scored(runner)
        request = make_request("0", prompt, PARAMS["greedy"])
        drafter.replay([request])
        losses = drafter.take_losses("0").prompt
        assert len(losses) == MAX_SCORED
        assert losses == _expected(request, "shared-noise", 100 - MAX_SCORED)
        drafter.forget("0")


def test_many_requests_share_what_logits_may_take(runner_of: Callable[..., ModelRunner]) -> None:
    drafter = _scored(runner_of("llama"))
    requests = [make_request(str(i), prompt, PARAMS["greedy"]) for i, prompt in enumerate(random_prompts([40] * 16))]
    drafter.draft([span_of(request) for request in requests], [TreeBudget.expansion((1,))] * 16)
    for request in requests:
        assert drafter.take_losses(request.request_id).prompt == _expected(request, "shared-noise", 40 - 256 // 16)
        drafter.forget(request.request_id)


def test_without_free_slots_nothing_is_scored_and_nothing_is_kept(runner_of: Callable[..., ModelRunner]) -> None:
    runner = resized(runner_of("llama"), 8)
    drafter = _scored(runner)
    request = make_request("0", random_prompts([10])[0], PARAMS["greedy"])
    drafter.replay([request])
    assert drafter.take_losses("0") == ([], [])
    assert runner.cache.num_free == 8
    drafter.forget("0")


def test_a_text_longer_than_the_drafters_context_is_not_read(runner_of: Callable[..., ModelRunner]) -> None:
    drafter = _scored(runner_of("gpt2", n_positions=16))
    for length, num_scored in ((15, 14), (16, 0), (20, 0)):
        drafter.replay([make_request(str(length), random_prompts([length])[0])])
        assert len(drafter.take_losses(str(length)).prompt) == num_scored
        drafter.forget(str(length))


def test_a_drafter_that_is_not_scored_computes_no_extra_logits(runner_of: Callable[..., ModelRunner]) -> None:
    """The choice is off: one row a request, as ever."""
    runner, rows = runner_of("llama"), []
    drafter = SmallModelDrafter(runner, VOCAB)
    step_by_step = SamplingParams(temperature=0.0, repetition_penalty=1.1)
    request = make_request("0", random_prompts([9])[0], step_by_step)
    forward = runner.forward
    runner.forward = lambda pieces: (rows.append([piece.num_logits for piece in pieces]), forward(pieces))[1]  # type: ignore[method-assign]
    try:
        drafter.draft([span_of(request)], [TreeBudget.expansion((1,))])
    finally:
        del runner.forward
    assert rows == [[1]]
    assert drafter.take_losses("0") == ([], [])
    drafter.forget("0")


def test_lookups_are_scored_as_far_as_the_text_stays_in_their_tree() -> None:
    tree = TokenTree.chain(0, [5, 6, 7])
    assert lookup_losses(tree, [5, 6, 7, 8]) == [0, 0, 0]
    assert lookup_losses(tree, [5, 9, 7]) == [0, 1]
    assert lookup_losses(tree, [9]) == [1]
    assert lookup_losses(TokenTree.root(0), [9, 9]) == [1], "to say nothing is to be wrong"
    branching = TokenTree((0, 5, 6, 1), (-1, 0, 0, 2))
    assert lookup_losses(branching, [6, 1, 4]) == [1, 0], "its second guess is not its best"


# ------------------------------------------------------------------------------------------ scripted experts


def _text(place: int) -> int:
    """The text that is said, token by token."""
    return 2 + place * 7919 % 89


class Expert:
    """Guesses rightly in its domain, four times of five, and elsewhere once in five."""

    def __init__(self, name: str, is_mine: Callable[[Request, int], bool]) -> None:
        self.name, self._is_mine = name, is_mine
        self.replayed: list[int] = []  # lengths of texts
        self.asked: list[tuple[str, int]] = []  # requests, and lengths of their texts
        self._num_scored: dict[str, int] = {}
        self._losses: dict[str, Losses] = {}
        self.forgotten: list[str] = []

    def _errs(self, request: Request, place: int) -> bool:
        return ((place * 7 + ord(self.name[0])) % 5 == 0) == self._is_mine(request, place)

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        trees = []
        for span, budget in zip(spans, budgets, strict=True):
            request, start = span.request, len(span.request.token_ids)
            places = range(start, start + min(budget.max_depth, budget.max_nodes))
            guesses = [1 if self._errs(request, place) else _text(place) for place in places]
            if guesses:
                self.asked.append((request.request_id, start))
            trees.append(TokenTree.chain(request.token_ids[-1], guesses, self.name, 0.5))
        return trees

    def can_read(self, request: Request) -> bool:
        return True

    def replay(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.replayed.append(len(request.token_ids))
            self._score(request)

    def _score(self, request: Request) -> None:
        end = len(request.token_ids)
        start = max(self._num_scored.get(request.request_id, 1), end - MAX_SCORED)
        self._num_scored[request.request_id] = end
        losses = self._losses.setdefault(request.request_id, Losses([], []))
        for place in range(start, end):
            (losses.prompt if place < len(request.prompt_ids) else losses.output).append(
                float(self._errs(request, place))
            )

    def take_losses(self, request_id: str) -> Losses:
        return self._losses.pop(request_id, Losses([], []))

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        if self.name in {draw.drafter for draw in tree.draws}:
            self._score(request)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def _merged(experts: Sequence[Any], num_asked: int, lookups: Sequence[Any] = ()) -> MergedDrafter:
    names = [expert.name for expert in experts], [lookup.name for lookup in lookups]
    return MergedDrafter([*experts, *lookups], vocab_size=100, selection=Selection(*names, num_asked))


def _text_request(name: str, length: int = 80) -> Request:
    return make_request(name, [_text(place) for place in range(length)], SamplingParams(max_tokens=10_000))


def _step(merged: MergedDrafter, requests: Sequence[Request], budget: TreeBudget = BUDGET) -> list[int]:
    """The tokens that each request says in one step."""
    trees = merged.draft([span_of(request) for request in requests], [budget] * len(requests))
    drafted = []
    for request, tree in zip(requests, trees, strict=True):
        node, path = 0, list[int]()
        while (child := tree.children[node].get(_text(len(request.token_ids)))) is not None:
            path.append(child)
            node = child
            request.append(tree.tokens[node], None)
        request.append(_text(len(request.token_ids)), None)
        merged.observe(request, tree, Acceptance(tuple(path), request.token_ids[-1]))
        drafted.append(len(path) + 1)
    return drafted


def _asked(experts: Sequence[Expert], request_id: str, start: int, end: int) -> dict[str, int]:
    """How often each was asked while the text was so long."""
    return {
        expert.name: sum(name == request_id and start <= place < end for name, place in expert.asked)
        for expert in experts
    }


def _run(merged: MergedDrafter, request: Request, length: int) -> None:
    while len(request.token_ids) < length:
        _step(merged, [request])


def test_a_shift_is_followed_within_300_tokens_and_back() -> None:
    def is_code(request: Request, place: int) -> bool:
        return not 2000 <= place < 3500

    code, prose = Expert("code", is_code), Expert("prose", lambda request, place: not is_code(request, place))
    merged, request = _merged([code, prose], 1), _text_request("0")
    _run(merged, request, 5000)
    for start, end, best, other in (
        (80, 2000, "code", "prose"),
        (2300, 3500, "prose", "code"),
        (3800, 4900, "code", "prose"),
    ):
        asked = _asked([code, prose], "0", start, end)
        assert asked[best] > 200, (start, asked)
        assert asked[other] == 0, (start, asked)
    # Who is not asked reads on now and then, less and less often, until the other does worse.
    calm = [place for place in prose.replayed if place < 2000]
    waits = [b - a for a, b in pairwise(calm)]
    assert calm[0] == 80, "the prompt is read first"
    assert 32 <= waits[0] < 40
    assert max(waits) >= 256
    assert len(calm) < 14
    assert any(2000 < place < 2100 for place in prose.replayed), "an alarm, before it was due"
    again = [b - a for a, b in pairwise(place for place in prose.replayed if place > 3600)]
    assert again[0] < 80, "after it was asked, it is replayed as often as at first"


def test_the_generalist_is_asked_together_with_the_best() -> None:
    def is_code(request: Request, place: int) -> bool:
        return place < 1000

    general = Expert("general", lambda request, place: place % 3 == 0)
    code, prose = Expert("code", is_code), Expert("prose", lambda request, place: not is_code(request, place))
    merged, request = _merged([general, code, prose], 2), _text_request("0")
    _run(merged, request, 2000)
    asked = _asked([general, code, prose], "0", 80, 1000)
    assert asked["general"] == asked["code"] > 100
    assert asked["prose"] == 0
    asked = _asked([general, code, prose], "0", 1300, 2000)
    assert asked["general"] == asked["prose"] > 100
    assert asked["code"] == 0


def test_the_generalist_is_replayed_as_often_as_ever() -> None:
    general = Expert("general", lambda request, place: False)
    code = Expert("code", lambda request, place: True)
    merged, request = _merged([general, code], 1), _text_request("0")
    _run(merged, request, 1080)
    waits = [b - a for a, b in pairwise(general.replayed)]
    assert len(waits) > 25
    assert max(waits) < 32 + 9
    assert not general.asked


def test_requests_of_two_domains_each_get_theirs() -> None:
    """From their first step on: their prompts tell."""
    code = Expert("code", lambda request, place: request.request_id.startswith("code"))
    prose = Expert("prose", lambda request, place: request.request_id.startswith("prose"))
    merged = _merged([code, prose], 1)
    requests = [_text_request(f"{kind} {i}") for i in range(4) for kind in ("code", "prose")]
    for _ in range(100):
        _step(merged, requests)
    for kind, expert in (("code", code), ("prose", prose)):
        assert len(expert.asked) == 400
        assert all(name.startswith(kind) for name, _ in expert.asked)
    for request in requests:
        merged.forget(request.request_id)
    assert not merged.selection.hedge._requests  # type: ignore[union-attr]


def test_lookups_are_always_asked_and_scored() -> None:
    models = [Expert("one", lambda request, place: True), Expert("two", lambda request, place: False)]
    lookup = NGramDrafter()
    merged, request = _merged(models, 1, [lookup]), _text_request("0", 95)
    for _ in range(20):
        trees = merged.draft([span_of(request)], [BUDGET])
        assert {draw.drafter for draw in trees[0].draws} == {"one", "ngram"}
        request.append(_text(len(request.token_ids)), None)
        merged.observe(request, trees[0], Acceptance((), request.token_ids[-1]))
    assert merged.selection is not None
    assert merged.selection.hedge.mean_loss("0", "ngram") == 0.0, "the text repeats itself after 89 tokens"
    assert set(merged.selection.weights) == {"one", "two", "ngram"}
    merged.forget("0")


def test_a_policys_choice_goes_first() -> None:
    models = [Expert(name, lambda request, place: True) for name in ("one", "two")]
    merged, request = _merged(models, 1, [NGramDrafter()]), _text_request("0", 95)
    for allowed, expected in (({"two"}, {"two"}), ({"two", "ngram"}, {"two", "ngram"}), ({"ngram"}, {"ngram"})):
        (tree,) = merged.draft([span_of(request)], [replace(BUDGET, drafters=frozenset(allowed))])
        assert {draw.drafter for draw in tree.draws} == expected
    (tree,) = merged.draft([span_of(request)], [replace(BUDGET, drafters=frozenset())])
    assert not tree.num_guessed
    merged.forget("0")


def test_requests_that_decode_plainly_are_not_replayed() -> None:
    models = [Expert(name, lambda request, place: True) for name in ("one", "two")]
    merged = _merged(models, 1)
    guessing, plain = _text_request("0"), _text_request("1")
    merged.draft([span_of(guessing), span_of(plain)], [BUDGET, OFF])
    assert [expert.replayed for expert in models] == [[80], [80]]


def _fail(*_: Any) -> Any:
    raise RuntimeError("broken on purpose")


@pytest.mark.parametrize("place", ["replay", "take_losses"])
def test_scoring_that_fails_is_harmless(place: str, caplog: pytest.LogCaptureFixture) -> None:
    """After three times it is tried no more, and the others are chosen; it keeps nothing of what failed."""
    good, bad = Expert("good", lambda request, place: True), Expert("bad", lambda request, place: True)
    setattr(bad, place, _fail)
    merged, requests = _merged([bad, good], 1), [_text_request(str(i)) for i in range(5)]
    for request in requests:
        for _ in range(20):
            assert _step(merged, [request]) >= [1]
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 3
    assert "bad cannot be scored" in caplog.text
    assert len([name for name, _ in good.asked if name == "4"]) == 20
    assert "0" in bad.forgotten


def test_if_nobody_can_be_scored_guessing_goes_on() -> None:
    models = [Expert(name, lambda request, place: True) for name in ("one", "two")]
    for model in models:
        model.take_losses = _fail  # type: ignore[method-assign]
    merged, request = _merged(models, 1), _text_request("0")
    for _ in range(20):
        _step(merged, [request])
    assert len(models[0].asked) == 20
    later = _text_request("1")
    _step(merged, [later])
    assert len(models[0].asked) == 21, "also for one that comes when nobody is scored any more"


def test_a_drafter_that_failed_too_often_is_not_chosen() -> None:
    best, other = Expert("best", lambda request, place: True), Expert("other", lambda request, place: False)

    best.draft = _fail  # type: ignore[method-assign]
    merged, request = _merged([best, other], 1), _text_request("0")
    for _ in range(20):
        _step(merged, [request])
    assert len(other.asked) == 20 - 3


def test_the_choice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    models = [Expert("one", lambda request, place: True), Expert("two", lambda request, place: False)]
    merged, request = _merged(models, 1), _text_request("0")
    with caplog.at_level("DEBUG", "specinfer.drafters.merge.selection"):
        _step(merged, [request])
        _step(merged, [request])
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("request 0: asked are one; weights: one 1.00, two 0.00")


# ------------------------------------------------------------------------------------------- the option


@pytest.fixture(scope="module")
def folders(model_folder: Callable[..., Path]) -> tuple[Path, list[str]]:
    """A target, and drafters of which the second is much the better."""
    return model_folder(tokenizer=True), [str(model_folder(noise=noise, tokenizer=True)) for noise in (3.0, 0.15)]


def test_an_llm_generates_the_same_tokens_with_a_choice(folders: tuple[Path, list[str]]) -> None:
    target, drafters = folders
    prompts = random_prompts([7, 9, 30])
    params = [SamplingParams(temperature=t, max_tokens=40, seed=i) for i, t in enumerate((0.0, 0.8, 1.0))]

    def drafted(**options: Any) -> list[list[int]]:
        with LLM(target, drafters=[*drafters, "suffix"], **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            if llm.drafter is not None and llm.drafter.selection is not None and options["tree"] != "auto":
                weights = llm.drafter.selection.weights
                assert weights[Path(drafters[1]).name] > weights[Path(drafters[0]).name]
        return [output.outputs[0].token_ids for output in outputs]

    plain = drafted(tree="off")
    for tree, select in (
        ("auto", "hedge"),
        ("2,1,1", "hedge:1"),
        ("best-first:8", "hedge:1"),
        ("best-first:8", "hedge:5"),
    ):
        assert drafted(tree=tree, select=select) == plain


def test_a_fixed_expansion_is_grown_by_those_who_are_asked(folders: tuple[Path, list[str]]) -> None:
    target, drafters = folders
    sizes = {"all": 3, "hedge": 3, "hedge:1": 2}
    for select, num_drafters in sizes.items():
        with LLM(target, drafters=[*drafters, "ngram"], tree="1,1", select=select) as llm:
            assert llm.drafter is not None
            assert llm.drafter.num_drafters == num_drafters
            (output,) = llm.generate([random_prompts([9])[0]], SamplingParams(max_tokens=20), use_tqdm=False)
            assert output.metrics.speculative_decoding["num_draft_tokens"] > 0


def test_without_two_models_there_is_nothing_to_choose(folders: tuple[Path, list[str]]) -> None:
    target, drafters = folders
    for few in (drafters[:1], ["ngram", "suffix"], [drafters[0], "ngram"], "auto"):
        with pytest.raises(ValueError, match=r"^select: hedge:1 chooses among drafters that are models"):
            LLM(target, drafters=few, tree="1", select="hedge:1")
    LLM(target, drafters=drafters[:1], tree="off", select="hedge:1")


def test_costs_are_kept_for_each_number_of_models(runner_of: Callable[..., ModelRunner]) -> None:
    models = [resized(runner_of("llama", 0, noise), 500) for noise in (0.15, 3.0)]
    made = [make_drafter(models, VOCAB, ["a", "b"], max_asked=count) for count in (None, 1, 2)]
    situations = [json.dumps(_situation(runner_of("llama"), drafter)) for drafter in made if drafter]
    assert len(set(situations)) == 3


def test_measurements_take_the_choice(folders: tuple[Path, list[str]]) -> None:
    target, drafters = folders
    common = {"model": str(target), "drafters": tuple(drafters), "trees": ("1,1",), "device": "cpu", "max_tokens": 6,
              "prompts": ((1, 2, 3),), "repeats": 1, "warmup": 0, "select": "hedge:1"}  # fmt: skip
    asked = []

    def watched(*args: Any, **options: Any) -> Any:
        asked.append(options["max_asked"])
        return make_drafter(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specinfer.setup.drafter_setup.make_drafter", watched)
        assert run_latency(LatencyConfig(**common)).options["select"] == "hedge:1"  # type: ignore[arg-type]
        run_throughput(ThroughputConfig(**common, batch_sizes=(1,)))  # type: ignore[arg-type]
    assert asked == [1, 1]
    for config in (LatencyConfig, ThroughputConfig):
        with pytest.raises(ValueError, match=r"^select: 'best' is not understood"):
            config(select="best")


@pytest.mark.parametrize("command", [("generate", "the"), ("bench", "latency"), ("bench", "throughput"), ("serve",)])
def test_commands_refuse_what_they_do_not_understand(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*command[:1], "demo", *command[1:]] if command[0] != "bench" else [*command, "demo"]
    with pytest.raises(SystemExit) as ended:
        app([*words, "--select", "best"])
    assert ended.value.code == 2
    assert "select: 'best' is not understood" in capsys.readouterr().err
