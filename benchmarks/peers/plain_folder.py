"""Conversion of a GGUF model to a folder of safetensors, for peers that read no other format."""

import json
import shutil
import tempfile
from pathlib import Path

import torch

from benchmarks.growth.shard_writer import ShardWriter
from specinfer.core.files import cache_folder
from specinfer.model.gguf.folder import weights_file
from specinfer.model.offload.shards import Shards


def plain_folder(folder: Path, dtype: str) -> Path:
    """Return a folder with the weights as safetensors: `folder` itself, or a copy in the user's cache.

    The copy is written on the first call.

    Args:
        dtype: Type of the copy's weights, such as "bfloat16".
    """
    if weights_file(folder) is None:
        return folder
    destination = cache_folder() / f"{folder.name}-{dtype}"  # the folder's name identifies the file and its state
    if destination.exists():
        return destination
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".plain-") as name:
        fresh = Path(name) / "fresh"
        fresh.mkdir()
        writer = ShardWriter(fresh)
        with Shards(folder, getattr(torch, dtype)) as shards:
            for tensor_name, source in shards.sources.items():
                writer.add(tensor_name, source.read())
        writer.close()
        for path in folder.iterdir():
            if path.suffix in (".json", ".jinja"):
                shutil.copyfile(path, fresh / path.name)
        config = json.loads((folder / "config.json").read_text())
        (fresh / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
        try:
            fresh.rename(destination)
        except OSError:  # another process was first
            if not destination.exists():
                raise
    return destination
