"""What a budget must hold, as far as the files tell: a user is refused before anything is loaded, and once."""

from collections.abc import Iterable
from pathlib import Path

from specinfer.model.offload.budget import WIDTHS, Budget, PassRoom, held_bytes
from specinfer.model.offload.checkpoint import Checkpoint


def check_budget(
    budget: Budget,
    folder: Path,
    drafters: Iterable[str],
    num_known: int,
    num_requests: int,
    cache_bytes: int | None = None,
) -> None:
    """Refuses a budget in which the target could not even be loaded, and names one for all that comes after that too.

    What is left of a larger one is looked at when all is loaded, with what is then known exactly.

    Args:
        drafters: Folders, or names of what is no folder and takes little.
        num_known: Tokens of a step that are no guesses, at most.
        num_requests: At once.
        cache_bytes: That the caller gives caches; None: their usual share.

    Raises:
        ModelError: The weights cannot be used.
        ValueError: The budget is too small.
    """
    checkpoint = Checkpoint(folder)
    try:
        loading = checkpoint.least_bytes()
        sources = checkpoint.shards.sources
        outside = [one for name, one in sources.items() if not checkpoint.is_numbered(name)]
        inside = [one for name, one in sources.items() if checkpoint.is_numbered(name)]
        widest = max((size for one in inside for size in one.shape), default=1)
        vocab = max((one.shape[0] for one in outside if len(one.shape) > 1), default=1)
    finally:
        checkpoint.close()
    cache = budget.cache_bytes if cache_bytes is None else cache_bytes
    held = held_bytes(budget.device)
    if held + loading + cache <= budget.num_bytes:
        return
    larger = held + 2 * loading + cache  # guesses have their share of it
    room = PassRoom.of(larger, num_known, num_requests, WIDTHS * widest, vocab).num_bytes
    beside = sum(file.stat().st_size for name in drafters for file in Path(name).expanduser().glob("*.safetensors"))
    budget.refuse(held + loading + beside + room, cache_bytes)
