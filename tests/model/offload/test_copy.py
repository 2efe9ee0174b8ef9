"""Packed copies of streamed layers, and families that need them: written once, read instead of the model's files."""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specinfer.core.config import OffloadConfig
from specinfer.core.errors import ModelError, WeightsError
from specinfer.model.load import load_model
from specinfer.model.offload.copy import Copy, open_copy
from specinfer.model.offload.direct import DirectFile
from specinfer.model.runner import ModelRunner
from tests.model.offload.streamed_models import generated, load_streamed, save_deep, stream_of
from tiny import FAMILIES, load_runner, quick, save_model

# What these make of the files' tensors is not done anew for each pass.
NEED_COPY = {"gpt2", "mixtral", "qwen3_moe"}
save = partial(save_deep, num_layers=4)


def load(folder: Path, copy: Path | None, quantization: str | None = None, num_resident: int = 0) -> ModelRunner:
    return load_streamed(folder, num_resident, quantization=quantization, offload_folder=copy)


def _copied() -> Iterator[Any]:
    """Families and quantizations; in every run those whose layers are made of other weights, and two others."""
    for family in sorted(FAMILIES):
        for quantization in (None, "int8", "int4"):
            is_slow = family not in (*NEED_COPY, "llama", "gemma3_text")
            yield pytest.param(family, quantization, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.covering(1)
@pytest.mark.parametrize(("family", "quantization"), list(_copied()))
def test_every_family_generates_the_same_tokens_from_a_copy(
    tmp_path: Path, family: str, quantization: str | None
) -> None:
    folder = save(tmp_path / "target", family)
    whole = load_runner(folder, quantization=quantization)
    wanted = {temperature: generated(whole, temperature) for temperature in (0.0, 1.0)}
    for num_resident, temperature in ((0, 1.0), (1, 0.0)):
        runner = load(folder, tmp_path / "copy", quantization, num_resident)
        assert generated(runner, temperature) == wanted[temperature]
        stream_of(runner).close()


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_weights_in_floating_point_come_from_a_copy(tmp_path: Path, family: str) -> None:
    test_every_family_generates_the_same_tokens_from_a_copy(tmp_path, family, "fp8")


@pytest.mark.parametrize(
    "family",
    quick(sorted(FAMILIES), *NEED_COPY, "llama", "gemma3_text", "gpt_neox", "mpt", "opt", "phi3", "starcoder2"),
)
def test_every_family_generates_the_same_tokens_from_its_own_files(tmp_path: Path, family: str) -> None:
    folder = save(tmp_path, family)
    if family in NEED_COPY:
        with pytest.raises(ModelError, match=r"offload_folder: .* name a folder"):
            load(folder, None)
        return
    runner = load(folder, None)
    assert generated(runner) == generated(load_runner(folder))
    stream_of(runner).close()


def test_without_native_kernels_layers_are_streamed_as_pytorch_has_them(tmp_path: Path) -> None:
    folder = save(tmp_path / "target")
    for quantization, copy in ((None, None), ("int8", tmp_path / "copy")):
        found = []
        for offload in (OffloadConfig(), OffloadConfig("disk", None, copy)):
            loaded = load_model(folder, torch.float32, torch.device("cpu"), quantization, native=False, offload=offload)
            found.append(generated(ModelRunner(loaded, 2048)))
        assert found[0] == found[1]


def test_quantized_weights_need_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"offload_folder: weights are not quantized anew .* name a folder"):
        load(save(tmp_path), None, "int8")


def test_a_copy_is_read_instead_of_the_files_and_used_again(tmp_path: Path) -> None:
    folder, copies = save(tmp_path / "target"), tmp_path / "copies" / "here"
    stream_of(load(folder, copies, "int8")).close()
    (copy,) = copies.glob("*.layers")
    written = copy.stat().st_mtime_ns
    runner = load(folder, copies, "int8")
    assert copy.stat().st_mtime_ns == written
    shutil.rmtree(folder)  # all that is needed is in the copy
    assert generated(runner)
    stream_of(runner).close()


def _other_weights(folder: Path, _copy: Path) -> None:
    save_model(folder, num_hidden_layers=4, seed=1)


def _cut_copy(_folder: Path, copy: Path) -> None:
    os.truncate(copy, copy.stat().st_size // 2)


def _no_description(_folder: Path, copy: Path) -> None:
    copy.with_suffix(".json").write_text("{")


@pytest.mark.parametrize("change", [_other_weights, _cut_copy, _no_description])
def test_a_copy_of_other_weights_is_written_anew(tmp_path: Path, change: Callable[[Path, Path], None]) -> None:
    folder, copies = save(tmp_path / "target"), tmp_path / "copies"
    stream_of(load(folder, copies)).close()
    (copy,) = copies.glob("*.layers")
    change(folder, copy)
    runner = load(folder, copies)
    assert generated(runner) == generated(load_runner(folder))
    assert len(list(copies.iterdir())) == 2
    stream_of(runner).close()


def test_copies_of_several_forms_share_a_folder(tmp_path: Path) -> None:
    folder, copies = save(tmp_path / "target"), tmp_path / "copies"
    for quantization in (None, "int8", "int4", "fp8"):
        stream_of(load(folder, copies, quantization)).close()
    assert len(list(copies.glob("*.layers"))) == 4


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, copies = save(tmp_path / "target"), tmp_path / "copies"
    real = os.fsync
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelError, match=r"offload_folder: .* No space left on device; name another"):
        load(folder, copies)
    assert not list(copies.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(ModelError, match=r"offload_folder: a copy of the layers takes \d+ MiB"):
        load(folder, copies)
    assert not list(copies.iterdir())
    open_files = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_link(name)]
    assert not [name for name in open_files if str(tmp_path) in name]


def test_a_disk_too_full_for_the_description_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, copies = save(tmp_path / "target"), tmp_path / "copies"

    def full(path: Path, text: str, **_: Any) -> int:
        path.write_bytes(text.encode()[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ModelError, match=r"offload_folder: .* No space left on device; name another"):
        load(folder, copies)
    assert not list(copies.iterdir())


def test_what_a_killed_process_left_of_a_copy_is_written_over(tmp_path: Path) -> None:
    folder, copies = save(tmp_path / "target"), tmp_path / "copies"
    stream_of(load(folder, copies)).close()
    (copy,) = copies.glob("*.layers")
    copy.with_suffix(".part").write_bytes(b"x" * 10**6)
    copy.unlink()
    runner = load(folder, copies)
    assert generated(runner) == generated(load_runner(folder))
    assert {path.suffix for path in copies.iterdir()} == {".layers", ".json"}
    stream_of(runner).close()


def _is_link(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


class _Layout:
    """A layer of one page, which takes a while to make."""

    num_bytes, widest = 4096, 1

    def __init__(self) -> None:
        self.num_written = 0

    def write(self, buffer: torch.Tensor, _parts: Any) -> None:
        self.num_written += 1
        time.sleep(0.1)
        buffer.fill_(7)


def test_of_two_that_want_the_same_copy_one_writes_it(tmp_path: Path) -> None:
    """Else the one that was first would find its file replaced, and refuse it for ever."""
    layout, both = _Layout(), threading.Barrier(2)
    shards = SimpleNamespace(files=[])
    checkpoint: Any = SimpleNamespace(folder=tmp_path / "target", shards=shards, progress=lambda *_: None)

    def opened(_number: int) -> Copy:
        both.wait()
        layouts: Any = [layout]
        return open_copy(tmp_path / "copies", checkpoint, [], [{}], layouts, lambda _: {})

    with ThreadPoolExecutor(2) as pool:
        copies = list(pool.map(opened, range(2)))
    assert layout.num_written == 1
    for copy in copies:
        copy.layers[0].check()
        copy.close()
    assert {path.suffix for path in (tmp_path / "copies").iterdir()} == {".layers", ".json"}


def test_weights_that_change_while_they_are_copied_are_refused(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"x" * 5000)
    shards = SimpleNamespace(files=[DirectFile(weights)])
    checkpoint: Any = SimpleNamespace(
        folder=tmp_path / "target", shards=shards, progress=lambda *_: weights.write_bytes(b"y" * 6000)
    )
    images: Any = [_Layout()]
    with pytest.raises(WeightsError, match="was changed"):
        open_copy(tmp_path / "copies", checkpoint, [], [{}], images, lambda _: {})
    assert not list((tmp_path / "copies").iterdir())
    shards.files[0].close()


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    folder, place = save(tmp_path / "target"), tmp_path / "file"
    place.write_text("")
    with pytest.raises(ModelError, match=r"offload_folder: .* cannot be written: .*; name another"):
        load(folder, place)


def test_progress_is_reported(tmp_path: Path) -> None:
    reported: list[Any] = []
    load_model(
        save(tmp_path / "target"),
        torch.float32,
        torch.device("cpu"),
        offload=OffloadConfig("disk", None, tmp_path / "copy"),
        progress=lambda *what: reported.append(what),
    )
    assert {what for what, _, _ in reported} == {"reading layers once to check them", "writing a copy"}
    last = {what: (done, total) for what, done, total in reported}
    assert all(done == total > 0 for done, total in last.values())
