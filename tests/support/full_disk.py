"""A limit on the size of files in place of a full disk."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def limited_files(num_bytes: int) -> Iterator[None]:
    """Let no file of this process become longer: writing more fails with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
