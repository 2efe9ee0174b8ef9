"""EngineArgs: all settings of an engine, for the library, the ranks, the server, its replicas and the command line.

Each field is the only place of its setting: the arguments of `LLM`, the flags, the environment variables, the keys of
configuration files and the table in docs/configuration.md are made from it. Nothing here needs torch, so that a mistake
is refused before it is imported.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from specinfer.core.config import (
    DTYPES,
    KV_CACHE_DTYPES,
    MODEL,
    QUANTIZATIONS,
    SPECULATION,
    DraftSampling,
    DType,
    EngineConfig,
    KVCacheDType,
    Offload,
    OffloadConfig,
    Quantization,
    SpeculativeConfig,
    VerificationRule,
    check_device,
)
from specinfer.core.drafter_forms import parse_drafters, parse_token_map
from specinfer.core.errors import check_path
from specinfer.core.limits import SLO
from specinfer.core.lookups import reserved_names
from specinfer.core.lora import LoRAConfig
from specinfer.core.options import Flag, check_settings, parse_size, setting, setting_of, settings_of
from specinfer.core.parallel_config import DrafterPlacement, ParallelConfig
from specinfer.core.progress import ProgressCallback
from specinfer.core.vllm_names import asks_for_invariance, takes_vllm_arguments
from specinfer.demo.chat_model import CHAT, CODE, EMBEDDED
from specinfer.hub.locate import at_revision

C = TypeVar("C")
P = ParamSpec("P")
# Checked as given.
_PATHS = (
    *("model", "tokenizer", "cluster_cert", "speculation_policy", "step_log", "adapt_dir", "prefix_cache_dir"),
    "suffix_corpus",
)
_MODELS = "A folder, a GGUF file, a Hugging Face model ID, demo or demo-chat."


@takes_vllm_arguments
@dataclass(frozen=True, slots=True)
class EngineArgs:
    """Arguments of `LLM`: the model, its limits, its drafters and its ranks.

    Raises:
        ValueError: An argument is out of range, or contradicts another; the message names it.
    """

    model: str | Path = field(metadata={"flag": Flag(MODEL, _MODELS, metavar="NAME")})
    _: KW_ONLY
    tokenizer: str | Path | None = setting(
        None,
        MODEL,
        "Tokenizer to use instead of that of the model: a folder, a GGUF file or a Hugging Face model ID.",
        metavar="NAME",
    )
    revision: str | None = setting(
        None, MODEL, "Branch, tag or commit of a model of the hub; the same as MODEL@REVISION."
    )
    tokenizer_revision: str | None = setting(
        None, MODEL, "Branch, tag or commit of the tokenizer. (default: that of the model)"
    )
    reasoning_parser: str = setting(
        "auto",
        MODEL,
        "Format of the thoughts of the model: a name, none (thoughts are a part of the answer), or auto (by the chat "
        "template).",
        metavar="NAME",
    )
    tool_call_parser: str = setting(
        "auto", MODEL, "Format of the tool calls of the model: a name, or auto (by the chat template).", metavar="NAME"
    )
    dtype: DType = setting(
        "auto", MODEL, "Data type of the weights: {choices}; auto is that of the checkpoint.", choices=DTYPES
    )
    quantization: Quantization | None = setting(
        None, MODEL, "Quantize the linear layers of the target to {choices}.", choices=QUANTIZATIONS
    )
    offload: Offload | None = setting_of(OffloadConfig, "offload")
    memory_budget: int | str | None = setting_of(OffloadConfig, "memory_budget")
    offload_folder: str | Path | None = setting_of(OffloadConfig, "offload_folder")
    device: str = setting("auto", MODEL, "Device of the models: auto, cpu, cuda, cuda:1, ...")
    tensor_parallel_size: int = setting_of(ParallelConfig, "tensor_parallel_size")
    pipeline_parallel_size: int = setting_of(ParallelConfig, "pipeline_parallel_size")
    nnodes: int = setting_of(ParallelConfig, "nnodes")
    node_rank: int = setting_of(ParallelConfig, "node_rank")
    master_addr: str | None = setting_of(ParallelConfig, "master_addr")
    master_port: int | None = setting_of(ParallelConfig, "master_port")
    cluster_cert: str | Path | None = setting_of(ParallelConfig, "cluster_cert")
    insecure_cluster: bool = setting_of(ParallelConfig, "insecure_cluster")
    drafter_placement: DrafterPlacement = setting_of(ParallelConfig, "drafter_placement")
    enable_lora: bool = setting(False, MODEL, "Let requests have LoRA adapters.")
    max_loras: int = setting_of(LoRAConfig, "max_loras")
    max_lora_rank: int = setting_of(LoRAConfig, "max_lora_rank")
    max_cpu_loras: int | None = setting_of(LoRAConfig, "max_cpu_loras", default=None)
    max_model_len: int | None = setting_of(EngineConfig, "max_model_len")
    max_num_seqs: int = setting_of(EngineConfig, "max_num_seqs")
    max_num_batched_tokens: int | None = setting_of(EngineConfig, "max_num_batched_tokens", default=None)
    kv_cache_memory_bytes: int | str | None = setting_of(EngineConfig, "kv_cache_memory_bytes")
    kv_cache_dtype: KVCacheDType = setting(
        "auto",
        MODEL,
        "Data type of the keys and values in the KV caches of all models: {choices}; auto is that of the model, fp8 is "
        "fp8_e4m3.",
        choices=tuple(KV_CACHE_DTYPES),
    )
    gpu_memory_utilization: float | None = setting_of(EngineConfig, "gpu_memory_utilization")
    enable_prefix_caching: bool = setting(True, MODEL, "Reuse the KV cache of common prefixes of prompts.")
    prefix_cache_dir: str | Path | None = setting(
        None,
        MODEL,
        "Folder to keep cached prefixes in, for the next start. Prompts can be derived from its files.",
        metavar="DIR",
    )
    prefix_cache_size: int | str | None = setting(
        None,
        MODEL,
        "Size of --prefix-cache-dir; the least recently used files are removed. (default: 16GiB)",
        metavar="SIZE",
    )
    enforce_eager: bool = setting(False, MODEL, "Do not capture CUDA graphs.")
    batch_invariant: bool = setting(
        False,
        MODEL,
        "Compute each token of the target with one order of sums, whatever else is in its pass, or refuse the model. "
        "VLLM_BATCH_INVARIANT=1 sets it, too.",
    )
    slo: SLO | Mapping[str, float] | str | None = setting(
        None,
        MODEL,
        "Latency targets of requests that state none: milliseconds to the first token and for each further one.",
        metavar="ttft:MS,tpot:MS",
    )
    seed: int = setting_of(EngineConfig, "seed")
    drafters: str | Sequence[str] = setting(
        "auto",
        SPECULATION,
        f"A folder, a GGUF file, a Hugging Face model ID, {', '.join((*reserved_names(), *EMBEDDED))}, "
        "or none. May be repeated. (default: auto, the target's MTP layers, a head or small model for it, or a lookup)",
        name="drafter",
        metavar="NAME",
    )
    prompt_lookup_min: int = setting_of(SpeculativeConfig, "prompt_lookup_min")
    prompt_lookup_max: int = setting_of(SpeculativeConfig, "prompt_lookup_max")
    suffix_corpus: str | Path | None = setting(
        None,
        SPECULATION,
        "File of texts, made by specinfer corpus build. The drafter suffix searches them for all requests.",
        metavar="FILE",
    )
    drafter_quantization: Quantization | None = setting(
        None, SPECULATION, "Quantize the linear layers of draft models to {choices}.", choices=QUANTIZATIONS
    )
    drafter_token_map: int | str | Path = setting(
        "auto",
        SPECULATION,
        "Tokens that draft models propose (FR-Spec): auto, full, the first N in the order of merges, or a JSON file of "
        "their ids.",
        metavar="auto|full|N|FILE",
    )
    tree: str = setting_of(SpeculativeConfig, "tree")
    verification: VerificationRule = setting_of(SpeculativeConfig, "verification")
    draft_sampling: DraftSampling = setting_of(SpeculativeConfig, "draft_sampling")
    select: str = setting_of(SpeculativeConfig, "select")
    drafter_window: str = setting_of(SpeculativeConfig, "drafter_window")
    speculation_policy: str | Path | None = setting_of(SpeculativeConfig, "speculation_policy")
    step_log: str | Path | None = setting(
        None,
        SPECULATION,
        "Record the features and the outcome of each step here, to train a speculation policy.",
        metavar="FILE",
    )
    adapt_drafters: bool = setting(
        False,
        SPECULATION,
        "Train draft models on the traffic in idle moments. Outputs do not change, but their speed then depends on the "
        "requests of others.",
    )
    adapt_dir: str | Path | None = setting(
        None, SPECULATION, "Folder to keep the trained drafters in, for the next start.", metavar="FOLDER"
    )

    def __post_init__(self) -> None:
        if repr(self.dtype).startswith("torch."):  # a torch.dtype, as for vLLM and transformers
            object.__setattr__(self, "dtype", repr(self.dtype).removeprefix("torch."))
        check_settings(self)
        if asks_for_invariance(os.environ):
            object.__setattr__(self, "batch_invariant", True)
        for name in _PATHS:
            if (path := getattr(self, name)) is not None or name == "model":
                check_path(name, path)
        self._name_revisions()
        # Each of them checks its fields.
        _ = self.engine_config, self.offload_config, self.parallel_config, self.speculative_config, self.lora_config
        SLO.parse(self.slo)
        check_device(self.device)
        object.__setattr__(self, "drafter_token_map", parse_token_map(self.drafter_token_map))
        if self.adapt_dir is not None and not self.adapt_drafters:
            raise ValueError("adapt_dir: drafters learn only with adapt_drafters; set that too, or leave it out")
        self._check_prefix_cache()

    def _check_prefix_cache(self) -> None:
        """Check that prefixes can be kept on disk, and how many."""
        if self.prefix_cache_size is not None:
            parse_size("prefix_cache_size", self.prefix_cache_size)
        if self.prefix_cache_dir is None:
            if self.prefix_cache_size is not None:
                raise ValueError(
                    "prefix_cache_size: it limits prefix_cache_dir, which is not set; set that too, or leave it out"
                )
        elif not self.enable_prefix_caching:
            raise ValueError("prefix_cache_dir: enable_prefix_caching is off; leave one of them out")
        elif self.parallel_config.world_size > 1:
            raise ValueError(
                "prefix_cache_dir: each rank has a part of the keys and values, and only a target in one process can "
                "keep them; leave it out, or set tensor_parallel_size and pipeline_parallel_size to 1"
            )
        elif self.offload is not None:
            raise ValueError(
                "prefix_cache_dir: with offload, memory_budget has no room for blocks that wait to be written; leave "
                "one of them out"
            )

    def _name_revisions(self) -> None:
        """Make the revisions part of the names, as everything else expects them."""
        model = self.model
        for field_name, value, revision in (
            ("tokenizer", self.tokenizer if self.tokenizer is not None else model, "tokenizer_revision"),
            ("model", model, "revision"),
        ):
            if (given := getattr(self, revision)) is not None:
                if given != "main" and str(value) in (CODE, CHAT):
                    raise ValueError(f"{revision}: {value} is part of the package; leave {revision} out")
                object.__setattr__(self, field_name, at_revision(revision, value, given))
                object.__setattr__(self, revision, None)

    @property
    def engine_config(self) -> EngineConfig:
        """Limits of the engine."""
        tokens, size = self.max_num_batched_tokens, self.kv_cache_memory_bytes
        if tokens is None:
            # One read of the weights of a streamed target should serve many tokens of a prompt.
            tokens = EngineConfig().max_num_batched_tokens if self.offload is None else 1024
        if isinstance(size, str):
            size = parse_size("kv_cache_memory_bytes", size)
        return self._part(EngineConfig, max_num_batched_tokens=tokens, kv_cache_memory_bytes=size)

    @property
    def offload_config(self) -> OffloadConfig:
        """Location of layers that do not fit into memory."""
        return self._part(OffloadConfig)

    @property
    def lora_config(self) -> LoRAConfig | None:
        """Limits for adapters, or None if requests may have none."""
        most = self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras
        config = self._part(LoRAConfig, max_cpu_loras=most)
        return config if self.enable_lora else None

    @property
    def parallel_config(self) -> ParallelConfig:
        """Ranks of the target."""
        return self._part(ParallelConfig, cluster_cert=None if self.cluster_cert is None else str(self.cluster_cert))

    @property
    def speculative_config(self) -> SpeculativeConfig:
        """Drafters, trees and verification."""
        policy = None if self.speculation_policy is None else str(self.speculation_policy)
        return self._part(SpeculativeConfig, drafters=parse_drafters(self.drafters), speculation_policy=policy)

    def _part(self, config: Callable[..., C], **others: Any) -> C:
        """Return the settings of one concern; `others` take precedence over the fields of the same names."""
        return config(**{name: getattr(self, name) for name in inspect.signature(config).parameters} | others)

    def as_dict(self) -> dict[str, Any]:
        """Return the arguments by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


EngineArgs.__doc__ = f"{EngineArgs.__doc__}\n    Attributes:\n" + "\n".join(
    f"        {each.name}: {flag.text}" for each, flag in settings_of(EngineArgs)
)


@dataclass(frozen=True, slots=True)
class LoadArgs(EngineArgs):
    """Arguments of `LLM`, with those that are no settings.

    Attributes:
        progress: Callback that receives the name of the work, the units done and their total: bytes while a streamed
            target is loaded, captured sizes of passes on a GPU.
    """

    progress: ProgressCallback | None = field(default=None, kw_only=True)


def with_arguments_of(
    source: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a method the typed signature of `source`, for type checkers, `help` and completion."""

    def apply(method: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [self, *inspect.signature(source).parameters.values()]
        method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return method

    return apply
