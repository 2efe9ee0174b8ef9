"""Drafters that learn while they are served: outputs stay, hits rise, what is worse goes, nothing private is kept."""

import asyncio
import contextlib
import json
import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from serving import serve
from specinfer import LLM, SamplingParams
from specinfer.core.request import FinishReason, Span
from specinfer.core.tree import TreeBudget
from specinfer.drafters import SmallModelDrafter
from specinfer.engine import thread
from specinfer.engine.tally import Tally
from specinfer.engine.thread import EngineThread
from specinfer.learning.adapt.adaptation import Adaptation
from specinfer.learning.adapt.held_out_evaluation import HeldOutEvaluation, Version
from specinfer.learning.adapt.hits import served_hits
from specinfer.learning.adapt.online_trainer import OnlineTrainer
from specinfer.learning.adapt.settings import AdaptationConfig
from specinfer.learning.adapt.traffic import Traffic
from specinfer.learning.adapt.versions import RECORD, AdaptationFolder, Versions
from specinfer.learning.batches import batches, last_part, pieces
from specinfer.learning.examples import Source, TrainingExample
from specinfer.learning.heads.new import new_head
from specinfer.learning.trainable import TrainableModel, export
from specinfer.model.definition import load_config
from specinfer.model.load import load_model
from specinfer.model.runner import ModelRunner
from specinfer.server.metrics import Metrics
from specinfer.server.state import ServerState
from specinfer.verify import Acceptance
from tiny import VOCAB, make_engine, make_request, random_prompts, resized, run, save_model

CPU = torch.device("cpu")
QUICK = AdaptationConfig(
    learning_rate=3e-3, window=64, steps_between=16, eval_tokens=512, min_eval_tokens=64, max_tokens=20_000
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SAMPLED = SamplingParams(max_tokens=40)
Folders = Callable[..., Path]


def _prompts(count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": ids} for ids in random_prompts([5] * count, seed)]


@pytest.fixture(scope="module")
def heads(model_folder: Folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Untrained heads, which have the target's last norm and output head."""
    found = {name: tmp_path_factory.mktemp("heads") / name for name in ("eagle3", "dspark")}
    for name, folder in found.items():
        token_map = range(2, 96) if name == "eagle3" else None
        export(new_head(f"new:{name}", model_folder(tokenizer=True, num_hidden_layers=4), 0, token_map), folder)
    return found


@pytest.fixture
def loaded(
    model_folder: Folders, heads: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., LLM]]:
    """Loads a target whose drafter, small or a head, agrees with it partly, and learns fast."""
    opened: list[LLM] = []

    def load(config: AdaptationConfig = QUICK, kind: str = "small", **settings: Any) -> LLM:
        def make(engine: Any, drafters: Any, folder: Any) -> Adaptation:
            return Adaptation(engine, drafters, folder, config)

        monkeypatch.setattr("specinfer.llm.Adaptation", make)
        settings = {"tree": "2,1,1", "adapt_drafters": True, "max_num_seqs": 8} | settings
        changes = {} if kind == "small" else {"num_hidden_layers": 4}
        drafter = model_folder(noise=0.4, tokenizer=True) if kind == "small" else heads[kind]
        opened.append(LLM(model_folder(tokenizer=True, **changes), drafters=[str(drafter)], **settings))
        return opened[-1]

    yield load
    for llm in opened:
        llm.shutdown()


def _trainer(llm: LLM) -> OnlineTrainer:
    assert llm.adaptation is not None
    return llm.adaptation._trainers[0]


def _emitted(llm: LLM, prompts: Sequence[Any], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def _tokens_per_pass(llm: LLM, prompts: Sequence[Any]) -> float:
    outputs = llm.generate(prompts, GREEDY)
    num_emitted = sum(len(output.outputs[0].token_ids) for output in outputs)
    passes = sum(int(output.metrics.speculative_decoding["num_target_passes"]) for output in outputs)  # type: ignore[call-overload]
    return num_emitted / passes


# ------------------------------------------------------------------------------------- what it does


@pytest.mark.parametrize(
    ("params", "verification", "kind"),
    [
        (GREEDY, "coupled", "small"),
        pytest.param(SAMPLED, "target-only", "small", marks=pytest.mark.slow),
        (SAMPLED, "coupled", "eagle3"),
        (GREEDY, "coupled", "dspark"),
    ],
    ids=["greedy", "sampled", "eagle3", "dspark"],
)
def test_outputs_stay_while_drafters_learn_and_are_replaced(
    loaded: Callable[..., LLM], params: SamplingParams, verification: str, kind: str
) -> None:
    prompts = _prompts(20)
    plain = loaded(kind=kind, adapt_drafters=False, tree="off")
    wanted, asked = _emitted(plain, prompts, params), _prompts(3, seed=1)
    plain_streams = [[token for chunk in plain.stream(one, params) for token in chunk.token_ids] for one in asked]

    llm = loaded(kind=kind, verification=verification)
    assert _emitted(llm, prompts, params) == wanted
    stats = _trainer(llm).stats
    streams = [llm.stream(one, params) for one in asked]
    streamed: list[list[int]] = [[*next(stream).token_ids] for stream in streams]
    running = list(llm.engine.scheduler.requests())
    assert len(running) == 3
    llm.adapt(600)
    assert stats.num_swaps >= 1, "the drafter should have been replaced while they ran"
    assert not any(request.drafting.is_read for request in running)
    for stream, tokens in zip(streams, streamed, strict=True):
        tokens += [token for chunk in stream for token in chunk.token_ids]
    assert streamed == plain_streams


@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_hits_and_tokens_per_pass_rise_on_narrow_traffic(loaded: Callable[..., LLM], quantization: str | None) -> None:
    settings, unseen = {"tree": "1,1,1", "drafter_quantization": quantization}, _prompts(24, seed=5)
    before = _tokens_per_pass(loaded(adapt_drafters=False, **settings), unseen)
    llm = loaded(**settings)
    _emitted(llm, _prompts(48))
    llm.adapt(600)
    stats = _trainer(llm).stats
    assert stats.num_swaps >= 1
    assert stats.hit_rate > stats.original_hit_rate + 0.1
    assert _tokens_per_pass(llm, unseen) > before * 1.2
    assert _trainer(llm)._drafter.runner.loaded.quantization == quantization


def test_it_ends_when_there_is_nothing_left_to_learn(loaded: Callable[..., LLM]) -> None:
    llm = loaded()
    assert llm.adaptation is not None
    assert not llm.adaptation.work()
    _emitted(llm, _prompts(10))
    llm.adapt(600)
    steps = _trainer(llm).stats.num_micro_steps
    assert steps > 0
    assert not llm.adaptation.work()
    assert _trainer(llm).stats.num_micro_steps == steps


def test_what_is_worse_on_newer_traffic_is_taken_back(loaded: Callable[..., LLM], tmp_path: Path) -> None:
    llm = loaded(adapt_dir=tmp_path / "kept")
    trainer = _trainer(llm)
    assert llm.adaptation is not None
    bad = trainer._versions.write(lambda folder: _corrupted(trainer, folder))
    trainer._swap_in(trainer._load(bad))  # as if the evaluation had been passed
    assert trainer.current is not trainer.original
    original, prompts = trainer.original.loaded, _prompts(40)
    assert trainer._drafter.runner.loaded is not original
    wanted = _emitted(loaded(adapt_drafters=False, tree="off"), prompts)
    assert _emitted(llm, prompts) == wanted
    for _ in range(1000):
        llm.adaptation.watch()  # under load, too
        if trainer.stats.num_rollbacks:
            break
    assert trainer.stats.num_rollbacks == 1
    assert trainer.current is trainer.original
    assert trainer._drafter.runner.loaded is original
    assert not list((tmp_path / "kept").glob("*-*")), "it would come back with the next start"
    assert trainer.stats.hit_rate == trainer.stats.original_hit_rate > 0.1


def _corrupted(trainer: OnlineTrainer, folder: Path) -> None:
    drafter = TrainableModel.load(trainer.original.folder)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    drafter.save(folder, trainer.original.folder)


def test_a_round_that_was_left_for_others_goes_on(loaded: Callable[..., LLM]) -> None:
    llm = loaded()
    trainer, adaptation = _trainer(llm), llm.adaptation
    assert adaptation is not None
    rounds = 0
    while not trainer.stats.num_swaps or not trainer.stats.num_evaluations:
        llm.generate(_prompts(8, seed=rounds), GREEDY)
        for _ in range(6):  # never long enough for a whole round
            adaptation.work()
        adaptation.watch()
        rounds += 1
        assert rounds < 200, "bursts leave time to learn, but never to examine"
    assert trainer.current is not trainer.original


def test_what_is_not_finite_is_thrown_away(loaded: Callable[..., LLM], caplog: pytest.LogCaptureFixture) -> None:
    llm = loaded()
    trainer = _trainer(llm)
    _emitted(llm, _prompts(10))
    with torch.no_grad():
        next(iter(trainer._student.drafter.parameters())).fill_(float("nan"))
    llm.adapt(600)
    assert trainer.stats.num_restarts == 1
    assert "not finite" in caplog.text
    assert math.isfinite(trainer.stats.loss), "it goes on from the weights in use"
    assert all(bool(weight.isfinite().all()) for weight in trainer._student.drafter.parameters())


@pytest.mark.parametrize("kind", ["cannot be loaded", "is worse as it serves", "does not fit on the disk"])
def test_a_version_that_cannot_serve_or_is_worse_leaves_nothing(
    kind: str, loaded: Callable[..., LLM], tmp_path: Path
) -> None:
    llm = loaded(adapt_dir=tmp_path)
    trainer = _trainer(llm)
    _emitted(llm, _prompts(16))
    saved = []

    def save(folder: Path, origin: Path) -> None:
        saved.append(folder)
        if kind == "cannot be loaded":
            (folder / "config.json").write_text("{}")
        elif kind == "is worse as it serves":
            _corrupted(trainer, folder)
        else:
            (folder / "model.safetensors").write_bytes(b"half")
            raise OSError(28, "No space left on device")

    trainer._student.save = save  # type: ignore[method-assign]
    with pytest.raises(OSError, match="No space") if "disk" in kind else contextlib.nullcontext():
        llm.adapt(600)
    assert saved
    assert trainer.stats.num_swaps == 0
    assert (trainer.stats.num_restarts >= 1) is (kind == "cannot be loaded")
    assert trainer.current is trainer.original
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_held_out_examples_are_never_learned_from(loaded: Callable[..., LLM]) -> None:
    llm = loaded(replace(QUICK, steps_between=4))
    trainer = _trainer(llm)
    _emitted(llm, _prompts(20))
    learned: set[bytes] = set()

    def learn(examples: Sequence[TrainingExample]) -> float:
        learned.update(example.tokens.tobytes() for example in examples)
        return 1.0

    trainer._student.learn = learn  # type: ignore[method-assign]
    llm.adapt(600)
    assert llm.adaptation is not None
    kept = list(llm.adaptation._traffic)
    assert [served.number for served in kept if served.is_held_out] == [15, 7]
    assert learned == {served.example.tokens.tobytes() for served in kept if not served.is_held_out}


def test_drafters_learn_in_turn(model_folder: Folders) -> None:
    names = [str(model_folder(noise=noise)) for noise in (0.3, 0.4)]
    with LLM(model_folder(), drafters=[*names, "ngram"], tree="1,1", adapt_drafters=True) as llm:
        assert llm.adaptation is not None
        llm.generate(_prompts(10), GREEDY)
        llm.adapt(600)
        assert len(llm.adaptation.stats) == 2
        assert all(one.num_micro_steps for one in llm.adaptation.stats.values())


# ------------------------------------------------------------------------------- what is kept of whom


def test_requests_that_share_with_nobody_leave_nothing(loaded: Callable[..., LLM]) -> None:
    llm = loaded()
    assert llm.adaptation is not None
    requests = [
        make_request(str(i), ids, GREEDY, cache_salt=None, max_model_len=200)
        for i, ids in enumerate(random_prompts([5, 6, 7]))
    ]
    for request in requests:
        llm.engine.add(request)
    llm.engine.step()
    assert llm.adaptation._traffic.num_unfinished == 0
    while not all(request.is_finished for request in requests):
        llm.engine.step()
    assert not list(llm.adaptation._traffic)
    assert not llm.adaptation.work()


def test_requests_that_are_ended_from_outside_leave_nothing(loaded: Callable[..., LLM]) -> None:
    llm = loaded()
    assert llm.adaptation is not None
    traffic = llm.adaptation._traffic
    stream = llm.stream(_prompts(1)[0], GREEDY)
    next(stream)
    assert traffic.num_unfinished == 1
    stream.close()  # type: ignore[attr-defined]
    assert not llm.adaptation.work()
    assert traffic.num_unfinished == traffic.num_tokens == 0


@given(st.integers(1, 300), st.integers(0, 100))
def test_traffic_is_bounded(max_tokens: int, seed: int) -> None:
    traffic = Traffic(max_tokens)
    lengths = np.random.default_rng(seed).integers(2, 60, size=20).tolist()
    for i, length in enumerate(lengths):
        request = make_request(str(i), [1] * 3, GREEDY)
        traffic._running[request.request_id] = request
        traffic._recorder.finish = lambda request, length=length: _example(3, length)  # type: ignore[misc,method-assign]
        request.finish(FinishReason.LENGTH)
        traffic._take(request)
        kept = list(traffic)
        assert sum(len(served.example.tokens) for served in kept) == traffic.num_tokens <= max_tokens
        assert [served.number for served in kept] == sorted((served.number for served in kept), reverse=True)
    assert all(served.is_held_out == (served.number % 8 == 7) for served in traffic)


def _example(num_prompt: int, num_output: int, top: int = 4) -> TrainingExample:
    count = num_prompt + num_output
    ids = np.arange(num_output * top, dtype=np.int32).reshape(num_output, top) % VOCAB
    return TrainingExample(
        np.arange(count, dtype=np.int32) % VOCAB,
        num_prompt,
        ids,
        np.full((num_output, top), -2.0, np.float16),
        np.full(num_output, -1.0, np.float16),
    )


@given(st.integers(1, 90), st.integers(1, 90), st.integers(2, 40))
def test_pieces_teach_every_token_once(num_prompt: int, num_output: int, num_tokens: int) -> None:
    example = _example(num_prompt, num_output)
    taps = torch.arange(len(example.tokens) - 1.0)[:, None]  # of each token but the last
    example = replace(example, taps={1: taps})
    parts = pieces(example, num_tokens)
    for part in parts:
        assert part.taps is not None
        assert part.tokens[:-1].tolist() == (part.taps[1][:, 0] % VOCAB).tolist()
    assert all(len(part.tokens) <= num_tokens for part in parts)
    for name in ("top_ids", "top_logprobs", "generated_logprobs"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        assert np.array_equal(joined, getattr(example, name))
    assert np.array_equal(
        np.concatenate([part.tokens[part.num_prompt :] for part in parts]), example.tokens[num_prompt:]
    )
    end = num_prompt
    for part in parts:  # each is a stretch of the example
        end += part.num_output
        assert np.array_equal(part.tokens, example.tokens[end - len(part.tokens) : end])
    last = last_part(example, num_tokens)
    assert np.array_equal(last.tokens, example.tokens[-num_tokens:])
    assert np.array_equal(last.top_ids, example.top_ids[len(example.top_ids) - last.num_output :])
    assert last.num_output == min(num_output, len(last.tokens) - 1)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 60))
def test_batches_keep_order_and_size(lengths: list[int], num_tokens: int) -> None:
    examples = [_example(1, length) for length in lengths]
    found = list(batches(examples, num_tokens))
    assert [example for batch in found for example in batch] == examples
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(len(example.tokens) for example in batch) <= num_tokens


# ------------------------------------------------------------------------------------ evaluations


def test_versions_are_compared_on_what_both_answered() -> None:
    evaluation = HeldOutEvaluation(max_tokens=400, min_tokens=200, margin=0.01)
    for _ in range(3):
        evaluation.add(_example(3, 100))
    right, wrong = np.ones(100, np.float32), np.zeros(100, np.float32)
    bad, good = Version(lambda example: wrong), Version(lambda example: right)
    bad.hits, good.hits = {0: wrong}, {0: right}
    assert not evaluation.is_better(good, bad), "100 tokens are too few"
    bad.hits[1], good.hits[1] = right, right
    assert evaluation.is_better(good, bad)
    assert not evaluation.is_better(bad, good)
    assert evaluation.rate(bad) == 0.5
    assert not evaluation.has_evaluated(bad)
    assert len(list(evaluation.evaluate(bad))) == 1
    assert evaluation.has_evaluated(bad)
    # 60 gained and 55 lost is what chance makes of two that are alike.
    first, second = Version(lambda example: right), Version(lambda example: right)
    first.hits = {0: (np.arange(100) < 60).astype(np.float32), 1: right}
    second.hits = {0: (np.arange(100) >= 45).astype(np.float32), 1: right}
    assert not evaluation.is_better(first, second)
    assert math.isnan(evaluation.rate(Version(lambda example: right)))
    for _ in range(2):
        evaluation.add(_example(3, 100))
    assert list(evaluation.examples) == [1, 2, 3, 4]
    assert len(list(evaluation.evaluate(bad))) == 2
    assert list(bad.hits) == [1, 2, 3, 4]


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_hits_are_those_of_a_plain_pass(model_folder: Folders, quantization: str | None) -> None:
    folder = model_folder(noise=0.4)
    loaded = load_model(folder, torch.float32, CPU, quantization)
    model = TrainableModel.load(folder).model
    example = _example(7, 60)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(input_ids=torch.from_numpy(example.tokens[None]).long()).logits[0, 6:-1]
        return found

    for place in range(7, 40):  # a greedy text of its own, and then another
        example.tokens[place] = int(logits()[place - 7].argmax())
    wanted = (logits().argmax(-1).numpy() == example.tokens[7:]).astype(np.float32)
    assert 0.5 < wanted.mean() < 0.8
    exact = quantization is None
    assert np.allclose(served_hits(loaded, example, VOCAB), wanted) if exact else True
    assert (served_hits(loaded, example, VOCAB) == wanted).mean() > 0.8

    sampled = replace(example, source=Source.SAMPLED)
    q = logits().softmax(-1).numpy()
    p = np.exp(example.top_logprobs.astype(np.float32))
    overlap = [
        sum(min(p[i, j], q[i, token]) for j, token in enumerate(row)) for i, row in enumerate(example.top_ids.tolist())
    ]
    assert np.allclose(served_hits(loaded, sampled, VOCAB), overlap, atol=1e-4 if exact else 0.1)


def test_a_model_without_attention_is_trained(model_folder: Folders, tmp_path: Path) -> None:
    folder = model_folder("qwen3_5_text", tokenizer=True, layer_types=["linear_attention"] * 3)
    drafter = TrainableModel.load(folder)
    model = drafter.model
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad.any()
    drafter.save(tmp_path / "copy", folder)
    assert load_config(tmp_path / "copy").use_cache
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()


@pytest.mark.parametrize("family", ["llama", "opt", "falcon-7b", "mpt", "gpt2", "qwen3_moe", "gemma2", "gpt_neox"])
def test_a_copy_goes_into_a_folder_and_back(family: str, model_folder: Folders, tmp_path: Path) -> None:
    folder = model_folder(family, tokenizer=True)
    drafter = TrainableModel.load(folder)
    assert all(weight.requires_grad and weight.dtype == torch.float32 for weight in drafter.parameters())
    drafter.save(tmp_path / "copy", folder)
    tokens = _example(3, 40)
    before, after = (load_model(each, torch.float32, CPU) for each in (folder, tmp_path / "copy"))
    assert np.array_equal(served_hits(before, tokens, VOCAB), served_hits(after, tokens, VOCAB))
    assert after.layer_shapes == before.layer_shapes
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_weights_may_be_replaced_between_drafting_and_observing(
    runner_of: Callable[..., Any], model_folder: Folders
) -> None:
    drafter = SmallModelDrafter(resized(runner_of(noise=0.4), 2048), VOCAB)
    request = make_request("0", [3, 1, 4], GREEDY)
    (tree,) = drafter.draft([Span(request, 0, 3)], [TreeBudget.expansion((2, 1))])
    drafter.replace(load_model(model_folder(noise=0.1), torch.float32, CPU))
    request.append(tree.tokens[1], None)
    drafter.observe(request, tree, Acceptance((1,), 7))
    assert drafter.runner.cache.num_owned == 0
    (again,) = drafter.draft([Span(request, 0, 4)], [TreeBudget.expansion((2, 1))])
    assert again.tokens[0] == tree.tokens[1]
    drafter.forget("0")


@pytest.mark.parametrize("is_scored", [False, True])
def test_replaced_weights_guess_as_if_they_had_always_been_there(
    runner_of: Callable[..., Any], model_folder: Folders, is_scored: bool
) -> None:
    target, runner = runner_of(), resized(runner_of(noise=0.4), 2048, keeps_prefixes=True)
    other = load_model(model_folder(noise=0.1), torch.float32, CPU)
    prompts = random_prompts([9, 12, 20])
    requests = [make_request(str(i), ids, GREEDY) for i, ids in enumerate(prompts)]
    drafter, fresh = (
        SmallModelDrafter(each, VOCAB, is_scored=is_scored) for each in (runner, ModelRunner(other, 2048))
    )
    engine = make_engine(target, drafter, (2, 1, 1))
    for request in requests:
        engine.add(request)
    left = make_request("left", random_prompts([7], seed=1)[0], GREEDY)
    engine.add(left)
    for _ in range(4):
        engine.step()
    assert runner.cache.num_owned + runner.cache.num_cached > 0
    drafter.replace(other)
    engine.abort(left)  # what the old weights knew of it is gone already
    assert runner.cache.num_owned == runner.cache.num_cached == 0
    while any(not request.is_finished for request in requests):
        spans = [Span(request, request.num_computed, len(request.token_ids)) for request in engine.scheduler.running]
        budgets = [TreeBudget.expansion((2, 1, 1)).cut(50, 50)] * len(spans)
        for one, another in zip(drafter.draft(spans, budgets), fresh.draft(spans, budgets), strict=True):
            assert (one.tokens, one.parents) == (another.tokens, another.parents)
        engine.step()
    for request in requests:
        fresh.forget(request.request_id)
    assert [request.output_ids for request in requests] == run(
        make_engine(target), [make_request(str(i), ids, GREEDY) for i, ids in enumerate(prompts)]
    )


# ------------------------------------------------------------------------------------------ folders


def test_what_was_learned_is_taken_up_at_the_next_start(loaded: Callable[..., LLM], tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    llm = loaded(adapt_dir=folder)
    _emitted(llm, _prompts(16))
    llm.adapt(600)
    trainer = _trainer(llm)
    assert trainer.stats.num_swaps >= 1
    origin = trainer.original.folder
    untouched = {file.name: file.read_bytes() for file in origin.iterdir()}
    kept = trainer.current.folder
    assert kept.parent == folder
    weights = load_model(kept, torch.float32, CPU)  # an ordinary folder
    example = _example(3, 40)
    wanted = served_hits(trainer.current.loaded, example, VOCAB)
    assert np.array_equal(served_hits(weights, example, VOCAB), wanted)
    assert len(list(folder.glob("*-*"))) <= 2
    with pytest.raises(ValueError, match="in use by another engine"):
        loaded(adapt_dir=folder)
    llm.shutdown()

    again = _trainer(loaded(adapt_dir=folder))
    assert again.current.folder == kept
    assert again.current is not again.original
    assert np.array_equal(served_hits(again._drafter.runner.loaded, example, VOCAB), wanted)
    assert {file.name: file.read_bytes() for file in origin.iterdir()} == untouched


@pytest.mark.parametrize("damage", ["weights", "record", "gone", "other", "shape"])
def test_damaged_and_foreign_versions_are_left_aside(
    damage: str, loaded: Callable[..., LLM], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = loaded(adapt_dir=tmp_path)
    trainer = _trainer(llm)
    source = trainer.original.folder if damage != "shape" else save_model(tmp_path / "wide", hidden_size=64)
    kept = trainer._versions.store(trainer._versions.write(lambda folder: _copied(source, folder)))
    llm.shutdown()
    if damage == "weights":
        content = bytearray((kept / "model.safetensors").read_bytes())
        content[-5] ^= 1
        (kept / "model.safetensors").write_bytes(content)
    elif damage == "record":
        (kept / RECORD).write_text("[1, ")
    elif damage == "gone":
        (kept / "config.json").unlink()
    elif damage == "other":
        record = json.loads((kept / RECORD).read_text())
        (kept / RECORD).write_text(json.dumps(record | {"origin": "0" * 64}))
    again = _trainer(loaded(adapt_dir=tmp_path))
    assert again.current is again.original
    assert str(kept) in caplog.text
    assert kept.is_dir()


def _copied(source: Path, folder: Path) -> None:
    for file in source.iterdir():
        shutil.copyfile(file, folder / file.name)


def test_what_a_killed_process_left_is_removed(model_folder: Folders, tmp_path: Path) -> None:
    (tmp_path / ".partial-x").mkdir()
    (tmp_path / "mine").mkdir()
    Versions(tmp_path, model_folder())
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_private_folder_goes_with_its_owner() -> None:
    folder = AdaptationFolder(None)
    assert folder.path.stat().st_mode & 0o77 == 0
    folder.close()
    assert not folder.path.exists()


# ----------------------------------------------------------------------------------------- refusals


def test_what_cannot_learn_is_refused(model_folder: Folders, tmp_path: Path, loaded: Callable[..., LLM]) -> None:
    target, drafter = model_folder(tokenizer=True), str(model_folder(noise=0.4, tokenizer=True))
    for drafters, tree in (["ngram"], "auto"), ([], "auto"), ([drafter], "off"):
        with pytest.raises(ValueError, match="adapt_drafters: no drafter is a model"):
            LLM(target, drafters=drafters, tree=tree, adapt_drafters=True)
    with pytest.raises(ValueError, match="adapt_dir: drafters learn only with adapt_drafters"):
        LLM(target, drafters=[drafter], adapt_dir=tmp_path)
    with pytest.raises(ValueError, match="adapt_drafters=True"):
        loaded(adapt_drafters=False).adapt(1)
    with pytest.raises(ValueError, match="seconds must be"):
        loaded().adapt(float("nan"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"adapt_dir: .* cannot be written"):
        loaded(adapt_dir=tmp_path / "file")
    with pytest.raises(ValueError, match="a drafter's own folder"):
        loaded(adapt_dir=drafter)
    assert not (Path(drafter) / ".lock").exists()


def test_a_drafter_with_tokens_of_its_own_is_refused(
    loaded: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SmallModelDrafter, "shares_vocabulary", property(lambda self: False))
    with pytest.raises(ValueError, match="has the target's tokenizer"):
        loaded()


@pytest.mark.parametrize("field", ["max_tokens", "learning_rate", "window", "margin"])
def test_settings_out_of_range_are_named(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        AdaptationConfig(**{field: -1})


# ------------------------------------------------------------------------------------- idle moments


class _Idle:
    def __init__(self, seconds: float = 0.0, fails: bool = False) -> None:
        self.seconds, self.fails = seconds, fails
        self.num_slices = self.num_looks = 0
        self.began = threading.Event()

    def work(self) -> bool:
        self.num_slices += 1
        self.began.set()
        time.sleep(self.seconds)
        if self.fails:
            raise RuntimeError("no")
        return True

    def watch(self) -> None:
        self.num_looks += 1
        if self.fails:
            raise RuntimeError("no")


def _threaded(runner_of: Callable[..., Any], idle: _Idle, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(thread, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(thread, "WATCH_SECONDS", 0.0)
    engine = make_engine(resized(runner_of(), 256))
    done = threading.Event()
    stepping = EngineThread(
        engine, lambda ended: done.set() if any(r.is_finished for r in ended) else None, done.set, idle
    )
    stepping.start()
    return stepping, done


def test_idle_work_delays_neither_requests_nor_the_end(
    runner_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = _Idle(seconds=0.02)
    stepping, done = _threaded(runner_of, idle, monkeypatch)
    assert idle.began.wait(10)
    request = make_request("a", [1, 2, 3], GREEDY)
    assert stepping.add([request])
    assert done.wait(10), "idle work that never ends keeps nobody waiting"
    assert request.num_output == 40
    assert idle.num_looks > 0
    idle.began.clear()
    assert idle.began.wait(10), "it goes on after the request"
    assert stepping.stop(10)


def test_idle_work_that_fails_is_given_up(
    runner_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    idle = _Idle(fails=True)
    stepping, done = _threaded(runner_of, idle, monkeypatch)
    assert idle.began.wait(10)
    request = make_request("a", [1, 2, 3], GREEDY)
    assert stepping.add([request])
    assert done.wait(10)
    assert request.num_output == 40
    assert stepping.stop(10)
    assert stepping.error is None
    assert (idle.num_slices, idle.num_looks) == (1, 0)
    assert "requests are served as before" in caplog.text


def test_served_answers_stay_while_drafters_learn(
    loaded: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(thread, "IDLE_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "specinfer")
    prompts = [prompt["prompt_token_ids"] for prompt in _prompts(20)]
    wanted = {
        str(ids): out
        for ids, out in zip(prompts, _emitted(loaded(adapt_drafters=False, tree="off"), _prompts(20)), strict=True)
    }
    llm = loaded()
    trainer = _trainer(llm)

    async def ask(client: httpx.AsyncClient, ids: list[int]) -> None:
        body = {"prompt": ids, "max_tokens": 40, "temperature": 0, "return_token_ids": True}
        answer = await client.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["token_ids"] == wanted[str(ids)]

    async def body(client: httpx.AsyncClient, state: ServerState) -> str:
        metrics = Metrics(state.engine, Tally(), "tiny")
        await asyncio.gather(*(ask(client, ids) for ids in prompts))
        for _ in range(600):
            await ask(client, prompts[0])  # again and again, while it learns
            if trainer.stats.num_swaps:
                break
            await asyncio.sleep(0.05)
        await asyncio.gather(*(ask(client, ids) for ids in prompts))
        return metrics.scrape().decode()

    text = serve(llm, body)
    assert trainer.stats.num_swaps >= 1
    assert "is replaced by what it has learned" in caplog.text
    samples = {
        (sample.name, sample.labels.get("version")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "adaptation" in sample.name
    }
    assert samples[("specinfer:adaptation_swaps_total", None)] >= 1
    assert samples[("specinfer:adaptation_micro_steps_total", None)] >= 1
    now, original = (samples[("specinfer:adaptation_hit_rate", version)] for version in ("now", "original"))
    assert 0 < original < now <= 1
