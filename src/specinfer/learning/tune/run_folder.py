"""The models and the folder of a tuning run, checked before the long work begins."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specinfer.core.files import write_atomically
from specinfer.learning.tune.initial_weights import InitialWeights, check_vocabulary, parse_initial_weights
from specinfer.learning.tune.options import TuneConfig
from specinfer.reporting.files import write_json
from specinfer.setup.model_names import find_target

_RUN_FILE = "run.json"
# Options that may change between two starts of one run: its location and device, and what it shows.
_FREE = ("out", "device", "json", "plot", "tensorboard", "save_every")


def find_models(config: TuneConfig) -> tuple[Path, tuple[InitialWeights, ...], tuple[InitialWeights, ...]]:
    """Return the target's folder, the initial weights of the drafters, and those of the drafters in `beside`.

    Raises:
        ModelError: The target cannot be found.
        ValueError: A drafter cannot be used with it.
    """
    target = find_target(config.target)
    starts = tuple(parse_initial_weights(name) for name in config.drafters)
    beside = tuple(parse_initial_weights(name) for name in config.beside)
    for start in (*starts, *beside):
        check_vocabulary(start, target)
    made = next((start for start in beside if start.folder is None), None)
    if made is not None:
        raise ValueError(f"beside: {made.name} has no weights yet; name a folder or hub name")
    return target, starts, beside


def open_run(config: TuneConfig, content: str = "", *, writes: bool = True) -> Path:
    """Create or open the run's folder and return it.

    Args:
        content: A digest of the data: a run whose files have changed is a different run.
        writes: True if this process is the one that writes there.

    Raises:
        ValueError: The folder contains another run or something else, or cannot be written.
    """
    assert config.out is not None
    folder = Path(config.out)
    path = folder / _RUN_FILE
    options = json.loads(json.dumps({name: value for name, value in asdict(config).items() if name not in _FREE}))
    options["content of the data"] = content
    if path.is_file():
        try:
            known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"out: {path} cannot be read; name another folder") from error
        if known != options:
            names = [name for name in options if not isinstance(known, dict) or known.get(name) != options[name]]
            raise ValueError(
                f"out: {folder} has a run with another {', '.join(names) or 'version'}; name another folder"
            )
        return folder
    # A run that was killed at once may have left a partial file.
    if folder.exists() and (not folder.is_dir() or any(not file.name.startswith(".") for file in folder.iterdir())):
        raise ValueError(f"out: {folder} exists and has no run; name a folder that is new or empty")
    if writes:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda partial: write_json(partial, options))
        except OSError as error:
            raise ValueError(f"out: {folder} cannot be written ({error.strerror}); name another folder") from error
    return folder


def check_disk_space(config: TuneConfig, folder: Path, parameters: int) -> None:
    """Check that the disk has space for examples, checkpoints and drafters.

    Raises:
        ValueError: It has not enough space.
    """
    num_output = (config.num_prompts + config.num_held_out) * config.max_tokens + config.num_texts * config.text_tokens
    number = len(config.beside) + len(config.drafters) * (2 if config.control else 1)
    wanted = num_output * (6 + 6 * config.top) + number * (num_output * (6 + 2 * config.top) + 16 * parameters)
    # A resumed run has already written a part of it.
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    free = shutil.disk_usage(folder).free + written
    if wanted > free:
        raise ValueError(
            f"out: the run may need {wanted / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB left; free some, or "
            "name another folder, with fewer prompts if need be"
        )
