"""Devices by name, and why PyTorch sees none of a machine's GPUs; drivers and builds of PyTorch are made up."""

import gc
import logging
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from specinfer.model import device
from specinfer.model.device import check_gpu, driver_version, find_device, warn_of_slow_type, why_no_cuda
from specinfer.model.load import load_model

CPU = torch.device("cpu")
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020)"
VERSIONS = {
    "535.104.05": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\nGCC version: 12.3.0\n",
    "580.65.06": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@host)\n",
}


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with `dev` and `version` of a machine whose GPU PyTorch does not see."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "version").write_text(VERSIONS["535.104.05"])
    monkeypatch.setattr(device, "_DEVICES", tmp_path / "dev")
    monkeypatch.setattr(device, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(device, "_WSL", tmp_path / "wsl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    device.warn_of_unused_gpu.cache_clear()
    device.warn_of_slow_type.cache_clear()
    yield tmp_path
    device.warn_of_unused_gpu.cache_clear()
    device.warn_of_slow_type.cache_clear()


def build_for_cuda(monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    """Make up a build for CUDA that cannot start it."""

    def fail() -> None:
        raise RuntimeError(error)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", fail)


def without_gpu(machine: Path) -> None:
    (machine / "dev/nvidia0").unlink()
    (machine / "version").unlink()


def test_a_gpu_that_is_not_used_is_one_warning_with_pytorchs_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build_for_cuda(monkeypatch, f"{TOO_OLD}.\nmore of it")
    assert find_device("auto") == find_device("auto") == CPU
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == f"device: the CPU is used, since PyTorch sees no GPU: {TOO_OLD}"


def test_a_build_without_cuda_is_named_where_there_is_a_gpu(
    machine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    (machine / "dev/nvidia0").unlink()  # made when it is first used
    assert find_device("auto") == CPU
    (record,) = caplog.records
    assert (
        f"PyTorch {torch.__version__} is a build without CUDA; to use a GPU of NVIDIA, pip uninstall torch"
        in record.getMessage()
    )
    with pytest.raises(ValueError, match=r'use "cpu" or "auto" \(PyTorch \S+ is a build without CUDA'):
        find_device("cuda")


def test_nothing_is_said_where_there_is_no_gpu_or_it_is_hidden(
    machine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build_for_cuda(monkeypatch, "No CUDA GPUs are available")
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert find_device("auto") == CPU
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    without_gpu(machine)
    assert find_device("auto") == CPU
    assert not caplog.records


def test_a_container_without_devices_is_told_how_it_gets_some(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_for_cuda(monkeypatch, "Found no NVIDIA driver on your system.")
    assert why_no_cuda() == "Found no NVIDIA driver on your system"
    without_gpu(machine)
    with pytest.raises(ValueError, match=r"no CUDA device 'cuda:1' .*no NVIDIA driver.*docker run --gpus all"):
        find_device("cuda:1")


def test_in_the_linux_of_windows_a_driver_is_known_by_its_libraries(
    machine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has neither a file in /proc nor devices of its own."""
    build_for_cuda(monkeypatch, TOO_OLD)
    without_gpu(machine)
    assert driver_version() is None
    (machine / "wsl").mkdir()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (machine / "wsl" / name).touch()
    assert driver_version() is None, "no library at all"
    code, asked = 0, list[str]()

    def version(text: Any, _: int) -> int:
        text.value = b"572.83"
        return code

    def load(path: str) -> Any:
        asked.append(path)
        return SimpleNamespace(
            nvmlInit_v2=lambda: code, nvmlSystemGetDriverVersion=version, nvmlShutdown=lambda: asked.append("end")
        )

    monkeypatch.setattr(device.ctypes, "CDLL", load)
    assert driver_version() == "572.83"
    assert asked == [str(machine / "wsl/libnvidia-ml.so.1"), "end"]
    assert why_no_cuda() == TOO_OLD, "nothing is said of containers"
    assert find_device("auto") == CPU
    assert [record.getMessage() for record in caplog.records] == [
        f"device: the CPU is used, since PyTorch sees no GPU: {TOO_OLD}"
    ]
    code = 9  # no driver
    assert driver_version() is None


def test_a_device_that_is_missing_among_others_has_no_other_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"no CUDA device 'cuda:2' is available; use \"cpu\" or \"auto\"$"):
        find_device("cuda:2")


def test_a_gpu_on_which_nothing_can_be_computed_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has no code for it, or its memory is full; loading would fail amid the weights."""
    assert check_gpu(CPU) == CPU

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore of it")

    monkeypatch.setattr(torch, "ones", fail)
    reason = "no kernel image is available for execution on the device; choose another device"
    with pytest.raises(ValueError, match=rf"^device: PyTorch \S+ cannot compute on cuda:1: CUDA error: {reason}"):
        check_gpu(torch.device("cuda", 1))


def test_a_model_stays_on_the_gpu_that_was_current_when_it_was_loaded(
    monkeypatch: pytest.MonkeyPatch, model_folder: Callable[..., Path]
) -> None:
    """Each thread has a current GPU of its own, so that a device without a number is another one for the engine's."""
    monkeypatch.setattr(torch, "ones", lambda *_, **__: Mock(device=torch.device("cuda", 1)))
    assert check_gpu(torch.device("cuda")) == torch.device("cuda", 1)
    monkeypatch.undo()
    monkeypatch.setattr("specinfer.model.load.check_gpu", lambda device: CPU if device.type == "cuda" else device)
    assert load_model(model_folder(), "auto", torch.device("cuda")).device == CPU


def test_what_nobody_uses_any_more_is_freed_before_a_model_is_loaded_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cycles would keep caches and weights of an engine on the GPU until Python searches for them."""

    class Engine:
        def __init__(self) -> None:
            self.itself = self

    monkeypatch.setattr(torch, "ones", Mock())
    gc.disable()
    try:
        engine = weakref.ref(Engine())
        assert engine() is not None
        check_gpu(torch.device("cuda", 1))
        assert engine() is None
    finally:
        gc.enable()


def test_a_model_is_not_loaded_on_a_gpu_on_which_nothing_can_be_computed(
    monkeypatch: pytest.MonkeyPatch, model_folder: Callable[..., Path]
) -> None:
    def refuse(found: torch.device) -> None:
        raise ValueError(f"device: {found}")

    monkeypatch.setattr("specinfer.model.load.check_gpu", refuse)
    with pytest.raises(ValueError, match="device: cuda:1"):
        load_model(model_folder(), "auto", torch.device("cuda", 1))


def test_bfloat16_on_a_gpu_without_units_for_it_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    warn_of_slow_type(CPU, torch.bfloat16)
    warn_of_slow_type(gpu, torch.float16)
    assert not caplog.records
    for _ in range(2):  # target and drafter
        warn_of_slow_type(gpu, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    warn_of_slow_type(torch.device("cuda", 1), torch.bfloat16)
    (record,) = caplog.records
    assert record.getMessage() == (
        "dtype: Tesla T4 has no units for bfloat16 (they come with compute capability 8.0); float16 is faster there"
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_the_version_of_the_driver_is_that_of_the_kernel_module(machine: Path, version: str) -> None:
    (machine / "version").write_text(VERSIONS[version])
    assert driver_version() == version
    (machine / "version").unlink()
    assert driver_version() is None


SHOWN = """
import sys
from pathlib import Path
import torch
from specinfer.cli.terminal import quiet_libraries
from specinfer.model import device
from specinfer.server import logs

device._DEVICES = Path(sys.argv[1])
torch.cuda.is_available = lambda: False
quiet_libraries(debug=False)
device.find_device("auto")
device.warn_of_unused_gpu.cache_clear()
logs.configure("info")
device.find_device("auto")
logs.flush()
"""


def test_the_warning_is_seen_with_the_usual_settings_of_commands_and_of_the_server(machine: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SHOWN, str(machine / "dev")], capture_output=True, text=True, check=True, timeout=120
    )
    command, server = result.stderr.splitlines()
    assert command.startswith("specinfer: warning: device: the CPU is used, since PyTorch sees no GPU: ")
    assert server.startswith("WARNING ")
    assert "device: the CPU is used" in server
