"""The known peers, their requirements and their names: `llama.cpp`, `llama.cpp-lookup`, `llama.cpp-draft:q8_0`."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Library:
    """Another project's inference engine.

    Attributes:
        module: Module of its adapter.
        packages: Name of each imported module -> name of the package to install.
        weights: Types that it can store the weights in.
        nearest: Measured dtype -> the entry of `weights` that is used if a peer's name gives no type.
        drafting: Suffix of its name when it speculates with a drafter, or None if it is measured only without one.
        lookup: Suffix of its name when it looks draft tokens up in its own text, or None if it cannot.
        samples_with_drafter: Whether tokens that it samples with a drafter have the target's distribution.
        offload: Where it keeps the layers, or None if it maps them or keeps them in memory.
        measurements: The measurements that it can take part in.
    """

    module: str
    packages: Mapping[str, str]
    weights: tuple[str, ...]
    nearest: Mapping[str, str]
    drafting: str | None = "draft"
    lookup: str | None = None
    needs_gguf: bool = True
    cpu_only: bool = True
    gpu_only: bool = False
    samples_with_drafter: bool = True
    offload: str | None = None
    measurements: tuple[str, ...] = ("latency",)

    def missing(self) -> str | None:
        """Return the command that installs its packages, or None if all are installed."""
        if all(importlib.util.find_spec(name) for name in self.packages):
            return None
        return "pip install " + " ".join(self.packages.values())


_HOME = "benchmarks.peers"
OWN_FILE = "file"  # type of weights that stands for the target's own GGUF file, unchanged
_FLOATS = ("float32", "bfloat16", "float16")


def _accelerate(offload: str) -> Library:
    return Library(
        f"{_HOME}.accelerate_engine",
        {"transformers": "transformers", "accelerate": "accelerate"},
        _FLOATS,
        {name: name for name in _FLOATS},
        drafting=None,
        needs_gguf=False,
        cpu_only=False,
        gpu_only=offload == "cpu",
        offload=offload,
        measurements=("offload",),
    )


LIBRARIES = {
    "transformers": Library(
        f"{_HOME}.transformers_engine",
        {"transformers": "transformers"},
        _FLOATS,
        {name: name for name in _FLOATS},
        drafting="assisted",
        lookup="lookup",
        needs_gguf=False,
        cpu_only=False,
    ),
    "transformers-compiled": Library(
        f"{_HOME}.transformers_compiled_engine",
        {"transformers": "transformers"},
        _FLOATS,
        {name: name for name in _FLOATS},
        drafting=None,  # transformers takes no assistant where the cache is static
        needs_gguf=False,
        cpu_only=False,
    ),
    "llama.cpp": Library(
        f"{_HOME}.llama_cpp_engine",
        {"llama_cpp": "llama-cpp-python", "gguf": "gguf"},
        ("f32", "f16", "bf16", "q8_0", "q4_0", OWN_FILE),
        {"float32": "f32", "bfloat16": "bf16", "float16": "f16"},
        lookup="lookup",
        measurements=("latency", "offload"),
    ),
    # OpenVINO reads no other types from GGUF files, and computes in bfloat16 where the CPU supports it.
    "openvino": Library(
        f"{_HOME}.openvino_engine",
        {"openvino_genai": "openvino-genai", "gguf": "gguf"},
        ("f16", "q8_0", "q4_0"),
        dict.fromkeys(_FLOATS, "f16"),
        samples_with_drafter=False,
    ),
    "accelerate": _accelerate("disk"),
    "accelerate-cpu": _accelerate("cpu"),
}


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


def parse_peer(text: str, dtype: str, measurement: str = "latency") -> Peer:
    """Return the peer of this name.

    Args:
        dtype: The measured dtype, which chooses the type of weights for names that give none.
        measurement: "latency", or "offload" for the peers that need not keep all weights in memory.

    Raises:
        ValueError: There is no such peer, or it does not support this type of weights.
    """
    arms: dict[str, tuple[str, bool, bool]] = {}
    for library, entry in LIBRARIES.items():
        if measurement in entry.measurements:
            arms[library] = (library, False, False)
            for suffix, looks_up in ((entry.drafting, False), (entry.lookup, True)):
                if suffix is not None:
                    arms[f"{library}-{suffix}"] = (library, True, looks_up)
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
