"""Writer of weights, which come one after another, into as many files of a model folder as they need."""

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 2 * 2**30


class ShardWriter:
    """A writer of weights to a folder, which keeps no more than one file's weights in host memory.

    Args:
        most: Largest size of a file in bytes, unless it has only one weight. None for `SHARD_BYTES`.
    """

    def __init__(self, folder: Path, most: int | None = None) -> None:
        self._folder, self._most = folder, most or SHARD_BYTES
        self._held: dict[str, Tensor] = {}
        self._num_held = self._num_written = 0  # bytes
        self._shards: list[list[str]] = []  # names of the weights in each

    def add(self, name: str, weight: Tensor) -> None:
        """Add a weight, from any device."""
        if self._held and self._num_held + weight.nbytes > self._most:
            self._write()
        self._held[name] = weight.cpu()
        self._num_held += weight.nbytes

    def close(self) -> None:
        """Write the remaining weights, and give the files their final names."""
        self._write()
        count = len(self._shards)
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        if count == 1:
            names = ["model.safetensors"]
        for number, name in enumerate(names):
            self._part(number).rename(self._folder / name)
        if count > 1:
            places = {weight: name for name, shard in zip(names, self._shards, strict=True) for weight in shard}
            index = {"metadata": {"total_size": self._num_written}, "weight_map": places}
            (self._folder / "model.safetensors.index.json").write_text(
                json.dumps(index, indent=2) + "\n", encoding="utf-8"
            )

    def _write(self) -> None:
        save_file(self._held, self._part(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._held))
        self._num_written += self._num_held
        self._held, self._num_held = {}, 0

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"
