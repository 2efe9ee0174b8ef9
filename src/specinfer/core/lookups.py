"""The drafters that are not models ("lookups"), by the names that users give them."""

from importlib import import_module
from typing import Any, NamedTuple


class LookupKind(NamedTuple):
    """A lookup drafter: its class as "module:class", imported when one is made, and its help text."""

    path: str
    help: str

    def make(self, **options: Any) -> Any:
        """Return a new drafter of this kind, a `drafters.base.Drafter`, with these options of its class."""
        module, name = self.path.split(":")
        return getattr(import_module(module), name)(**options)


LOOKUPS: dict[str, LookupKind] = {
    "ngram": LookupKind(
        "specinfer.drafters.lookup.ngram:NGramDrafter",
        "prompt lookup: what followed the last tokens earlier in the text",
    ),
    "suffix": LookupKind(
        "specinfer.drafters.lookup.suffix:SuffixDrafter",
        "suffix lookup: what followed the longest repeated end, in this text and in earlier answers",
    ),
}
MTP = "mtp"  # the drafter of the layers for several tokens that some targets have in their own checkpoints


class SelfKind(NamedTuple):
    """A drafter that is a cheaper form of the target itself.

    Attributes:
        quantization: What its weights are rounded to, or None for the target's own.
        is_sparse: Whether it attends to a part of a long context only.
    """

    quantization: str | None
    is_sparse: bool

    @property
    def help(self) -> str:
        """Return a description in words."""
        weights = "" if self.quantization is None else f" with weights rounded to {self.quantization}"
        return f"the target itself{weights}{' over a part of a long context' if self.is_sparse else ''}"


SELF_DRAFTERS = {
    "self:int8": SelfKind("int8", is_sparse=False),
    "self:int4": SelfKind("int4", is_sparse=False),
    "self:sparse": SelfKind(None, is_sparse=True),
    "self:int4-sparse": SelfKind("int4", is_sparse=True),
}
SOURCE = ":"  # between the name of a lookup and that of one of its sources, as in "suffix:earlier"
# Drafters that users do not name: of the predictions that requests bring, and of what their grammars force.
PREDICTION, GRAMMAR = "prediction", "grammar"
AUTOMATIC = (PREDICTION, GRAMMAR)


def reserved_names() -> tuple[str, ...]:
    """Return the names of drafters that stand for no folder, even if there is one."""
    return (*LOOKUPS, MTP, *SELF_DRAFTERS)


def is_self(drafter: str) -> bool:
    """Return whether the drafter of this name is the target itself, cheaper."""
    return drafter.startswith("self:")


def drafter_of(name: str) -> str:
    """Return the drafter of a draft token, which is named by its drafter, or by a lookup and one of its sources."""
    lookup = name.partition(SOURCE)[0]
    return lookup if lookup in LOOKUPS or lookup in AUTOMATIC else name


def is_model(drafter: str) -> bool:
    """Return whether the drafter of this name is a model, so that each level of its trees costs a pass."""
    drafter = drafter_of(drafter)
    return drafter not in LOOKUPS and drafter not in AUTOMATIC


def quoted_lookups(conjunction: str) -> str:
    """Return the names of all lookups for a message, as in '"ngram" or "suffix"'."""
    *others, last = [f'"{name}"' for name in LOOKUPS]
    return f"{', '.join(others)} {conjunction} {last}"
