"""The agreement of a head with its target on a short text, which chooses among the readings of its configuration."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specinfer.drafters.assistant_drafter import AssistantRunner
from specinfer.drafters.block_drafter import first_logits
from specinfer.drafters.feature_drafter import HeadRunner
from specinfer.hub.files import read_object, stated_target
from specinfer.hub.locate import TOKENIZER_FILE
from specinfer.model.batch import Piece
from specinfer.model.heads.block import BlockHead
from specinfer.model.kv_cache import NO_SLOTS
from specinfer.model.probe import common_tokens

logger = logging.getLogger(__name__)
_TEXT = (
    "The river rises in the hills above the town. For most of the year it is shallow enough to walk across, but in "
    "spring the melting snow fills it within days. def mean(values): return sum(values) / len(values)"
)
_NUM_TOKENS, _FEWEST = 48, 24
_NUM_BLOCKS = 12
_ALMOST_NONE = 0.03  # the share of a head for another target; heads agree on a third and more
_PROBE = "dialect-probe"


def choose_dialect(runner: HeadRunner, tokenizer: Any) -> None:
    """Let a head compute in the dialect whose best tokens agree most often with the target's, on a short text.

    A head that agrees on almost none in any is warned of, unless its own tokenizer was found to be the target's.

    Args:
        tokenizer: The target's tokenizer, or None for a model without one.
    """
    head, folder, target = runner.head, runner.loaded.folder, runner.target.loaded
    is_known = (folder / TOKENIZER_FILE).is_file()
    dialects = head.dialects or (None,)
    count = _num_tokens(runner)
    if len(dialects) == 1 and (is_known or target.stream is not None or count < _FEWEST):
        return
    ids = common_tokens(target.vocab_size, count) if tokenizer is None else tokenizer.encode(_TEXT)[:count]
    try:
        wanted = _target_choices(runner, ids)
        shares = [_agreement(runner, ids, wanted, dialect) for dialect in dialects]
    finally:
        runner.target.cache.free(_PROBE)
    best = int(np.argmax(shares))
    if shares[best] < _ALMOST_NONE and not is_known:
        stated = stated_target(read_object(folder / "config.json") or {})
        logger.warning(
            "drafters: %s agrees with the target on %.0f %% of the tokens of a short text%s; take a drafter that was "
            "trained for this target",
            folder, 100 * shares[best], f", and was trained for {stated}" if stated else "",
        )  # fmt: skip
    if len(dialects) == 1:
        return
    head.speak(dialects[best])
    logger.info(
        "%s: its configuration can be read in %d ways; it reads %s, which agrees with the target on %.0f %% of tokens",
        folder, len(shares), dialects[best], 100 * shares[best],
    )  # fmt: skip


def _num_tokens(runner: HeadRunner) -> int:
    """Return the length of the text, for which the caches have room."""
    num_slots, block = runner.target.cache.num_slots, runner.head.block
    room = num_slots // 2 if block is None else num_slots - _NUM_BLOCKS * block.size
    return min(_NUM_TOKENS, room)


def _target_choices(runner: HeadRunner, ids: Sequence[int]) -> torch.Tensor:
    """Return the [tokens] most probable token after each of these, and keep their hidden states in the cache."""
    target, count = runner.target, len(ids)
    slots = target.cache.reserve(_PROBE, count)
    visible = np.tri(count, dtype=np.bool_)
    logits = target.forward([Piece(ids, range(count), NO_SLOTS, slots, visible, count)])
    target.cache.commit(_PROBE, range(count))
    return logits.argmax(dim=-1)


def _agreement(runner: HeadRunner, ids: Sequence[int], wanted: torch.Tensor, dialect: Any) -> float:
    """Return the share of tokens on which a head agrees with the target at the first and the second level."""
    if isinstance(runner.head, BlockHead):
        return _block_agreement(runner, ids, wanted)
    runner.head.speak(dialect)
    if isinstance(runner, AssistantRunner):
        return _assistant_agreement(runner, ids, wanted)
    pairs = len(ids) - 1
    try:
        first = runner.cache.reserve(_PROBE, pairs)
        seen = np.tri(pairs, dtype=np.bool_)
        features = runner.features(_PROBE, 0, pairs)
        logits = runner.forward([Piece(ids[1:], range(pairs), NO_SLOTS, first, seen, pairs, features=features)])
        agrees = [runner.choices(logits) == wanted[1:]]
        second = runner.cache.reserve(_PROBE, pairs - 1)
        recycled = runner.tensors.taps[0][torch.from_numpy(first[:-1])]
        nodes = Piece(
            ids[2:], range(1, pairs), NO_SLOTS, second,
            np.concatenate([seen[:-1], np.eye(pairs - 1, dtype=np.bool_)], axis=1), pairs - 1,
            first, range(pairs), recycled,
        )  # fmt: skip
        agrees.append(runner.choices(runner.forward([nodes])) == wanted[2:])
        return float(torch.cat(agrees).float().mean())
    finally:
        runner.cache.free(_PROBE)


def _block_agreement(runner: HeadRunner, ids: Sequence[int], wanted: torch.Tensor) -> float:
    """Do the same for the first tokens of some blocks, spread over the text."""
    count = len(ids) - 1
    anchors = np.linspace(1, count, _NUM_BLOCKS, dtype=int).tolist()
    try:
        logits = first_logits(runner, _PROBE, ids, runner.features(_PROBE, 0, count), anchors)
        return float((runner.choices(logits) == wanted[anchors]).float().mean())
    finally:
        runner.cache.free(_PROBE)


def _assistant_agreement(runner: AssistantRunner, ids: Sequence[int], wanted: torch.Tensor) -> float:
    """Do the same for an assistant, one of whose pieces is a token with all tokens before it."""
    slots, ends = runner.target.cache.slots(_PROBE), range(1, len(ids) - 1)
    features, agrees = runner.features(_PROBE, 0, len(ends)), []
    for level in range(2):
        pieces = [
            runner.piece([ids[end + level]], slots[:end], feature)
            for end, feature in zip(ends, features.split(1), strict=True)
        ]
        logits, features = runner.score(pieces)
        agrees.append(runner.choices(logits) == wanted[1 + level : len(ends) + 1 + level])
    return float(torch.cat(agrees).float().mean())
