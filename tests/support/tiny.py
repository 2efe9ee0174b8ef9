"""Tiny random models of every supported family, a tokenizer, and engines of them: no downloads."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers import __version__ as transformers_version

from specinfer.core.options import settings_of
from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import Draw, TokenTree, TreeBudget
from specinfer.drafters import Drafter
from specinfer.engine.engine import Engine
from specinfer.engine.scheduler import Scheduler
from specinfer.engine_args import EngineArgs
from specinfer.model.attention import register
from specinfer.model.batch import Piece
from specinfer.model.load import load_model
from specinfer.model.past import PACKED
from specinfer.model.runner import ModelRunner
from specinfer.policy.base import FixedPolicy, SpeculationPolicy

VOCAB = 96
EOS = 1  # of the tokenizer below; the models have none unless asked for
_NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_LLAMA = _NONE | {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_HEAD = {"head_dim": 8}
_WINDOW = {"sliding_window": 8}
_GPT = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "eos_token_id": None,
    "bos_token_id": None,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GEMMA = _LLAMA | _WINDOW | _HEAD | {"query_pre_attn_scalar": 8}
_GEMMA_4 = _LLAMA | _WINDOW | _HEAD | {
    "global_head_dim": 16, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCAB,
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
}  # fmt: skip
_FALCON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "alibi": False,
    "new_decoder_architecture": False,
}

# Names are transformers' model types; what follows a hyphen tells variants apart.
_SHORT_YARN = {  # of 256 positions, as many as others have
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 8,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "opt": _NONE
    | {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "word_embed_proj_dim": 32,
    },
    "falcon": _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-7b": _FALCON | {"multi_query": True},
    "falcon-rw": _FALCON | {"multi_query": False, "alibi": True, "parallel_attn": False, "bias": True},
    "mpt": {
        "vocab_size": VOCAB,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 256,
        "eos_token_id": None,
    },
    "bloom": _NONE | {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "seq_length": 256},
    "gpt_bigcode": _GPT,
    "mistral": _LLAMA | _WINDOW | _HEAD,
    "mixtral": _LLAMA | _WINDOW | _LOCAL_MOE,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | _HEAD,
    "qwen3_moe": _LLAMA | _HEAD | _MOE,
    "gemma2": _GEMMA | {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0},
    "gemma3_text": _GEMMA
    | {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "phi3": _LLAMA | _WINDOW,
    "gpt2": _GPT,
    "gpt_neox": _LLAMA | {"num_key_value_heads": None},
    "starcoder2": _LLAMA | _WINDOW,
    "gpt_oss": _LLAMA | _WINDOW | _HEAD | _LOCAL_MOE | {"rope_parameters": _SHORT_YARN},
}

_KINDS_OF_ATTENTION = {"layer_types": ["sliding_attention", "full_attention"]}
GRANITE = {
    "residual_multiplier": 0.4, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "attention_multiplier": 0.2,
}  # fmt: skip
_GROUPED = _HEAD | {
    "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
# Other families that have native layers, each with what it differs from Llama in.
MORE_FUSED: dict[str, dict[str, Any]] = {
    "iquestcoder": _LLAMA,
    "internlm3": _LLAMA,
    "granite": _LLAMA | GRANITE,
    "smollm3-mixed": _LLAMA | {"no_rope_layers": [1, 0]},
    "seed_oss": _LLAMA | _HEAD | {"attention_out_bias": True},
    "ministral": _LLAMA | _WINDOW | _HEAD | _KINDS_OF_ATTENTION,
    "arcee": _LLAMA,
    "olmo2": _LLAMA,
    "olmo3-mixed": _LLAMA | _WINDOW | _KINDS_OF_ATTENTION,
    "exaone4-mixed": _LLAMA | _WINDOW | _KINDS_OF_ATTENTION,
    "glm": _LLAMA | _HEAD,
    "glm4": _LLAMA | _HEAD,
    "ernie4_5": _LLAMA | _HEAD | {"use_bias": True},
    "helium": _LLAMA | _HEAD,
    "qwen2_moe-mixed": _LLAMA | _MOE | {"shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
    "glm4_moe-grouped": _LLAMA | _GROUPED | {"use_qk_norm": True},
    "dots1": _LLAMA | _WINDOW | _GROUPED | _KINDS_OF_ATTENTION | {"n_shared_experts": 1},
    "solar_open": _LLAMA | _GROUPED,
    "exaone_moe": _LLAMA
    | _WINDOW
    | _HEAD
    | _KINDS_OF_ATTENTION
    | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2}
    | {"mlp_layer_types": ["dense", "sparse"], "first_k_dense_replace": 1},
    "hy_v3": _LLAMA | _HEAD | _MOE | {"num_experts": 8, "router_scaling_factor": 1.5, "first_k_dense_replace": 1},
    "minimax_m2": _LLAMA | _HEAD | _LOCAL_MOE | {"num_local_experts": 8, "rotary_dim": 4},
    "olmoe": _LLAMA | _MOE | {"norm_topk_prob": True},
    "ernie4_5_moe": _LLAMA | _MOE | {"num_experts": 8, "moe_num_experts": 8, "moe_k": 3, "moe_layer_start_index": 1},
    "granitemoe": _LLAMA | _LOCAL_MOE | GRANITE,
    "granitemoeshared": _LLAMA | _LOCAL_MOE | GRANITE | {"shared_intermediate_size": 24},
}
MORE_FUSED = {name: fields for name, fields in MORE_FUSED.items() if name.split("-")[0] in CONFIG_MAPPING}

# Gemma 4, whose layers store keys of two sizes, as the smallest, the dense and the sparse one of its models.
GEMMA_4: dict[str, dict[str, Any]] = {
    "gemma4_text": _GEMMA_4,
    "gemma4_text-shared": _GEMMA_4
    | {"hidden_size_per_layer_input": 6, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    | {"final_logit_softcapping": 5.0},
    "gemma4_text-alike": _GEMMA_4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4_text-moe": _GEMMA_4
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
}

_DELTA = _HEAD | {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2}
_MAMBA_1 = _NONE | {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip
_FACTORS = {
    "ssm_in_multiplier": 1.5, "ssm_out_multiplier": 0.8, "ssm_multipliers": [0.9, 1.1, 1.2, 0.7, 1.3],
    "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9, "key_multiplier": 0.8,
    "embedding_multiplier": 1.5, "lm_head_multiplier": 0.7, "mlp_multipliers": [1.1, 0.9],
}  # fmt: skip
# Families with layers that mix tokens without attention; their passes are not captured.
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": _LLAMA | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "lfm2-biased": _LLAMA | {"layer_types": ["conv", "full_attention"], "conv_bias": True, "conv_L_cache": 4},
    "lfm2_moe": _LLAMA | _MOE | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "qwen3_next": _LLAMA | _MOE | _DELTA | {"shared_expert_intermediate_size": 24},
    "qwen3_5_text": _LLAMA | _DELTA,
    "bamba": _LLAMA | _MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": _LLAMA
    | _MAMBA
    | _LOCAL_MOE
    | {"shared_intermediate_size": 24, "layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3},
    "nemotron_h": _LLAMA
    | _HEAD
    | {
        "layer_types": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "num_hidden_layers": 5,
    },
    "mamba2": _NONE
    | {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
    },
    "falcon_h1": _LLAMA | _HEAD | _MAMBA | _FACTORS | {"mamba_d_ssm": 64},
    "falcon_h1-normed": _LLAMA | _HEAD | _MAMBA | {"mamba_d_ssm": 64, "mamba_rms_norm": True},
    "jamba": _LLAMA | _MOE | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "qwen3_5_moe_text": _LLAMA | _MOE | _DELTA | {"shared_expert_intermediate_size": 24},
    "lfm3": _LLAMA
    | _HEAD
    | _WINDOW
    | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "sliding_attention"], "conv_L_cache": 3},
    "olmo_hybrid": _LLAMA | _DELTA,
    "olmo_hybrid-negative": _LLAMA | _DELTA | {"linear_allow_neg_eigval": True, "rope_parameters": None},
    "kimi_linear": _LLAMA | _LATENT | {"linear_head_dim": 8, "linear_num_heads": 4},
    "bailing_hybrid": _LLAMA | _LATENT | {"head_dim": 8, "n_group": 1, "topk_group": 1},
    "minimax": _LLAMA
    | _HEAD
    | _LOCAL_MOE
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
    | {"block_size": 8, "linear_attn_alpha_factor": 0.9, "linear_attn_beta_factor": 1.1},
    "recurrent_gemma": _LLAMA | {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8, "head_dim": 8},
    "mamba": _MAMBA_1,
    "falcon_mamba": _MAMBA_1,
}
# One family for each kind of layer.
KINDS_OF_HYBRIDS = (
    "lfm2_moe", "qwen3_next", "qwen3_5_text", "nemotron_h", "falcon_h1-normed", "jamba", "kimi_linear",
    "bailing_hybrid", "minimax", "recurrent_gemma", "mamba",
)  # fmt: skip


def quick(cases: Iterable[str], *chosen: str) -> list[Any]:
    """Cases of a test, of which those that are not chosen are slow."""
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def make_model(family: str, seed: int = 0, noise: float = 0.0, **changes: Any) -> Any:
    """A random model in fp32, with weights large enough that its greedy text is not one repeated token.

    A family without an entry above has Llama's sizes.
    With `noise` its matrices are disturbed by that share of their size: a drafter that agrees partly.
    A test of a family that this transformers does not have yet is skipped.
    """
    if family in HYBRIDS and family.split("-")[0] not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers_version} has no {family}")
    config = AutoConfig.for_model(
        family.split("-")[0], **((FAMILIES | MORE_FUSED | GEMMA_4 | HYBRIDS).get(family, _LLAMA) | changes)
    )
    torch.manual_seed(seed)
    # Eager knows soft caps and sinks; but Falcon's adds its ALiBi twice.
    config._attn_implementation = "sdpa" if family.split("-")[0] == "falcon" else "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 0.15 if "embed" not in name else 0.5)
            elif "sinks" in name:
                weight.normal_(0.0, 1.0)
        for weight in model.parameters():
            if weight.ndim > 1 and noise:
                weight += torch.randn_like(weight) * weight.std() * noise
    return model.eval()


def save_model(folder: Path, family: str = "llama", seed: int = 0, noise: float = 0.0, **changes: Any) -> Path:
    """The same, as a folder of safetensors."""
    make_model(family, seed, noise, **changes).save_pretrained(folder)
    return folder


# ---------------------------------------------------------------------------------------- tokenizer

# "\u00e9", "\u20ac" and an emoji are said byte by byte: text may break off inside a character.
_CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,!?'\n"
_MULTI_BYTE = "\u00e9\u20ac\U0001f642"
_MERGES = """
t h|h e|i n|e r|a n|r e|o n|a t|e n|n d|t i|e s|o r|t e|o f|e d|i s|i t|a l|a r|s t|t o|n t|n g|l l|o u
th e|in g|an d|er e|ti on|en t|th at|_ the|_ a|_ and|_ of|_ to|_ in|_ is|_ it|ou r|al l|e ll|_ s|_ w|_ b
st or|o m|e a|v er|, _|. _
"""


def _byte_names() -> dict[int, str]:
    """GPT-2's visible name of each byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def make_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Byte-level BPE of exactly `VOCAB` tokens: lower-case text, some of it in pieces of several characters."""
    names = _byte_names()
    data = [*_CHARACTERS.encode(), *dict.fromkeys(_MULTI_BYTE.encode())]
    space = names[ord(" ")]
    merges = [tuple(pair.replace("_", space).split(" ")) for pair in _MERGES.strip().replace("\n", "|").split("|")]
    tokens = ["<s>", "</s>", *(names[byte] for byte in data), *("".join(pair) for pair in merges)]
    assert len(tokens) == len(set(tokens)) == VOCAB, (len(tokens), len(set(tokens)))
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )


def save_tokenizer(folder: Path, chat_template: str | None = None) -> Path:
    """The tokenizer beside the model in `folder`."""
    make_tokenizer(chat_template).save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------ engines


def load_runner(folder: Path, num_slots: int = 2048, quantization: str | None = None) -> ModelRunner:
    return ModelRunner(load_model(folder, torch.float32, torch.device("cpu"), quantization), num_slots)


def transformers_model(folder: Path) -> Any:
    """As transformers loads it, with tree attention: what a test may take apart and change."""
    register()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=PACKED)
    return model.eval().requires_grad_(False)


def resized(runner: ModelRunner, num_slots: int, *, keeps_prefixes: bool = False) -> ModelRunner:
    """The same model with another cache."""
    return ModelRunner(runner.loaded, num_slots, keeps_prefixes=keeps_prefixes)


def logits(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab] of one pass over a prompt."""
    slots = runner.cache.reserve("a", len(tokens))
    try:
        piece = Piece.from_span(tokens, None, runner.cache.slots("a"), slots)
        return runner.forward([replace(piece, num_logits=len(tokens))])
    finally:
        runner.cache.free("a")


def make_engine(
    target: ModelRunner,
    drafter: Drafter | None = None,
    tree: Sequence[int] | TreeBudget | SpeculationPolicy = (),
    *,
    max_num_seqs: int = 32,
    max_num_batched_tokens: int = 512,
    verification: str = "coupled",
) -> Engine:
    """An engine whose trees are a fixed expansion, grown by each drafter, or what else is asked for."""
    scheduler = Scheduler(target.cache, max_num_seqs, max_num_batched_tokens)
    if isinstance(tree, Sequence):
        tree = TreeBudget.expansion(tree, getattr(drafter, "num_drafters", 1))
    policy = FixedPolicy(tree) if isinstance(tree, TreeBudget) else tree
    return Engine(target, drafter, policy, scheduler, verification)


def make_request(
    request_id: str, prompt_ids: Sequence[int], params: SamplingParams | None = None, seed: int = 0, **fields: Any
) -> Request:
    return Request(request_id, list(prompt_ids), params or SamplingParams(temperature=0.0), seed, **fields)


def requests_of(prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Callable[[], list[Request]]:
    """Return a function that makes the same requests anew, each with its number as name and seed."""
    return lambda: [make_request(str(i), p, q, seed=i) for i, (p, q) in enumerate(zip(prompts, params, strict=False))]


def run(engine: Engine, requests: Sequence[Request], max_steps: int = 3000) -> list[list[int]]:
    """Serves the requests to their ends; the output tokens of each."""
    for request in requests:
        engine.add(request)
    steps = 0
    while any(not request.is_finished for request in requests):
        engine.step()
        steps += 1
        assert steps < max_steps, "the engine makes no progress"
    return [request.output_ids for request in requests]


def arrive_in_turn(engine: Engine, requests: Iterable[Request]) -> None:
    """Let one of the requests arrive each time that the engine asks for those that arrived."""
    arriving = iter(requests)

    def take_arrivals() -> None:
        if request := next(arriving, None):
            engine.add(request)

    engine.host.take_arrivals = take_arrivals


def paths_of(tree: TokenTree) -> list[tuple[int, ...]]:
    """For each node the tokens that lead to it."""
    return [tree.path_tokens(node) for node in range(len(tree))]


def random_prompts(lengths: Sequence[int], seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]


@st.composite
def trees(draw: st.DrawFn, root: int = 7, vocab: int = 3, max_nodes: int = 10, name: str = "a") -> TokenTree:
    """Trees whose siblings differ, as drafters make them."""
    tokens, parents = [root], [-1]
    for _ in range(draw(st.integers(0, max_nodes))):
        parent, token = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, vocab - 1))
        if (parent, token) not in zip(parents[1:], tokens[1:], strict=True):
            parents.append(parent)
            tokens.append(token)
    return TokenTree(tuple(tokens), tuple(parents), tuple(Draw(node, name) for node in range(1, len(tokens))))


def as_values(tree: TokenTree) -> tuple[Any, ...]:
    """All that two trees may differ in."""
    draws = [
        (
            d.node,
            d.drafter,
            d.confidence,
            d.distribution
            and (d.distribution.token_ids.tolist(), d.distribution.probs.tolist(), d.distribution.removed),
        )
        for d in tree.draws
    ]
    return tree.tokens, tree.parents, draws


@contextmanager
def offered(field: str, value: str) -> Iterator[None]:
    """Add a choice to a setting of the engine, as an edit of the source would."""
    (about,) = (about for each, about in settings_of(EngineArgs) if each.name == field)
    before = about.choices
    object.__setattr__(about, "choices", (*before, value))
    try:
        yield
    finally:
        object.__setattr__(about, "choices", before)
