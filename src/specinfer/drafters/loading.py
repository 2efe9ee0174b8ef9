"""Loading of a drafter that is a model, next to its target."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specinfer.core.config import OffloadConfig, check_quantization
from specinfer.core.errors import ModelError
from specinfer.core.lookups import MTP, SELF_DRAFTERS
from specinfer.drafters.feature_drafter import NextTokens
from specinfer.drafters.self_drafter import load_self
from specinfer.drafters.vocabulary.token_map import SharedVocabulary, Vocabulary
from specinfer.drafters.vocabulary.translation import find_vocabulary
from specinfer.hub.files import read_object
from specinfer.model.definition import load_config, load_tokenizer
from specinfer.model.folder import read_token_map
from specinfer.model.heads.assistant import AssistantHead
from specinfer.model.heads.block import BlockHead
from specinfer.model.heads.load import find_format, load_head
from specinfer.model.load import LoadedModel, load_model


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A drafter that is a model, and the vocabulary that maps its tokens to the target's."""

    loaded: LoadedModel
    vocabulary: Vocabulary


def load_small(
    name: str,
    folder: Path,
    target: LoadedModel,
    tokenizer: Any,
    quantization: str | None,
    offload: OffloadConfig | None = None,
) -> SmallModel:
    """Load the model in a folder on the target's device; with a token map its head computes only those tokens' logits.

    A head on the target's hidden states is loaded too.

    Args:
        tokenizer: The target's tokenizer.
        quantization: The quantization of its linear layers. On CPUs None means "drafter_quantization" in its
            config.json, if that is set.
        offload: Settings of a streamed target, or None for no streaming.

    Raises:
        ModelError: The model cannot be used.
    """
    if name in SELF_DRAFTERS:
        loaded = load_self(name, target, offload or OffloadConfig())
        return SmallModel(loaded, SharedVocabulary(target.vocab_size, target.vocab_size, None))
    if quantization is None and target.device.type == "cpu" and folder != target.folder:
        quantization = _usual_quantization(folder)
    if reads_target(name, folder):
        loaded = load_head(folder, target, quantization)
        kind = SharedVocabulary if isinstance(loaded.model, BlockHead | AssistantHead) else NextTokens
        return SmallModel(loaded, kind(target.vocab_size, target.vocab_size, loaded.token_map))
    try:
        config = load_config(folder)
        vocab_size = min(target.vocab_size, config.get_text_config().vocab_size)
        token_map = read_token_map(folder, vocab_size)
        loaded = load_model(folder, target.dtype, target.device, quantization, token_map=token_map)
    except ModelError as error:
        raise ModelError(f"drafters: {str(error).removeprefix('model: ')}") from error
    vocabulary = find_vocabulary(
        name, tokenizer, load_tokenizer(folder), target.vocab_size, loaded.vocab_size, loaded.token_map
    )
    return SmallModel(loaded, vocabulary)


def reads_target(name: str, folder: Path) -> bool:
    """Return whether a drafter needs the target in its process: a head on hidden states, or a copy of the target."""
    return name == MTP or name in SELF_DRAFTERS or find_format(folder) is not None


def _usual_quantization(folder: Path) -> str | None:
    usual: str | None = (read_object(folder / "config.json") or {}).get("drafter_quantization")
    try:
        check_quantization(f"drafters: drafter_quantization in {folder / 'config.json'}", usual)
    except ValueError as error:
        raise ModelError(str(error)) from error
    return usual
