"""Targets whose layers are streamed: the same text as when they are whole, from files that may fail."""

import errno
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specinfer import LLM, SamplingParams
from specinfer.core.config import OffloadConfig
from specinfer.core.errors import ModelError, WeightsError
from specinfer.core.tree import TokenTree
from specinfer.model.batch import Piece
from specinfer.model.load import load_model
from specinfer.model.offload import stream as stream_module
from specinfer.model.offload.direct import DirectFile, padded_size, pages
from specinfer.model.runner import ModelRunner
from tests.model.offload.streamed_models import GREEDY, load_streamed, serve, stream_of
from tiny import (
    HYBRIDS,
    load_runner,
    make_engine,
    make_request,
    quick,
    random_prompts,
    run,
    save_model,
)

NUM_LAYERS = 5
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, seed=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "target", num_hidden_layers=NUM_LAYERS)


@pytest.fixture
def runner(folder: Path) -> Iterator[ModelRunner]:
    runner = load_streamed(folder)
    yield runner
    stream_of(runner).close()


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "family",
    quick(
        ["llama", "mistral", "qwen2", "qwen3", "olmo2", "glm4", "granite", "ernie4_5", "phi3"],
        *("llama", "mistral", "qwen3", "olmo2", "glm4", "phi3"),
    ),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_model_in_memory(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    # 36 outputs of keys and values, and 40 of the MLP's middle: neither ends with a panel
    save_model(tmp_path, family, num_hidden_layers=NUM_LAYERS, intermediate_size=80)
    whole = ModelRunner(load_model(tmp_path, dtype, torch.device("cpu")), 64)
    for num_resident in (0, 2, NUM_LAYERS):
        runner = load_streamed(tmp_path, num_resident, dtype)
        for _ in range(3):
            assert torch.equal(_logits(whole), _logits(runner))
        assert stream_of(runner).num_resident == num_resident
        stream_of(runner).close()


def _logits(runner: ModelRunner) -> torch.Tensor:
    """Of a pass of three tokens."""
    tree, slots = TokenTree.chain(5, (6, 7)), torch.arange(3).numpy()
    return runner.forward([Piece.from_span((5,), tree, slots[:0], slots)])


@pytest.mark.covering(1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("num_resident", [0, 3])
def test_requests_generate_the_same_tokens(folder: Path, params: SamplingParams, num_resident: int) -> None:
    expected = serve(load_runner(folder), params)
    runner = load_streamed(folder, num_resident)
    assert serve(runner, params) == expected
    assert serve(runner, params, max_num_batched_tokens=7) == expected
    stream_of(runner).close()


@pytest.mark.parametrize("tree", ["off", "1,2,1", "best-first:8"])
def test_speculation_with_a_streamed_target_changes_nothing(folder: Path, tree: str) -> None:
    drafters = [] if tree == "off" else ["ngram"]
    prompts = [{"prompt_token_ids": p} for p in random_prompts([9, 17])]
    for params in (GREEDY, SAMPLED):
        with LLM(folder, drafters=[], tree="off") as llm:
            expected = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
        with LLM(folder, drafters=drafters, tree=tree, offload="disk", memory_budget="8GiB") as llm:
            assert [out.outputs[0].token_ids for out in llm.generate(prompts, params)] == expected


@pytest.mark.parametrize(
    "family", quick(HYBRIDS, "lfm2_moe", "qwen3_5_text", "nemotron_h", "jamba", "kimi_linear", "recurrent_gemma")
)
def test_layers_without_attention_are_streamed(family: str, tmp_path: Path) -> None:
    """From a copy, because experts and some convolutions are made of several tensors of the files."""
    model = save_model(tmp_path / "model", family)
    prompts = [{"prompt_token_ids": p} for p in random_prompts([9, 33])]
    texts: list[list[list[int]]] = []
    copied: dict[str, Any] = {"offload": "disk", "offload_folder": tmp_path / "copy", "memory_budget": "8GiB"}
    for options in ({}, copied):
        with LLM(model, drafters=["ngram"], tree="1,2,1", max_num_batched_tokens=16, **options) as llm:
            texts.append([out.outputs[0].token_ids for p in (GREEDY, SAMPLED) for out in llm.generate(prompts, p)])
    assert texts[0] == texts[1]


def test_a_pass_reads_what_does_not_stay(folder: Path) -> None:
    runner = load_streamed(folder, 2)
    stream = stream_of(runner)
    each = sum(w.nbytes for n, w in _weights(folder).items() if ".0." in n and w.ndim > 1)
    assert stream.bytes_per_pass == 3 * each
    _logits(runner)
    before = stream.bytes_read
    for _ in range(4):
        _logits(runner)
    ahead = 2 * each  # each pass leaves two layers read for the next
    assert abs(stream.bytes_read - before - 4 * stream.bytes_per_pass) <= ahead
    stream.close()


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


# ------------------------------------------------------------------------------------------- faults


class Disk:
    """Stands before `os.preadv` and fails on request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mode, self._real, self.num_failed = "fine", os.preadv, 0
        monkeypatch.setattr(os, "preadv", self.read)

    def read(self, descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        if self.mode == "fine":
            return self._real(descriptor, buffers, offset, *flags)
        self.num_failed += 1
        if self.mode == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return 0


@pytest.mark.parametrize(("mode", "message"), [("error", "Input/output error"), ("short", "early")])
def test_a_read_that_fails_ends_the_requests_of_its_step_only(
    folder: Path, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, mode: str, message: str
) -> None:
    expected = serve(load_runner(folder))
    disk = Disk(monkeypatch)
    engine = make_engine(runner)
    for _ in range(5):  # more often than an engine may fail
        disk.mode = mode
        requests = [make_request(str(i), p, GREEDY) for i, p in enumerate(random_prompts([5, 30, 3]))]
        run(engine, requests)
        assert all(message in str(request.error) and "model.safetensors" in str(request.error) for request in requests)
        assert runner.cache.num_free == runner.cache.num_slots
        disk.mode = "fine"
        again = [make_request(str(i), p, GREEDY) for i, p in enumerate(random_prompts([5, 30, 3]))]
        assert run(engine, again) == expected
    assert disk.num_failed


def test_a_pass_that_waits_is_seen_to_wait(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only once it is over: a disk that hangs shows."""
    goes_on, real, stream = threading.Event(), os.preadv, stream_of(runner)

    def hang(*arguments: Any) -> int:
        assert goes_on.wait(30)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", hang)
    computing = threading.Thread(target=_logits, args=(runner,))
    stream.settle(0)
    before = stream.seconds_waiting
    computing.start()
    end = time.monotonic() + 20
    while (seen := stream.seconds_waiting - before) < 0.05 and time.monotonic() < end:
        time.sleep(0.005)
    goes_on.set()
    computing.join()
    assert 0.05 <= seen <= stream.seconds_waiting - before


def test_a_single_failed_read_is_tried_again_for_what_was_read_ahead(
    folder: Path, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    expected = serve(load_runner(folder))
    disk.mode = "error"
    with pytest.raises(WeightsError, match="cannot be read"):
        _logits(runner)
    disk.mode = "fine"
    assert serve(runner) == expected


def test_a_file_that_was_changed_is_refused_until_the_old_one_is_back(folder: Path, runner: ModelRunner) -> None:
    file, aside = folder / "model.safetensors", folder / "aside"
    expected = _logits(runner)
    file.rename(aside)
    with pytest.raises(WeightsError, match=r"is gone .* put it back"):
        _logits(runner)
    file.write_bytes(aside.read_bytes())
    with pytest.raises(WeightsError, match="was changed"):
        _logits(runner)
    aside.rename(file)
    assert torch.equal(_logits(runner), expected)
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(WeightsError, match=r"ends .* early|was changed"):
        _logits(runner)


def test_a_request_that_is_cancelled_in_mid_stream_changes_nothing(folder: Path, runner: ModelRunner) -> None:
    expected = serve(load_runner(folder))
    engine = make_engine(runner)
    gone = make_request("gone", random_prompts([40])[0], GREEDY)
    engine.add(gone)
    engine.step()
    engine.abort(gone)
    requests = [make_request(str(i), p, GREEDY) for i, p in enumerate(random_prompts([5, 30, 3]))]
    assert run(engine, requests) == expected


def test_a_pass_that_is_interrupted_between_layers_leaves_a_stream_that_works(
    folder: Path, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _logits(runner)
    layer = runner.loaded.model.layers[2]  # type: ignore[union-attr, index]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(layer, "mixers", interrupt)
        with pytest.raises(KeyboardInterrupt):
            _logits(runner)
    assert torch.equal(_logits(runner), expected)


def test_a_stream_that_is_shut_down_in_the_middle_of_a_pass_raises(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, stream = runner.loaded.model.layers[2], stream_of(runner)  # type: ignore[union-attr, index]
    mixer = layer.mixers  # type: ignore[union-attr]

    def close(*arguments: Any) -> Any:
        stream.close()
        return mixer(*arguments)

    monkeypatch.setattr(layer, "mixers", close)
    with pytest.raises(WeightsError, match="shut down"):
        _logits(runner)


@pytest.mark.parametrize("num_resident", [0, 2])
def test_an_interrupt_anywhere_in_the_stream_loses_no_buffer(folder: Path, num_resident: int) -> None:
    runner = load_streamed(folder, num_resident)
    expected, place = _logits(runner), stream_module.__file__
    num_lines = _interrupted(runner, place, 10**9)
    for after in range(0, num_lines, 3):
        if after % 2:
            _logits(runner)  # the first layers of the next pass are there already
        assert _interrupted(runner, place, after) <= after + 1
    assert torch.equal(_logits(runner), expected)
    assert torch.equal(_logits(runner), expected)
    stream_of(runner).close()


def _interrupted(runner: ModelRunner, place: str, after: int) -> int:
    """Runs a pass that is interrupted after so many lines of a file; how many it came to."""
    num_lines = 0

    def count(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal num_lines
        if frame.f_code.co_filename != place:
            return None
        # An interrupt is not met between a block and the end of its `with`, but a trace would be.
        if event == "line" and not getline(place, frame.f_lineno).lstrip().startswith("with "):
            num_lines += 1
            if num_lines == after + 1:
                raise KeyboardInterrupt
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        _logits(runner)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return num_lines


def test_weights_at_the_end_of_a_page_are_read_whole(tmp_path: Path) -> None:
    data = os.urandom(10_001)
    (tmp_path / "f").write_bytes(data)
    file = DirectFile(tmp_path / "f")
    for offset, size in [(0, 1), (1, 4095), (4095, 2), (4096, 4096), (8191, 1810), (10_000, 1), (0, 10_001)]:
        into = pages(padded_size(size))
        start = file.read(offset, size, into)
        assert into[start : start + size].numpy().tobytes() == data[offset : offset + size]
    with pytest.raises(WeightsError, match="ends 1 bytes early"):
        file.read(10_001, 1, pages(padded_size(1)))
    file.close()


# -------------------------------------------------------------------------------------------- leaks


def _resources(folder: Path) -> tuple[int, int]:
    """Reader threads, and open files of the model."""
    gc.collect()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("weights")]
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return len(threads), sum(link.exists() and str(folder) in os.readlink(link) for link in links)


def test_nothing_is_left_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder, drafters=[], offload="disk") as llm:
        llm.generate([{"prompt_token_ids": [1, 2]}], GREEDY)
        assert min(_resources(folder)) > 0
        target = llm.target
    assert _resources(folder) == (0, 0)
    with pytest.raises(WeightsError, match="shut down"):
        _logits(target)
    llm = LLM(folder, drafters=[], offload="disk")
    del llm
    assert _resources(folder) == (0, 0)
    with pytest.raises(ValueError, match="no folder"):
        LLM(folder, drafters=[str(folder / "none")], offload="disk")
    assert _resources(folder) == (0, 0)
    with pytest.raises(ValueError, match="max_model_len"):
        LLM(folder, drafters=[], offload="disk", kv_cache_memory_bytes=1000)
    assert _resources(folder) == (0, 0)
    for name in ("streamed.probe", "probe.judge"):
        monkeypatch.setattr(f"specinfer.model.{name}", _fail)
        with pytest.raises(ZeroDivisionError):
            LLM(folder, drafters=[], offload="disk")
        assert _resources(folder) == (0, 0)
        monkeypatch.undo()


def _fail(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offload": "tape"}, "offload must be one of disk, cpu"),
        ({"offload": "cpu"}, 'offload: the target runs on the CPU, .* use offload="disk"'),
        ({"memory_budget": "4GiB"}, "memory_budget: it is for targets that are streamed"),
        ({"offload_folder": "x"}, "offload_folder: it is for targets that are streamed"),
        ({"offload": "disk", "memory_budget": "much"}, "memory_budget: 'much' is not a size"),
        ({"offload": "disk", "memory_budget": 0}, "memory_budget: 0 is nothing"),
        ({"offload": "disk", "memory_budget": -5}, "memory_budget: -5 is not a size"),
        ({"offload": "disk", "memory_budget": True}, "memory_budget: True is not a size"),
        ({"offload": "disk", "memory_budget": "3MiB"}, r"memory_budget: 3 MiB are too few .* give at least \d+MiB"),
        ({"offload": "disk", "offload_folder": ""}, "offload_folder: an empty name"),
    ],
)
def test_what_cannot_be_is_refused_by_name(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(folder, drafters=[], **settings)
    assert _resources(folder) == (0, 0)


def test_the_least_budget_that_is_named_would_do(folder: Path) -> None:
    with pytest.raises(ValueError, match="give at least") as caught:
        LLM(folder, drafters=[], offload="disk", memory_budget="3MiB")
    # The other memory of the process may change a little until then.
    least = int(str(caught.value).rpartition(" ")[2].removesuffix("MiB")) + 16
    with LLM(folder, drafters=[], offload="disk", memory_budget=f"{least}MiB") as llm:
        assert llm.target.loaded.stream is not None


def test_sizes_are_read() -> None:
    sizes = {"4GiB": 2**32, "500MB": 500 * 10**6, "1.5 KiB": 1536, "12": 12}
    assert {text: OffloadConfig("disk", text).budget_bytes for text in sizes} == sizes
    assert OffloadConfig("disk", 77).budget_bytes == 77


def test_damaged_weights_are_refused_while_loading(folder: Path) -> None:
    weights = _weights(folder)
    name = "model.layers.3.mlp.up_proj.weight"
    weights[name][2, 3] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"{name} .* NaN"):
        load_streamed(folder)
    del weights[name]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="missing"):
        load_streamed(folder)
    assert _resources(folder) == (0, 0)


def test_layers_that_stay_are_spread_over_the_depth(tmp_path: Path) -> None:
    save_model(tmp_path, num_hidden_layers=12)
    runner = load_streamed(tmp_path, 4)
    stream = stream_of(runner)
    assert sorted(stream._own) == [0, 3, 6, 9]
    stream.settle(10 * stream.buffer_bytes)  # the ring's two would be enough for the last two
    assert stream.num_resident == 12
    assert stream.bytes_per_pass == 0
    stream.close()


def test_what_stays_may_be_settled_again(folder: Path, runner: ModelRunner) -> None:
    expected = _logits(runner)
    stream = stream_of(runner)
    for num_resident in (NUM_LAYERS, 0, 2, NUM_LAYERS, 1):
        stream.settle(num_resident * stream.buffer_bytes)
        assert stream.num_resident == num_resident
        assert torch.equal(_logits(runner), expected)
        assert torch.equal(_logits(runner), expected)


def test_settling_makes_no_second_ring(runner: ModelRunner) -> None:
    """Layers point into the first one until they are read again."""
    stream = stream_of(runner)
    _logits(runner)
    made: list[int] = []
    make, stream._make_buffer = stream._make_buffer, lambda size: made.append(size) or make(size)  # type: ignore[func-returns-value]
    stream.settle(2 * stream.buffer_bytes)
    assert len(made) == 2
    assert _logits(runner).isfinite().all()
