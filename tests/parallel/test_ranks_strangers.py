"""Strangers at the sockets and ports of ranks: they cannot end, delay or change anything."""

import contextlib
import os
import random
import socket
import ssl
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_distributed

from specinfer import LLM
from specinfer.core.parallel_config import Place, make_tls
from specinfer.parallel import links
from specinfer.parallel.group import Channel, HostGroup
from specinfer.parallel.rendezvous import join_rendezvous
from specinfer.parallel.sender import LinkError, shut
from worlds import (
    SETTINGS,
    free_port,
    listening_places,
    make_cluster_cert,
    threads_of_ranks,
    tokens_of,
)

_KEYS = ["error/1", "beat/1", "wanted/0", "wanted/1", "address/1", "specinfer/0/error/1"]
_TORCH_GREETING = struct.pack("<BI", 0, 0x3C85F7CE)  # of a client of torch.distributed's store
_WORDS = [
    b"GET / HTTP/1.1\r\n\r\n", b"", bytes(8), b"\xff" * 64, _TORCH_GREETING + b"\xff" * 9,
    struct.pack("<ii", 1, -1) + struct.pack("<I", 27) + b'["set", "error/1", "stranger"]',  # the store's own protocol
    struct.pack("<iiQ", 1, 2, 2**62),  # a message longer than memory
]  # fmt: skip


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The file of the ranks, and another one."""
    return make_cluster_cert(tmp_path_factory.mktemp("cert")), make_cluster_cert(tmp_path_factory.mktemp("other"))


def _write_into_torch_store(place: tuple[str, int]) -> None:
    """Does what ended the server when the store was torch.distributed's."""
    with contextlib.suppress(RuntimeError):
        moment = timedelta(seconds=0.5)
        store = torch_distributed.TCPStore(*place, None, False, moment, wait_for_workers=False)
        for key in _KEYS:
            store.set(key, "stranger")


def _connect_with_tls(place: tuple[str, int], cert: str | None) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if cert is not None:
        context.load_cert_chain(cert)
    with (
        contextlib.suppress(OSError),
        socket.create_connection(place, 5) as plain,
        context.wrap_socket(plain) as connection,
    ):
        connection.sendall(_WORDS[-2])
        assert connection.recv(1) == b""


@contextmanager
def _attacked(places: set[tuple[str, int]], other_cert: str) -> Iterator[None]:
    """Random bytes, TLS without the key, and connections that say nothing, many of them, until the block ends."""
    end, generator, kept = threading.Event(), random.Random(0), list[socket.socket]()

    def attack() -> None:
        while not end.is_set():
            for place in places:
                _connect_with_tls(place, generator.choice([None, other_cert]))
                connection = socket.create_connection(place, 5)
                kept.append(connection)
                with contextlib.suppress(OSError):  # it was refused
                    connection.sendall(generator.choice([*_WORDS, generator.randbytes(3000)]))
                if generator.random() < 0.5:
                    kept.pop().close()
            time.sleep(0.005)

    attacker = threading.Thread(target=attack, daemon=True)
    attacker.start()
    try:
        for place in places:
            _write_into_torch_store(place)
        yield
    finally:
        end.set()
        attacker.join()
        for connection in kept:
            connection.close()


_FOLLOWER = """
import sys
from specinfer.setup.follower import follow
sys.exit(follow({folder!r}, **{options!r}, node_rank=1))
"""


@contextmanager
def _two_machines(folder: str, cert: str) -> Iterator[tuple[LLM, list[int]]]:
    options = {"pipeline_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.1", "master_port": free_port()}
    options |= SETTINGS | {"cluster_cert": cert}
    home = str(Path(__file__).parents[2] / "src")
    environment = os.environ | {"PYTHONPATH": home, "OMP_NUM_THREADS": "1"}
    script = _FOLLOWER.format(folder=folder, options=options)
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as follower:
        try:
            with LLM(folder, **options) as llm:  # type: ignore[arg-type]
                yield llm, [follower.pid]
            assert follower.wait(60) == 0
        finally:
            follower.kill()


@pytest.mark.distributed
def test_strangers_at_every_port_change_nothing(folder: str, certs: tuple[str, str]) -> None:
    with _two_machines(folder, certs[0]) as (llm, others):
        expected = tokens_of(llm)
        places = {place for one in (os.getpid(), *others) for place in listening_places(one)}
        assert {host for host, _ in places} <= {"127.0.0.1"}  # and no other address
        with _attacked(places, certs[1]):
            for _ in range(3):
                assert tokens_of(llm) == expected
        time.sleep(1.5)  # errors in a store were noticed by the next check of heartbeats
        assert tokens_of(llm) == expected
        assert llm.failure is None
        assert places


_AS_ANOTHER_USER = """
import os, socket, sys
os.setgid(65534), os.setuid(65534)
for action in (lambda: os.listdir(sys.argv[1]), lambda: socket.socket(socket.AF_UNIX).connect(sys.argv[1] + "/0")):
    try:
        action()
    except PermissionError:
        print("refused")
"""


def test_no_other_user_enters_the_folder_of_the_sockets(tmp_path: Path) -> None:
    meeting = join_rendezvous(Place(0, 2, 0, 2))
    folder = Path(meeting.place.folder)
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        if os.getuid() == 0:
            command = [sys.executable, "-I", "-c", _AS_ANOTHER_USER, str(folder)]
            found = subprocess.run(command, capture_output=True, text=True, check=True)
            assert found.stdout.split() == ["refused", "refused"]
    finally:
        meeting.links.close()
    assert not folder.exists()
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match=r"^TMPDIR: .*does not belong to this user alone"):
        join_rendezvous(Place(0, 2, 0, 2, folder=str(tmp_path)))


def test_connections_that_make_way_are_closed_by_the_thread_that_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would go on reading from a file descriptor that another connection has by then."""
    closers = list[str]()

    def noted(connection: socket.socket) -> None:
        closers.append(threading.current_thread().name)
        shut(connection)

    monkeypatch.setattr(links, "shut", noted)
    rank = links.Links(Place(0, 2, 0, 1, port=free_port()), lambda _: "")
    address = rank.address
    assert not isinstance(address, str)
    silent = [socket.create_connection(address, 5) for _ in range(links._MAX_GREETING + 20)]
    end = time.monotonic() + 10
    while len(closers) < 20 and time.monotonic() < end:
        time.sleep(0.01)
    assert closers == ["specinfer-greet"] * 20
    rank.close()
    for connection in silent:
        connection.close()


def test_silent_connections_make_way_for_ranks(certs: tuple[str, str]) -> None:
    """A connection that is made when it is first used does not wait for theirs."""

    def work(rank: int, group: HostGroup, commands: Channel) -> None:
        group.all_reduce(torch.ones(1))
        if rank == 0:
            address = group._links.address
            assert not isinstance(address, str)
            silent = [socket.create_connection(address, 5) for _ in range(300)]
        begun = time.monotonic()
        for i in range(3):
            if rank == 1:
                HostGroup(group._links, range(2), 1, 5 + i).send(torch.ones(i), 0)
            else:
                HostGroup(group._links, range(2), 0, 5 + i).recv(torch.ones(i), 1)
        assert time.monotonic() - begun < 4
        if rank == 0:
            for connection in silent:
                connection.close()

    with threads_of_ranks(2, work, certs[0]):
        pass


@pytest.mark.parametrize("has_one", [True, False], ids=["another key", "no key"])
def test_a_rank_without_the_key_is_refused_on_both_sides(has_one: bool, certs: tuple[str, str]) -> None:
    port = free_port()
    first = join_rendezvous(Place(0, 2, 0, 1, port=port, cluster_cert=certs[0]))
    try:
        with pytest.raises(ValueError, match=r"cluster_cert|rank 0 was not reached"):
            join_rendezvous(Place(1, 2, 0, 1, port=port, cluster_cert=certs[1] if has_one else None), 0.5)
        assert first.store.get("address/1") is None
    finally:
        first.links.close()


def test_a_file_without_a_key_or_for_everyone_is_refused(certs: tuple[str, str], tmp_path: Path) -> None:
    text = Path(certs[0]).read_text()
    for name, content in {
        "key": text.split("-----BEGIN CERT")[0],
        "cert": text[text.index("-----BEGIN CERT") :],
    }.items():
        file = tmp_path / name
        file.write_text(content)
        file.chmod(0o600)
        with pytest.raises(ValueError, match=r"^cluster_cert: .* must hold a private key and its certificate"):
            make_tls(str(file))
    file.write_text(text)
    file.chmod(0o644)
    with pytest.raises(ValueError, match=r"^cluster_cert: .*chmod 600"):
        make_tls(str(file))


def test_closing_ends_what_waits_for_a_rank() -> None:
    meeting = join_rendezvous(Place(0, 2, 0, 2))
    threading.Timer(0.2, meeting.links.close).start()
    with pytest.raises(LinkError, match="closed"):
        meeting.links.receive(1, 0)
