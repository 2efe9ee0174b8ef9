"""Layers streamed to a device: its two queues never meet in a buffer, and its passes wait for no copy."""

import gc
import time
import weakref
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.disk import LinkBandwidth
from specinfer.core.errors import WeightsError
from specinfer.model.offload.budget import Budget
from specinfer.model.offload.device_stream import NUM_BUFFERS, DeviceStream
from specinfer.model.offload.direct import ALIGNMENT, Scratch
from specinfer.model.offload.streamed_layer import Chunk
from tests.model.offload.late import POISON, LateLink


class Layer:
    """Its bytes are its number, and how often it was read."""

    num_chunks = 2

    def __init__(self, number: int, num_pages: int = 1, lasts: float = 0.0) -> None:
        self.number, self.lasts = number, lasts
        self.num_bytes = self.num_read = num_pages * ALIGNMENT
        self.widest = 1
        self.bound: Tensor | None = None
        self.is_changed, self.fails = False, False
        self.num_filled = 0

    def chunks(self, buffer: Tensor) -> Sequence[Chunk]:
        return [partial(self._fill, part) for part in buffer[: self.num_bytes].chunk(self.num_chunks)]

    def _fill(self, part: Tensor, _scratch: Scratch) -> int:
        if self.fails:
            raise WeightsError("weights: no such luck")
        time.sleep(self.lasts)
        part.fill_(POISON)
        time.sleep(self.lasts)
        part.fill_(self.number)
        self.num_filled += 1
        return len(part)

    def bind(self, buffer: Tensor) -> None:
        self.bound = buffer

    def check(self) -> None:
        if self.is_changed:
            raise WeightsError("weights: changed")


class Model:
    """Computes with layers, or finds out that they are not what they should be."""

    def __init__(self, link: LateLink, layers: Sequence[Layer], *, in_host_memory: bool, num_sharing: int = 1) -> None:
        self.link, self.layers, self.num_closed = link, layers, 0
        self.stream = DeviceStream(
            layers, self._close, link, in_host_memory=in_host_memory, num_sharing=num_sharing
        )  # fmt: skip
        self.wrong: list[str] = []
        self.num_right = 0

    def _close(self) -> None:
        self.num_closed += 1

    def run(self, upto: int | None = None) -> None:
        """A pass, perhaps broken off in a layer."""
        for i, layer in enumerate(self.layers):
            self.stream.acquire(i)
            self.link.launch(partial(self._compute, layer, layer.bound))
            if i == upto:
                return
            self.stream.release(i)

    def _compute(self, layer: Layer, bound: Tensor) -> None:
        found = bound[: layer.num_bytes].unique().tolist()
        if found == [layer.number]:
            self.num_right += 1
        else:
            self.wrong.append(f"layer {layer.number} was computed with {found}")

    def close(self) -> None:
        self.stream.close()
        assert not self.wrong
        assert not self.link.pinned
        assert self.num_closed == 1


@given(
    st.integers(1, 9),
    st.integers(0, 9),
    st.booleans(),
    st.lists(st.none() | st.integers(0, 8), min_size=1, max_size=5),
    st.integers(0, 2**16),
)
def test_each_layer_is_computed_with_its_own_bytes(
    num_layers: int, num_resident: int, in_host_memory: bool, passes: list[int | None], seed: int
) -> None:
    link = LateLink(seed)
    layers = [Layer(i, 1 + i % 3, lasts=1e-4 * (seed % 2)) for i in range(num_layers)]
    model = Model(link, layers, in_host_memory=in_host_memory)
    model.stream.settle(num_resident * model.stream.buffer_bytes)
    if num_layers - num_resident > NUM_BUFFERS:
        assert model.stream.num_resident == num_resident
    else:
        assert model.stream.num_resident == num_layers
    for upto in passes:
        model.run(upto)
    link.finish()
    computed = sum(num_layers if upto is None else min(upto + 1, num_layers) for upto in passes)
    assert model.num_right == 3 * computed
    model.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("in_host_memory", [False, True])
def test_what_a_broken_pass_computes_with_is_not_overwritten(seed: int, in_host_memory: bool) -> None:
    link = LateLink(seed)
    model = Model(link, [Layer(i) for i in range(9)], in_host_memory=in_host_memory)
    for upto in (3, 8, None):
        model.run(upto)
    link.finish()
    assert model.num_right == 3 * (4 + 9 + 9)
    model.close()


def test_a_pass_waits_for_no_copy() -> None:
    link = LateLink()
    model = Model(link, [Layer(i) for i in range(12)], in_host_memory=True)
    model.stream.settle(2 * model.stream.buffer_bytes)
    link.num_waits, link.is_stuck = 0, True
    model.run()
    model.run()
    assert model.num_right == 0  # nothing was done yet of all that was requested
    assert link.num_waits == 0
    link.finish()
    assert model.num_right == 3 * 2 * 12
    model.close()


def test_the_first_layers_of_the_next_pass_are_copied_ahead() -> None:
    link = LateLink()
    model = Model(link, [Layer(i) for i in range(8)], in_host_memory=True)
    model.stream.settle(0)
    model.run()
    assert link.num_copies == 8 + NUM_BUFFERS
    model.run()
    assert link.num_copies == 2 * 8 + NUM_BUFFERS
    assert model.stream.bytes_read == link.num_copies * ALIGNMENT
    assert model.stream.bytes_per_pass == 8 * ALIGNMENT
    link.finish()
    assert model.stream.seconds_reading == pytest.approx(1e-3 * link.num_copies)
    assert model.stream.seconds_waiting >= 1e-3 * 16
    model.close()


def test_layers_in_host_memory_are_read_once() -> None:
    model = Model(LateLink(), [Layer(i) for i in range(8)], in_host_memory=True)
    model.stream.settle(2 * model.stream.buffer_bytes)
    for layer in model.layers:
        layer.is_changed = True  # what was read is not asked for again
    for _ in range(3):
        model.run()
    assert {layer.num_filled for i, layer in enumerate(model.layers) if i not in (0, 4)} == {Layer.num_chunks}
    model.close()


@pytest.mark.parametrize("fault", ["is_changed", "fails"])
def test_a_disk_that_fails_fails_the_pass_only(fault: str) -> None:
    link = LateLink()
    model = Model(link, [Layer(i) for i in range(8)], in_host_memory=False)
    model.stream.settle(0)
    for _ in range(3):
        setattr(model.layers[5], fault, True)
        with pytest.raises(WeightsError):
            model.run()
        setattr(model.layers[5], fault, False)
    model.run()
    model.close()


def test_settling_again_moves_layers() -> None:
    model = Model(LateLink(), [Layer(i) for i in range(9)], in_host_memory=True)
    for num_resident in (0, 5, 9, 2):
        model.stream.settle(num_resident * model.stream.buffer_bytes)
        assert model.stream.num_resident == num_resident
        model.run()
        model.run()
    model.close()
    with pytest.raises(WeightsError, match="shut down"):
        model.run()


def test_host_memory_that_is_too_small_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specinfer.model.offload.device_stream.available_bytes", lambda: 5 * ALIGNMENT)
    model = Model(LateLink(), [Layer(i) for i in range(9)], in_host_memory=True)
    with pytest.raises(ValueError, match=r"^offload: .*raise memory_budget"):
        model.stream.settle(0)
    model.stream.settle(4 * model.stream.buffer_bytes)
    model.run()
    model.close()


def test_ranks_of_a_machine_share_the_memory_that_their_layers_are_kept_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """All find as much available before they begin to read."""
    monkeypatch.setattr("specinfer.model.offload.device_stream.available_bytes", lambda: 10 * ALIGNMENT)
    for num_sharing, num_resident in ((1, 0), (2, 4)):
        model = Model(LateLink(), [Layer(i) for i in range(9)], in_host_memory=True, num_sharing=num_sharing)
        if num_resident:
            with pytest.raises(ValueError, match=r"^offload: .*raise memory_budget"):
                model.stream.settle((num_resident - 1) * model.stream.buffer_bytes)
        model.stream.settle(num_resident * model.stream.buffer_bytes)
        model.close()


def test_buffers_do_not_outlive_the_stream() -> None:
    model = Model(LateLink(), [Layer(i) for i in range(9)], in_host_memory=True)
    model.stream.settle(model.stream.buffer_bytes)
    model.run()
    model.close()
    assert all(layer.bound is not None and layer.bound.is_meta for layer in model.layers)


def test_the_budget_of_a_gpu_is_what_its_driver_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (600 * 2**20, 1000 * 2**20))
    assert Budget(None, device).num_bytes == (400 + 480) * 2**20
    assert Budget(700 * 2**20, device).spare(100 * 2**20, 50 * 2**20, "") == 150 * 2**20
    with pytest.raises(ValueError, match=r"^memory_budget: 499 MiB are too few for two layers; give at least 511MiB"):
        Budget(499 * 2**20, device).spare(100 * 2**20, 10 * 2**20, "two layers")
    with pytest.raises(ValueError, match=r"^memory_budget: 1001 MiB are more than the device's 1000"):
        Budget(1001 * 2**20, device)


def test_what_others_use_of_a_gpu_gives_caches_and_guesses_no_larger_share(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 * 2**20, 1000 * 2**20))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 20 * 2**20)
    budget = Budget(None, device)
    assert budget.num_bytes == (900 + 80) * 2**20
    assert budget.own_bytes == (20 + 80) * 2**20
    assert budget.cache_bytes == 15 * 2**20
    assert budget.spare(50 * 2**20, budget.cache_bytes) == 15 * 2**20
    with pytest.raises(ValueError, match=r"give at least 992MiB$"):
        budget.spare(75 * 2**20, budget.cache_bytes)
    enough = Budget(992 * 2**20, device)
    assert enough.spare(75 * 2**20, enough.cache_bytes) >= 0
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 950 * 2**20)  # counted at another moment
    assert Budget(None, device).own_bytes == budget.num_bytes


def test_the_bandwidth_of_a_link_is_bytes_by_the_time_on_the_device() -> None:
    link = LateLink(milliseconds=4.0)
    bandwidth = LinkBandwidth(link, num_bytes=2**20)
    assert bandwidth.measure(0.0) == pytest.approx(link.num_copies * 2**20 / 4e-3)
    assert len(bandwidth.rates["1 MiB"]) == 1
    bandwidth.close()
    assert not link.pinned


@pytest.mark.parametrize("in_host_memory", [False, True])
def test_host_memory_comes_back_when_a_stream_is_settled_or_closed(in_host_memory: bool) -> None:
    """It may be most of the machine's, and the next streamed model needs it."""
    model = Model(LateLink(eager=True), [Layer(i) for i in range(9)], in_host_memory=in_host_memory)
    seen = list[weakref.ref[Tensor]]()
    pin = model.link.pin

    def note(memory: Tensor) -> None:
        seen.append(weakref.ref(memory))
        pin(memory)

    model.link.pin = note  # type: ignore[method-assign]
    gc.collect()
    gc.disable()
    try:
        model.stream.settle(2 * model.stream.buffer_bytes)  # the layers that stay come through host memory, too
        model.run()
        num_seen = len(seen)
        assert len([one for one in seen if one() is not None]) == (7 if in_host_memory else 2)
        model.stream.settle(3 * model.stream.buffer_bytes)
        model.run()
        assert all(one() is None for one in seen[:num_seen])
        model.close()
        assert all(one() is None for one in seen)
    finally:
        gc.enable()
