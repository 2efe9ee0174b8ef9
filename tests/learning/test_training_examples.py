"""Examples are the target's own distributions of what it said, whatever the engine does meanwhile; and survive their
file."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.drafters import SmallModelDrafter
from specinfer.learning.batches import collate
from specinfer.learning.examples import DamagedError, ExampleRecorder, Source, TrainingExample, TrainingExamples
from specinfer.learning.tune.collection import Collection, load
from specinfer.model.runner import ModelRunner
from tiny import VOCAB, make_engine, make_model, make_request, random_prompts, run

TREES: list[tuple[int, ...]] = [(), (1,) * 5, (3, 2, 1)]
TOP = 9


def distributions(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab] what transformers foresees after each token."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return torch.as_tensor(logits).float().log_softmax(-1)


def check(example: TrainingExample, model: Any) -> None:
    """Whether an example keeps the target's distributions of its own text."""
    distribution = distributions(model, example.tokens.tolist())[example.num_prompt - 1 : -1]
    output_ids = torch.from_numpy(example.tokens[example.num_prompt :].astype(np.int64))
    assert example.top_ids.shape == (example.num_output, min(TOP, VOCAB))
    assert torch.from_numpy(example.generated_logprobs).float().numpy() == pytest.approx(
        distribution.gather(1, output_ids[:, None])[:, 0].numpy(), abs=0.01
    )
    # By value: tokens that are equally likely to the last bit may stand either way round.
    wanted = distribution.topk(TOP, dim=-1).values.numpy()
    assert example.top_logprobs.astype(np.float32) == pytest.approx(wanted, abs=0.01)
    own = distribution.gather(1, torch.from_numpy(example.top_ids.astype(np.int64))).numpy()
    assert own == pytest.approx(wanted, abs=1e-3)


def requests_of(num: int = 4) -> list[Request]:
    """Greedy and sampled by turns, of different lengths."""
    prompts = random_prompts([3, 17, 1, 8][:num], seed=2)
    return [
        make_request(f"r{i}", ids, SamplingParams(temperature=float(i % 2), max_tokens=9 + 5 * i), seed=40 + i)
        for i, ids in enumerate(prompts)
    ]


# ---------------------------------------------------------------------------------------- recording


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_examples_are_transformers_distributions_of_the_same_text(
    runner_of: Callable[..., ModelRunner], tree: tuple[int, ...]
) -> None:
    drafter = SmallModelDrafter(runner_of(noise=0.1), VOCAB) if tree else None
    engine = make_engine(runner_of(), drafter, tree)
    engine.observers.append(recorder := ExampleRecorder(TOP))
    requests = requests_of()
    run(engine, requests)
    model = make_model("llama")
    for request in requests:
        example = recorder.finish(request)
        assert example is not None
        assert example.tokens.tolist() == request.token_ids
        assert (example.num_prompt, example.seed) == (len(request.prompt_ids), request.seed)
        assert example.source == (Source.GREEDY if request.params.temperature == 0 else Source.SAMPLED)
        check(example, model)
    assert not num_kept(recorder)


def num_kept(recorder: ExampleRecorder) -> int:
    return len(recorder._seen)


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_a_request_that_ends_inside_an_accepted_path_has_a_example_of_what_it_took(
    runner_of: Callable[..., ModelRunner], max_tokens: int
) -> None:
    # The drafter is all but the target: every path is accepted whole, six tokens with the one that follows.
    engine = make_engine(runner_of(), SmallModelDrafter(runner_of(noise=1e-6), VOCAB), (1,) * 5)
    engine.observers.append(recorder := ExampleRecorder(TOP))
    request = make_request("r", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=max_tokens))
    run(engine, [request])
    assert request.num_output == max_tokens
    example = recorder.finish(request)
    assert example is not None
    check(example, make_model("llama"))
    assert request.speculation.num_accepted_draft_tokens >= max_tokens * 5 // 6


def test_aborted_requests_leave_nothing_and_make_no_example(runner_of: Callable[..., ModelRunner]) -> None:
    engine = make_engine(runner_of(), SmallModelDrafter(runner_of(noise=0.1), VOCAB), (1, 1))
    engine.observers.append(recorder := ExampleRecorder(TOP))
    requests = requests_of()
    for request in requests:
        engine.add(request)
    for _ in range(2):
        engine.step()
    for request in requests[:2]:
        engine.abort(request)
        recorder.finish(request)
        assert recorder.finish(request) is None, "nothing is left of it"
    run_out(engine)
    assert all(recorder.finish(request) is not None for request in requests[2:])
    assert not num_kept(recorder)


def run_out(engine: Any) -> None:
    while engine.has_work:
        engine.step()


def test_a_request_that_was_not_seen_from_its_beginning_makes_no_example(
    runner_of: Callable[..., ModelRunner],
) -> None:
    engine = make_engine(runner_of())
    request = make_request("r", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=6))
    engine.add(request)
    engine.step()
    engine.observers.append(recorder := ExampleRecorder(TOP))
    run_out(engine)
    assert recorder.finish(request) is None
    assert not num_kept(recorder)


# --------------------------------------------------------------------------------------- collecting


@pytest.fixture(scope="module")
def llm(model_folder: Callable[..., Path]) -> Any:
    from specinfer.llm import LLM

    return LLM(model_folder(tokenizer=True), tree="off", max_num_seqs=8)


def collected(llm: Any, folder: Path, note: Any = lambda done: None, **changes: Any) -> TrainingExamples:
    prompts = random_prompts([4] * 70, seed=9)
    Collection(llm, TOP, note, **changes).generate(prompts, folder, max_tokens=5, temperatures=(0.0, 1.0), seed=3)
    return load(folder)


def test_collecting_keeps_the_targets_output_after_each_prompt(llm: Any, tmp_path: Path) -> None:
    notes: list[int] = []
    examples = collected(llm, tmp_path, note=notes.append)
    assert notes == [64, 70]
    assert [one.tokens[:4].tolist() for one in examples] == random_prompts([4] * 70, seed=9)
    assert [one.source for one in examples[:3]] == [Source.GREEDY, Source.SAMPLED, Source.GREEDY]
    assert examples.num_tokens == 70 * 5
    model = make_model("llama")
    for example in examples[::17]:
        check(example, model)
    assert len({one.seed for one in examples}) == 70


def test_files_that_are_there_are_not_made_again_and_a_missing_one_is_made_the_same(llm: Any, tmp_path: Path) -> None:
    collected(llm, tmp_path)
    first, second = sorted(tmp_path.iterdir())
    before = first.read_bytes(), second.read_bytes(), first.stat().st_mtime_ns
    second.unlink()
    collected(llm, tmp_path)
    assert (first.read_bytes(), second.read_bytes(), first.stat().st_mtime_ns) == before


def test_two_processes_share_the_files(llm: Any, tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    alone.mkdir()
    shared.mkdir()
    collected(llm, alone)
    collected(llm, shared, process=(1, 2))
    assert [file.name for file in shared.iterdir()] == ["generated-00001.safetensors"]
    collected(llm, shared, process=(0, 2))
    for file in alone.iterdir():
        assert (shared / file.name).read_bytes() == file.read_bytes()


def test_texts_are_read_as_transformers_reads_them(llm: Any, tmp_path: Path) -> None:
    texts = random_prompts([2, 13, 40], seed=4)
    Collection(llm, TOP, lambda done: None).read(texts, tmp_path)
    model = make_model("llama")
    for example, text in zip(load(tmp_path), texts, strict=True):
        assert (example.tokens.tolist(), example.num_prompt, example.source) == (text, 1, Source.READ)
        check(example, model)


# -------------------------------------------------------------------------------------------- files


def some_examples(largest: int = VOCAB) -> list[TrainingExample]:
    source = np.random.default_rng(0)
    made = []
    for num_prompt, num_output in ((3, 4), (1, 1), (5, 9)):
        made.append(
            TrainingExample(
                source.integers(0, largest, num_prompt + num_output).astype(np.int32),
                num_prompt,
                source.integers(0, largest, (num_output, 3)).astype(np.int32),
                -source.random((num_output, 3)).astype(np.float16),
                -source.random(num_output).astype(np.float16),
                2**63 - 1 - num_output,
                Source(num_output % 3),
            )
        )
    return made


@pytest.mark.parametrize("largest", [VOCAB, 2**16, 200_000])
def test_examples_come_back_from_their_file(tmp_path: Path, largest: int) -> None:
    examples = some_examples(largest)
    TrainingExamples(examples).save(path := tmp_path / "a.safetensors")
    found = TrainingExamples.load(path)
    assert len(found) == len(examples)
    for one, other in zip(examples, found, strict=True):
        for name in ("tokens", "top_ids", "top_logprobs", "generated_logprobs"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype
        assert (one.num_prompt, one.seed, one.source) == (other.num_prompt, other.seed, other.source)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    TrainingExamples(some_examples()).save(path := tmp_path / "a.safetensors")
    whole, arrays = path.read_bytes(), load_file(path)
    for damaged in (b"", whole[:7], whole[: len(whole) // 2], whole[:-1], b"\xff" * 300):
        path.write_bytes(damaged)
        with pytest.raises(DamagedError, match=r"a\.safetensors cannot be read as examples"):
            TrainingExamples.load(path)
    for name in arrays:
        save_file({key: value for key, value in arrays.items() if key != name}, path)
        with pytest.raises(DamagedError, match="cannot be read as examples"):
            TrainingExamples.load(path)
        save_file(arrays | {name: arrays[name][:-1]}, path)
        if name != "meta":  # an example less is no damage
            with pytest.raises(DamagedError, match="cannot be read as examples"):
                TrainingExamples.load(path)
    with pytest.raises(DamagedError, match="cannot be read as examples"):
        TrainingExamples.load(tmp_path / "none.safetensors")


def test_a_write_that_fails_leaves_the_file_before_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TrainingExamples(some_examples()).save(path := tmp_path / "a.safetensors")
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        TrainingExamples(some_examples()[:1]).save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


# ------------------------------------------------------------------------------------------ batches


def test_a_batch_has_the_place_where_each_output_token_is_predicted() -> None:
    examples = some_examples()
    batch = collate(examples)
    number = 0
    for row, example in enumerate(examples):
        length = len(example.tokens)
        assert batch.tokens[row, :length].tolist() == example.tokens.tolist()
        for i in range(example.num_output):
            assert (int(batch.rows[number]), int(batch.places[number])) == (row, example.num_prompt + i - 1)
            assert int(batch.output_ids[number]) == int(example.tokens[example.num_prompt + i])
            assert batch.top_ids[number].tolist() == example.top_ids[i].tolist()
            assert batch.top_logprobs[number].tolist() == example.top_logprobs[i].tolist()
            assert float(batch.generated_logprobs[number]) == float(example.generated_logprobs[i])
            number += 1
    assert number == len(batch.rows)
