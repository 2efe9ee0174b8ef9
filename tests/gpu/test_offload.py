"""On a CUDA device: targets whose layers lie in host memory or on the disk say what those say that it holds."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.disk import LinkBandwidth
from specinfer import LLM, SamplingParams
from specinfer.core.config import OffloadConfig
from specinfer.model.load import load_model
from specinfer.model.offload.device_stream import DeviceStream
from specinfer.model.offload.direct import DirectFile, pages
from specinfer.model.offload.transfer import CudaTransfer
from specinfer.model.runner import ModelRunner
from tiny import FAMILIES, make_engine, make_request, random_prompts, run

pytestmark = pytest.mark.gpu
PROMPTS = random_prompts([3, 40, 17, 60])
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
SAMPLED = SamplingParams(temperature=1.0, top_k=20, seed=1, max_tokens=16)
_DEPTHS = {"bloom": "n_layer", "gpt2": "n_layer", "gpt_bigcode": "n_layer", "mpt": "n_layers"}


def _deep(model_folder: Callable[..., Path], family: str) -> Path:
    """More layers than the device has buffers for."""
    depth = {_DEPTHS.get(family, "num_hidden_layers"): 6}
    if family == "gemma3_text":
        depth["layer_types"] = ["sliding_attention", "full_attention"] * 3
    return model_folder(family, **depth)


def _said(
    folder: Path, quantization: str | None, offload: OffloadConfig | None, num_resident: int = 0
) -> list[list[int]]:
    device = torch.device("cuda")
    loaded = load_model(folder, torch.float32, device, quantization, offload=offload)
    if offload is not None:
        assert isinstance(loaded.stream, DeviceStream)
        loaded.stream.settle(num_resident * loaded.stream.buffer_bytes)
        assert loaded.stream.num_resident == num_resident
    runner = ModelRunner(loaded, 4096)
    said = []
    for params in (GREEDY, SAMPLED):
        requests = [make_request(str(i), p, params, seed=i) for i, p in enumerate(PROMPTS)]
        said += run(make_engine(runner, max_num_batched_tokens=32), requests)
    if loaded.stream is not None:
        loaded.stream.close()
    return said


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_generate_the_same_tokens_from_host_memory(
    family: str, quantization: str | None, model_folder: Callable[..., Path]
) -> None:
    folder = _deep(model_folder, family)
    expected = _said(folder, quantization, None)
    for num_resident in (0, 2):
        assert _said(folder, quantization, OffloadConfig("cpu"), num_resident) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_families_generate_the_same_tokens_from_the_disk(
    family: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = _deep(model_folder, family)
    assert _said(folder, None, OffloadConfig("disk", None, tmp_path), 1) == _said(folder, None, None)


@pytest.mark.parametrize("offload", ["cpu", "disk"])
@pytest.mark.parametrize("tree", ["off", "2,2,1", "best-first:32"])
def test_speculation_with_a_streamed_target_changes_nothing(
    tree: str, offload: str, model_folder: Callable[..., Path]
) -> None:
    folder, small = _deep(model_folder, "llama"), model_folder("llama", noise=0.02)
    drafters = [] if tree == "off" else [str(small), "ngram"]
    texts = []
    for options in ({}, {"offload": offload}):
        with LLM(folder, drafters=drafters, tree=tree, device="cuda", **options) as llm:
            outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], [GREEDY, SAMPLED] * 2)
            texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1]


def test_the_budget_is_kept_and_memory_comes_back(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llama", num_hidden_layers=12, hidden_size=1024, intermediate_size=4096)  # 750 MB
    device = torch.device("cuda")
    torch.cuda.init()
    torch.cuda.empty_cache()
    free_before, whole = torch.cuda.mem_get_info(device)
    budget = whole - free_before + 500 * 2**20
    llm = LLM(folder, drafters=[], device="cuda", offload="cpu", memory_budget=budget, kv_cache_memory_bytes=2**26)
    stream = llm.target.loaded.stream
    assert stream is not None
    assert 0 < stream.num_resident < 12
    llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY)
    assert whole - torch.cuda.mem_get_info(device)[0] <= 1.1 * budget
    before = stream.bytes_read
    llm.generate([{"prompt_token_ids": PROMPTS[0]}], GREEDY)
    assert stream.bytes_read - before >= 15 * stream.bytes_per_pass
    assert stream.seconds_reading > 0
    llm.shutdown()
    del llm, stream
    torch.cuda.empty_cache()
    assert free_before - torch.cuda.mem_get_info(device)[0] < 300 * 2**20


def test_a_budget_that_is_too_small_is_refused(model_folder: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"^memory_budget: .* too few"):
        LLM(_deep(model_folder, "llama"), drafters=[], device="cuda", offload="cpu", memory_budget="1MiB")


def test_files_are_read_straight_into_pinned_memory(tmp_path: Path) -> None:
    content = os.urandom(2**20)
    (tmp_path / "file").write_bytes(content)
    link, file, memory = CudaTransfer(torch.device("cuda")), DirectFile(tmp_path / "file"), pages(2**20)
    link.pin(memory)
    assert memory.is_pinned()
    assert file.read(0, 2**20, memory) == 0
    there = link.buffer(2**20)
    link.copy(memory, there, None).done.synchronize()
    assert there.cpu().numpy().tobytes() == content
    file.close()
    link.unpin(memory)
    assert not memory.is_pinned()


def test_copies_run_while_the_device_computes() -> None:
    """What is said takes no time, and the two queues overlap."""
    link = CudaTransfer(torch.device("cuda"))
    memory, there = pages(2**28), link.buffer(2**28)
    link.pin(memory)
    matrix = torch.randn(8192, 8192, device="cuda")
    link.finish()
    first = link.record()
    for _ in range(40):
        matrix @ matrix
    copies = [link.copy(memory, there, None) for _ in range(4)]
    computed = link.record()
    assert not computed.query()
    link.finish()
    assert first.elapsed_time(copies[0].done) < first.elapsed_time(computed)
    link.unpin(memory)


def test_the_link_has_a_bandwidth() -> None:
    bandwidth = LinkBandwidth(CudaTransfer(torch.device("cuda")))
    assert 1e9 < bandwidth.measure(0.2) < 1e12
    bandwidth.close()
