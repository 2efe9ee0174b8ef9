"""What is decided before a model is loaded: small frozen values, checked here, one for each concern."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_TREE_NODES = 1024


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine.

    Attributes:
        max_model_len: Prompt and output together, in tokens; None is the model's own length.
        max_num_seqs: Requests running at once.
        max_num_batched_tokens: Known tokens computed in one step.
        kv_cache_memory_bytes: For keys and values of all models; None: a quarter of a CPU's memory, or most of a GPU's.
        seed: Of requests that bring none.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    kv_cache_memory_bytes: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            if value is None and name in ("max_model_len", "kv_cache_memory_bytes"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be a whole number from 0 to 2**63 - 1, not {self.seed!r}")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Who guesses, in which shape, and how guesses are verified.

    Attributes:
        drafters: Folders, hub names or "ngram"; None chooses: the embedded drafter for "demo", else n-gram.
        tree: "auto" (by measured cost), "off", or an expansion such as "1,1,3,1".
        verification: "coupled".
    """

    drafters: tuple[str, ...] | None = None
    tree: str = "auto"
    verification: str = "coupled"

    def __post_init__(self) -> None:
        if self.verification != "coupled":
            raise ValueError(f'verification must be "coupled", not {self.verification!r}')
        parse_tree(self.tree)

    @property
    def widths(self) -> tuple[int, ...] | None:
        """The fixed expansion; () for off, None for auto."""
        return parse_tree(self.tree)


def parse_tree(tree: str) -> tuple[int, ...] | None:
    """The widths of an expansion: () for "off", None for "auto".

    Raises:
        ValueError: Not one of the forms, or too large.
    """
    if tree == "auto":
        return None
    if tree == "off":
        return ()
    forms = 'use "auto", "off", or children per level such as "1,1,3,1"'
    if not isinstance(tree, str):
        raise ValueError(f"tree: {tree!r} is no string; {forms}")
    parts = [part.strip() for part in tree.strip().removeprefix("<").removesuffix(">").split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) <= 6 for part in parts):
        raise ValueError(f"tree: {tree[:60]!r} is not understood; {forms}")
    widths = tuple(int(part) for part in parts)
    if 0 in widths:
        raise ValueError(f'tree: a level of {tree[:60]!r} has no children; each needs at least 1, or use "off"')
    nodes, level = 0, 1
    for width in widths:
        level *= width
        nodes += level
        if nodes > MAX_TREE_NODES:
            raise ValueError(f"tree: {tree[:60]!r} has more than {MAX_TREE_NODES} nodes; make it smaller")
    return widths


def parse_drafters(drafters: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Drafter names as a tuple; None for "auto".

    Raises:
        ValueError: A name is empty or stands twice.
    """
    if drafters is None or drafters == "auto":
        return None
    names = (drafters,) if isinstance(drafters, str) else tuple(str(name) for name in drafters)
    if any(not name for name in names):
        raise ValueError('drafters: an empty name; give folders, hub names or "ngram"')
    if len(set(names)) < len(names):
        raise ValueError(f"drafters: {', '.join(names)} names a drafter twice; leave one out")
    return names
