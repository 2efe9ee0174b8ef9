"""A drafter that is a model, loaded beside its target."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specinfer.drafters.translation import find_vocabulary
from specinfer.drafters.vocabulary import Vocabulary
from specinfer.errors import ModelError
from specinfer.model.definition import load_tokenizer
from specinfer.model.load import LoadedModel, load_model


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A drafter that is a model, and how it comes to speak the target's tokens."""

    loaded: LoadedModel
    vocabulary: Vocabulary


def load_small(name: str, folder: Path, target: LoadedModel, tokenizer: Any, quantization: str | None) -> SmallModel:
    """The model in a folder, on the target's device.

    Args:
        tokenizer: The target's.

    Raises:
        ModelError: It cannot be used.
    """
    try:
        loaded = load_model(folder, target.dtype, target.device, quantization)
    except ModelError as error:
        raise ModelError(f"drafters: {str(error).removeprefix('model: ')}") from error
    vocabulary = find_vocabulary(name, tokenizer, load_tokenizer(folder), target.vocab_size, loaded.vocab_size)
    return SmallModel(loaded, vocabulary)
