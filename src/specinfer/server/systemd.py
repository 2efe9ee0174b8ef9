"""Messages to systemd about the state of the service: ready, alive, stopping.

The protocol is sd_notify(3): datagrams to the socket that systemd names. Without systemd nothing is sent.
"""

import contextlib
import os
import socket


def notify(message: str) -> None:
    """Send a message such as READY=1 to systemd, if this process runs as its service."""
    place = os.environ.get("NOTIFY_SOCKET", "")
    if not place or not hasattr(socket, "AF_UNIX"):
        return
    if place.startswith("@"):
        place = "\0" + place[1:]  # a name in the abstract namespace
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(message.encode(), place)


def watchdog_seconds() -> float | None:
    """Return half the time after which systemd takes this process for hung, or None if it does not watch."""
    micros = os.environ.get("WATCHDOG_USEC", "")
    if not micros.isdecimal() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(micros) / 2e6
