"""vLLM's names: which of its arguments and sampling parameters work, which have no effect, and which are refused.

The tables are the only place of this knowledge: `EngineArgs`, `SamplingParams`, the command line and docs/vllm.md read
them.
A name that is also one of ours is not in them, because it works.
"""

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

from specinfer.core.errors import as_python
from specinfer.core.flags import current_names
from specinfer.core.lookups import MTP, quoted_lookups, reserved_names
from specinfer.core.tree_shape import MAX_TREE_NODES

T = TypeVar("T")


class VllmName(NamedTuple):
    """An argument of vLLM that is not one of ours.

    Attributes:
        about: Why it has no effect, or what to use instead.
        accepted: Values that are accepted without effect, or None for all.
        is_switch: Whether the command line accepts it without effect, as a flag without a value.
    """

    about: str
    accepted: tuple[Any, ...] | None = (None,)
    is_switch: bool = False


_ANY = None
_MEDIA = "models read text only"
_POOLING = "for models that are made for embeddings; see embed"
ENGINE: Mapping[str, VllmName] = {
    "allowed_local_media_path": VllmName(_MEDIA, ("", None)),
    "async_scheduling": VllmName("the next step is prepared while the device computes wherever that is possible", _ANY),
    "block_size": VllmName("the cache has single slots, not blocks", _ANY),
    "calculate_kv_scales": VllmName("scales of keys and values are those of the checkpoint, or 1", (False,)),
    "code_revision": VllmName("code of a checkpoint is never run"),
    "compilation_config": VllmName("passes are captured, and nothing is compiled; see enforce_eager", _ANY),
    "config_format": VllmName("configurations are in the format of transformers, or in a GGUF file", ("auto", "hf")),
    "convert": VllmName(_POOLING, ("auto", "none")),
    "cpu_offload_gb": VllmName('use offload="cpu" with memory_budget', (0, 0.0)),
    "data_parallel_size": VllmName("use specinfer serve --replicas", (1,)),
    "disable_custom_all_reduce": VllmName("there is no kernel of our own for it", _ANY),
    "disable_log_requests": VllmName("the server logs requests; see --no-access-log", _ANY),
    "disable_log_stats": VllmName("get_metrics always has counters; the server logs by --log-stats-interval", _ANY),
    "disable_sliding_window": VllmName("the window of a model is always applied", (False,)),
    "distributed_executor_backend": VllmName("ranks are processes that are started here or with nnodes", (None, "mp")),
    "download_dir": VllmName("set HF_HOME"),
    "enable_auto_tool_choice": VllmName("tools that a request has may always be called", _ANY, is_switch=True),
    "enable_chunked_prefill": VllmName("prompts are always read in chunks of max_num_batched_tokens", (True, None)),
    "enable_expert_parallel": VllmName("experts are sharded with the other layers", (False,)),
    "enable_log_requests": VllmName("the server logs requests; see --no-access-log", _ANY),
    "enable_prompt_embeds": VllmName("prompts are text or token ids", (False,)),
    "enable_reasoning": VllmName("thoughts are told from answers; see reasoning_parser", _ANY, is_switch=True),
    "enable_sleep_mode": VllmName("shut the LLM down and load it again", (False,)),
    "generation_config": VllmName("generate has the defaults of SamplingParams", (None, "auto", "vllm")),
    "guided_decoding_backend": VllmName("llguidance is used for every constraint", _ANY),
    "hf_overrides": VllmName("edit config.json in a copy of the model", (None, {})),
    "hf_token": VllmName("set HF_TOKEN", (None, False)),
    "kv_transfer_config": VllmName("the cache stays with its engine"),
    "limit_mm_per_prompt": VllmName(_MEDIA, _ANY),
    "load_format": VllmName("weights are safetensors or GGUF files", ("auto", "safetensors", "gguf")),
    "logits_processors": VllmName("use logit_bias, bad_words, allowed_token_ids or structured_outputs of a request"),
    "max_logprobs": VllmName("a request may ask for 100 at most", _ANY),
    "max_parallel_loading_workers": VllmName("each rank loads its own part", _ANY),
    "max_seq_len_to_capture": VllmName("captured passes have no limit of length", _ANY),
    "mm_processor_kwargs": VllmName(_MEDIA, (None, {})),
    "model_impl": VllmName("definitions are those of transformers", ("auto", "transformers")),
    "num_gpu_blocks_override": VllmName("use kv_cache_memory_bytes"),
    "override_generation_config": VllmName("give the values in SamplingParams", (None, {})),
    "override_pooler_config": VllmName(_POOLING),
    "pooler_config": VllmName(_POOLING),
    "preemption_mode": VllmName("preempted requests are computed again", (None, "recompute")),
    "reasoning_config": VllmName("use reasoning_parser"),
    "rope_scaling": VllmName("edit config.json in a copy of the model"),
    "rope_theta": VllmName("edit config.json in a copy of the model"),
    "runner": VllmName(_POOLING, ("auto", "generate")),
    "scheduling_policy": VllmName("requests of AsyncLLM and of the server have priorities", ("fcfs", "priority")),
    "served_model_name": VllmName("for specinfer serve; see --served-model-name"),
    "skip_tokenizer_init": VllmName("prompts may be token ids in any case", (False,)),
    "structured_outputs_config": VllmName("llguidance is used for every constraint", _ANY),
    "swap_space": VllmName("preempted requests are computed again, not swapped", _ANY),
    "task": VllmName(_POOLING, ("auto", "generate")),
    "tokenizer_mode": VllmName("the kind of a tokenizer follows from its files", ("auto", "hf")),
    "trust_remote_code": VllmName("code of a checkpoint is never run: definitions are those of transformers", _ANY),
    "use_v2_block_manager": VllmName("there is one scheduler", _ANY),
    "worker_cls": VllmName("there is one kind of rank", ("auto",)),
}

_HEADS = "heads of this kind cannot be loaded; name one of another method, or a small model with draft_model"
METHODS: Mapping[str, str] = {
    **dict.fromkeys(("medusa", "mlp_speculator"), _HEADS),
    "custom_class": "code of a caller is not a drafter; name a model, or use ngram or suffix",
    "extract_hidden_states": "hidden states are not returned; leave it out",
}
_SAME_METHOD = {"ngram_gpu": "ngram"}
_WITH_MODEL = ("mtp", "gemma4_mtp")  # MTP methods that may have a model of their own, an assistant
_OF_MODELS = ("draft_model", "eagle", "eagle3", "dflash", "dspark")  # methods with a model, whose files say its kind
_SIMULATED = "acceptance is never simulated; leave it out"
_STORE = "suffix keeps what fits into its own limit of tokens, and tree limits the depth"
SPECULATIVE: Mapping[str, VllmName] = {
    "attention_backend": VllmName("the device decides the attention kernels", _ANY),
    "code_revision": VllmName("code of a checkpoint is never run"),
    "disable_by_batch_size": VllmName('tree="auto" decides by the measured costs of each batch size'),
    "disable_eagle_block_drop": VllmName("cached prefixes are used to their last token but one", _ANY),
    "disable_logprobs": VllmName("log-probabilities are returned in any case", _ANY),
    "disable_padded_drafter_batch": VllmName("batches of drafters are not padded", _ANY),
    "draft_load_config": VllmName("drafters are read as the model is"),
    "draft_sample_method": VllmName("output does not depend on it; see draft_sampling", _ANY),
    "draft_tensor_parallel_size": VllmName("draft models are not sharded; see drafter_placement", (None, 1)),
    "dspark_draft_topk": VllmName("every candidate is scored", _ANY),
    "enable_adaptive_verification": VllmName('leave num_speculative_tokens out: tree="auto" decides', (None, False)),
    "enforce_eager": VllmName("set enforce_eager of the LLM"),
    "index_share_for_mtp_iteration": VllmName("layers with sparse attention are not MTP layers here", (None, False)),
    "kv_cache_dtype": VllmName("caches of drafters have the kv_cache_dtype of the LLM", (None, "auto")),
    "max_model_len": VllmName("a drafter stops at the end of its own context", _ANY),
    "moe_backend": VllmName("the device decides how experts are computed", _ANY),
    "num_speculative_tokens_per_batch_size": VllmName('tree="auto" decides by the measured costs of each batch size'),
    "parallel_drafting": VllmName("whether a drafter drafts in one pass is in its own files", _ANY),
    "rejection_sample_method": VllmName("use verification", (None, "standard", "strict")),
    "spec_token_tree": VllmName("use tree"),
    "speculative_token_tree": VllmName("use tree"),
    "suffix_decoding_max_cached_requests": VllmName(_STORE, _ANY),
    "suffix_decoding_max_spec_factor": VllmName("tree limits the draft tokens", (None, 1.0)),
    "suffix_decoding_max_tree_depth": VllmName(_STORE, _ANY),
    "suffix_decoding_min_token_prob": VllmName('tree="best-first" drafts the most probable tokens first', (None, 0.1)),
    "synthetic_acceptance_length": VllmName(_SIMULATED),
    "synthetic_acceptance_rates": VllmName(_SIMULATED),
    "tensor_parallel_size": VllmName("set tensor_parallel_size of the LLM"),
    "use_heterogeneous_vocab": VllmName("tokens of drafters with another tokenizer are always translated", _ANY),
    "use_local_argmax_reduction": VllmName("draft models are not sharded", _ANY),
}

SAMPLING: Mapping[str, VllmName] = {
    "best_of": VllmName("ask for n outputs and choose among them", (None, 1)),
    "detokenize": VllmName("outputs have text wherever the model has a tokenizer", (True,)),
    "early_stopping": VllmName("there is no beam search", (None, False)),
    "extra_args": VllmName("there are no plug-ins that read it", (None, {})),
    "flat_logprobs": VllmName("log-probabilities are one dict for each token", (False,)),
    "guided_decoding": VllmName("use structured_outputs"),
    "length_penalty": VllmName("there is no beam search", (None, 1.0)),
    "logits_processors": VllmName("use logit_bias, bad_words, allowed_token_ids or structured_outputs", (None, [])),
    "prompt_logprob_start": VllmName("prompt_logprobs are of the whole prompt"),
    "prompt_logprob_token_ids": VllmName("prompt_logprobs are of the most probable tokens"),
    "repetition_detection": VllmName("use repetition_penalty or a limit of tokens"),
    "routed_experts_prompt_start": VllmName("routes to experts are not returned", (0,)),
    "skip_clone": VllmName("parameters are never changed", _ANY),
    "skip_reading_prefix_cache": VllmName("give the prompt a cache_salt of its own", (None, False)),
    "spaces_between_special_tokens": VllmName("text is that of the tokenizer's decode", _ANY),
    "stream_interval": VllmName("stream yields a chunk for each step; the server has stream_interval", (None, 1)),
    "trace_decode_token_ids": VllmName("tokens cannot be forced; use a prompt and prompt_logprobs"),
    "truncate_prompt_tokens": VllmName("cut the prompt before; the server's endpoints have the field"),
    "use_beam_search": VllmName("there is no beam search", (None, False)),
}


def without_vllm_names(
    given: Mapping[str, Any], table: Mapping[str, VllmName], ours: Iterable[str], place: str = ""
) -> dict[str, Any]:
    """Return arguments without those of vLLM that have no effect here.

    Args:
        given: Arguments by name.
        table: vLLM's names that are not ours.
        ours: Names that work, whatever the table has.
        place: Prefix of messages.

    Raises:
        ValueError: An argument would have an effect in vLLM that it cannot have here; the message names the remedy.
    """
    kept, known = {}, frozenset(ours)
    for name, value in given.items():
        entry = None if name in known else table.get(name)
        if entry is None:
            kept[name] = value
        elif entry.accepted is not None and value not in entry.accepted:
            raise ValueError(f"{place}{name}: {value!r:.60} has no equivalent: {entry.about}")
    return kept


def check_arguments(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Check the names of keyword arguments.

    Raises:
        TypeError: One is not known; the message has the nearest name that is.
    """
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1, 0.7)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def takes_vllm_arguments(kind: type[T]) -> type[T]:
    """Let the constructor of EngineArgs take vLLM's arguments, too."""
    make = kind.__init__

    @functools.wraps(make)
    def init(self: Any, *model: Any, **given: Any) -> None:
        make(self, *model, **engine_arguments(kind, given))

    kind.__init__ = init  # type: ignore[method-assign]
    return kind


def engine_arguments(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that EngineArgs has, those of `speculative_config` among them.

    Raises:
        TypeError: An argument is not known; the message has the nearest name.
        ValueError: An argument cannot be used; the message names it.
    """
    ours = {each.name: each.default for each in fields(kind)}
    arguments = {name: as_python(value) for name, value in given.items()}
    config = arguments.pop("speculative_config", None) or {}
    if not isinstance(config, Mapping):
        raise ValueError(f"speculative_config: give a dict such as {{'method': 'ngram'}}, not {config!r:.60}")
    chosen = from_speculative_config(current_names(kind, config))
    # vLLM's defaults of some arguments are None.
    arguments = {name: value for name, value in arguments.items() if value is not None or ours.get(name) is None}
    arguments = without_vllm_names(arguments, ENGINE, ours)
    check_arguments("LLM", arguments, ours)
    if both := sorted(arguments.keys() & chosen.keys()):
        raise ValueError(f"speculative_config: it and {both[0]} both choose {both[0]}; leave one out")
    return arguments | chosen


_SAME = (
    *("tree", "verification", "draft_sampling", "select", "speculation_policy"),
    *("prompt_lookup_max", "prompt_lookup_min"),
)


def from_speculative_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return our arguments for vLLM's `speculative_config`, whose keys may also be ours.

    Raises:
        ValueError: A key or a value is not known, or two contradict each other.
    """
    keys = ("method", "model", "revision", "quantization", "num_speculative_tokens", *_SAME)
    config = without_vllm_names(given, SPECULATIVE, keys, "speculative_config: ")
    if unknown := sorted(config.keys() - set(keys)):
        raise ValueError(f"speculative_config: key {unknown[0]!r} is not known; use {', '.join(keys)}")
    chosen: dict[str, Any] = {name: config[name] for name in _SAME if config.get(name) is not None}
    if config.get("quantization") is not None:
        chosen["drafter_quantization"] = config["quantization"]
    if (drafters := _drafters(config.get("method"), config.get("model"), config.get("revision"))) is not None:
        chosen["drafters"] = drafters
    _choose_sizes(chosen)
    if (count := config.get("num_speculative_tokens")) is not None:
        if "tree" in chosen:
            raise ValueError("speculative_config: tree and num_speculative_tokens both choose the shape; leave one out")
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_TREE_NODES:
            raise ValueError(
                f"speculative_config: num_speculative_tokens must be from 1 to {MAX_TREE_NODES}, not {count!r}"
            )
        chosen["tree"] = ",".join(["1"] * count)
    return chosen


def _drafters(method: object, model: object, revision: object) -> list[str] | None:
    if revision not in (None, "main"):
        if not isinstance(model, str) or not isinstance(revision, str):
            raise ValueError("speculative_config: revision is for one model of the hub; of several, name NAME@REVISION")
        model = f"{model}@{revision}"
    if method is None and model is None:
        return None
    method = _SAME_METHOD.get(str(method), method)
    if method in _WITH_MODEL and model is not None:
        method = None  # the model's files say its kind
    elif isinstance(method, str) and method.endswith("_mtp"):  # vLLM has a name for each family
        method = MTP
    if method in reserved_names():
        if model is not None:
            raise ValueError(f'speculative_config: method "{method}" has no model; leave one out')
        return [str(method)]
    if method in METHODS:
        raise ValueError(f"speculative_config: method {method!r}: {METHODS[str(method)]}")
    if method is not None and method not in _OF_MODELS:
        names = ", ".join(f'"{name}"' for name in _OF_MODELS)
        raise ValueError(f'speculative_config: method must be {names}, "{MTP}", {quoted_lookups("or")}, not {method!r}')
    if model is None:
        raise ValueError(f"speculative_config: method {method!r} needs a model; name its folder, file or hub name")
    models = [model] if isinstance(model, str) else model
    if not isinstance(models, list) or not models or not all(isinstance(name, str) for name in models):
        raise ValueError("speculative_config: model must be a name or a list of names")
    return models


def _choose_sizes(chosen: dict[str, Any]) -> None:
    """Let one n-gram size stand for both limits if only it is given, as in vLLM."""
    least, most = "prompt_lookup_min", "prompt_lookup_max"
    for name, other in ((least, most), (most, least)):
        if name in chosen:
            chosen.setdefault(other, chosen[name])
