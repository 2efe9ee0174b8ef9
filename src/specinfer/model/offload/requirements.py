"""Check of a memory budget against file sizes, so that a user gets one error before anything is loaded."""

from collections.abc import Iterable
from pathlib import Path

from specinfer.model.offload.budget import WIDTHS, Budget, PassCapacity, used_bytes
from specinfer.model.offload.checkpoint import Checkpoint, layer_number


def check_budget(
    budget: Budget,
    folder: Path,
    drafters: Iterable[str],
    num_known: int,
    num_requests: int,
    cache_bytes: int | None = None,
) -> None:
    """Refuse a budget that is too small to load the target, and name one that suffices for everything after it too.

    A larger budget is checked again when all is loaded and the exact sizes are known.

    Args:
        drafters: Folders of models; other names are ignored, because those drafters take little memory.
        num_known: Largest number of tokens of a step that are not guesses.
        num_requests: Largest number of requests at a time.
        cache_bytes: Bytes that the caller gives to the caches, or None for their usual share.

    Raises:
        ModelError: The weights cannot be used.
        ValueError: The budget is too small.
    """
    checkpoint = Checkpoint(folder)
    try:
        loading = checkpoint.least_bytes()
        sources = checkpoint.shards.sources
        outside = [one for name, one in sources.items() if layer_number(name) is None]
        inside = [one for name, one in sources.items() if layer_number(name) is not None]
        widest = max((size for one in inside for size in one.shape), default=1)
        vocab = max((one.shape[0] for one in outside if len(one.shape) > 1), default=1)
    finally:
        checkpoint.close()
    used = used_bytes(budget.device)
    if used + loading + (cache_bytes or 0) <= budget.num_bytes:
        return
    # A share of it is for guesses.
    larger = used + 2 * loading + (cache_bytes or budget.cache_bytes) - budget.other_bytes
    in_pass = PassCapacity.of(larger, num_known, num_requests, WIDTHS * widest, vocab).num_bytes
    of_drafters = sum(
        file.stat().st_size for name in drafters for file in Path(name).expanduser().glob("*.safetensors")
    )
    budget.refuse(used + loading + of_drafters + in_pass, cache_bytes)
