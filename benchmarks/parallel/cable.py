"""Simulated cable between two hosts, as a separate program: packets that enter at one end leave at the other later.

It replaces netem on kernels without it. It is run by its path and imports nothing of the package, so it is a small
process that mostly sleeps and that the system schedules before processes that compute. Each line of its standard input,
"SECONDS BYTES_PER_SECOND", sets latency and bandwidth from then on, and is answered once it is in force. The program
ends when its input ends.
"""

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # from <linux/if_tun.h>
_LARGEST = 1 << 16  # bytes of the largest packet


class Direction:
    """Packets in transit from one end to the other."""

    def __init__(self) -> None:
        self.latency, self.bandwidth = 0.0, 1e12
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._free_at = 0.0  # when the last byte so far has entered

    def enter(self, packet: bytes, now: float) -> None:
        """Add a packet. Its bytes enter one after another, and it leaves as a whole when its last byte does."""
        self._free_at = max(now, self._free_at) + len(packet) / self.bandwidth
        self._under_way.append((self._free_at + self.latency, packet))

    def leave(self, now: float) -> list[bytes]:
        """Remove and return the packets that have left by now, in order."""
        out = []
        while self._under_way and self._under_way[0][0] <= now:
            out.append(self._under_way.popleft()[1])
        return out

    @property
    def next_at(self) -> float | None:
        """Time at which the next packet leaves, or None if no packet is in transit."""
        return self._under_way[0][0] if self._under_way else None


def main(names: list[str]) -> None:
    """Create a tun device with each name, and carry packets between the two."""
    with suppress(OSError, AttributeError):  # without this permission, delays are a little longer than requested
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ends = [_open_device(name) for name in names]
    directions = [Direction(), Direction()]  # one for packets from each end
    print("ready", flush=True)
    commands = b""
    while True:
        due = [at for direction in directions if (at := direction.next_at) is not None]
        timeout = max(0.0, min(due) - time.perf_counter()) if due else None
        readable, _, _ = select.select([*ends, 0], [], [], timeout)
        for place, end in enumerate(ends):
            if end in readable:
                for packet in _read(end):
                    directions[place].enter(packet, time.perf_counter())
        for place, direction in enumerate(directions):
            for packet in direction.leave(time.perf_counter()):
                with suppress(OSError):  # a host that is shutting down accepts none
                    os.write(ends[1 - place], packet)
        if 0 in readable:
            piece = os.read(0, 4096)
            if not piece:
                return
            *lines, commands = (commands + piece).split(b"\n")
            for line in lines:
                for direction in directions:
                    direction.latency, direction.bandwidth = map(float, line.split())
                print("done", flush=True)


def _open_device(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def _read(end: int) -> list[bytes]:
    packets = []
    with suppress(BlockingIOError):
        while True:
            packets.append(os.read(end, _LARGEST))
    return packets


if __name__ == "__main__":
    main(sys.argv[1:])
