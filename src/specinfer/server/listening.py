"""The socket that the server listens on: a port, or a file."""

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator

from specinfer.server.config import ServerConfig

_BACKLOG = 2048  # connections that wait while no engine accepts them


@contextlib.contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """Yield a socket that listens; an address in use is reported before a model is loaded.

    Raises:
        OSError: The address cannot be used; the message names it.
    """
    try:
        listener = _unix_socket(config.uds) if config.uds is not None else _tcp_socket(config.host, config.port)
    except OSError as error:
        raise OSError(_refusal(config, error)) from error
    owner = os.getpid()
    try:
        yield listener
    finally:
        listener.close()
        if config.uds is not None and os.getpid() == owner:  # and not in a process that was forked meanwhile
            with contextlib.suppress(OSError):
                os.unlink(config.uds)


def _refusal(config: ServerConfig, error: OSError) -> str:
    # Python adds the address to the words of some errors, but not to those of others.
    reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror or error
    if config.uds is not None:
        return f"uds: cannot listen on {config.uds}: {reason}; choose another"
    place = f"cannot listen on {config.host}:{config.port}: {reason}"
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        return f"port: {place}; choose another, or 0 for a free one"
    return f"host: {place}; name an address of this machine"


def _tcp_socket(host: str, port: int) -> socket.socket:
    family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    # The IPv6 wildcard address covers both families.
    is_both = place[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((str(place[0]), port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_both)


def _unix_socket(path: str) -> socket.socket:
    if not hasattr(socket, "AF_UNIX"):
        raise OSError("this system has no Unix sockets")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(path).st_mode) and not _is_answered(path):
                os.unlink(path)  # left by a process that was killed
        listener.bind(path)
        os.chmod(path, 0o660)  # a client that may write to the socket needs no key
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _is_answered(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def address(config: ServerConfig, listener: socket.socket) -> str:
    """Return the URL of the server."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{host}:{listener.getsockname()[1]}{config.root_path}"
