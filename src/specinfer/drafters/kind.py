"""DraftKind: what a drafter that is a model reads, computes and stores. Each class of drafters declares its own."""

from typing import NamedTuple

from specinfer.core.tree_shape import MAX_TREE_NODES
from specinfer.drafters.base import Drafter


class DraftKind(NamedTuple):
    """The known tokens that a drafter computes, and its passes.

    Attributes:
        reads_features: Whether it reads hidden states of the target.
        reads_paths: Whether it computes whole accepted paths anew, as heads with a cache do.
        shares_cache: Whether it attends to what the target has stored, as copies of the target and assistants do.
        stores_drafts: False for assistants, whose drafts depend only on the output for their parents, and are all
            computed at one position.
        is_sparse: Whether it attends to a part of a long context only.
        window: Tokens of a long context that it reads at least, or None to read all.
        is_remote: Whether it is on another rank, and drafts at the same time as others.
        block: Distances from the root of the tokens of the only pass of all levels; empty if each level has a pass.
        max_depth: Largest depth of a tree.
    """

    reads_features: bool = False
    reads_paths: bool = False
    shares_cache: bool = False
    stores_drafts: bool = True
    is_sparse: bool = False
    window: int | None = None
    is_remote: bool = False
    block: range = range(0)
    max_depth: int = MAX_TREE_NODES

    @property
    def reads_target(self) -> bool:
        """True if it drafts only what the target has read."""
        return self.reads_features or self.shares_cache

    @property
    def reads_prompts(self) -> bool:
        """True if it computes prompts before it drafts."""
        return not self.shares_cache

    @property
    def keeps_drafts(self) -> bool:
        """True if what was computed for accepted drafts stays valid."""
        return not self.reads_target

    @property
    def borrows_slots(self) -> bool:
        """True if it stores its drafts in the target's slots of a step."""
        return self.shares_cache and self.stores_drafts


def draft_kind(drafter: Drafter) -> DraftKind | None:
    """Return the kind of a drafter that is a model, or None for a lookup."""
    kind: DraftKind | None = getattr(drafter, "kind", None)
    return kind
