"""Targets held by several processes within a test, and a look at these processes from outside."""

import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specinfer import LLM, SamplingParams
from specinfer.core.parallel_config import Place
from specinfer.parallel.group import Channel, HostGroup
from specinfer.parallel.rendezvous import join_rendezvous
from tiny import random_prompts

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "drafters": ["ngram"], "tree": "best-first:8", "max_num_seqs": 8, "max_model_len": 160,
    "max_num_batched_tokens": 32,
}  # fmt: skip


# Of a request with a long prompt, and one with a short one, whose texts tell a wrong rank from a right one.
PROMPTS = [{"prompt_token_ids": ids} for ids in random_prompts([100, 3])]
PARAMS = SamplingParams(max_tokens=40, temperature=0.8, seed=3)


def sizes_of(split: tuple[int, int]) -> dict[str, int]:
    """Settings for so many ranks of a tensor group, and so many stages."""
    return {"tensor_parallel_size": split[0], "pipeline_parallel_size": split[1]}


def tokens_of(
    llm: LLM, prompts: Any = PROMPTS, params: SamplingParams | Sequence[SamplingParams] = PARAMS
) -> list[list[int]]:
    """The tokens of all outputs, none of which may have an error."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert not any(output.error for output in outputs)
    return [list(one.token_ids) for output in outputs for one in output.outputs]


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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def make_cluster_cert(folder: Path) -> str:
    """A key and its certificate in one file, as docs/distributed.md makes it."""
    file = folder / "cluster.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-days", "3650", "-subj", "/CN=specinfer", "-keyout", str(file), "-out", str(file)]
    subprocess.run(words, check=True, capture_output=True)
    file.chmod(0o600)
    return str(file)


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
def threads_of_ranks(
    size: int, work: Callable[[int, HostGroup, Channel], None], cert: str | None = None
) -> Iterator[None]:
    """Runs ranks that are threads, over real connections; their errors are raised at the end.

    Args:
        cert: With it, the ranks connect as those of several machines.
    """
    local, port = (size, 0) if cert is None else (1, free_port())
    folder = tempfile.mkdtemp(prefix="specinfer-threads-") if cert is None else ""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            meeting = join_rendezvous(Place(rank, size, rank, local, port=port, folder=folder, cluster_cert=cert), 20.0)
            meeting.check_settings({})
            others = range(1, size) if rank == 0 else range(1)
            work(rank, HostGroup(meeting.links, range(size), rank, 1), Channel(meeting.links, others, 2))
            all_done.wait(60)  # whoever closes first breaks connections that others still use
            meeting.links.close()
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
