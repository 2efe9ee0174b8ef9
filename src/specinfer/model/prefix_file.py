"""The file of a block of a cached prefix, named by the key of the block, and checked before it is used.

magic | CRC-32 of all that follows | key, number of tokens, place of a state, size of the body | body
"""

import io
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from specinfer.core.files import write_atomically

_MAGIC = b"SPECPFX1"
_CHECKED = struct.Struct("<32sIIQ")
HEADER_BYTES = len(_MAGIC) + 4 + _CHECKED.size


class Block(NamedTuple):
    """A block to write.

    Attributes:
        chain: Keys of the blocks before it, from the first.
        state_end: Number of its tokens after which it has the states of recurrent layers; 0 for none.
        body: Its numbers.
        is_sound: Function that returns whether all of these are finite.
    """

    key: bytes
    chain: Sequence[bytes]
    num_tokens: int
    state_end: int
    body: memoryview
    is_sound: Callable[[], bool]


class DamagedFileError(Exception):
    """Error for a file that is not the wanted block as it was written."""


def write_block(path: Path, block: Block) -> None:
    """Write a block, readable only by this user, in a way that no reader finds a part of it.

    It is not synchronized with the disk: what a crash of the system leaves half written has another checksum.

    Raises:
        OSError: It cannot be written.
    """
    checked = _CHECKED.pack(block.key, block.num_tokens, block.state_end, block.body.nbytes)
    start = _MAGIC + zlib.crc32(block.body, zlib.crc32(checked)).to_bytes(4, "little") + checked
    write_atomically(path, lambda partial: _write_private(partial, start, block.body), is_shared=True)


def read_block(path: Path, key: bytes, num_tokens: int, buffer: memoryview, sizes: tuple[int, int]) -> int:
    """Read the body of a block into a buffer, and return its `state_end`.

    Args:
        sizes: Bytes of a body without states, and of the states.

    Raises:
        DamagedFileError: It is cut, damaged or something else; the message says which.
        OSError: It cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        header = file.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES or not header.startswith(_MAGIC):
            raise DamagedFileError("it is no block of a prefix")
        checked = header[-_CHECKED.size :]
        stated_key, stated_tokens, state_end, size = _CHECKED.unpack(checked)
        expected = sizes[0] + (sizes[1] if state_end else 0)
        if (stated_key, stated_tokens, size) != (key, num_tokens, expected) or state_end > num_tokens:
            raise DamagedFileError("it is a block of something else")
        body = buffer[:size]
        if os.fstat(file.fileno()).st_size != HEADER_BYTES + size or _read_into(file, body) < size:
            raise DamagedFileError("it is cut")
        if zlib.crc32(body, zlib.crc32(checked)).to_bytes(4, "little") != header[len(_MAGIC) : len(_MAGIC) + 4]:
            raise DamagedFileError("its checksum does not agree")
    return int(state_end)


def _write_private(path: Path, *parts: bytes | memoryview) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb", buffering=0) as file:
        for part in parts:
            rest = memoryview(part)
            while rest.nbytes:
                rest = rest[file.write(rest) :]


def _read_into(file: io.FileIO, buffer: memoryview) -> int:
    """Fill a buffer from a file, and return the bytes that there were."""
    count = 0
    while count < buffer.nbytes and (size := file.readinto(buffer[count:])):
        count += size
    return count
