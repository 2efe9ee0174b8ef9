"""Messages to systemd about the state of the service: ready, alive, stopping.

The protocol is sd_notify(3): datagrams to the socket that systemd names. Without systemd nothing is sent.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable


def notify(message: str) -> None:
    """Send a message such as READY=1 to systemd, if this process runs as its service."""
    place = os.environ.get("NOTIFY_SOCKET", "")
    if not place or not hasattr(socket, "AF_UNIX"):
        return
    if place.startswith("@"):
        place = "\0" + place[1:]  # a name in the abstract namespace
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(message.encode(), place)


async def report_health(check: Callable[[], None]) -> None:
    """Report to the watchdog of systemd that the service is well, twice within its limit, while the check passes."""
    micros = os.environ.get("WATCHDOG_USEC", "")
    if not micros.isdecimal() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    while True:
        check()
        notify("WATCHDOG=1")
        await asyncio.sleep(int(micros) / 2e6)
