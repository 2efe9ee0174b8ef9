"""LLM: text in, text out; what it refuses and how; that no bad prompt, break or stream spoils another."""

import gc
import itertools
import json
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reference
from specinfer import LLM, ModelError, RequestError, RequestOutput, SamplingParams
from specinfer.core.limits import SLO
from specinfer.core.noise import derive_seed
from tiny import EOS, VOCAB, make_model, make_tokenizer, random_prompts, save_model, save_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
CHAT = (
    "{% for m in messages %}{{ m['role'] }}, {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}it is{% endif %}"
)
PROMPTS = ["the cat", "and of the story, that", "in", "all is \u20ac"]


@pytest.fixture(scope="module")
def folder(model_folder: Callable[..., Path]) -> Path:
    return model_folder("llama", tokenizer=True, eos_token_id=EOS)


@pytest.fixture(scope="module")
def small(model_folder: Callable[..., Path]) -> Path:
    """A drafter that agrees partly."""
    return model_folder("llama", 0, 0.15, tokenizer=True, eos_token_id=EOS)


def _llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **({"device": "cpu", "drafters": ["ngram"], "tree": "1,1,1"} | options))


@pytest.fixture(scope="module")
def llm(folder: Path, small: Path) -> LLM:
    return _llm(folder, drafters=[str(small), "ngram"], tree="2,1,1")


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return _llm(folder, tree="off")


def _tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


# --------------------------------------------------------------------------------------- what it gives


def test_text_of_a_prompt(llm: LLM) -> None:
    (output,) = llm.generate("the cat", GREEDY)
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("the cat")
    assert (output.prompt, output.prompt_token_ids, output.error, output.finished) == ("the cat", ids, None, True)
    (completion,) = output.outputs
    wanted = reference.generate(make_model("llama", eos_token_id=EOS), ids, GREEDY, 0, [EOS])
    assert completion.token_ids == wanted
    assert completion.text == tokenizer.decode(wanted, skip_special_tokens=True)
    assert completion.finish_reason == ("stop" if wanted[-1] == EOS else "length")
    assert (completion.index, completion.logprobs, completion.cumulative_logprob) == (0, None, None)
    assert len(completion.token_origins) == len(wanted)


WAYS: list[Callable[[str, list[int]], Any]] = [
    lambda text, ids: text,
    lambda text, ids: ids,
    lambda text, ids: tuple(ids),
    lambda text, ids: {"prompt": text},
    lambda text, ids: {"prompt_token_ids": ids},
    lambda text, ids: np.array(ids),
    lambda text, ids: {"prompt_token_ids": torch.tensor(ids)},
    lambda text, ids: list(np.array(ids)),
]


@pytest.mark.parametrize(
    "wrap", WAYS, ids=["text", "list", "tuple", "prompt", "prompt_token_ids", "numpy", "tensor", "numbers"]
)
def test_ways_to_give_a_prompt(llm: LLM, wrap: Callable[[str, list[int]], Any]) -> None:
    tokenizer = make_tokenizer()
    given = [wrap(text, tokenizer.encode(text)) for text in PROMPTS]
    wanted = _tokens(llm.generate(PROMPTS, GREEDY))
    assert _tokens(llm.generate(given, GREEDY)) == wanted, "a list of them"
    for prompt, tokens in zip(given, wanted, strict=True):
        if not isinstance(prompt, tuple):
            assert _tokens(llm.generate(prompt, GREEDY)) == [tokens], "one of them"


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_defaults(llm: LLM) -> None:
    (output,) = llm.generate("the cat")
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_outputs_come_in_the_order_of_prompts(llm: LLM, plain: LLM) -> None:
    """Each with its own parameters, longest first."""
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (20, 3, 11, 1)]
    outputs = llm.generate(PROMPTS, params)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [len(tokens) for tokens in _tokens(outputs)] == [20, 3, 11, 1]
    assert _tokens(outputs) == _tokens(plain.generate(PROMPTS, params))


def test_capacity_for_answers_without_a_limit(folder: Path) -> None:
    llm = _llm(folder, max_model_len=24)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate([random_prompts([10])[0]], params)
    assert len(output.outputs[0].token_ids) == 14
    assert output.outputs[0].finish_reason == "length"


def test_the_same_seed_gives_the_same_text_with_and_without_speculation(folder: Path, small: Path) -> None:
    params = [
        SamplingParams(n=2, max_tokens=12),
        SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=15),
        SamplingParams(n=3, temperature=1.2, top_k=20, presence_penalty=0.5, max_tokens=9),
        SamplingParams(min_p=0.05, stop=["a", "e"], max_tokens=20, logprobs=2),
    ]
    outputs = []
    for options in (
        {"tree": "off"},
        {"drafters": [str(small)], "tree": "3,2"},
        {"drafters": ["ngram"], "tree": "<1,1,1>"},
        {"drafters": [str(folder), "ngram"], "tree": " 2 , 1 , 1 ", "max_num_seqs": 2, "max_num_batched_tokens": 7},
        {"drafters": [str(small)], "slo": "ttft:50,tpot:0.1"},  # the trees that measured costs and targets favour
    ):
        llm = _llm(folder, seed=5, **({"tree": "auto"} | options))
        made = llm.generate(PROMPTS, params)
        outputs.append([(c.token_ids, c.text, c.finish_reason, c.stop_reason) for o in made for c in o.outputs])
    assert len(outputs[0]) == 7
    assert all(texts == outputs[0] for texts in outputs[1:])
    assert len({tuple(tokens) for tokens, *_ in outputs[0][:2]}) == 2, "each of n has its own noise"


@pytest.mark.parametrize("drawing", ["auto", "top-k", "without-replacement", "iid", "hybrid"])
def test_target_only_gives_the_same_text_too(folder: Path, small: Path, plain: LLM, drawing: str) -> None:
    params = [SamplingParams(temperature=t, seed=i, max_tokens=15) for i, t in enumerate((0.0, 0.7, 1.0, 1.3))]
    llm = _llm(
        folder, drafters=[str(small), "suffix"], tree="best-first:8", verification="target-only", draft_sampling=drawing
    )
    assert _tokens(llm.generate(PROMPTS, params)) == _tokens(plain.generate(PROMPTS, params))


@pytest.mark.parametrize("tree", ["2,1,1", "best-first:8:4", "auto"])
@pytest.mark.parametrize("rule", ["multi-step", "traversal"])
def test_rules_that_use_random_numbers(folder: Path, small: Path, plain: LLM, rule: str, tree: str) -> None:
    llm = _llm(folder, drafters=[str(small), "ngram"], tree=tree, verification=rule)
    assert _tokens(llm.generate(PROMPTS, GREEDY)) == _tokens(plain.generate(PROMPTS, GREEDY))
    params = SamplingParams(n=3, seed=4, max_tokens=15, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params)
    assert [len(tokens) for tokens in _tokens(outputs)] == [15] * 12
    assert len({tuple(tokens) for tokens in _tokens(outputs)}) == 12
    assert all(output.error is None for output in outputs)
    if tree == "2,1,1":  # best first goes by what was learned meanwhile
        assert _tokens(llm.generate(PROMPTS[::-1], params)) == [
            tokens for i in (3, 2, 1, 0) for tokens in _tokens(outputs[i : i + 1])
        ]


TREES: list[str | None] = [None, "off", "1,1", "best-first:4", "auto", "3,1", "best-first:6:2"]


def _nodes(output: RequestOutput) -> int:
    """Guesses a step, at most."""
    stats: Any = output.metrics.speculative_decoding
    return -(-stats["num_draft_tokens"] // max(stats["num_spec_steps"], 1))


@pytest.mark.parametrize("rule", ["coupled", "multi-step"])
def test_each_request_may_ask_for_its_own_tree(folder: Path, small: Path, plain: LLM, rule: str) -> None:
    """In one batch; a tree changes no token where the rule is coupled."""
    llm = _llm(folder, drafters=[str(small)], tree="2,2", verification=rule)

    def params(trees: Sequence[str | None]) -> list[SamplingParams]:
        return [SamplingParams(seed=i, max_tokens=20, ignore_eos=True, tree=tree) for i, tree in enumerate(trees)]

    outputs = llm.generate(["the cat"] * len(TREES), params(TREES))
    wanted = _tokens(plain.generate(["the cat"] * len(TREES), params([None] * len(TREES))))
    if rule == "coupled":
        assert _tokens(outputs) == wanted
    assert _tokens(outputs[1:2]) == wanted[1:2], "plain decoding under any rule"
    stats: list[Any] = [output.metrics.speculative_decoding for output in outputs]
    assert [s["num_spec_tokens"] for i, s in enumerate(stats) if TREES[i] not in ("auto", "best-first:4")] == [
        2,
        0,
        2,
        2,
        2,
    ]
    assert stats[1]["num_draft_tokens"] == 0
    assert stats[1]["tokens_per_pass"] == 1.0
    most = {None: 6, "1,1": 2, "best-first:4": 4, "3,1": 6, "best-first:6:2": 6}
    for tree, output in zip(TREES, outputs, strict=True):
        if tree in most:
            assert 0 < _nodes(output) <= most[tree], tree
    assert 0 < stats[3]["num_spec_tokens"] <= 4


def test_a_tree_without_a_drafter_is_refused(plain: LLM) -> None:
    wanted = _tokens(plain.generate(PROMPTS, GREEDY))
    for tree in ("off", "auto"):  # plain decoding is what they may mean
        params = SamplingParams(temperature=0.0, max_tokens=12, tree=tree)
        assert _tokens(plain.generate(PROMPTS, params)) == wanted
    for tree in ("1,1", "best-first:4"):
        with pytest.raises(RequestError, match=r"^prompts\[0\]: tree: .* needs drafters"):
            plain.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12, tree=tree))


def test_a_server_without_speculation_plans_for_latency_targets(folder: Path) -> None:
    """Its passes are measured once it is prepared; outputs and the reason for them stay as they are."""
    llm = _llm(folder, drafters=[], tree="off")
    wanted, scheduler = _tokens(llm.generate(PROMPTS, GREEDY)), llm._parts.scheduler
    assert scheduler.planner is None
    llm.prepare()
    assert scheduler.planner is not None
    outputs = llm.generate(PROMPTS, GREEDY)
    assert _tokens(outputs) == wanted
    assert outputs[0].metrics.speculative_decoding["reason"] == "tree off: plain decoding was asked for"


def test_the_reason_for_plain_decoding_is_part_of_the_metrics(folder: Path, small: Path, plain: LLM) -> None:
    def reason(llm: LLM, **params: Any) -> object:
        (output,) = llm.generate("the cat", SamplingParams(**({"max_tokens": 12, "ignore_eos": True} | params)))
        return output.metrics.speculative_decoding["reason"]

    assert reason(plain) == "tree off: plain decoding was asked for"
    assert reason(_llm(folder, drafters=[], tree="auto")) == "no drafter is loaded"
    drafting = _llm(folder, drafters=[str(folder)], tree="1,1")
    assert reason(drafting, temperature=0.0) is None
    assert reason(drafting, tree="off") == "tree off: plain decoding was asked for"
    assert reason(drafting, max_tokens=1) == "the output has a single token"
    nothing = reason(_llm(folder, tree="1"), max_tokens=3, seed=1)
    assert nothing == "the drafters proposed no tokens for most passes"


def test_a_prediction_that_comes_true_saves_passes(folder: Path, plain: LLM) -> None:
    """Given as text or as tokens; it is a guess like any other."""
    llm = _llm(folder, tree="1,1,1,1")
    params = {"temperature": 0.0, "max_tokens": 15, "ignore_eos": True}
    (wanted,) = plain.generate("the cat", SamplingParams(**params))
    said = wanted.outputs[0].token_ids
    for prediction in (said, wanted.outputs[0].text, [7] * 15, "", []):
        (output,) = llm.generate("the cat", SamplingParams(**params, prediction=prediction))
        assert output.outputs[0].token_ids == said
        if prediction == said:
            stats: Any = output.metrics.speculative_decoding
            assert stats["num_target_passes"] == 3
            assert output.outputs[0].token_origins.count("prediction") == 12


def test_seeds(folder: Path) -> None:
    params = SamplingParams(max_tokens=12)
    seeded = SamplingParams(max_tokens=12, seed=9)
    ids = make_tokenizer().encode("the cat")
    model = make_model("llama", eos_token_id=EOS)
    llm = _llm(folder, seed=5)
    first, second, fixed = (_tokens(llm.generate("the cat", p))[0] for p in (params, params, seeded))
    assert first == reference.generate(model, ids, params, derive_seed(5, 0), [EOS])
    assert second == reference.generate(model, ids, params, derive_seed(5, 1), [EOS])
    assert fixed == reference.generate(model, ids, params, 9, [EOS])
    assert first != second
    assert _tokens(llm.generate("the cat", SamplingParams(max_tokens=12, seed=2**63 - 1, n=2)))[0]


def test_logprobs(llm: LLM) -> None:
    (output,) = llm.generate("the cat", SamplingParams(max_tokens=5, seed=1, logprobs=2, ignore_eos=True))
    (completion,) = output.outputs
    assert completion.logprobs is not None
    model, ids = make_model("llama"), list(output.prompt_token_ids)
    total = 0.0
    for token, row in zip(completion.token_ids, completion.logprobs, strict=True):
        exact = reference.last_logits(model, ids).log_softmax(dim=-1)
        assert set(row) == {token, *exact.topk(2).indices.tolist()}
        for kind, known in row.items():
            assert known.logprob == pytest.approx(float(exact[kind]), abs=1e-4)
            assert known.rank == 1 + int((exact > exact[kind]).sum())
            assert known.decoded_token == llm.tokenizer.decode([kind])
        assert max(known.rank for known in row.values()) <= max(2, row[token].rank)
        total += float(exact[token])
        ids.append(token)
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("num_batched", [5, 512])
def test_prompt_logprobs(folder: Path, small: Path, num_batched: int) -> None:
    """Of each prompt that asked, whatever `n`; also where its prompt is read in pieces."""
    llm = _llm(folder, drafters=[str(small)], tree="2,1", max_num_batched_tokens=num_batched)
    params = SamplingParams(n=2, max_tokens=4, prompt_logprobs=2, seed=1)
    outputs = llm.generate([*PROMPTS, "the"], [params] * 4 + [GREEDY])
    model = make_model("llama", eos_token_id=EOS)
    for output in outputs[:4]:
        rows, ids = output.prompt_logprobs, output.prompt_token_ids
        assert rows is not None
        assert rows[0] is None
        assert len(rows) == len(ids)
        for i in range(1, len(ids)):
            exact = reference.last_logits(model, ids[:i]).log_softmax(dim=-1)
            row = rows[i]
            assert row is not None
            assert next(iter(row)) == ids[i]
            assert set(row) == {ids[i], *exact.topk(2).indices.tolist()}
            assert {kind: known.logprob for kind, known in row.items()} == pytest.approx(
                {kind: float(exact[kind]) for kind in row}, abs=2e-4
            )
    assert outputs[4].prompt_logprobs is None


def test_special_tokens_in_the_text(llm: LLM) -> None:
    fields = {"temperature": 0.0, "max_tokens": 4, "allowed_token_ids": [EOS], "ignore_eos": True}
    (without,) = llm.generate("in", SamplingParams(**fields))
    (unskipped,) = llm.generate("in", SamplingParams(**fields, skip_special_tokens=False))
    assert without.outputs[0].text == ""
    assert unskipped.outputs[0].text == "</s>" * 4


def test_metrics_of_a_prompt(llm: LLM) -> None:
    (output,) = llm.generate("the cat", SamplingParams(n=2, max_tokens=12, ignore_eos=True, seed=0))
    stats: Any = output.metrics.speculative_decoding
    assert stats["num_target_passes"] + stats["num_accepted_draft_tokens"] == 24
    assert stats["tokens_per_pass"] == pytest.approx(24 / stats["num_target_passes"])
    assert output.metrics.first_token_time is not None
    assert output.metrics.finished_time is not None
    assert output.metrics.arrival_time <= output.metrics.first_token_time <= output.metrics.finished_time


def test_a_step_of_the_systems_clock_changes_no_times(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = itertools.count(start=500_000, step=-1)
    monkeypatch.setattr(time, "time", lambda: 3600.0 * next(hours))
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=0, slo=SLO(ttft=1e4, tpot=1e4))
    (output,) = llm.generate("the cat", params)
    first, end = output.metrics.first_token_time, output.metrics.finished_time
    assert first is not None
    assert end is not None
    assert output.metrics.arrival_time <= first <= end < output.metrics.arrival_time + 600


# ---------------------------------------------------------------------------------------------- chat


@pytest.fixture(scope="module")
def chatting(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    copy = Path(shutil.copytree(folder, tmp_path_factory.mktemp("chat") / "model"))
    return _llm(save_tokenizer(copy, CHAT))


def test_chat_goes_through_the_template(chatting: LLM) -> None:
    short = [{"role": "user", "content": "the cat"}]
    long = [*short, {"role": "assistant", "content": "is"}, {"role": "user", "content": "in"}]
    wanted = chatting.generate(["user, the cat\nit is", "user, the cat\nassistant, is\nuser, in\nit is"], GREEDY)
    assert _tokens(chatting.chat([short, long], GREEDY)) == _tokens(wanted)
    assert _tokens(chatting.chat(short, GREEDY)) == _tokens(wanted[:1])


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": "in"}, 3], "the cat"], ids=repr)
def test_chat_refuses(chatting: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match=r"^messages(\[[01]\])?: "):
        chatting.chat(messages, GREEDY)


def test_a_bad_conversation_of_several_is_refused_by_its_index(chatting: LLM) -> None:
    good = [{"role": "user", "content": "in"}]
    with pytest.raises(RequestError, match=r"^messages\[1\]\[1\]: "):
        chatting.chat([good, [*good, 3]], GREEDY)  # type: ignore[list-item]


def test_no_chat_without_a_template(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no chat template; use generate"):
        llm.chat([{"role": "user", "content": "the cat"}])


# -------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(seed=4, max_tokens=30),
        SamplingParams(seed=5, max_tokens=30, stop=["er", "a", "ti"], ignore_eos=True),
        SamplingParams(seed=6, max_tokens=30, stop=["a"], include_stop_str_in_output=True, ignore_eos=True),
        SamplingParams(seed=7, max_tokens=1),
    ],
)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_stream_adds_up(llm: LLM, prompt: str, params: SamplingParams) -> None:
    chunks = list(llm.stream(prompt, params))
    (whole,) = llm.generate(prompt, params)
    (completion,) = whole.outputs
    assert "".join(chunk.text for chunk in chunks) == completion.text
    assert [token for chunk in chunks for token in chunk.token_ids] == completion.token_ids
    assert [origin for chunk in chunks for origin in chunk.origins] == completion.token_origins
    assert all(chunk.output is None for chunk in chunks[:-1])
    last = chunks[-1].output
    assert last is not None
    assert last.outputs == whole.outputs
    if len(completion.token_ids) > 1:
        assert len(chunks) < len(completion.token_ids) or len(chunks) > 1


def test_a_stream_left_early_is_over(llm: LLM) -> None:
    stream = llm.stream("the cat", SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    first = next(stream)
    assert first.token_ids
    stream.close()
    assert not llm.engine.has_work


def test_a_stream_next_to_other_work(llm: LLM) -> None:
    """Work done for others moves a stream's request on as well; nothing of it may be lost."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    (wanted,) = llm.generate("the cat", params)
    stream = llm.stream("the cat", params)
    chunks = [next(stream)]
    llm.generate(["in"] * 2, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    chunks += stream
    assert [token for chunk in chunks for token in chunk.token_ids] == wanted.outputs[0].token_ids
    assert chunks[-1].output is not None
    assert "".join(chunk.text for chunk in chunks) == wanted.outputs[0].text


def test_two_streams_in_turns(llm: LLM) -> None:
    params = [SamplingParams(seed=i, max_tokens=n, ignore_eos=True) for i, n in enumerate((25, 7))]
    wanted = llm.generate(PROMPTS[:2], params)
    streams = [llm.stream(prompt, p) for prompt, p in zip(PROMPTS, params, strict=False)]
    chunks: list[list[Any]] = [[], []]
    running = [0, 1]
    while running:
        for i in list(running):
            chunk = next(streams[i], None)
            if chunk is None:
                running.remove(i)
            else:
                chunks[i].append(chunk)
    for i in (0, 1):
        assert [token for chunk in chunks[i] for token in chunk.token_ids] == wanted[i].outputs[0].token_ids
        assert chunks[i][-1].output is not None


def test_calls_of_several_threads_take_turns(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    wanted = _tokens(llm.generate(PROMPTS, params))

    def complete(number: int) -> list[int]:
        if number % 2:
            return [token for chunk in llm.stream(PROMPTS[number // 2], params) for token in chunk.token_ids]
        return llm.generate(PROMPTS[number // 2], params)[0].outputs[0].token_ids

    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert list(pool.map(complete, range(8))) == [tokens for tokens in wanted for _ in range(2)]


def test_a_stream_has_one_output(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"^n: "):
        next(llm.stream("the cat", SamplingParams(n=2)))
    with pytest.raises(RequestError, match=r"^prompt: empty"):
        next(llm.stream(""))


# ------------------------------------------------------------------------------------------ interrupts


@pytest.mark.parametrize("place", ["target", "draft", "cache"])
def test_a_keyboard_interrupt_leaves_it_usable(llm: LLM, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=15, seed=1)
    wanted = _tokens(llm.generate(PROMPTS, params))
    owner, name = {
        "target": (llm.target, "forward"),
        "draft": (llm.engine.drafter, "draft"),
        "cache": (llm.target.cache, "commit"),
    }[place]
    for at in range(4):
        with monkeypatch.context() as patch:
            calls, function = iter(range(10**6)), getattr(owner, name)

            def interrupted(*args: Any, calls: Any = calls, function: Any = function, at: int = at) -> Any:
                if next(calls) == at:
                    raise KeyboardInterrupt
                return function(*args)

            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, params)
        assert not llm.engine.has_work
        assert llm.target.cache.num_owned == 0
        assert _tokens(llm.generate(PROMPTS, params)) == wanted


def test_a_keyboard_interrupt_in_a_stream(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream("the cat", SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.0))
    next(stream)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.target, "forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert not llm.engine.has_work
    assert llm.target.cache.num_owned == 0


def test_shutdown_ends_everything(folder: Path) -> None:
    with _llm(folder) as llm:
        stream = llm.stream("the cat", SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        engine, cache = llm.engine, llm.target.cache
        assert engine.scheduler.running
    assert cache.num_owned == 0
    assert not engine.has_work
    stream.close()


# ------------------------------------------------------------------------------- prompts it refuses

NO_LIST = r"prompt: give text or (a list of )?token ids"
BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "prompt: empty"),
    ([[]], "prompt: empty"),
    ({"prompt": ""}, "prompt: empty"),
    ({"prompt_token_ids": []}, "prompt: empty"),
    ({}, NO_LIST),
    ("\u4e16", "prompt: empty"),  # no token of this vocabulary
    ([[5, VOCAB]], rf"prompt: token id {VOCAB} is not in the vocabulary of {VOCAB} tokens"),
    ([[5, -1]], "prompt: token id -1 is not in the vocabulary"),
    ([[2**70]], "prompt: token id .* is not in the vocabulary"),
    ([[1, True]], "prompt: "),
    ([1, False], "prompt: "),
    ([[1, 2.0]], "prompt: "),
    ([[1, None]], "prompt: "),
    ([[1, "2"]], "prompt: "),
    ([1.5], NO_LIST),
    ({"prompt_token_ids": [1, "2"]}, "prompt: a token id must be a whole number, not '2'"),
    ([None], NO_LIST),
    ({"prompt_token_ids": None}, NO_LIST),
    ({"prompt_token_ids": "12"}, NO_LIST),
    ({"prompt": None}, "prompt: "),
    ({"prompt": 3}, NO_LIST),
    ([b"the cat"], NO_LIST),
    (["\ud800"], "prompt: "),  # half a surrogate pair: not text that any encoding has
    ([[5] * 256], "This model's maximum context length is 256 tokens.* 256 tokens and leave no space for output"),
    ([[5] * 5000], "This model's maximum context length is 256 tokens. However, your prompt resulted in 5000 tokens"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=lambda x: repr(x)[:30])
def test_bad_prompts_are_refused_before_any_work(
    llm: LLM, prompt: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.engine, "step", lambda: pytest.fail("work was done"))
    with pytest.raises(RequestError, match=f"^{message}"):
        llm.generate(prompt, GREEDY)
    assert not llm.engine.has_work


# As one of several prompts: what was a list of one is its one.
IN_A_LIST = [prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt for prompt, _ in BAD_PROMPTS]


@pytest.mark.parametrize("bad", IN_A_LIST, ids=lambda x: repr(x)[:30])
def test_a_bad_prompt_of_a_list_is_refused_by_its_index_before_anything_runs(
    llm: LLM, bad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.engine, "step", lambda: pytest.fail("work was done"))
    with pytest.raises(RequestError, match=r"^prompts\[1\]: "):
        llm.generate([PROMPTS[0], bad, *PROMPTS[1:]], GREEDY)
    assert not llm.engine.has_work


BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 300, "min_tokens": 255}, r"min_tokens: 255 .* 256 tokens \(max_model_len\); use at most 254"),
    ({"max_tokens": None, "min_tokens": 10**18}, "min_tokens: "),
    ({"stop_token_ids": [VOCAB]}, f"stop_token_ids: token id {VOCAB} is not in the vocabulary of {VOCAB} tokens"),
    ({"logit_bias": {VOCAB + 7: 1.0}}, f"logit_bias: token id {VOCAB + 7} is not in"),
    ({"allowed_token_ids": [3, 10**9]}, "allowed_token_ids: token id 1000000000 is not in"),
    ({"allowed_token_ids": [EOS], "min_tokens": 2}, "allowed_token_ids: "),
    ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2}, "allowed_token_ids: "),
]


@pytest.mark.parametrize(("fields", "message"), BAD_PARAMS, ids=lambda x: repr(x)[:30])
def test_parameters_that_do_not_fit_the_model(llm: LLM, fields: dict[str, Any], message: str) -> None:
    prompt = [5, 6]
    with pytest.raises(RequestError, match=f"^{message}"):
        llm.generate(prompt, SamplingParams(**fields))
    with pytest.raises(RequestError, match=rf"^prompts\[1\]: {message}"):
        llm.generate([prompt, prompt], [GREEDY, SamplingParams(**fields)])


def test_the_longest_request_that_fits(folder: Path) -> None:
    llm = _llm(folder, max_model_len=20)
    prompt = random_prompts([19])[0]
    for max_tokens in (1, 2):
        (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))
        assert len(output.outputs[0].token_ids) == 1
    with pytest.raises(RequestError, match=r"use at most 1$"):
        llm.generate(prompt, SamplingParams(max_tokens=2, min_tokens=2))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_parameters_as_prompts(llm: LLM, count: int) -> None:
    with pytest.raises(ValueError, match=f"sampling_params: {count} given for 2 prompts; give one for each"):
        llm.generate(["in", "the"], [GREEDY] * count)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, ["temperature"], 3, "greedy"], ids=repr)
def test_parameters_of_another_type(llm: LLM, params: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="sampling_params"):
        llm.generate("the cat", params)
    assert not llm.engine.has_work


def test_no_tokenizer_no_text(model_folder: Callable[..., Path]) -> None:
    llm = _llm(model_folder("llama"))
    with pytest.raises(RequestError, match="no tokenizer; give token ids"):
        llm.generate("the cat")
    with pytest.raises(RequestError, match="no tokenizer; use stop_token_ids"):
        llm.generate([1, 2], SamplingParams(stop="a"))
    (output,) = llm.generate([1, 2], GREEDY)
    assert len(output.outputs[0].token_ids) == 12
    assert output.outputs[0].text == ""
    assert "".join(chunk.text for chunk in llm.stream([1, 2], GREEDY)) == ""


# ------------------------------------------------------------------------- options it refuses

BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    *(({"tree": tree}, "tree") for tree in ("", "1,0", 3, "best-first:0")),
    *(({"drafters": names}, "drafters") for names in (["ngram", "ngram"], [""])),
    *(({"dtype": dtype}, "dtype") for dtype in ("int8", "", "fp32", "float64")),
    *(({"device": device}, "device") for device in ("tpu9", "", "gpu", "cuda:x")),
    *(({"max_model_len": value}, "max_model_len") for value in (0, 1.5, True, "256", 257, 10**9)),
    *(({"max_num_seqs": 0}, "max_num_seqs"), ({"max_num_batched_tokens": 2.0}, "max_num_batched_tokens")),
    *(({"kv_cache_memory_bytes": value}, "kv_cache_memory_bytes") for value in (0, -1, 1e9, 1, 1000)),
    *(({"seed": 2**63}, "seed"), ({"verification": "typical"}, "verification")),
    ({"draft_sampling": ""}, "draft_sampling must be one of auto, shared-noise"),
    ({"verification": "traversal", "draft_sampling": "shared-noise"}, "draft_sampling: 'shared-noise' .* use .*top-k"),
    ({"drafters": [], "tree": "best-first:4"}, "tree: 'best-first:4' needs a drafter"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "name"), BAD_OPTIONS, ids=lambda x: repr(x)[:40])
def test_bad_options_are_refused_by_name(folder: Path, options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        _llm(folder, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda(folder: Path) -> None:
    with pytest.raises(ValueError, match='device: no CUDA device \'cuda\' is available; use "cpu" or "auto"'):
        _llm(folder, device="cuda")


@pytest.mark.parametrize(
    "tree", ["1", " 1 , 2 ", "<2,2>", "1,1,3,1,1", "1024", "off", "auto", "  4  ", "best-first:9:3"]
)
def test_trees_that_are_fine(folder: Path, plain: LLM, tree: str) -> None:
    assert _tokens(_llm(folder, tree=tree).generate("the cat", GREEDY)) == _tokens(plain.generate("the cat", GREEDY))


def test_a_pool_too_small_for_one_request_is_refused_with_a_remedy(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"lower max_model_len to \d+, or raise kv_cache_memory_bytes"):
        _llm(folder, kv_cache_memory_bytes=10_000)
    llm = _llm(folder, kv_cache_memory_bytes=10_000, max_model_len=30)
    assert llm.target.cache.num_slots * 256 <= 10_000
    assert llm.generate([5] * 20, SamplingParams(max_tokens=10))[0].error is None


def test_small_pools_serve_many(folder: Path, small: Path, plain: LLM) -> None:
    """Room for two requests at a time: others are put back, and say the same in the end."""
    llm = _llm(folder, drafters=[str(small)], tree="2,2", kv_cache_memory_bytes=2 * 60 * 256, max_model_len=50)
    prompts = random_prompts([4, 30, 12, 20, 7, 25] * 3)
    params = [SamplingParams(max_tokens=18, seed=i, ignore_eos=True) for i in range(18)]
    assert _tokens(llm.generate(prompts, params)) == _tokens(plain.generate(prompts, params))
    assert llm.engine.metrics.num_preempted > 0


# ---------------------------------------------------------------------------------------- models


def test_no_model_at_all() -> None:
    for name in ("/no/such/folder", "nobody/nothing"):
        with pytest.raises(ModelError, match=r"^model: "):
            LLM(name, device="cpu")


def test_a_drafter_that_cannot_be_loaded(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no/such/drafter"):
        _llm(folder, drafters=["./no/such/drafter"])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=str(tmp_path)):
        _llm(folder, drafters=[str(tmp_path)])


def test_a_drafter_with_another_vocabulary(folder: Path, model_folder: Callable[..., Path]) -> None:
    drafter = model_folder("llama", vocab_size=VOCAB + 8)
    with pytest.raises(ModelError, match=rf"drafters: .* vocabulary of {VOCAB + 8} tokens, the target of {VOCAB}"):
        _llm(folder, drafters=[str(drafter)])


def test_a_drafter_with_another_tokenizer(folder: Path, plain: LLM, tmp_path: Path) -> None:
    """What it guesses is translated; the output is as ever."""
    drafter = save_tokenizer(save_model(tmp_path, "llama"))
    data = json.loads((drafter / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (drafter / "tokenizer.json").write_text(json.dumps(data))
    llm = _llm(folder, drafters=[str(drafter)], tree="2,2")
    for params in (GREEDY, SamplingParams(max_tokens=15, seed=3)):
        assert _tokens(llm.generate(PROMPTS, params)) == _tokens(plain.generate(PROMPTS, params))


def test_a_drafter_without_a_tokenizer_is_fine(folder: Path, plain: LLM, model_folder: Callable[..., Path]) -> None:
    drafter = model_folder("gpt2")
    assert _tokens(_llm(folder, drafters=[str(drafter)]).generate(PROMPTS, GREEDY)) == _tokens(
        plain.generate(PROMPTS, GREEDY)
    )


def test_a_drafter_of_another_family_padded_differently(
    folder: Path, plain: LLM, model_folder: Callable[..., Path]
) -> None:
    """One tokenizer, but logits padded to another size, as happens within model families."""
    drafter = model_folder("mistral", vocab_size=VOCAB + 32, tokenizer=True)
    params = SamplingParams(max_tokens=15, seed=3)
    assert _tokens(_llm(folder, drafters=[str(drafter)], tree="3,2").generate(PROMPTS, params)) == _tokens(
        plain.generate(PROMPTS, params)
    )


@pytest.mark.parametrize("vocab", [VOCAB - 6, VOCAB + 32])
def test_a_tokenizer_of_another_size_than_the_model(model_folder: Callable[..., Path], vocab: int) -> None:
    """More logits than tokens is common; a token the model does not have must not reach it."""
    llm = _llm(model_folder("llama", vocab_size=vocab, tokenizer=True))
    (output,) = llm.generate("cat", SamplingParams(max_tokens=30, seed=1))
    assert len(output.outputs[0].token_ids) == 30
    if vocab < VOCAB:
        with pytest.raises(RequestError, match="prompt: token id 90 is not in the vocabulary of 90 tokens"):
            llm.generate("story")


@pytest.mark.parametrize("dtype", ["auto", "float32", "float", "bfloat16", "float16", "half"])
def test_types(folder: Path, small: Path, dtype: str) -> None:
    llm = _llm(folder, dtype=dtype, drafters=[str(small)])
    kinds = {"auto": torch.float32, "float": torch.float32, "half": torch.float16}
    wanted = kinds.get(dtype, getattr(torch, dtype, None))
    assert llm.target.loaded.dtype == wanted
    assert llm.target.tensors.keys[0].dtype == wanted
    (output,) = llm.generate("the cat", SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 6


# --------------------------------------------------------------------------------------------- NaN


def test_nan_in_a_batch_is_one_requests_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = _tokens(llm.generate(PROMPTS, GREEDY))
    monkeypatch.setattr(llm.target.cache, "keeps_prefixes", False)  # the prompts are to be computed
    forward = llm.target.forward
    target_tokens = make_tokenizer().encode(PROMPTS[1])
    first_slots = set()  # of the request to spoil, in every step, with and without guesses

    def spoiled(pieces: Sequence[Any]) -> torch.Tensor:
        logits, start = forward(pieces).clone(), 0
        for piece in pieces:
            if list(piece.tokens[: len(target_tokens)]) == target_tokens:
                first_slots.add(piece.slots[0])
            if first_slots.intersection([*piece.prefix_slots[:1], piece.slots[0]]):
                logits[start : start + piece.num_logits] = float("nan")
            start += piece.num_logits
        return logits

    monkeypatch.setattr(llm.target, "forward", spoiled)
    with pytest.warns(RuntimeWarning, match="request .* failed: the model computed values") as caught:
        outputs = llm.generate(PROMPTS, GREEDY)
    assert [warning.filename for warning in caught] == [__file__]
    assert outputs[1].error is not None
    assert outputs[1].outputs == []
    assert _tokens([*outputs[:1], *outputs[2:]]) == [*wanted[:1], *wanted[2:]]
    assert all(output.error is None for i, output in enumerate(outputs) if i != 1)


@pytest.mark.parametrize("tree", ["off", "2,1,1"])
def test_a_stream_goes_on_after_an_interrupt_of_another(
    folder: Path, plain: LLM, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that comes between the cache's taking of slots and the request's."""

    class Stop(BaseException):
        pass

    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    (wanted,) = plain.generate([[5, 6, 7]], params)
    llm = _llm(folder, tree=tree)
    stream = llm.stream([5, 6, 7], params)
    said = list(next(stream).token_ids)
    commit = llm.target.cache.commit

    def interrupted(request_id: str, kept: Any, of: int | None = None) -> None:
        commit(request_id, kept, of)
        if len(kept):
            monkeypatch.undo()
            raise Stop

    monkeypatch.setattr(llm.target.cache, "commit", interrupted)
    with pytest.raises(Stop):
        llm.generate([[9, 9]], params)
    for chunk in stream:
        said += chunk.token_ids
    assert said == wanted.outputs[0].token_ids


@pytest.mark.parametrize("tree", ["auto", "2,1,1"])
def test_its_memory_is_free_as_soon_as_nobody_has_it(tree: str, folder: Path, small: Path) -> None:
    """A cycle of references would keep a GPU's memory until the garbage collector runs."""
    gc.disable()
    try:
        llm = _llm(folder, drafters=[str(small), "ngram"], tree=tree)
        llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
        target, engine = weakref.ref(llm.target), weakref.ref(llm.engine)
        del llm
        assert target() is None
        assert engine() is None
    finally:
        gc.enable()


def test_a_with_block_frees_the_model_though_its_name_remains(folder: Path) -> None:
    with _llm(folder) as llm:
        target = weakref.ref(llm.target)
        assert repr(llm) == f"<LLM {folder.name}, drafters: ngram, verification: coupled>"
    assert target() is None
    assert repr(llm) == "<LLM, shut down>"
    with pytest.raises(AttributeError, match="was shut down; load the model again"):
        llm.generate("a")
    llm.shutdown()  # a second time does nothing


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the resident memory of a process this way")
def test_memory_of_a_deleted_model_returns_to_the_system(tmp_path: Path) -> None:
    """The C library keeps freed parts of less than 32 MiB otherwise."""
    folder = save_model(tmp_path / "model", hidden_size=512, intermediate_size=1024, num_hidden_layers=24)
    program = f"""
from pathlib import Path
from specinfer import LLM

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

with LLM({str(folder)!r}, device="cpu", drafters="none") as llm:
    llm.generate([[1, 2, 3]], use_tqdm=False)
before = resident()
for _ in range(2):
    llm = LLM({str(folder)!r}, device="cpu", drafters="none")
    llm.generate([[1, 2, 3]], use_tqdm=False)
    held = resident() - before
    del llm
print(held, resident() - before)
"""
    ran = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True)
    held, kept = map(int, ran.stdout.split())
    assert held > 2**26
    assert kept < held / 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda llm: llm.generate("a", max_tokens=3),
            r"max_tokens: .* give SamplingParams\(max_tokens=3\) to gen",
        ),
        (
            lambda llm: llm.generate([{"role": "user", "content": "a"}]),
            "prompt: a message .* use chat",
        ),
        (lambda llm: next(llm.stream(["a", "b"])), "prompt: a list of prompts .* use generate for several"),
        (lambda _: LLM(), "model is missing; give a folder"),
        (lambda _: LLM("demo", "suffix"), r"name what follows: LLM\('demo', drafters='suffix'\)"),
        (lambda _: LLM("demo", verification="naive"), "not 'naive', which is called target-only here"),
    ],
)
def test_calls_that_people_try_first_are_answered_with_what_to_write(
    llm: LLM, call: Callable[[LLM], object], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(llm)


def test_a_kv_cache_larger_than_the_memory_is_refused_before_it_is_allocated(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_memory_bytes: .* take .* GiB, and this machine has .*; lower it"):
        _llm(folder, kv_cache_memory_bytes="100TiB", max_num_seqs=2**30)
