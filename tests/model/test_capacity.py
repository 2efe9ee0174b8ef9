"""Memory of a GPU that caches leave to passes, and how much of a prompt is read in a pass there."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from on_device import load_plain
from specinfer.core.config import EngineConfig
from specinfer.engine_args import EngineArgs
from specinfer.model.capacity import cache_bytes, pass_bytes
from specinfer.model.definition import load_config
from specinfer.model.device import prompt_tokens
from specinfer.model.layers.device import DeviceDecoder
from specinfer.setup import model_plan
from specinfer.setup.model_plan import plan_models

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
CORES = {"H200": 132, "A100": 108, "RTX 4090": 128, "RTX 3090": 82, "L4": 58, "T4": 40, "a seventh of an H200": 16}


@pytest.fixture
def gpu_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that gives all GPUs this many multiprocessors."""

    def give(num_cores: int) -> None:
        properties = SimpleNamespace(multi_processor_count=num_cores)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    return give


def test_a_step_reads_more_of_prompts_the_more_a_device_computes_at_a_time(gpu_of: Callable[[int], None]) -> None:
    found = {}
    for name, num_cores in CORES.items():
        gpu_of(num_cores)
        found[name] = prompt_tokens(GPU)
    assert list(found.values()) == [2048, 2048, 2048, 1024, 1024, 512, 512]
    assert prompt_tokens(CPU) == 512


def test_the_device_decides_how_much_of_prompts_a_step_reads_if_nobody_does(
    model_folder: Callable[..., Path], gpu_of: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_of(132)

    def planned(family: str = "llama", **options: object) -> int:
        args = EngineArgs(model_folder(family, tokenizer=True), drafters=["ngram"], **options)  # type: ignore[arg-type]
        return plan_models(args).settings.limits.max_num_batched_tokens

    assert planned(device="cpu") == 512
    monkeypatch.setattr(model_plan, "find_device", lambda _: GPU)
    assert planned() == 2048
    assert [planned(max_num_batched_tokens=count) for count in (7, 512, 8192)] == [7, 512, 8192]
    assert planned("qwen3_5_text") == planned("lfm2") == 512, "a prefix continues at the end of a chunk"


@pytest.mark.parametrize("fuses", [False, True])
def test_caches_leave_a_gpu_what_the_largest_pass_takes(
    fuses: bool, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_plain(model_folder("llama"))
    config = load_config(loaded.folder)
    if fuses:
        loaded = replace(loaded, model=DeviceDecoder(loaded.model, loaded.max_position).eval())
    there = replace(loaded, device=GPU)
    assert pass_bytes(loaded, 2048) == 0, "memory of CPUs is not divided up"
    few, many = pass_bytes(there, 512), pass_bytes(there, 2048)
    assert many == 4 * few
    at_once = 4 * config.intermediate_size + 3 * config.hidden_size  # gates, the same opened, values and products
    assert 2048 * 4 * at_once <= many <= 5 * 2048 * 4 * at_once
    free = 4 * many
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 2 * free))

    def left(tokens: int, utilization: float | None = None, num_sharing: int = 1) -> int:
        config = EngineConfig(max_num_batched_tokens=tokens, gpu_memory_utilization=utilization)
        return free - num_sharing * cache_bytes(config, there, None, num_sharing)

    assert left(512) == pytest.approx(0.2 * free, abs=2), "the usual rest is enough"
    assert left(2048) == many
    assert left(2048, 0.99) == many
    assert left(2048, 0.7) == pytest.approx(0.6 * free, abs=2)
    assert left(2048, num_sharing=2) == 2 * many, "each of the processes that share a GPU runs passes"


def test_experts_count_in_a_pass_as_often_as_a_token_chooses_them(model_folder: Callable[..., Path]) -> None:
    loaded = replace(load_plain(model_folder("mixtral")), device=GPU)
    config = load_config(loaded.folder)
    assert pass_bytes(loaded, 10) >= 10 * 4 * config.num_experts_per_tok * 3 * config.intermediate_size
