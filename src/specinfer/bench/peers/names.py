"""Which peers there are, what each needs, and how they are named: `llama.cpp`, `llama.cpp-draft:q8_0`."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass


class PeerError(Exception):
    """Why a peer is not measured; the run goes on without it."""


@dataclass(frozen=True, slots=True)
class Library:
    """An engine of others.

    Attributes:
        module: Where its adapter is.
        packages: What is imported -> what is to be installed.
        weights: The types it can hold the weights in.
        nearest: Type measured -> the one of those that is taken if none is asked for.
        samples_with_drafter: Whether what it says with a drafter at a temperature has the target's distribution.
        drafting: What follows its name when it speculates with a drafter; None: it is measured without.
        offload: Where it is told to leave the layers; None: it maps them, or holds them.
        measurements: Those it can be part of.
    """

    module: str
    packages: Mapping[str, str]
    weights: tuple[str, ...]
    nearest: Mapping[str, str]
    drafting: str | None = "draft"
    needs_gguf: bool = True
    cpu_only: bool = True
    gpu_only: bool = False
    samples_with_drafter: bool = True
    offload: str | None = None
    measurements: tuple[str, ...] = ("latency",)

    def missing(self) -> str | None:
        """The command that installs what is not there."""
        if all(importlib.util.find_spec(name) for name in self.packages):
            return None
        return "pip install " + " ".join(self.packages.values())


_HOME = "specinfer.bench.peers"
OWN_FILE = "file"  # stands among types of weights for the GGUF file that the target is read from, as it is
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
        measurements=("latency", "offload"),
    ),
    # It reads no other types from GGUF files, and computes in bfloat16 where the machine can.
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
    """One library with weights of one type, with or without a drafter."""

    library: str
    drafts: bool
    weights: str

    @property
    def name(self) -> str:
        suffix = f"-{LIBRARIES[self.library].drafting}" if self.drafts else ""
        return f"{self.library}{suffix}:{self.weights}"


def parse_peer(text: str, dtype: str, measurement: str = "latency") -> Peer:
    """The peer of this name; `dtype` is the type measured, for names that ask for none.

    Args:
        measurement: Whose peers are meant: "latency", or "offload" for those that need not hold the weights.

    Raises:
        ValueError: There is no such peer, or it has no weights of that type.
    """
    arms: dict[str, tuple[str, bool]] = {}
    for library, entry in LIBRARIES.items():
        if measurement in entry.measurements:
            arms[library] = (library, False)
            if entry.drafting is not None:
                arms[f"{library}-{entry.drafting}"] = (library, True)
    arm, colon, weights = text.partition(":")
    if arm not in arms:
        raise ValueError(f"peers: {text!r} is not known; there are {', '.join(arms)}")
    library, drafts = arms[arm]
    entry = LIBRARIES[library]
    if colon and weights not in entry.weights:
        raise ValueError(f"peers: {arm} has weights in {', '.join(entry.weights)}, not in {weights!r}")
    if not weights and dtype not in entry.nearest:
        raise ValueError(f"peers: {arm} has no weights in {dtype}; choose among {', '.join(entry.weights)}, or a dtype")
    return Peer(library, drafts, weights or entry.nearest[dtype])
