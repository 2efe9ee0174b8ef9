"""Token ids of prompts, checked against the model that is to continue them."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from specinfer.bench.options import AnyPrompt
from specinfer.demo.corpus import heldout_prompts
from specinfer.llm import LLM
from specinfer.model.definition import known_positions, load_config, load_tokenizer

_SALTS = itertools.count()


def run_salt(llm: LLM) -> str:
    """Return the cache salt of a run, a new one, so that no arm can look up what another generated for the same prompt.

    It is the same for all runs if prompts are read once.
    """
    return "prompts" if llm.target.cache.keeps_prefixes else f"turn-{next(_SALTS)}"


def token_prompts(
    folder: Path,
    max_tokens: int,
    *,
    count: int = 0,
    num_chars: int = 600,
    prompts: Sequence[AnyPrompt] | None = None,
) -> list[list[int]]:
    """Return prompts as token ids for the model in `folder`. The context also holds `max_tokens` more.

    Args:
        count: Number of held-out texts to use if no prompts are given.
        num_chars: Approximate length of those texts in characters.

    Raises:
        ValueError: An option cannot be used. The message names it.
    """
    if prompts is None:
        try:
            prompts = heldout_prompts(count, num_chars=num_chars)
        except ValueError as error:
            raise ValueError(f"num_prompts: {error}") from error
    tokenizer = load_tokenizer(folder)
    if tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(f"prompts: {folder} has no tokenizer; give token ids")
    encoded = [tokenizer.encode(p) if isinstance(p, str) else list(p) for p in prompts]
    vocab_size = load_config(folder).get_text_config().vocab_size
    if wrong := [token for ids in encoded for token in ids if not 0 <= token < vocab_size]:
        raise ValueError(f"prompts: token id {wrong[0]} is not in the vocabulary of {vocab_size} tokens")
    longest, context = max(map(len, encoded)), known_positions(folder)
    if context is not None and not max_tokens and longest > context:
        raise ValueError(f"prompts: {longest} tokens do not fit into the context of {context}; give shorter ones")
    if context is not None and longest + max_tokens > context:
        raise ValueError(
            f"max_tokens: {max_tokens} after a prompt of {longest} tokens do not fit into the context of "
            f"{context}; lower max_tokens or prompt_chars"
        )
    return encoded
