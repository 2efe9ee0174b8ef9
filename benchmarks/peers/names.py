"""The known peers and their names: `transformers`, `transformers-assisted`, `llama.cpp`, `llama.cpp-draft:q8_0`."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

OWN_FILE = "file"  # type of weights that stands for the target's own GGUF file, unchanged
_FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Library:
    """Another project's inference engine.

    Attributes:
        module: Module that a worker runs, or None for llama.cpp's server.
        weights: Types that it can store the weights in.
        nearest: Measured dtype -> the entry of `weights` that is used if a peer's name gives no type.
        drafting: Suffix of its name when it speculates with a drafter.
        lookup: Suffix of its name when it looks draft tokens up in its own text, or None if it is not measured so.
        package: Package that has to be installed for the module.
        takes_requests: Whether it answers chat requests with formats and tools.
    """

    module: str | None
    weights: tuple[str, ...]
    nearest: Mapping[str, str]
    drafting: str
    lookup: str | None = None
    needs_gguf: bool = True
    cpu_only: bool = True
    package: str | None = None
    takes_requests: bool = False

    def missing(self) -> str | None:
        """Return the command that installs its package, or None if it is installed."""
        is_there = self.package is None or importlib.util.find_spec(self.package) is not None
        return None if is_there else f"pip install {self.package}"


LIBRARIES = {
    "transformers": Library(
        "benchmarks.peers.transformers_worker", _FLOATS, {name: name for name in _FLOATS}, "assisted", "lookup",
        needs_gguf=False, cpu_only=False,
    ),
    "llama.cpp": Library(
        None, ("f32", "f16", "bf16", "q8_0", "q4_0", OWN_FILE),
        {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}, "draft", "lookup", takes_requests=True,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Peer:
    """One library with weights of one type, with or without draft tokens, which may be looked up."""

    library: str
    drafts: bool
    weights: str
    looks_up: bool = False

    @property
    def has_drafter(self) -> bool:
        """True if a model drafts."""
        return self.drafts and not self.looks_up

    @property
    def name(self) -> str:
        entry = LIBRARIES[self.library]
        suffix = f"-{entry.lookup if self.looks_up else entry.drafting}" if self.drafts else ""
        return f"{self.library}{suffix}:{self.weights}"


def parse_peer(text: str, dtype: str) -> Peer:
    """Return the peer of this name.

    Args:
        dtype: The measured dtype, which chooses the type of weights for names that give none.

    Raises:
        ValueError: There is no such peer, or it does not support this type of weights.
    """
    arms: dict[str, tuple[str, bool, bool]] = {}
    for library, entry in LIBRARIES.items():
        arms |= {library: (library, False, False), f"{library}-{entry.drafting}": (library, True, False)}
        if entry.lookup is not None:
            arms[f"{library}-{entry.lookup}"] = (library, True, True)
    arm, colon, weights = text.partition(":")
    if arm not in arms:
        raise ValueError(f"peers: {text!r} is not known; there are {', '.join(arms)}")
    library, drafts, looks_up = arms[arm]
    entry = LIBRARIES[library]
    if colon and weights not in entry.weights:
        raise ValueError(f"peers: {arm} has weights in {', '.join(entry.weights)}, not in {weights!r}")
    if not weights and dtype not in entry.nearest:
        raise ValueError(f"peers: {arm} has no weights in {dtype}; choose among {', '.join(entry.weights)}, or a dtype")
    return Peer(library, drafts, weights or entry.nearest[dtype], looks_up)
