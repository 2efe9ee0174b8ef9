"""Settings that are chosen before a model is loaded: small frozen values, one for each concern, validated here."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from specinfer.core.drafter_forms import USUAL_WINDOW, parse_select, parse_window
from specinfer.core.errors import check_path
from specinfer.core.options import check_settings, parse_size, setting
from specinfer.core.rules import AUTO, DRAFT_SAMPLINGS, RULES
from specinfer.core.tree_shape import TreeShape, parse_tree

DType = Literal["auto", "float32", "bfloat16", "float16", "half", "float"]
KVCacheDType = Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"]
Offload = Literal["disk", "cpu"]
Quantization = Literal["int8", "int4", "fp8"]
VerificationRule = Literal["coupled", "multi-step", "traversal", "target-only", "auto"]
DraftSampling = Literal["auto", "shared-noise", "top-k", "without-replacement", "iid", "hybrid"]
DTYPES = get_args(DType)
QUANTIZATIONS = get_args(Quantization)
# Types of keys and values, by the names that users give them, as PyTorch names them; None is that of the model.
KV_CACHE_DTYPES = {
    "auto": None,
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
MODEL, SPECULATION = "Model", "Speculation"  # sections of the help
_MAX_NGRAM = 64  # each length takes memory for every token


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    max_model_len: int | None = setting(None, MODEL, "Maximum length of prompt and output together, in tokens.", low=1)
    max_num_seqs: int = setting(32, MODEL, "Maximum number of requests in a batch.", low=1)
    max_num_batched_tokens: int = setting(
        512,
        MODEL,
        "Maximum number of prompt tokens in a step. (default: 512, up to 2048 on GPUs, 1024 with --offload)",
        low=1,
    )
    kv_cache_memory_bytes: int | None = setting(
        None, MODEL, "Size of the KV caches of all models, such as 512M or 4GiB.", metavar="SIZE", low=1
    )
    seed: int = setting(0, MODEL, "Random seed of requests that have none of their own.", low=0, high=2**63 - 1)
    gpu_memory_utilization: float | None = setting(
        None,
        MODEL,
        "Share of the memory of a GPU that weights and KV caches may take. (default: 0.8 of what the weights leave)",
        low=0,
        high=1,
        low_open=True,
    )

    def __post_init__(self) -> None:
        check_settings(self)


def check_quantization(name: str, value: str | None) -> None:
    """Check a quantization setting.

    Raises:
        ValueError: The value is neither None nor one of `QUANTIZATIONS`; the message names the field.
    """
    if value is not None and value not in QUANTIZATIONS:
        raise ValueError(f"{name} must be one of {', '.join(QUANTIZATIONS)}, not {value!r}; leave it out for none")


def check_device(name: object, others: Collection[str] = ()) -> None:
    """Check the name of a device; whether it is there is known only once torch is imported.

    Args:
        others: Names that may be given, too.

    Raises:
        ValueError: It is not the name of a device.
    """
    if isinstance(name, str) and re.fullmatch(r"mps(:\d+)?", name):
        raise ValueError(f'device: {name!r}, the GPU of a Mac, is not supported; use "cpu", which has native kernels')
    if not (isinstance(name, str) and (_DEVICE.fullmatch(name) or name in others)):
        names = ", ".join(['"auto"', '"cpu"', *(f'"{other}"' for other in others)])
        raise ValueError(f'device: {name!r:.60} is not known; use {names} or "cuda"')


_DEVICE = re.compile(r"auto|(cpu|cuda)(:\d{1,3})?")


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """Location of the target's layers that do not fit into memory.

    Raises:
        ValueError: A field is invalid, or makes no sense without `offload`.
    """

    offload: Offload | None = setting(
        None,
        MODEL,
        "Where to keep layers of the target that do not fit into memory: disk (read for every pass) or cpu (host "
        "memory, for a target on a GPU).",
        choices=get_args(Offload),
    )
    memory_budget: int | str | None = setting(
        None,
        MODEL,
        "Memory limit of the whole process with --offload, such as 4GiB. (default: 80 % of free memory)",
        metavar="SIZE",
    )
    offload_folder: str | Path | None = setting(
        None,
        MODEL,
        "Folder for a packed copy of the offloaded layers. Required for quantized layers.",
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("memory_budget", "offload_folder") if self.offload is None else ():
            if getattr(self, name) is not None:
                raise ValueError(
                    f'{name}: it is for targets that are streamed; set offload="disk" too, or leave it out'
                )
        if self.memory_budget is not None:
            parse_size("memory_budget", self.memory_budget)
        if self.offload_folder is not None:
            check_path("offload_folder", self.offload_folder)

    @property
    def budget_bytes(self) -> int | None:
        """Memory limit of the process in bytes, or None if the caller sets none."""
        return None if self.memory_budget is None else parse_size("memory_budget", self.memory_budget)


NONE = "none"


def check_verification(rule: object) -> None:
    """Check the name of a verification rule.

    Raises:
        ValueError: There is no such rule; the message names those that there are.
    """
    if rule not in (*RULES, AUTO):
        raise ValueError(f"verification must be one of {', '.join((*RULES, AUTO))}, not {rule!r}")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Settings of speculation: the drafters, the tree shape, and how draft tokens are sampled and verified.

    Attributes:
        drafters: Names of drafters; None is the embedded drafter for "demo"; else MTP layers, a head or a small model
            with suffix lookup, or n-gram lookup, as `hub.known_drafters` finds them.
        draft_sampling: "auto" becomes that of the verification rule.

    Raises:
        ValueError: A field is out of range, or the rule does not support the draft sampling; the message says
            what it supports.
    """

    drafters: tuple[str, ...] | None = None
    tree: str = setting(
        "auto",
        SPECULATION,
        "Token tree: auto (by measured costs), off, children per level such as 1,1,3,1, or best-first:32.",
    )
    verification: str = setting(
        "coupled",
        SPECULATION,
        "Verification rule. coupled and target-only generate the tokens of plain decoding with the same seed; "
        "multi-step and traversal generate tokens of the same distribution; auto takes the faster of coupled and "
        "traversal for each sampled request.",
        choices=(*RULES, AUTO),
        other_names={"naive": "target-only"},  # of the SpecInfer paper
    )
    draft_sampling: str = setting(
        "auto",
        SPECULATION,
        "Sampling of draft tokens: {choices}; auto is that of the verification rule.",
        choices=("auto", *DRAFT_SAMPLINGS),
        old_name="drawing",
    )
    select: str = setting(
        "all",
        SPECULATION,
        "Draft models to use for each request: all, or hedge:N for the N (default 2) that predict its text best.",
    )
    drafter_window: str = setting(
        "auto",
        SPECULATION,
        "Tokens of a long prompt that a draft model reads, mostly the last ones: a number, all, or auto, which "
        f"is {USUAL_WINDOW} on CPUs and all on GPUs.",
        metavar="TOKENS",
    )
    speculation_policy: str | None = setting(
        None,
        SPECULATION,
        "Learned speculation policy for --tree auto, made by specinfer tune --policy.",
        metavar="FILE",
        old_name="scheduler",
    )
    prompt_lookup_min: int = setting(
        2, SPECULATION, "Shortest n-gram that the drafter ngram looks up.", low=1, high=_MAX_NGRAM
    )
    prompt_lookup_max: int = setting(
        4, SPECULATION, "Longest n-gram that the drafter ngram looks up.", low=1, high=_MAX_NGRAM
    )

    def __post_init__(self) -> None:
        check_settings(self)
        parse_select(self.select)
        parse_window(self.drafter_window)
        if self.prompt_lookup_min > self.prompt_lookup_max:  # one of them may be the default
            raise ValueError(
                f"prompt_lookup_min, prompt_lookup_max: the shortest n-gram ({self.prompt_lookup_min}) is longer than "
                f"the longest ({self.prompt_lookup_max}); set both"
            )
        if self.speculation_policy is not None:
            check_path("speculation_policy", self.speculation_policy)
        allowed = (AUTO,) if self.verification == AUTO else RULES[self.verification].draft_samplings
        if self.draft_sampling == AUTO:
            object.__setattr__(self, "draft_sampling", allowed[0])
        elif self.verification == AUTO:
            raise ValueError(
                f"draft_sampling: {self.draft_sampling!r} is for one rule, and verification auto draws as the rule "
                "that it chooses needs; leave draft_sampling out"
            )
        elif self.draft_sampling not in allowed:
            raise ValueError(
                f"draft_sampling: {self.draft_sampling!r} is for coupled verification, not for {self.verification!r}; "
                f"use {', '.join(allowed)}"
            )
        shape = parse_tree(self.tree)
        if self.drafters == () and not (shape.is_auto or shape.is_off):
            raise ValueError(f'tree: {self.tree!r} needs a drafter and drafters is empty; name one, or use tree="off"')

    @property
    def shape(self) -> TreeShape:
        return parse_tree(self.tree)

    @property
    def max_asked(self) -> int | None:
        """Maximum number of model drafters for one request in one step, or None for no limit."""
        return parse_select(self.select)

    def window(self, *, on_cpu: bool) -> int | None:
        """Return the tokens of a long prompt that a draft model reads at least, or None for all."""
        if self.drafter_window == AUTO:
            return USUAL_WINDOW if on_cpu else None
        return parse_window(self.drafter_window)
