"""Targets held by several processes within a test, and a look at these processes from outside."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specinfer import LLM
from specinfer.core.parallel_config import Place
from specinfer.parallel.messages import Broadcast
from specinfer.parallel.rendezvous import join_rendezvous, listen
from specinfer.parallel.torch_group import TorchGroup

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "drafters": ["ngram"], "tree": "best-first:8", "max_num_seqs": 8, "max_model_len": 160,
    "max_num_batched_tokens": 32,
}  # fmt: skip


def workers(llm: LLM) -> list[int]:
    """Process ids of the ranks that this process has started."""
    assert llm._parts.ranks is not None
    return llm._parts.ranks.process_ids


def is_alive(process_id: int) -> bool:
    """Whether it is there, and not only waits to be collected."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(process_id: int) -> list[int]:
    return [
        int(task)
        for thread in Path(f"/proc/{process_id}/task").iterdir()
        for task in (thread / "children").read_text().split()
    ]


def await_that(what: Callable[[], bool], seconds: float) -> float:
    """Seconds until it is so.

    Raises:
        AssertionError: It is not in this time.
    """
    start = time.monotonic()
    while not what():
        assert time.monotonic() - start < seconds, "not in time"
        time.sleep(0.02)
    return time.monotonic() - start


def listening_places(process_id: int) -> list[tuple[str, int]]:
    """Addresses that a process listens on, over IPv4 and IPv6."""
    sockets = set()
    for link in Path(f"/proc/{process_id}/fd").iterdir():
        try:
            sockets.add(os.readlink(link))
        except OSError:
            continue
    places = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{process_id}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                address, port = fields[1].split(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                places.append((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return places


@contextmanager
def threads_of_ranks(size: int, work: Callable[[int, TorchGroup, Broadcast], None]) -> Iterator[None]:
    """Runs ranks that are threads, over real connections; their errors are raised at the end."""
    start = Place(0, size, 0, size)
    listener = listen(start)
    place = Place(0, size, 0, size, port=listener.getsockname()[1])
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            own = Place(rank, size, rank, size, port=place.port)
            meeting = join_rendezvous(own, 20.0, listener if rank == 0 else None)
            meeting.check_settings({})
            backend = meeting.connect()
            group, commands = TorchGroup(backend, range(size), rank, 1), Broadcast(backend, rank, size, 2)
            work(rank, group, commands)
            all_done.wait(60)  # whoever closes first breaks connections that others still use
            group.close()
            commands.close()
        except BaseException as error:
            errors.append(error)
            all_done.abort()

    all_done = threading.Barrier(size)
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads)
