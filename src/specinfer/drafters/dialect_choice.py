"""The choice among the readings of a head's configuration, by agreement with the target."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specinfer.drafters.assistant_drafter import AssistantRunner
from specinfer.drafters.feature_drafter import HeadRunner
from specinfer.model.batch import Piece
from specinfer.model.kv_cache import NO_SLOTS
from specinfer.model.probe import common_tokens

logger = logging.getLogger(__name__)
_TEXT = (
    "The river rises in the hills above the town. For most of the year it is shallow enough to walk across, but in "
    "spring the melting snow fills it within days. def mean(values): return sum(values) / len(values)"
)
_NUM_TOKENS = 48
_PROBE = "dialect-probe"


def choose_dialect(runner: HeadRunner, tokenizer: Any) -> None:
    """Let a head compute in the dialect whose best tokens agree most often with the target's, on a short text.

    Args:
        tokenizer: The target's tokenizer, or None for a model without one.
    """
    head = runner.head
    if len(head.dialects) < 2:
        return
    vocab_size = runner.target.loaded.vocab_size
    ids = common_tokens(vocab_size, _NUM_TOKENS) if tokenizer is None else tokenizer.encode(_TEXT)[:_NUM_TOKENS]
    try:
        wanted = _target_choices(runner, ids)
        shares = [_agreement(runner, ids, wanted, dialect) for dialect in head.dialects]
    finally:
        runner.target.cache.free(_PROBE)
    best = int(np.argmax(shares))
    head.speak(head.dialects[best])
    logger.info(
        "%s: its configuration can be read in %d ways; it reads %s, which agrees with the target on %.0f %% of tokens",
        runner.loaded.folder, len(shares), head.dialects[best], 100 * shares[best],
    )  # fmt: skip


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
    runner.head.speak(dialect)
    if isinstance(runner, AssistantRunner):
        return _assistant_agreement(runner, ids, wanted)
    pairs = len(ids) - 1
    try:
        first = runner.cache.reserve(_PROBE, pairs)
        seen = np.tri(pairs, dtype=np.bool_)
        features = runner.features(_PROBE, 0, pairs)
        logits = runner.forward([Piece(ids[1:], range(pairs), NO_SLOTS, first, seen, pairs, features=features)])
        found = [runner.choices(logits) == wanted[1:]]
        second = runner.cache.reserve(_PROBE, pairs - 1)
        recycled = runner.tensors.taps[0][torch.from_numpy(first[:-1])]
        nodes = Piece(
            ids[2:], range(1, pairs), NO_SLOTS, second,
            np.concatenate([seen[:-1], np.eye(pairs - 1, dtype=np.bool_)], axis=1), pairs - 1,
            first, range(pairs), recycled,
        )  # fmt: skip
        found.append(runner.choices(runner.forward([nodes])) == wanted[2:])
        return float(torch.cat(found).float().mean())
    finally:
        runner.cache.free(_PROBE)


def _assistant_agreement(runner: AssistantRunner, ids: Sequence[int], wanted: torch.Tensor) -> float:
    """Do the same for an assistant, one of whose pieces is a token with all tokens before it."""
    slots, ends = runner.target.cache.slots(_PROBE), range(1, len(ids) - 1)
    features, found = runner.features(_PROBE, 0, len(ends)), []
    for level in range(2):
        pieces = [
            runner.piece([ids[end + level]], slots[:end], feature)
            for end, feature in zip(ends, features.split(1), strict=True)
        ]
        logits, features = runner.score(pieces)
        found.append(runner.choices(logits) == wanted[1 + level : len(ends) + 1 + level])
    return float(torch.cat(found).float().mean())
