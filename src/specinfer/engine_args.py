"""EngineArgs: all settings of an engine, for the library, the ranks, the server, its replicas and the command line.

Each field is the only place of its setting: the arguments of `LLM`, the flags, the environment variables, the keys of
configuration files and the table in docs/configuration.md are made from it. Nothing here needs torch, so that a mistake
is refused before it is imported.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from specinfer.core.config import (
    AUTO,
    DRAFT_SAMPLINGS,
    DTYPES,
    KV_CACHE_DTYPES,
    OFFLOADS,
    QUANTIZATIONS,
    EngineConfig,
    OffloadConfig,
    SpeculativeConfig,
    check_device,
    parse_drafters,
)
from specinfer.core.errors import check_path
from specinfer.core.limits import SLO
from specinfer.core.lookups import reserved_names
from specinfer.core.lora import LoRAConfig
from specinfer.core.options import Flag, check_choices, parse_size, setting, settings_of
from specinfer.core.parallel_config import PLACEMENTS, ParallelConfig
from specinfer.core.progress import ProgressCallback
from specinfer.core.vllm_names import takes_vllm_arguments
from specinfer.demo.chat_model import CHAT, CODE, EMBEDDED
from specinfer.hub.locate import at_revision

P = ParamSpec("P")
_MODEL, _RANKS, _SPECULATION = "Model", "Ranks", "Speculation"
_PATHS = ("model", "tokenizer", "cluster_cert", "speculation_policy", "step_log", "adapt_dir")  # checked as given
_MODELS = "A folder, a GGUF file, a Hugging Face model ID, demo or demo-chat."


@takes_vllm_arguments
@dataclass(frozen=True, slots=True)
class EngineArgs:
    """Arguments of `LLM`: the model, its limits, its drafters and its ranks.

    Raises:
        ValueError: An argument is out of range, or contradicts another; the message names it.
    """

    model: str | Path = field(metadata={"flag": Flag(_MODEL, _MODELS, metavar="NAME")})
    _: KW_ONLY
    tokenizer: str | Path | None = setting(
        None,
        _MODEL,
        "Tokenizer to use instead of that of the model: a folder, a GGUF file or a Hugging Face model ID.",
        metavar="NAME",
    )
    revision: str | None = setting(
        None, _MODEL, "Branch, tag or commit of a model of the hub; the same as MODEL@REVISION."
    )
    tokenizer_revision: str | None = setting(
        None, _MODEL, "Branch, tag or commit of the tokenizer. (default: that of the model)"
    )
    reasoning_parser: str = setting(
        "auto",
        _MODEL,
        "Format of the thoughts of the model: a name, none (thoughts are a part of the answer), or auto (by the chat "
        "template).",
        metavar="NAME",
    )
    tool_call_parser: str = setting(
        "auto", _MODEL, "Format of the tool calls of the model: a name, or auto (by the chat template).", metavar="NAME"
    )
    dtype: str = setting(
        "auto",
        _MODEL,
        "Data type of the weights: {choices}; auto is that of the checkpoint.",
        choices=DTYPES,
    )
    quantization: str | None = setting(
        None, _MODEL, "Quantize the linear layers of the target to {choices}.", choices=QUANTIZATIONS
    )
    offload: str | None = setting(
        None,
        _MODEL,
        "Where to keep layers of the target that do not fit into memory: disk (read for every pass) or cpu (host "
        "memory, for a target on a GPU).",
        choices=OFFLOADS,
    )
    memory_budget: int | str | None = setting(
        None,
        _MODEL,
        "Memory limit of the whole process with --offload, such as 4GiB. (default: 80 % of free memory)",
        metavar="SIZE",
    )
    offload_folder: str | Path | None = setting(
        None,
        _MODEL,
        "Folder for a packed copy of the offloaded layers. Required for quantized layers.",
        metavar="DIR",
    )
    device: str = setting("auto", _MODEL, "Device of the models: auto, cpu, cuda, cuda:1, ...")
    tensor_parallel_size: int = setting(1, _RANKS, "Number of tensor parallel processes.", short="-tp")
    pipeline_parallel_size: int = setting(1, _RANKS, "Number of pipeline parallel stages.", short="-pp")
    nnodes: int = setting(1, _RANKS, "Number of nodes. Start the same command on each.")
    node_rank: int = setting(0, _RANKS, "Rank of this node, from 0. Node 0 runs the engine.")
    master_addr: str | None = setting(None, _RANKS, "Address of node 0, reachable from all nodes.", metavar="HOST")
    master_port: int | None = setting(None, _RANKS, "Port of node 0 for the rendezvous of ranks. (default: 29500)")
    cluster_cert: str | Path | None = setting(
        None,
        _RANKS,
        "File with the private key and certificate, the same on all nodes, by which ranks accept and encrypt messages.",
        metavar="FILE",
    )
    insecure_cluster: bool = setting(False, _RANKS, "Allow several nodes without --cluster-cert.")
    drafter_placement: str = setting(
        "auto",
        _RANKS,
        "Ranks that run draft models: first (all on the rank of the engine), spread (in parallel, one after the other "
        "on each rank), or auto (spread on a single node with two CPUs per rank).",
        choices=PLACEMENTS,
    )
    enable_lora: bool = setting(False, _MODEL, "Let requests have LoRA adapters.")
    max_loras: int = setting(8, _MODEL, "Maximum number of LoRA adapters in a batch.")
    max_lora_rank: int = setting(64, _MODEL, "Maximum rank of a LoRA adapter.")
    max_cpu_loras: int | None = setting(
        None, _MODEL, "Maximum number of LoRA adapters in memory. (default: the same as --max-loras)"
    )
    max_model_len: int | None = setting(None, _MODEL, "Maximum length of prompt and output together, in tokens.")
    max_num_seqs: int = setting(EngineConfig().max_num_seqs, _MODEL, "Maximum number of requests in a batch.")
    max_num_batched_tokens: int | None = setting(
        None,
        _MODEL,
        "Maximum number of prompt tokens in a step. (default: 512, up to 2048 on GPUs, 1024 with --offload)",
    )
    kv_cache_memory_bytes: int | str | None = setting(
        None, _MODEL, "Size of the KV caches of all models, such as 512M or 4GiB.", metavar="SIZE"
    )
    kv_cache_dtype: str = setting(
        "auto",
        _MODEL,
        "Data type of the keys and values in the KV caches of all models: {choices}; auto is that of the model, fp8 is "
        "fp8_e4m3.",
        choices=KV_CACHE_DTYPES,
    )
    gpu_memory_utilization: float | None = setting(
        None,
        _MODEL,
        "Share of the memory of a GPU that weights and KV caches may take. (default: 0.8 of what the weights leave)",
    )
    enable_prefix_caching: bool = setting(True, _MODEL, "Reuse the KV cache of common prefixes of prompts.")
    enforce_eager: bool = setting(False, _MODEL, "Do not capture CUDA graphs.")
    slo: SLO | Mapping[str, float] | str | None = setting(
        None,
        _MODEL,
        "Latency targets of requests that state none: milliseconds to the first token and for each further one.",
        metavar="ttft:MS,tpot:MS",
    )
    seed: int = setting(0, _MODEL, "Random seed of requests that have none of their own.")
    drafters: str | Sequence[str] = setting(
        "auto",
        _SPECULATION,
        f"A folder, a GGUF file, a Hugging Face model ID, {', '.join((*reserved_names(), *EMBEDDED))}, "
        "or none. May be repeated. (default: auto, the target's MTP layers, a head or small model for it, or a lookup)",
        name="drafter",
        metavar="NAME",
    )
    prompt_lookup_min: int = setting(2, _SPECULATION, "Shortest n-gram that the drafter ngram looks up.")
    prompt_lookup_max: int = setting(4, _SPECULATION, "Longest n-gram that the drafter ngram looks up.")
    drafter_quantization: str | None = setting(
        None, _SPECULATION, "Quantize the linear layers of draft models to {choices}.", choices=QUANTIZATIONS
    )
    tree: str = setting(
        "auto",
        _SPECULATION,
        "Token tree: auto (by measured costs), off, children per level such as 1,1,3,1, or best-first:32.",
    )
    verification: str = setting(
        "coupled",
        _SPECULATION,
        "Verification rule. coupled and target-only generate the tokens of plain decoding with the same seed; "
        "multi-step and traversal generate tokens of the same distribution; auto takes the faster of coupled and "
        "traversal for each sampled request.",
        choices=(*DRAFT_SAMPLINGS, AUTO),
    )
    draft_sampling: str = setting(
        "auto",
        _SPECULATION,
        "Sampling of draft tokens: {choices}; auto is that of the verification rule.",
        choices=("auto", *DRAFT_SAMPLINGS["coupled"]),
        old_name="drawing",
    )
    select: str = setting(
        "all",
        _SPECULATION,
        "Draft models to use for each request: all, or hedge:N for the N (default 2) that predict its text best.",
    )
    speculation_policy: str | Path | None = setting(
        None,
        _SPECULATION,
        "Learned speculation policy for --tree auto, made by specinfer tune --policy.",
        metavar="FILE",
        old_name="scheduler",
    )
    step_log: str | Path | None = setting(
        None,
        _SPECULATION,
        "Record the features and the outcome of each step here, to train a speculation policy.",
        metavar="FILE",
    )
    adapt_drafters: bool = setting(
        False,
        _SPECULATION,
        "Train draft models on the traffic in idle moments. Outputs do not change, but their speed then depends on the "
        "requests of others.",
    )
    adapt_dir: str | Path | None = setting(
        None, _SPECULATION, "Folder to keep the trained drafters in, for the next start.", metavar="FOLDER"
    )

    def __post_init__(self) -> None:
        if repr(self.dtype).startswith("torch."):  # a torch.dtype, as for vLLM and transformers
            object.__setattr__(self, "dtype", repr(self.dtype).removeprefix("torch."))
        check_choices(self)
        for name in _PATHS:
            if (path := getattr(self, name)) is not None or name == "model":
                check_path(name, path)
        self._name_revisions()
        # Each of them checks its fields.
        _ = self.engine_config, self.offload_config, self.parallel_config, self.speculative_config, self.lora_config
        SLO.parse(self.slo)
        check_device(self.device)
        if self.adapt_dir is not None and not self.adapt_drafters:
            raise ValueError("adapt_dir: drafters learn only with adapt_drafters; set that too, or leave it out")

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
        return EngineConfig(self.max_model_len, self.max_num_seqs, tokens, size, self.seed, self.gpu_memory_utilization)

    @property
    def offload_config(self) -> OffloadConfig:
        """Location of layers that do not fit into memory."""
        return OffloadConfig(self.offload, self.memory_budget, self.offload_folder)

    @property
    def lora_config(self) -> LoRAConfig | None:
        """Limits for adapters, or None if requests may have none."""
        most = self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras
        config = LoRAConfig(self.max_loras, self.max_lora_rank, most)
        return config if self.enable_lora else None

    @property
    def parallel_config(self) -> ParallelConfig:
        """Ranks of the target."""
        return ParallelConfig(
            self.tensor_parallel_size, self.pipeline_parallel_size, self.nnodes, self.node_rank, self.master_addr,
            self.master_port, self.drafter_placement, None if self.cluster_cert is None else str(self.cluster_cert),
            self.insecure_cluster,
        )  # fmt: skip

    @property
    def speculative_config(self) -> SpeculativeConfig:
        """Drafters, trees and verification."""
        policy = None if self.speculation_policy is None else str(self.speculation_policy)
        return SpeculativeConfig(
            parse_drafters(self.drafters), self.tree, self.verification, self.draft_sampling, self.select, policy,
            (self.prompt_lookup_min, self.prompt_lookup_max),
        )  # fmt: skip

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
