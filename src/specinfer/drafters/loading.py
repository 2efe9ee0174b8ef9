"""A drafter that is a model, loaded beside its target."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specinfer.config import check_quantization
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
        quantization: Of its linear layers; None: on CPUs what "drafter_quantization" in its config.json says, if
            anything.

    Raises:
        ModelError: It cannot be used.
    """
    try:
        config = load_config(folder)
        vocab_size = min(target.vocab_size, config.get_text_config().vocab_size)
        if quantization is None and target.device.type == "cpu":
            quantization = _usual_quantization(config, folder)
        token_map = read_token_map(folder, vocab_size)
        loaded = load_model(folder, target.dtype, target.device, quantization, token_map=token_map)
    except ModelError as error:
        raise ModelError(f"drafters: {str(error).removeprefix('model: ')}") from error
    vocabulary = find_vocabulary(
        name, tokenizer, load_tokenizer(folder), target.vocab_size, loaded.vocab_size, loaded.token_map
    )
    return SmallModel(loaded, vocabulary)


def _usual_quantization(config: Any, folder: Path) -> str | None:
    usual: str | None = getattr(config, "drafter_quantization", None)
    try:
        check_quantization(f"drafter_quantization in {folder / 'config.json'}", usual)
    except ValueError as error:
        raise ModelError(str(error)) from error
    return usual
