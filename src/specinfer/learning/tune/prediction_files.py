"""Files of predictions, stored next to the examples that they belong to."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from specinfer.learning.examples import DamagedError, TrainingExample, save_arrays
from specinfer.learning.tune.boosting import Predictions


def save_predictions(predictions: Sequence[Predictions], path: Path) -> None:
    """Write one file, atomically."""
    arrays = {
        "lengths": np.asarray([len(prediction.ranks) for prediction in predictions], dtype=np.int64),
        "ranks": np.concatenate([prediction.ranks for prediction in predictions]),
        "accepted": np.concatenate([prediction.accepted for prediction in predictions]),
        "top_probs": np.concatenate([prediction.top_probs for prediction in predictions]),
    }
    save_arrays(arrays, path)


def load_predictions(path: Path, examples: Sequence[TrainingExample]) -> list[Predictions]:
    """Load the predictions on these examples.

    Raises:
        DamagedError: The file is damaged, or belongs to other examples.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        ends = arrays["lengths"].cumsum()[:-1]
        parts = [np.split(arrays[name], ends) for name in ("ranks", "accepted", "top_probs")]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise DamagedError(f"{path} cannot be read as predictions ({type(error).__name__}); delete it") from error
    predictions = [Predictions(*arrays) for arrays in zip(*parts, strict=True)]
    wanted = [(example.num_output,) * 3 for example in examples]
    if [(len(one.ranks), len(one.accepted), len(one.top_probs)) for one in predictions] != wanted:
        raise DamagedError(f"{path} is about other examples than those of the run; delete it")
    return predictions
