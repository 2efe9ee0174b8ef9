"""Groups of ranks over sockets: ranks are threads here, connections are real."""

import socket
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from specinfer.cli.app import app
from specinfer.core.parallel_config import ParallelConfig, Place, find_place
from specinfer.parallel.group import Channel, HostGroup
from specinfer.parallel.processes import share_cores
from specinfer.parallel.ranks import Ranks
from specinfer.parallel.rendezvous import join_rendezvous
from worlds import make_cluster_cert, threads_of_ranks

_SIZES = [(), (3, 5), (0, 4), (16_000,), (70_000,), (10, 700, 300)]  # also more than the system takes at once


def run_ranks(size: int, work: object, cert: str | None = None) -> None:
    with threads_of_ranks(size, work, cert):  # type: ignore[arg-type]
        pass


@pytest.fixture(scope="module")
def cert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_cluster_cert(tmp_path_factory.mktemp("cert"))


@pytest.mark.parametrize("is_spread", [False, True], ids=["one machine", "several machines"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_in_the_order_of_ranks_to_the_bit(dtype: torch.dtype, is_spread: bool, cert: str) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = {shape: [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)] for shape in _SIZES}
    sums: dict[tuple[int, ...], list[torch.Tensor]] = {shape: [] for shape in _SIZES}

    def work(rank: int, group: HostGroup, _: Channel) -> None:
        for shape, tensors in parts.items():
            before = tensors[rank].clone()
            sums[shape].append(group.all_reduce(tensors[rank]))
            assert torch.equal(tensors[rank], before)

    run_ranks(3, work, cert if is_spread else None)
    for shape, (first, second, third) in parts.items():
        expected = (first.float() + second.float() + third.float()).to(dtype)
        assert all(torch.equal(found, expected) for found in sums[shape])
        assert len(sums[shape]) == 3


def test_many_sums_in_a_row_do_not_mix() -> None:
    def work(rank: int, group: HostGroup, _: Channel) -> None:
        for i in range(200):
            assert group.all_reduce(torch.full((7,), float(i * (rank + 1)))).tolist() == [3.0 * i] * 7

    run_ranks(2, work)


def test_traffic_counts_what_goes_and_comes() -> None:
    def work(rank: int, group: HostGroup, _: Channel) -> None:
        group.all_reduce(torch.zeros(10))
        traffic = group.traffic
        assert (traffic.num_bytes, traffic.num_messages) == (80, 2)
        assert (traffic.num_bytes_received, traffic.num_messages_received) == (80, 2)

    run_ranks(3, work)


def test_messages_come_in_order_and_whole() -> None:
    def work(rank: int, group: HostGroup, _: Channel) -> None:
        for i in range(30):
            if rank == 1:
                group.send(torch.full((i + 1, 3), float(i)), 0)
            else:
                place = torch.empty(i + 1, 3)
                group.recv(place, 1)
                assert (place == i).all()

    run_ranks(2, work)


@pytest.mark.parametrize("count", [0, 1, 16_383, 16_384, 2_000_000])
def test_orders_of_any_length_reach_every_rank(count: int) -> None:
    def work(rank: int, _: HostGroup, commands: Channel) -> None:
        numbers = torch.arange(count, dtype=torch.int32)
        for length in (numbers, numbers[:3], numbers):
            if rank == 0:
                commands.send_all(length)
            else:
                assert torch.equal(commands.receive(0), length)

    run_ranks(3, work)


def test_ranks_that_want_different_things_are_refused_by_name(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    messages = []

    def join(rank: int) -> None:
        meeting = join_rendezvous(Place(rank, 2, rank, 2, folder=str(tmp_path)), 20.0)
        with pytest.raises(ValueError, match="dtype: ") as refused:
            meeting.check_settings({"dtype": ("float32", "bfloat16")[rank], "model": "same"})
        messages.append(str(refused.value))

    thread = threading.Thread(target=join, args=(1,))
    thread.start()
    join(0)
    thread.join()
    assert len(messages) == 2
    assert all("float32" in message and "bfloat16" in message for message in messages)


def test_a_rank_0_that_is_not_there_is_named_in_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "specinfer")
    with pytest.raises(ValueError, match=r"master_addr, master_port: .*127\.0\.0\.1:9 within 1 seconds"):
        join_rendezvous(Place(1, 2, 0, 1, port=9), 1.0)
    assert caplog.messages == ["rank 0 is not at 127.0.0.1:9 yet ([Errno 111] Connection refused); waiting for it"]


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(ValueError, match="master_addr"):
        join_rendezvous(Place(0, 2, 0, 1, host="192.0.2.1"))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"tensor_parallel_size": -1}, "tensor_parallel_size"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size"),
        ({"tensor_parallel_size": 10**9}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 1.5}, "pipeline_parallel_size"),
        ({"nnodes": 0}, "nnodes"),
        ({"nnodes": 2, "master_addr": "a"}, "nnodes"),
        ({"tensor_parallel_size": 3, "nnodes": 2, "master_addr": "a"}, "nnodes"),
        ({"tensor_parallel_size": 2, "nnodes": 2}, "master_addr"),
        ({"tensor_parallel_size": 2, "node_rank": 1}, "node_rank"),
        ({"tensor_parallel_size": 2, "node_rank": -1}, "node_rank"),
        ({"tensor_parallel_size": 2, "nnodes": 2, "node_rank": 2, "master_addr": "a"}, "node_rank"),
        ({"master_port": 0}, "master_port"),
        ({"master_port": 65536}, "master_port"),
        ({"master_port": "x"}, "master_port"),
        ({"master_addr": ""}, "master_addr"),
        ({"master_addr": "a b"}, "master_addr"),
        ({"master_addr": 7}, "master_addr"),
        ({"master_addr": "http://a"}, "master_addr"),
        ({"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "a"}, "nnodes: .* cluster_cert"),
        ({"cluster_cert": "/no/such/file"}, "cluster_cert"),
        ({"cluster_cert": "/etc/passwd"}, "cluster_cert: .*other users"),
    ],
)
def test_sizes_and_addresses_that_cannot_be_are_refused_by_name(fields: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        ParallelConfig(**fields)  # type: ignore[arg-type]


def test_each_machine_has_the_ranks_that_follow_those_of_the_one_before() -> None:
    config = ParallelConfig(2, 2, nnodes=2, node_rank=1, master_addr="::1", insecure_cluster=True)
    place = find_place(config, {})
    assert (place.rank, place.world_size, place.num_started, place.local_size) == (2, 4, 1, 2)
    assert (place.host, place.port) == ("::1", 29500)


_TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
_TORCHRUN |= {"MASTER_ADDR": "host", "MASTER_PORT": "1234", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def test_torchrun_gives_a_rank_its_place() -> None:
    place = find_place(ParallelConfig(2, 2, insecure_cluster=True), _TORCHRUN)
    assert replace(place, folder="") == Place(3, 4, 1, 2, "host", 1234, is_hosted=True, num_started=0)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE"),
        ({"RANK": "4"}, "WORLD_SIZE"),
        ({"RANK": "x"}, "RANK"),
        ({"RANK": ""}, "RANK"),
    ],
)
def test_what_torchrun_started_must_fit_the_sizes(changes: dict[str, str], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        find_place(ParallelConfig(2, 2), _TORCHRUN | changes)


@pytest.mark.parametrize("words", [["--node-rank", "1"], ["--node-rank", "-1"], ["--master-port", "0"]])
def test_a_place_that_cannot_be_is_refused_where_nothing_is_split(words: list[str]) -> None:
    result = CliRunner().invoke(app, ["generate", "demo", "x", *words])
    assert result.exit_code == 2
    assert words[0] in result.stderr


def test_the_engine_is_refused_on_other_ranks_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (_TORCHRUN | {"RANK": "1", "WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"^RANK: .*follower\.follow"):
        Ranks(ParallelConfig(2), {}, "module", lambda _: "job", torch.device("cpu"))


def test_a_port_that_is_taken_is_refused_and_no_thread_is_left() -> None:
    before = threading.active_count()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ParallelConfig(
            2, nnodes=2, master_addr="127.0.0.1", master_port=taken.getsockname()[1], insecure_cluster=True
        )
        with pytest.raises(ValueError, match=r"^master_addr, master_port"):
            Ranks(config, {}, "module", lambda _: "job", torch.device("cpu"))
    assert threading.active_count() == before


class _JustLate(Future[int]):
    """Done in the moment after the waiting was given up."""

    def result(self, timeout: float | None = None) -> int:
        try:
            return super().result(timeout)
        except TimeoutError:
            self.set_result(7)
            raise


def test_what_ends_just_after_a_look_is_no_failure() -> None:
    ranks, late = Ranks.__new__(Ranks), _JustLate()
    ranks.failure = None
    threading.Timer(1.2, lambda: late.done() or late.set_result(7)).start()
    assert ranks.result(late) == 7


def test_every_rank_computes_with_its_part_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specinfer.parallel.processes.usable_cpus", lambda: 6)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(6)
        monkeypatch.setenv("OMP_NUM_THREADS", "6")
        assert share_cores(2) is None
        monkeypatch.delenv("OMP_NUM_THREADS")
        assert share_cores(2) == 6
        assert torch.get_num_threads() == 3
        assert share_cores(2) is None  # nor more than somebody has set
        assert share_cores(1) is None
        assert torch.get_num_threads() == 3
        assert share_cores(100) == 3
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
