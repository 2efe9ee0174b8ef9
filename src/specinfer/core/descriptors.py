"""The number of files and sockets that this process may have open."""

from contextlib import suppress

_UNLIMITED = 1 << 20
_MOST = 1 << 16  # more than any server needs; some programs walk through all of them


def max_descriptors() -> int:
    """Return the largest number of files and sockets that may be open at once."""
    try:
        import resource  # not on every system
    except ImportError:
        return _UNLIMITED
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def raise_max_descriptors() -> None:
    """Raise that number as far as the system allows without privileges."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
