"""The memory of a process, as the operating system counts it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specinfer.core import systems
from specinfer.model.offload import budget
from specinfer.model.offload.stream import Stream
from specinfer.quantize.checkpoint import write_quantized
from specinfer.quantize.options import QuantizeConfig
from tiny import FAMILIES

_SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "max_position_embeddings": 2048,
}
_ASYNC = {"HF_DEACTIVATE_ASYNC_LOAD": "0"}  # as users have it: several threads read the model
_CHILD = """
import re, sys
from pathlib import Path
from specinfer import LLM, SamplingParams

folder, copy = sys.argv[1], sys.argv[2] or None

def load(num_bytes):
    return LLM(
        folder, drafters=["ngram"], tree="best-first:16", offload="disk", memory_budget=num_bytes,
        quantization=None if copy is None else "int8", offload_folder=copy,
    )

try:
    load(2**20)
except ValueError as error:
    refused = str(error)
num_bytes = int(re.search(r"at least (\\d+)MiB", refused)[1]) * 2**20
llm = load(num_bytes)
stream = llm.target.loaded.stream
prompts = [{"prompt_token_ids": [(i * j) % 90 for i in range(160)]} for j in (1, 2)]
assert all(out.outputs for out in llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0.0)))
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(refused)
print(num_bytes, int(peak[1]) * 1024, stream.num_resident, stream.num_layers)
llm.shutdown()
"""

_LOADING = """
import re, sys
from pathlib import Path
import torch
from transformers import PreTrainedModel
from specinfer.model import load

def resident(kind):
    return int(re.search(rf"Rss{kind}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def at_the_end():
    before = resident("Anon")
    release()
    kept.append(before - resident("Anon"))

release, load.release_freed_memory = load.release_freed_memory, at_the_end
for folder, quantization in zip(sys.argv[1:], (None, "int8")):
    kept, files = [], resident("File")
    loaded = load.load_model(Path(folder), torch.bfloat16, torch.device("cpu"), quantization)
    print(*kept, resident("File") - files, loaded.num_bytes)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """140 MB of weights."""
    folder = tmp_path_factory.mktemp("wide")
    config = AutoConfig.for_model("llama", **(FAMILIES["llama"] | _SIZES))
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("quantized", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_process_keeps_to_its_budget(folder: Path, tmp_path: Path, quantized: bool) -> None:
    copy = str(tmp_path / "copy") if quantized else ""
    command = [sys.executable, "-c", _CHILD, str(folder), copy]
    child = subprocess.run(command, env=os.environ | _ASYNC, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, "nobody is refused twice: " + child.stderr
    refused, numbers = child.stdout.splitlines()
    assert "memory_budget: 1 MiB are too few" in refused
    num_bytes, peak, num_resident, num_layers = map(int, numbers.split())
    assert peak < num_bytes
    assert quantized or num_resident < num_layers


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_returns_what_it_frees(folder: Path, tmp_path: Path) -> None:
    codes = tmp_path / "codes"  # those of gates and values are joined
    write_quantized(QuantizeConfig(model=str(folder), to="int8", out=codes))
    command = [sys.executable, "-c", _LOADING, str(codes), str(folder)]
    child = subprocess.run(command, env=os.environ | _ASYNC, capture_output=True, text=True, timeout=300, check=True)
    for kept, mapped, num_bytes in (map(int, line.split()) for line in child.stdout.splitlines()):
        assert kept < 0.3 * num_bytes
        assert mapped < 0.3 * num_bytes, "the file stays mapped"


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used"),
    [
        ("0::/outer/inner", "outer/inner", "memory.max", "memory.current"),
        ("0::/outer/inner", "outer", "memory.max", "memory.current"),
        ("0::/hidden/by/a/container", ".", "memory.max", "memory.current"),
        ("4:memory:/outer/inner", "memory/outer/inner", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("4:memory:/hidden/by/a/container", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_the_tightest_limit_of_the_control_groups_is_what_is_available(
    line: str, folder: str, limit: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systems, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(systems, "_OWN", tmp_path / "own")
    (tmp_path / "own").write_text(f"{line}\n")
    group = tmp_path / "groups" / folder
    group.mkdir(parents=True)
    (group / limit).write_text("1000000\n")
    (group / used).write_text("400000\n")
    assert budget.available_bytes() == 600_000


def test_cached_files_of_a_control_group_are_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "control_groups", lambda _: iter([tmp_path / "none", tmp_path]))
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    limit.write_text("1000000\n")
    used.write_text("400000\n")
    # Files in the page cache count as used, and are given up first.
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100000\nactive_file 5\n")
    assert budget.available_bytes() == 700_000
    (tmp_path / "memory.stat").write_text("inactive_file 0\ntotal_inactive_file 150000\n")
    assert budget.available_bytes() == 750_000
    for unusual in ("inactive_file many\n", "inactive_file\n", "inactive_file 1 2\n"):
        (tmp_path / "memory.stat").write_text(unusual)
        assert budget.available_bytes() == 600_000, "the limit holds though the cached bytes are not known"
    limit.write_text("max\n")
    assert budget.available_bytes() > 750_000
    assert budget.usual_budget() > budget.used_bytes() > 0


def test_buffers_are_allocated_before_the_rest_goes_to_layers() -> None:
    size = 64 * 2**20
    layers: Any = [SimpleNamespace(num_bytes=size, widest=1) for _ in range(4)]
    before = budget.used_bytes()
    stream = Stream(layers, lambda: None)
    assert budget.used_bytes() - before > 1.9 * size
    stream.settle(0)
    assert budget.used_bytes() - before > 1.9 * size
    stream.close()
