"""Models whose layers are brought to a device that copies late: the same text as with all layers in memory."""

import gc
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer.core.config import OffloadConfig
from specinfer.model import streamed
from specinfer.model.load import load_model
from specinfer.model.load_config import LoadConfig
from specinfer.model.offload.device_stream import DeviceStream
from specinfer.model.offload.streamed_layer import StreamedLayer
from specinfer.model.runner import ModelRunner
from tests.model.offload.late import LateLink
from tests.model.offload.streamed_models import generated, save_deep, settled, stream_of
from tiny import FAMILIES, quick

_CPU = torch.device("cpu")


class Device:
    """Makes the CPU look like a device with a memory of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.link = LateLink(eager=True)

    def load(
        self, folder: Path, where: str, quantization: str | None = None, num_resident: int = 0, **options: Any
    ) -> ModelRunner:
        """Args:
        where: "cpu" or "disk", as in `OffloadConfig`.
        """

        def stream(layers: Sequence[StreamedLayer], close: Callable[[], None], settings: Any, _: Any) -> DeviceStream:
            return DeviceStream(layers, close, self.link, in_host_memory=settings.in_host_memory)

        self._patch.setattr(streamed, "_stream", stream)
        self._patch.setattr(LoadConfig, "in_host_memory", where == "cpu")
        offload = OffloadConfig("disk", **options)
        loaded = load_model(folder, torch.float32, _CPU, quantization, native=False, offload=offload)
        assert isinstance(loaded.stream, DeviceStream)
        runner = settled(loaded, num_resident)
        assert loaded.stream.num_resident == num_resident
        return runner

    def close(self, runner: ModelRunner) -> None:
        stream_of(runner).close()
        assert not self.link.pinned


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def in_memory(folder: Path, quantization: str | None = None) -> ModelRunner:
    return ModelRunner(load_model(folder, torch.float32, _CPU, quantization, native=False), 2048)


# How quantized weights and copies are brought in depends on the shapes of layers only.
_SOME = ("gemma3_text", "gpt2", "llama", "mixtral")


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        *itertools.product(_SOME, (None, "int8", "int4")),
        *(pytest.param(family, None, marks=pytest.mark.slow) for family in sorted(set(FAMILIES) - set(_SOME))),
    ],
)
def test_from_host_memory(tmp_path: Path, device: Device, family: str, quantization: str | None) -> None:
    folder = save_deep(tmp_path, family)
    expected = generated(in_memory(folder, quantization))
    runner = device.load(folder, "cpu", quantization, num_resident=2)
    assert generated(runner) == expected
    device.close(runner)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_in_floating_point_from_host_memory(tmp_path: Path, device: Device, family: str) -> None:
    test_from_host_memory(tmp_path, device, family, "fp8")


@pytest.mark.parametrize("family", quick(_SOME, "llama", "mixtral"))  # test_copy has the copies of all families
def test_from_the_disk(tmp_path: Path, device: Device, family: str) -> None:
    folder = save_deep(tmp_path / "target", family)
    runner = device.load(folder, "disk", offload_folder=tmp_path / "copy")
    assert generated(runner, 1.0) == generated(in_memory(folder), 1.0)
    device.close(runner)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_from_its_own_files(tmp_path: Path, device: Device, where: str) -> None:
    folder = save_deep(tmp_path)
    runner = device.load(folder, where, num_resident=2)
    for _ in range(2):
        assert generated(runner) == generated(in_memory(folder))
    assert stream_of(runner).seconds_reading > 0
    device.close(runner)


def test_quantized_layers_are_brought_in_as_they_are(tmp_path: Path, device: Device) -> None:
    folder = save_deep(tmp_path)
    sizes = []
    for quantization in (None, "int8", "int4"):
        runner = device.load(folder, "cpu", quantization)
        sizes.append(stream_of(runner).bytes_per_pass)
        device.close(runner)
    assert sizes[0] > sizes[1] > sizes[2]


def test_a_model_that_is_let_go_gives_host_memory_back(tmp_path: Path, device: Device) -> None:
    runner = device.load(save_deep(tmp_path), "cpu")
    generated(runner)
    assert device.link.pinned
    del runner
    gc.collect()
    assert not device.link.pinned
