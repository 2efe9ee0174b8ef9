"""Loading of a drafter that is a model, next to its target."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from specinfer.core.config import OffloadConfig, check_quantization
from specinfer.core.drafter_forms import TOKEN_MAP_AUTO, TOKEN_MAP_FULL
from specinfer.core.errors import ModelError
from specinfer.core.lookups import MTP, SELF_DRAFTERS
from specinfer.drafters.feature_drafter import NextTokens
from specinfer.drafters.vocabulary.token_map import ReducedVocabulary, SharedVocabulary, Vocabulary
from specinfer.drafters.vocabulary.translation import find_vocabulary
from specinfer.hub.files import read_object
from specinfer.hub.locate import TOKENIZER_FILE
from specinfer.model.definition import load_config, load_tokenizer, token_ids
from specinfer.model.folder import count_parameters, read_token_ids, read_token_map
from specinfer.model.heads.head import FeatureHead
from specinfer.model.heads.load import find_format, load_head
from specinfer.model.layers.families import layer_kind
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.offload.shards import Shards
from specinfer.model.self_copy import load_self

logger = logging.getLogger(__name__)
_USUAL = 48_000  # tokens of a reduced vocabulary: 2 % to 8 % of the tokens of English, code and JSON are other ones
_OPTION = "drafter_token_map: "  # before messages about it
_MANY = 2**25  # parameters, that do not stay in a processor's cache from level to level
_MAX_RENAMED = 0.05  # share of tokens that fine-tuning may have renamed or added


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A drafter that is a model, and the vocabulary that maps its tokens to the target's."""

    loaded: LoadedModel
    vocabulary: Vocabulary


def load_draft_model(
    name: str,
    folder: Path,
    target: LoadedModel,
    tokenizer: Any,
    quantization: str | None,
    offload: OffloadConfig | None = None,
    token_map: int | str | Path = TOKEN_MAP_AUTO,
) -> DraftModel:
    """Load the model in a folder on the target's device; with a token map its head computes only those tokens' logits.

    A head on the target's hidden states is loaded too.

    Args:
        tokenizer: The target's tokenizer.
        quantization: The quantization of its linear layers. On CPUs None means "drafter_quantization" in its
            config.json or, for a large small model whose files have no codes, "int8".
        offload: Settings of a streamed target, or None for no streaming.
        token_map: The tokens that it proposes, from `drafter_forms.parse_token_map`.

    Raises:
        ModelError: The model cannot be used.
    """
    if name in SELF_DRAFTERS:
        if token_map not in (TOKEN_MAP_AUTO, TOKEN_MAP_FULL):
            logger.warning("drafter_token_map has no effect on %s, which is the target itself", name)
        loaded = load_self(name, target, offload or OffloadConfig())
        return DraftModel(loaded, SharedVocabulary(target.vocab_size, target.vocab_size, None))
    if quantization is None and target.device.type == "cpu" and folder != target.folder:
        quantization = _usual_quantization(folder)
    if reads_target(name, folder):
        if folder != target.folder and tokenizer is not None and (folder / TOKENIZER_FILE).is_file():
            _check_tokenizer(folder, tokenizer)
        loaded = load_head(folder, target, quantization)
        assert isinstance(loaded.model, FeatureHead)
        kind = NextTokens if loaded.model.reads_pairs else SharedVocabulary
        reduced = _reduced_of_head(name, loaded, tokenizer, token_map)
        return DraftModel(loaded, kind(target.vocab_size, target.vocab_size, loaded.token_map, reduced))
    try:
        config = load_config(folder)
        vocab_size = min(target.vocab_size, config.get_text_config().vocab_size)
        ids, reduced = _proposed(folder, vocab_size, target, tokenizer, token_map)
        if quantization is None and target.device.type == "cpu" and _gains_by_rounding(folder, config):
            quantization = "int8"
        loaded = load_model(
            folder, target.dtype, target.device, quantization, token_map=ids, kv_dtype=target.kv_dtype,
            max_model_len=target.max_position,
        )  # fmt: skip
    except ModelError as error:
        fault = str(error).removeprefix("model: ")
        raise ModelError(fault if fault.startswith(_OPTION) else f"drafters: {fault}") from error
    vocabulary = find_vocabulary(
        name, tokenizer, load_tokenizer(folder), target.vocab_size, loaded.vocab_size, loaded.token_map, reduced
    )
    if isinstance(token_map, int) and vocabulary.reduced is not None and not isinstance(loaded.model, FusedDecoder):
        logger.warning("drafter_token_map has no effect on %s, whose layers are not fused", name)
    return DraftModel(loaded, vocabulary)


def _proposed(
    folder: Path, vocab_size: int, target: LoadedModel, tokenizer: Any, choice: int | str | Path
) -> tuple[Tensor | None, ReducedVocabulary | None]:
    """Return the only tokens that a small model's head is to have, or None, and those proposed as a rule, or None.

    On CPUs a reduced head is a part of the whole one, which stays for texts of other tokens.
    """
    if choice == TOKEN_MAP_FULL:
        return None, None
    if isinstance(choice, Path):
        try:
            return read_token_ids(choice, vocab_size), None
        except ModelError as error:
            raise ModelError(f"{_OPTION}{str(error).removeprefix('model: ')}") from error
    trained = read_token_map(folder, vocab_size) if choice == TOKEN_MAP_AUTO else None
    if trained is not None:
        return trained, None
    reduced = _reduced(tokenizer, vocab_size, choice)
    if target.device.type == "cpu" or reduced is None:
        return None, reduced
    return None if choice == TOKEN_MAP_AUTO else reduced.ids, None


def _reduced(tokenizer: Any, vocab_size: int, choice: int | str | Path) -> ReducedVocabulary | None:
    """Return the first tokens in the order of merges; "auto" reduces only vocabularies of at least twice as many."""
    if choice == TOKEN_MAP_AUTO:
        return ReducedVocabulary.from_tokenizer(tokenizer, vocab_size, _USUAL) if vocab_size >= 2 * _USUAL else None
    reduced = ReducedVocabulary.from_tokenizer(tokenizer, vocab_size, int(str(choice)))
    if reduced is None:
        raise ModelError(
            f"{_OPTION}the tokenizer has no merges, or no more than {choice} tokens; give a file of ids, or "
            "leave it out"
        )
    return reduced


def _reduced_of_head(
    name: str, loaded: LoadedModel, tokenizer: Any, choice: int | str | Path
) -> ReducedVocabulary | None:
    """Return the tokens that a head on the target's hidden states proposes as a rule, or None for all it knows.

    Raises:
        ModelError: They are in a file, which only small models take.
    """
    if isinstance(choice, Path):
        raise ModelError(
            f"{_OPTION}{name} is a head, whose own file says which tokens it knows; give a number of tokens, "
            "or leave it out"
        )
    if loaded.token_map is None and loaded.device.type == "cpu" and choice != TOKEN_MAP_FULL:
        return _reduced(tokenizer, loaded.vocab_size, choice)
    if isinstance(choice, int):
        logger.warning("drafter_token_map has no effect on %s, which is a head", name)
    return None


def reads_target(name: str, folder: Path) -> bool:
    """Return whether a drafter needs the target in its process: a head on hidden states, or a copy of the target."""
    return name == MTP or name in SELF_DRAFTERS or find_format(folder) is not None


def _check_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Raise a `ModelError` if a head's own tokenizer has other tokens than the target's, a few renamed ones aside."""
    ids_of_drafter = token_ids(folder, with_added_tokens=True)
    if ids_of_drafter is None:
        raise ModelError(f"drafters: tokenizer.json of {folder} cannot be read; replace it by the target's")
    of_target = {i: token for token, i in tokenizer.get_vocab().items()}
    num_other = sum(of_target.get(i) != token for token, i in ids_of_drafter.items())
    if num_other > _MAX_RENAMED * len(ids_of_drafter):
        raise ModelError(
            f"drafters: tokenizer.json of {folder} gives {num_other} of {len(ids_of_drafter)} ids to tokens that are "
            "not the target's; take a drafter that was trained for this target"
        )


def _gains_by_rounding(folder: Path, config: Any) -> bool:
    """Return whether a small model drafts faster in 8 bits: it reads much, and its files have numbers of 16 or 32.

    Codes stay as they are: to round them anew takes seconds, and saves little.
    """
    if layer_kind(config) is None or count_parameters(folder) < _MANY:
        return False
    with Shards(folder) as shards:
        return not any(len(source.shape) == 2 and source.has_codes for source in shards.sources.values())


def _usual_quantization(folder: Path) -> str | None:
    usual: str | None = (read_object(folder / "config.json") or {}).get("drafter_quantization")
    try:
        check_quantization(f"drafters: drafter_quantization in {folder / 'config.json'}", usual)
    except ValueError as error:
        raise ModelError(str(error)) from error
    return usual
