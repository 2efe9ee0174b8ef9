"""Two hosts within one machine: Linux network namespaces, joined by a cable with set latency and bandwidth.

The cable is a veth pair with tc's netem, or, where the kernel has no netem, a small process between two tun devices. A
guard process removes everything once this process closes a pipe. The pipe closes however this process ends, so nothing
is left behind.
"""

import itertools
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Protocol, Self

from benchmarks.parallel import cable
from specinfer.planning.network import Link

ADDRESSES = ("10.213.0.1", "10.213.0.2")  # of the hosts; not visible outside them
_REMEDY = "measure with namespaces off"
_GOODBYE = 30.0  # seconds that the guard or the relay has to end
_QUEUE = 20_000  # packets that may be in transit
_MTU = 65_000  # of the tun devices, so that packets are as long as those handed to a real network card
_COUNT = itertools.count()
_GUARD = """
trap '' INT TERM HUP
read -r _
for name in "$@"; do
  for pid in $(ip netns pids "$name" 2>/dev/null); do kill -9 "$pid" 2>/dev/null; done
  ip netns del "$name" 2>/dev/null
done
exit 0
"""


def why_not() -> str | None:
    """Return the reason why hosts cannot be made here, or None if they can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "only root may make them"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no command {tool} (it comes with iproute2)"
    return None


class Cable(Protocol):
    """Connection of the two hosts. Once it is made, each host has a device with the host's name."""

    method: str

    def set(self, link: Link) -> None:
        """Set the latency and bandwidth of both directions."""
        ...

    def close(self) -> None: ...


class Namespaces:
    """Two hosts that exist until closed.

    Raises:
        ValueError: Hosts cannot be made here. The message gives the reason.
    """

    def __init__(self) -> None:
        if (reason := why_not()) is not None:
            raise ValueError(f"namespaces: two hosts cannot be made here: {reason}; {_REMEDY}")
        key = f"si{os.getpid()}n{next(_COUNT)}"
        self.names = (f"{key}a", f"{key}b")
        self._cable: Cable | None = None
        self._guard = subprocess.Popen(
            ["sh", "-c", _GUARD, "guard", *self.names],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C in the terminal does not reach it
        )
        try:
            for name in self.names:
                _run("ip", "netns", "add", name)
                _inside(name, "ip", "link", "set", "lo", "up")
                # An idle connection would restart with a small window, and pauses between passes can be long enough.
                _inside(name, "sh", "-c", "echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle")
            try:
                self._cable = Netem(self.names)
            except ValueError:
                self._cable = Relay(self.names)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _inside(name, "ip", "address", "add", f"{address}/24", "dev", name)
                _inside(name, "ip", "link", "set", name, "up")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def cable(self) -> Cable:
        assert self._cable is not None
        return self._cable

    def command(self, host: int) -> tuple[str, ...]:
        """Return the words that go before a command to run it on host 0 or 1."""
        return ("ip", "netns", "exec", self.names[host])

    def close(self) -> None:
        """End all processes on the hosts, and remove both hosts."""
        if self._cable is not None:
            self._cable.close()
        assert self._guard.stdin is not None
        with suppress(OSError):
            self._guard.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(_GOODBYE)


class Netem:
    """Cable that is a veth pair with tc's netem on both ends.

    Raises:
        ValueError: This kernel has no netem.
    """

    method = "veth and netem"

    def __init__(self, names: tuple[str, str]) -> None:
        self._names = names
        first, second = names
        _run("ip", "link", "add", first, "netns", first, "type", "veth", "peer", "name", second, "netns", second)
        try:
            self.set(Link(0.0, 1.25e8))
        except ValueError:
            _inside(first, "ip", "link", "del", first)  # deletes the other end as well
            raise

    def set(self, link: Link) -> None:
        rate, delay = f"{8 * link.bandwidth:.0f}bit", f"{1e6 * link.latency:.0f}us"
        for name in self._names:
            words = ("tc", "qdisc", "replace", "dev", name, "root", "netem", "delay", delay, "rate", rate)
            _inside(name, *words, "limit", str(_QUEUE))

    def close(self) -> None:
        """Do nothing: the pair is removed with its hosts."""


class Relay:
    """Cable that is two tun devices and a process that carries packets between them.

    Raises:
        ValueError: The process could not be started.
    """

    method = "tun and a relay"

    def __init__(self, names: tuple[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(cable.__file__)), *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            self.close()
            raise ValueError(f"namespaces: /dev/net/tun cannot be used here; {_REMEDY}")
        for name in names:
            _run("ip", "link", "set", name, "netns", name)
            _inside(name, "ip", "link", "set", name, "mtu", str(_MTU))

    def set(self, link: Link) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{link.latency!r} {link.bandwidth!r}\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_GOODBYE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def crossed(device: str) -> dict[str, int]:
    """Return the bytes and packets through a device of this host so far, in both directions, headers included."""
    folder = Path("/sys/class/net", device, "statistics")

    def count(what: str) -> int:
        return sum(int((folder / f"{way}_{what}").read_text()) for way in ("tx", "rx"))

    return {"link_bytes": count("bytes"), "link_packets": count("packets")}


def _inside(name: str, *words: str) -> str:
    return _run("ip", "netns", "exec", name, *words)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        why = lines[-1] if lines else f"status {done.returncode}"
        raise ValueError(f"namespaces: {shlex.join(words)} failed: {why}; {_REMEDY}")
    return done.stdout
