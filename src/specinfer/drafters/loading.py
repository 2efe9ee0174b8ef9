"""A drafter that is a model, loaded beside its target."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specinfer.drafters.translation import find_vocabulary
from specinfer.drafters.vocabulary import Vocabulary
from specinfer.errors import ModelError
from specinfer.model.definition import load_config, load_tokenizer
from specinfer.model.folder import read_token_map
from specinfer.model.load import LoadedModel, load_model


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A drafter that is a model, and how it comes to speak the target's tokens."""

    loaded: LoadedModel
    vocabulary: Vocabulary


def load_small(name: str, folder: Path, target: LoadedModel, tokenizer: Any, quantization: str | None) -> SmallModel:
    """The model in a folder, on the target's device; with a token map its head computes only those tokens' logits.

    Args:
        tokenizer: The target's.

    Raises:
        ModelError: It cannot be used.
    """
    try:
        vocab_size = min(target.vocab_size, load_config(folder).get_text_config().vocab_size)
        token_map = read_token_map(folder, vocab_size)
        loaded = load_model(folder, target.dtype, target.device, quantization, token_map=token_map)
    except ModelError as error:
        raise ModelError(f"drafters: {str(error).removeprefix('model: ')}") from error
    vocabulary = find_vocabulary(
        name, tokenizer, load_tokenizer(folder), target.vocab_size, loaded.vocab_size, loaded.token_map
    )
    return SmallModel(loaded, vocabulary)
