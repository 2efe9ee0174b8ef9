"""Groups over a back end of their own, as GPUs have one: gloo stands in for NCCL, and CPUs for GPUs.

The code that runs between GPUs is run here, but for NCCL itself: that needs two of them.
"""

import gc
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as torch_distributed
from torch import Tensor

from specinfer.core.parallel_config import ParallelConfig, Place
from specinfer.model.load import load_model
from specinfer.model.sharding.shard_runner import ShardRunner
from specinfer.parallel import ranks
from specinfer.parallel.device_group import DeviceGroup, each_has_a_gpu
from specinfer.parallel.group import Group, HostGroup
from specinfer.parallel.ranks import Connections
from specinfer.parallel.rendezvous import Rendezvous, as_torch_store, join_rendezvous
from thread_group import Ranks as ThreadRanks
from thread_group import at_once, passes
from tiny import save_model

_CPU = torch.device("cpu")
_dist: Any = torch_distributed
_MOMENT = timedelta(seconds=60)


def _gloo_instead(meeting: Rendezvous, name: str, rank: int, size: int) -> Any:
    gloo = _dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._threads = [gloo.create_device(hostname="127.0.0.1")], 1
    options._timeout = _MOMENT
    return gloo(as_torch_store(meeting.another(), f"nccl/{name}/"), rank, size, options)


@pytest.fixture
def as_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "has_nccl", lambda: True)
    monkeypatch.setattr(Rendezvous, "connect_devices", _gloo_instead)


def _run(config: ParallelConfig, work: Callable[[Connections], Any], name: str = "cuda") -> list[Any]:
    """What each rank, a thread, makes of its connections."""
    size = config.world_size
    folder = tempfile.mkdtemp(prefix="specinfer-threads-")
    all_done = threading.Barrier(size)

    def run(rank: int) -> Any:
        try:
            meeting = join_rendezvous(Place(rank, size, rank, size, folder=folder), 20.0)
            meeting.check_settings({})
            with ExitStack() as undo:
                connections = Connections(meeting, config, torch.device(name, rank) if name == "cuda" else _CPU)
                undo.callback(connections.close)
                found = work(connections)
                all_done.wait(60)
                return found
        except BaseException:
            all_done.abort()
            raise

    return at_once(run, range(size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_sums_are_those_in_the_order_of_ranks_to_the_bit(dtype: torch.dtype, as_gpus: None) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [(100 * torch.randn(7, 300, generator=generator)).to(dtype) for _ in range(3)]

    def work(connections: Connections) -> tuple[Tensor, list[Tensor]]:
        group = connections.shard.tensor
        assert isinstance(group, DeviceGroup)
        own = parts[group.rank].clone()
        found = group.all_reduce(own.T), group.all_gather(own)
        assert torch.equal(own, parts[group.rank])
        return found

    wanted = (parts[0].double() + parts[1].double() + parts[2].double()).to(dtype)
    if dtype is torch.float32:
        wanted = parts[0] + parts[1] + parts[2]
    if dtype is torch.bfloat16:
        wanted = (parts[0].float() + parts[1].float() + parts[2].float()).to(dtype)
    for total, gathered in _run(ParallelConfig(3), work):
        assert torch.equal(total, wanted.T)
        assert all(map(torch.equal, gathered, parts))


def test_what_is_handed_on_comes_in_order_and_is_counted(as_gpus: None) -> None:
    def work(connections: Connections) -> list[Any]:
        stages, found = connections.stages, []
        assert isinstance(stages, DeviceGroup)
        assert isinstance(connections.shard.tensor, HostGroup), "alone it needs no connection"
        before = connections.traffic.num_bytes, connections.traffic.num_bytes_received
        for i in range(30):
            if stages.rank == 1:
                stages.send(torch.full((4, i + 1), float(i)).T, 0)
            else:
                place = torch.empty(4, i + 1).T if i % 2 else torch.empty(i + 1, 4)
                stages.recv(place, 1)
                found.append((place == i).all().item())
        sent = connections.traffic.num_bytes - before[0], connections.traffic.num_bytes_received - before[1]
        return [found, sent]

    (received, first), (_, second) = _run(ParallelConfig(1, 2), work)
    assert received == [True] * 30
    assert first == second[::-1] == (0, 4 * 4 * sum(range(1, 31)))


@pytest.mark.parametrize("split", [(2, 1), (1, 3), (2, 2)], ids=["tp2", "pp3", "tp2-pp2"])
def test_devices_connect_before_they_are_used(split: tuple[int, int], as_gpus: None) -> None:
    """NCCL takes memory of a GPU for each connection, and what is free is measured when all have been made."""

    def work(connections: Connections) -> tuple[int, int]:
        connections.connect(_CPU)
        return connections.traffic.num_messages, connections.traffic.num_messages_received

    width, num_stages = split
    found = _run(ParallelConfig(*split), work)
    for rank, (sent, received) in enumerate(found):
        stage, of_world, of_tensor = rank // width, len(found) - 1, width - 1
        assert sent == of_world + of_tensor + (stage > 0)
        assert received == of_world + of_tensor + (stage + 1 < num_stages)


@pytest.mark.parametrize("split", [(2, 1), (1, 3), (2, 2)], ids=["tp2", "pp3", "tp2-pp2"])
def test_a_split_model_generates_what_it_does_over_sockets_to_the_bit(
    split: tuple[int, int], tmp_path: Path, as_gpus: None
) -> None:
    folder = save_model(tmp_path, "llama", num_hidden_layers=3)
    wanted = ThreadRanks(folder, split).logits()
    loading = threading.Lock()  # transformers' loading is no thing for threads

    def work(connections: Connections) -> list[Tensor]:
        connections.connect(_CPU)
        with loading:
            loaded = load_model(folder, torch.float32, _CPU, shard=connections.shard)
        part = ShardRunner(loaded, 64, connections.stages, [torch.float32])
        return [part.run(pieces) for pieces in passes()]

    found = _run(ParallelConfig(*split), work)[0]
    assert all(map(torch.equal, found, wanted))


class _Nccl:
    """As the backend, which keeps its store in C++, and asks it for other ranks when it is first used."""

    Options = SimpleNamespace

    def __init__(self, store: Any, _rank: int, _size: int, options: Any) -> None:
        self.store = _dist.PrefixStore("", store)
        assert options._timeout > timedelta(days=365)


def test_nccl_finds_its_store_when_it_connects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dist, "ProcessGroupNCCL", _Nccl, raising=False)
    meeting = join_rendezvous(Place(0, 1, 0, 1, folder=str(tmp_path / "ranks")), 20.0)
    try:
        store = meeting.connect_devices("1/0", 0, 1).store
        gc.collect()
        store.set("0", "".join(map(chr, range(1, 128))))
        assert store.get("0") == bytes(range(1, 128))
        assert not store.check(["dump"])
    finally:
        meeting.links.close()


def test_ranks_without_a_gpu_each_use_sockets(as_gpus: None) -> None:
    def work(connections: Connections) -> list[type]:
        return [type(connections.shard.tensor), type(connections.stages)]

    assert _run(ParallelConfig(2, 2), work) == [[DeviceGroup, DeviceGroup]] * 4
    assert _run(ParallelConfig(2, 2), work, "cpu") == [[HostGroup, HostGroup]] * 4


class _Asked:
    """A world whose ranks have offered this."""

    rank, size = 0, 2

    def __init__(self, other: list[int]) -> None:
        self._other = other

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor, torch.tensor(self._other)]


@pytest.mark.parametrize(
    ("other", "name", "is_available", "expected"),
    [
        ([1, 0, 1], "cuda:0", True, True),
        ([1, 0, 0], "cuda:0", True, False),  # both on one GPU
        ([1, 2, 0], "cuda:0", True, True),  # of another machine
        ([0, 0, 1], "cuda:0", True, False),  # the other has none
        ([1, 0, 1], "cpu", True, False),
        ([1, 0, 1], "cuda:0", False, False),
    ],
)
def test_the_backend_that_connects_gpus(other: list[int], name: str, is_available: bool, expected: bool) -> None:
    world: Group = _Asked(other)  # type: ignore[assignment]
    assert each_has_a_gpu(world, Place(0, 2, 0, 2), torch.device(name), is_available=is_available) == expected


class _Stuck:
    """A back end as NCCL is: nothing it does ends by itself."""

    def __init__(self) -> None:
        self.is_aborted = threading.Event()

    def allgather(self, *_: Any) -> "_Stuck":
        return self

    def wait(self) -> None:
        assert self.is_aborted.wait(60)
        raise RuntimeError("NCCL communicator was aborted")

    def abort(self) -> None:
        self.is_aborted.set()


def test_what_waits_for_a_gpu_that_hangs_is_ended_by_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "has_nccl", lambda: True)
    monkeypatch.setattr(Rendezvous, "connect_devices", lambda *_: _Stuck())

    def work(connections: Connections) -> str:
        errors: list[str] = []

        def reduce() -> None:
            with pytest.raises(RuntimeError) as caught:
                connections.shard.tensor.all_reduce(torch.ones(3))
            errors.append(str(caught.value))

        thread = threading.Thread(target=reduce, daemon=True)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        connections.abort()
        thread.join(10)
        return errors[0]

    assert _run(ParallelConfig(2), work) == ["NCCL communicator was aborted"] * 2
