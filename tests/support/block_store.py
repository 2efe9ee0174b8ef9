"""A store of blocks of prefixes in memory, in place of files."""

from collections.abc import Sequence
from typing import Any

from specinfer.model.kv_cache import Slots


class FakeStore:
    """Blocks in memory: of each, what was in its slots."""

    def __init__(self, block_size: int = 2) -> None:
        self.block_size = block_size
        self.blocks: dict[bytes, list[Any]] = {}
        self.content: dict[int, Any] = {}
        self.is_busy = False

    def keys(self, salt: str, tokens: Sequence[int] | Slots, known: Sequence[bytes] = ()) -> list[bytes]:
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        return [repr((salt, [int(token) for token in tokens[:end]])).encode() for end in ends]

    def write(self, chain: Sequence[bytes], slots: Slots) -> bool:
        if not self.is_busy:
            self.blocks[chain[-1]] = [self.content[slot] for slot in slots.tolist()]
        return not self.is_busy

    def will_read(self, keys: Sequence[bytes], most: int | None = None) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def read(self, key: bytes, slots: Slots) -> bool:
        if None in self.blocks[key]:  # damaged
            return False
        stored = self.blocks[key][self.block_size - len(slots) :]
        self.content.update(zip(slots.tolist(), stored, strict=True))
        return True

    def use(self, chain: Sequence[bytes]) -> None:
        assert all(key in self.blocks or self.is_busy for key in chain)
