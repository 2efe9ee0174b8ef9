"""The folder of cached prefixes as the settings name it, and the identity of the models whose prefixes are in it."""

import torch

from specinfer import ops
from specinfer.core.options import parse_size
from specinfer.engine_args import EngineArgs
from specinfer.hub.cache import content_digest
from specinfer.model.context_length import fit_to_length
from specinfer.model.definition import load_config
from specinfer.model.device import device_name
from specinfer.model.folder import weight_files
from specinfer.model.prefix_folder import PrefixFolder
from specinfer.model.prefix_store import PrefixStore
from specinfer.model.runner import ModelRunner
from specinfer.model.target import installed_version

USUAL_SIZE = "16GiB"


def open_prefixes(args: EngineArgs) -> PrefixFolder | None:
    """Return the folder of cached prefixes, or None if prefixes do not outlast the process.

    Raises:
        ValueError: It cannot be used.
    """
    if args.prefix_cache_dir is None:
        return None
    return PrefixFolder(args.prefix_cache_dir, parse_size("prefix_cache_size", args.prefix_cache_size or USUAL_SIZE))


def keep_prefixes(folder: PrefixFolder, runner: ModelRunner, max_model_len: int | None) -> None:
    """Let the cached prefixes of a model outlast the process.

    Args:
        max_model_len: As the setting; positions may depend on it.
    """
    loaded, tensors = runner.loaded, runner.tensors
    config = load_config(loaded.folder)
    fit_to_length(config, max_model_len)
    identity = {
        "files": [content_digest(file) for file in (loaded.folder / "config.json", *weight_files(loaded.folder))],
        "positions": str(getattr(config.get_text_config(), "rope_parameters", None)),
        "types": f"{loaded.dtype} {loaded.kv_dtype} {loaded.weights_type}",
        "layers": str(loaded.layer_shapes),
        "hidden states": str(sorted(tensors.taps)),
        # Other code may round in another way, and then a text would depend on what was cached.
        "computed by": f"{runner.compute_path}, {ops.describe() if loaded.native else 'PyTorch'}",
        "device": "cpu" if loaded.device.type == "cpu" else device_name(loaded.device),
        "versions": f"{installed_version()} {torch.__version__}",
    }
    runner.cache.store = PrefixStore(folder, identity, tensors)
