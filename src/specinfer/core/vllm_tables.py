"""vLLM's names that are not ours: which of them have no effect here, and which values are refused with a remedy.

The tables are the only place of this knowledge: `EngineArgs`, `SamplingParams`, the command line and docs/vllm.md read
them. A name that is also one of ours is not in them, because it works.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class VllmName(NamedTuple):
    """An argument of vLLM that is not one of ours.

    Attributes:
        about: Why it has no effect, or what to use instead.
        accepted: Values that are accepted without effect, or None for all.
        is_switch: Whether its flag has no value on the command line.
    """

    about: str
    accepted: tuple[Any, ...] | None = (None,)
    is_switch: bool = False


def _ignored(about: str, names: str, switches: str = "") -> dict[str, VllmName]:
    """Return names without effect; those of switches are flags without a value."""
    values = dict.fromkeys(names.split(), VllmName(about, None))
    return values | dict.fromkeys(switches.split(), VllmName(about, None, is_switch=True))


def _only(about: str, names: str, *accepted: Any, is_switch: bool = False) -> dict[str, VllmName]:
    """Return names of which some values have no effect; None is one of them."""
    return dict.fromkeys(names.split(), VllmName(about, (None, *accepted), is_switch))


_ANY = None
_MEDIA = "models read text only"
_POOLING = "for models that are made for embeddings; see embed"
_DEFINITION = "definitions are those of transformers"
_CONSTRAINTS = "llguidance is used for every constraint"
_EDIT = "edit config.json in a copy of the model"
_PLUGINS = "there are no plug-ins"
_RANKS = "ranks are processes that are started here or with nnodes"
_OTHER_ENGINES = "the cache and the weights stay with their engine"
ENGINE: Mapping[str, VllmName] = {
    **_ignored(
        _MEDIA,
        "allowed_local_media_path allowed_media_domains default_mm_loras ec_manager_config limit_mm_per_prompt "
        "media_io_kwargs mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
        "mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_hasher_algorithm "
        "mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device mm_processor_kwargs "
        "mm_shm_cache_max_object_size_mb mm_tensor_ipc video_pruning_method video_pruning_rate",
        "disable_chunked_mm_input disable_mm_preprocessor_cache enable_mm_embeds enable_mm_processor_stats "
        "enable_tower_connector_lora interleave_mm_strings language_model_only mm_device_do_normalize "
        "skip_mm_profiling",
    ),
    **_ignored(
        "the device decides which kernels run",
        "all2all_backend attention_backend attention_config gdn_prefill_backend kda_prefill_backend kernel_config "
        "linear_backend mamba_backend mamba_config mamba_ssu_algorithm moe_backend",
        "disable_cascade_attn disable_custom_all_reduce enable_bf16x3_router_gemm enable_flashinfer_autotune "
        "use_fp64_gumbel",
    ),
    **_ignored(
        "passes are captured, and nothing is compiled; see enforce_eager",
        "compilation_config cuda_graph_sizes cudagraph_capture_sizes max_cudagraph_capture_size "
        "max_seq_len_to_capture optimization_level performance_mode",
    ),
    **_ignored(
        "experts are sharded with the other layers",
        "eplb_config expert_placement_strategy",
        "enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel",
    ),
    **_ignored(
        "batches are not split, and the next step is prepared while the device computes",
        "dbo_decode_token_threshold dbo_prefill_token_threshold num_lookahead_slots num_scheduler_steps ubatch_size",
        "async_scheduling disable_async_output_proc enable_batch_sharded_sampling enable_dbo",
    ),
    **_ignored(
        "prompts are always read in chunks of max_num_batched_tokens",
        "long_prefill_token_threshold max_long_partial_prefills max_num_partial_prefills max_num_scheduled_tokens "
        "prefill_schedule_interval scheduler_delay_factor watermark",
        "enable_chunked_prefill scheduler_reserve_full_isl",
    ),
    **_ignored(
        "the cache has single slots, not blocks",
        "block_size mamba_block_size mamba_cache_mode prefix_cache_retention_interval prefix_caching_hash_algo "
        "prefix_match_unit",
        "disable_hybrid_kv_cache_manager kv_sharing_fast_prefill use_v2_block_manager",
    ),
    **_ignored(
        "states of recurrent layers have the type of their definition",
        "mamba_cache_dtype mamba_cache_philox_rounds mamba_ssm_cache_dtype replayssm_buffer_len",
        "enable_mamba_cache_stochastic_rounding use_replayssm",
    ),
    **_ignored(
        "preempted requests are computed again",
        "kv_offloading_backend kv_offloading_size preemption_mode swap_space",
    ),
    **_ignored(
        "each rank reads its own part of the weights, as its device needs them",
        "ignore_patterns max_parallel_loading_workers model_loader_extra_config pt_load_map_location "
        "safetensors_load_strategy",
        "allow_deprecated_quantization use_tqdm_on_load",
    ),
    **_ignored(
        "the server logs requests and has metrics; see --no-access-log and --log-stats-interval",
        "collect_detailed_traces jit_monitor_mode kv_cache_metrics_sample kv_events_config otlp_traces_endpoint "
        "per_request_spec_decode_metrics profiler_config show_hidden_metrics_for_version",
        "aggregate_engine_logging cudagraph_metrics disable_log_requests disable_log_stats "
        "enable_layerwise_nvtx_tracing enable_log_requests enable_logging_iteration_details enable_mfu_metrics "
        "jit_monitor_verbose kv_cache_metrics",
    ),
    **_ignored(
        _RANKS,
        "cp_kv_cache_interleave_size cpu_distributed_timeout_seconds data_parallel_backend "
        "dcp_comm_backend dcp_kv_cache_interleave_size distributed_timeout_seconds dp_sync_interval "
        "fault_tolerance_config numa_bind_cpus numa_bind_nodes",
        "dcp_q_replicate disable_nccl_for_dp_synchronization enable_cumem_allocator enable_fault_tolerance "
        "enable_nccl_comm_suspend numa_bind ray_workers_use_nsight",
    ),
    **_ignored(
        "prompts may be token ids in any case",
        "renderer_num_workers tokenizer_pool_extra_config tokenizer_pool_size tokenizer_pool_type",
        "skip_tokenizer_init tokens_only",
    ),
    **_ignored(
        "matrices of adapters are stored as each device needs them",
        "lora_extra_vocab_size",
        "enable_mixed_moe_lora_format enable_moe_shared_loras fully_sharded_loras specialize_active_lora",
    ),
    **_ignored(_CONSTRAINTS, "guided_decoding_backend structured_outputs_config", "guided_decoding_disable_fallback"),
    **_ignored("tools that a request has may always be called", "", "enable_auto_tool_choice"),
    **_ignored("thoughts are separated from answers; see reasoning_parser", "", "enable_reasoning"),
    **_ignored("a request may ask for 100 at most", "max_logprobs"),
    **_ignored("for specinfer serve", "served_model_name shutdown_timeout stream_interval"),
    **_ignored(_PLUGINS, "additional_config", "fail_on_environ_validation"),
    **_ignored("prompts are text or token ids", "", "enable_prompt_embeds"),
    **_ignored("shut the LLM down and load it again", "", "enable_sleep_mode"),
    **_ignored(f"code of a checkpoint is never run: {_DEFINITION}", "", "trust_remote_code"),
    **_only("use the encoder elsewhere: models read text only", "mm_encoder_only", False, is_switch=True),
    **_only("scales of the cache are those of the checkpoint, or 1", "calculate_kv_scales", False, is_switch=True),
    **_only("keys and values of all layers have kv_cache_dtype", "kv_cache_dtype_skip_layers", []),
    **_ignored("code of a checkpoint is never run", "code_revision"),
    **_only("configurations are in the format of transformers, or in a GGUF file", "config_format", "auto", "hf"),
    **_only("put config.json into the folder of the model", "hf_config_path"),
    **_only("name the folder with the weights as the model", "model_weights", ""),
    **_only(_DEFINITION, "model_impl", "auto", "transformers", "vllm"),
    **_only(_DEFINITION, "model_class_overrides", {}),
    **_only(_POOLING, "convert", "auto", "none"),
    **_only(_POOLING, "runner task", "auto", "generate"),
    **_only(_POOLING, "override_pooler_config pooler_config diffusion_config"),
    **_only('use offload="cpu" with memory_budget', "cpu_offload_gb offload_group_size", 0),
    **_ignored(
        "see offload",
        "cpu_offload_params offload_backend offload_num_in_group offload_params offload_prefetch_step",
    ),
    **_only("use specinfer serve --replicas", "data_parallel_size data_parallel_size_local", 1),
    **_only("use specinfer serve --replicas", "data_parallel_rank data_parallel_start_rank", 0),
    **_only("use specinfer serve --replicas", "data_parallel_address data_parallel_rpc_port"),
    **_only(
        "use specinfer serve --replicas",
        "data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb", False, is_switch=True,
    ),
    **_only("use tensor_parallel_size", "decode_context_parallel_size prefill_context_parallel_size", 1),
    **_only("use device, or set CUDA_VISIBLE_DEVICES", "device_ids"),
    **_only("the window of a model is always applied", "disable_sliding_window", False, is_switch=True),
    **_only(_RANKS, "distributed_executor_backend", "mp", "uni", "ray"),
    **_only("set HF_HOME", "download_dir"),
    **_only("set HF_TOKEN", "hf_token", True, False),
    **_only("generate has the defaults of SamplingParams", "generation_config", "auto", "vllm"),
    **_only("give the values in SamplingParams", "override_generation_config", {}),
    **_only(_EDIT, "hf_overrides", {}),
    **_only(_EDIT, "rope_scaling rope_theta"),
    **_only(_OTHER_ENGINES, "afd_config ec_transfer_config kv_transfer_config weight_transfer_config"),
    **_only("adapters change all layers that they have matrices for", "lora_target_modules", []),
    **_only("adapters have the type that the device computes with", "lora_dtype", "auto"),
    **_only("merge adapters with biases into the model", "enable_lora_bias", False, is_switch=True),
    **_only("name adapters in requests; see enable_lora", "qlora_adapter_name_or_path"),
    **_only(
        "weights are safetensors or GGUF files", "load_format",
        "auto", "safetensors", "gguf", "hf", "fastsafetensors", "runai_streamer",
    ),
    **_only(
        "use logit_bias, bad_words, allowed_token_ids or structured_outputs of a request",
        "logits_processor_pattern logits_processors", [],
    ),
    **_only("log-probabilities are those before processing", "logprobs_mode", "raw_logprobs"),
    **_only("for specinfer serve; see --max-num-queued-reqs", "max_num_queued_reqs max_num_queued_tokens"),
    **_only("use kv_cache_memory_bytes", "num_gpu_blocks_override"),
    **_only("attention computes with the dtype of the model", "override_attention_dtype"),
    **_only("use quantization", "quantization_config"),
    **_only("use reasoning_parser", "reasoning_config"),
    **_only("requests of AsyncLLM and of the server have priorities", "scheduling_policy", "fcfs", "priority"),
    **_only("the kind of a tokenizer follows from its files", "tokenizer_mode", "auto", "hf", "slow"),
    **_only(_PLUGINS, "io_processor_plugin reasoning_parser_plugin scheduler_cls worker_extension_cls", ""),
    **_only("there is one kind of rank", "worker_cls", "auto"),
    **_only("routes to experts are not returned", "enable_return_routed_experts", False, is_switch=True),
    **_only("requests are not replayed", "enable_trace_replay", False, is_switch=True),
}  # fmt: skip

_HEADS = "heads of this kind cannot be loaded; name one of another method, or a small model with draft_model"
METHODS: Mapping[str, str] = {
    **dict.fromkeys(("medusa", "mlp_speculator"), _HEADS),
    "custom_class": "code of a caller is not a drafter; name a model, or use ngram or suffix",
    "extract_hidden_states": "hidden states are not returned; leave it out",
}
_SIMULATED = "acceptance is never simulated; leave it out"
_STORE = "suffix keeps what fits into its own limit of tokens, and tree limits the depth"
SPECULATIVE: Mapping[str, VllmName] = {
    "attention_backend": VllmName("the device decides the attention kernels", _ANY),
    "code_revision": VllmName("code of a checkpoint is never run", _ANY),
    "disable_by_batch_size": VllmName('tree="auto" decides by the measured costs of each batch size', _ANY),
    "disable_eagle_block_drop": VllmName("cached prefixes are used to their last token but one", _ANY),
    "disable_logprobs": VllmName("log-probabilities are returned in any case", _ANY),
    "disable_padded_drafter_batch": VllmName("batches of drafters are not padded", _ANY),
    "draft_load_config": VllmName("drafters are read as the model is", _ANY),
    "draft_sample_method": VllmName("output does not depend on it; see draft_sampling", _ANY),
    "draft_tensor_parallel_size": VllmName("draft models are not sharded; see drafter_placement", _ANY),
    "dspark_draft_topk": VllmName("every candidate is scored", _ANY),
    "enable_adaptive_verification": VllmName('tree="auto" decides, without num_speculative_tokens', _ANY),
    "enforce_eager": VllmName("drafters have enforce_eager of the LLM", _ANY),
    "index_share_for_mtp_iteration": VllmName("layers with sparse attention are not MTP layers here", _ANY),
    "kv_cache_dtype": VllmName("caches of drafters have the kv_cache_dtype of the LLM", _ANY),
    "max_model_len": VllmName("a drafter stops at the end of its own context", _ANY),
    "moe_backend": VllmName("the device decides how experts are computed", _ANY),
    "num_speculative_tokens_per_batch_size": VllmName(
        'tree="auto" decides by the measured costs of each batch size', _ANY
    ),
    "parallel_drafting": VllmName("whether a drafter drafts in one pass is in its own files", _ANY),
    "rejection_sample_method": VllmName("use verification", (None, "standard", "strict")),
    "spec_token_tree": VllmName("use tree"),
    "speculative_token_tree": VllmName("use tree"),
    "suffix_decoding_max_cached_requests": VllmName(_STORE, _ANY),
    "suffix_decoding_max_spec_factor": VllmName("tree limits the draft tokens", _ANY),
    "suffix_decoding_max_tree_depth": VllmName(_STORE, _ANY),
    "suffix_decoding_min_token_prob": VllmName('tree="best-first" drafts the most probable tokens first', _ANY),
    "synthetic_acceptance_length": VllmName(_SIMULATED),
    "synthetic_acceptance_rates": VllmName(_SIMULATED),
    "tensor_parallel_size": VllmName("draft models are not sharded; see drafter_placement", _ANY),
    "use_heterogeneous_vocab": VllmName("tokens of drafters with another tokenizer are always translated", _ANY),
    "use_local_argmax_reduction": VllmName("draft models are not sharded", _ANY),
}

SAMPLING: Mapping[str, VllmName] = {
    "best_of": VllmName("ask for n outputs and choose among them", (None, 1)),
    "detokenize": VllmName("outputs have text wherever the model has a tokenizer", _ANY),
    "early_stopping": VllmName("there is no beam search", (None, False)),
    "extra_args": VllmName("there are no plug-ins that read it", _ANY),
    "flat_logprobs": VllmName("log-probabilities are one dict for each token", _ANY),
    "guided_decoding": VllmName("use structured_outputs"),
    "length_penalty": VllmName("there is no beam search", (None, 1.0)),
    "logits_processors": VllmName("use logit_bias, bad_words, allowed_token_ids or structured_outputs", (None, [])),
    "output_text_buffer_length": VllmName("text that may begin a stop string is held back", _ANY),
    "prompt_logprob_start": VllmName("prompt_logprobs are of the whole prompt"),
    "prompt_logprob_token_ids": VllmName("prompt_logprobs are of the most probable tokens"),
    "repetition_detection": VllmName("use repetition_penalty or a limit of tokens"),
    "routed_experts_prompt_start": VllmName("routes to experts are not returned", _ANY),
    "skip_clone": VllmName("parameters are never changed", _ANY),
    "skip_reading_prefix_cache": VllmName(
        "answers do not depend on it; a prompt may have a cache_salt of its own", _ANY
    ),
    "spaces_between_special_tokens": VllmName("text is that of the tokenizer's decode", _ANY),
    "stream_interval": VllmName("stream yields a chunk for each step; the server has stream_interval", _ANY),
    "trace_decode_token_ids": VllmName("tokens cannot be forced; use a prompt and prompt_logprobs"),
    "truncate_prompt_tokens": VllmName("cut the prompt before; the server's endpoints have the field"),
    "use_beam_search": VllmName("there is no beam search", (None, False)),
}

CALLS: Mapping[str, VllmName] = {  # arguments of generate and chat
    "chat_template_content_format": VllmName("contents are text, or parts of text", _ANY),
    "data_parallel_rank": VllmName("the server chooses replicas", _ANY),
    "guided_options_request": VllmName("use structured_outputs in SamplingParams"),
    "mm_processor_kwargs": VllmName(_MEDIA, _ANY),
    "priority": VllmName("prompts run in their order; requests of AsyncLLM and of the server have priorities", _ANY),
    "prompt_adapter_request": VllmName("use lora_request"),
    "tokenization_kwargs": VllmName("cut the prompt before, or give prompt_token_ids", (None, {})),
    "trace_headers": VllmName("requests are not traced", _ANY),
}
