"""Whether Triton can be used on a device, why not, and where compiled kernels are kept."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
from torch import Tensor

from specinfer import LLM, SamplingParams, StructuredOutputsParams
from specinfer.core.files import cache_folder
from specinfer.core.rules import RULES
from specinfer.ops import kernels as registry
from specinfer.ops import triton as kernels

CPU = torch.device("cpu")
INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here, and take no tensors of the CPU"
)
triton = pytest.importorskip("triton")
FileCacheManager = triton.runtime.cache.FileCacheManager
get_cache_manager = triton.runtime.cache.get_cache_manager


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    kernels.why_not_on.cache_clear()
    yield
    kernels.why_not_on.cache_clear()
    kernels._temporary.clear()


def _replace_smallest_kernel(monkeypatch: pytest.MonkeyPatch, outcome: Tensor | Exception) -> None:
    from specinfer.ops.triton import gate

    def run(_: Tensor) -> Tensor:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(gate, "gate", run)


@INTERPRETED
def test_compiled_kernels_are_kept_where_all_is_that_a_service_may_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Triton's own place is in the user's home, which services and containers may not have, or not write to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert kernels.why_not_on(CPU) is None
    assert Path(triton.knobs.cache.dir) == cache_folder() / "triton"
    assert tmp_path in Path(triton.knobs.cache.dir).parents


@INTERPRETED
@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "TRITON_HOME"])
def test_a_place_for_compiled_kernels_that_the_user_has_chosen_stays(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv(variable, "/chosen")
    before = triton.knobs.cache.dir
    assert kernels.why_not_on(CPU) is None
    assert triton.knobs.cache.dir == before


@INTERPRETED
def test_kernels_that_cannot_be_made_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton is installed on many machines that have no compiler."""
    assert kernels.why_not_on(CPU) is None
    kernels.why_not_on.cache_clear()
    reason = "Failed to find C compiler. Please specify via CC environment variable."
    _replace_smallest_kernel(monkeypatch, RuntimeError(reason))
    for _ in range(2):
        assert str(kernels.why_not_on(CPU)).startswith("Failed to find C compiler.")
    assert [record.getMessage() for record in caplog.records] == [
        "Triton cannot run on cpu, models run as transformers has them: "
        "Failed to find C compiler. Please specify via CC environment variable."
    ]


@INTERPRETED
def test_a_compiler_without_pythons_headers_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton reports the command, which is long; what the compiler lacks is on the terminal alone."""
    error = CalledProcessError(1, ["/usr/bin/gcc", "/tmp/tmp7/cuda_utils.c", "-O3", "-shared"])
    _replace_smallest_kernel(monkeypatch, error)
    assert (
        kernels.why_not_on(CPU) == "gcc failed on what launches kernels; are Python's headers (python3-dev) installed?"
    )


@INTERPRETED
def test_kernels_with_wrong_results_are_a_warning_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _replace_smallest_kernel(monkeypatch, torch.zeros(1, 1))
    assert kernels.why_not_on(CPU) == "its smallest kernel gives wrong numbers"
    assert "its smallest kernel gives wrong numbers" in caplog.text


@INTERPRETED
def test_without_a_place_to_keep_them_kernels_are_compiled_for_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file where the folder should be stands for a file system that may only be read."""
    (tmp_path / "specinfer").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert kernels.why_not_on(CPU) is None
    place = Path(os.environ["TRITON_CACHE_DIR"])
    assert place.is_dir()
    assert tmp_path not in place.parents
    (record,) = caplog.records
    assert record.getMessage() == (
        f"compiled kernels are not kept for the next start: {cache_folder() / 'triton'} cannot be written "
        "(Not a directory); set XDG_CACHE_HOME or TRITON_CACHE_DIR"
    )


@INTERPRETED
def test_where_the_disk_is_full_later_kernels_are_compiled_for_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel may be compiled amid a pass, whose requests would fail."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_MANAGER", raising=False)
    assert kernels.why_not_on(CPU) is None
    put, is_full = FileCacheManager.put, False

    def put_if_there_is_space(cache: Any, *args: Any, **options: Any) -> str:
        if is_full and tmp_path in Path(cache.cache_dir).parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), cache.cache_dir)
        return str(put(cache, *args, **options))

    monkeypatch.setattr(FileCacheManager, "put", put_if_there_is_space)
    for key in ("00", "01"):
        is_full, cache = False, get_cache_manager(key)
        paths = {"source": cache.put("source", "source")}
        assert tmp_path in Path(paths["source"]).parents
        is_full = True
        paths["cubin"] = cache.put(b"\0", "cubin")
        cache.put_group("all", paths)
        assert tmp_path not in Path(paths["cubin"]).parents
        assert Path(paths["cubin"]).read_bytes() == b"\0"
        assert cache.get_group("all") == paths
    shutil.rmtree(tmp_path)
    tmp_path.touch()  # a folder that cannot be made
    assert Path(get_cache_manager("02").put("source", "source")).read_text() == "source"
    (record,) = caplog.records
    assert record.getMessage() == (
        f"compiled kernels are not kept for the next start: {tmp_path} cannot be written (No space left on device); "
        "set XDG_CACHE_HOME or TRITON_CACHE_DIR"
    )


def test_the_smallest_kernel_runs_on_the_device_that_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, whatever the tensors are on."""
    from specinfer.ops.triton import gate

    current, asked = ["cuda:0"], torch.device("cuda", 1)

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(str(device))
        yield
        current.pop()

    def gate_there(_: Tensor) -> Tensor:
        assert current[-1] == "cuda:1"
        return torch.full((1, 1), 0.7310586)

    ones = torch.ones
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch, "ones", lambda *size, device: ones(*size))
    monkeypatch.setattr(gate, "gate", gate_there)
    assert kernels.why_not_on(asked) is None


@pytest.mark.usefixtures("small_demo")
def test_engines_on_a_cpu_run_no_operation_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests install a back end for tensors of a CPU, which no user has."""

    def refuse(name: str) -> Any:
        raise AssertionError(name)

    monkeypatch.setattr(registry, "back_end", refuse)
    sampled = SamplingParams(max_tokens=6, top_k=9, repetition_penalty=1.2, logprobs=2)
    for rule in RULES:
        with LLM("demo", verification=rule) as llm:
            masked = SamplingParams(max_tokens=6, structured_outputs=StructuredOutputsParams(regex="[a-z]+"))
            outputs = llm.generate(["a", "b", "c"], [SamplingParams(max_tokens=6, temperature=0.0), sampled, masked])
        assert all(output.outputs[0].token_ids for output in outputs)
