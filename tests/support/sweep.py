"""Every causal family of the installed transformers: a tiny random model of each, and what becomes of it here.

No list of families is kept: sizes are set by the names that configurations use, and kinds of layers by the defaults of
a family. `SETTINGS` has only what a configuration needs besides.
"""

import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import reference
import tiny
from specinfer.core.errors import ModelError, first_line
from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import Draw, TokenTree, TreeBudget
from specinfer.model.definition import quietly
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load import load_model
from specinfer.model.own_pass import REMEDY
from specinfer.model.runner import ModelRunner
from specinfer.verify import Acceptance
from tiny import VOCAB, make_engine, make_model, make_request, random_prompts, run

FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
SMALL = tiny.FAMILIES | tiny.MORE_FUSED | tiny.GEMMA_4 | tiny.HYBRIDS  # configurations of other tests
NUM_TOKENS = 12  # more than a window and a chunk, with the prompts

_LAYERS, _MOST = 2, 10_000_000
_SIZES: dict[str, Any] = dict.fromkeys(
    ("hidden_size", "d_model", "n_embd", "dim_model", "embedding_size", "emb_dim", "lru_width", "embedding_dim",
     "attention_hidden_size", "backbone_hidden_size", "cross_attention_hidden_size"), 32,
) | dict.fromkeys(
    ("intermediate_size", "ffn_dim", "d_inner", "encoder_ffn_dim", "decoder_ffn_dim", "dim_ff", "d_ff", "n_inner",
     "shared_intermediate_size", "shared_expert_intermediate_size", "moe_intermediate_size", "intermediate_size_mlp",
     "moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size", "feed_forward_size",
     "dense_intermediate_size"), 48,
) | dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
     "attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads", "linear_num_heads",
     "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads",
     "swa_num_attention_heads"), 4,
) | dict.fromkeys(
    ("num_key_value_heads", "num_kv_heads", "linear_num_key_heads", "n_groups", "mamba_n_groups",
     "swa_num_key_value_heads"), 2,
) | dict.fromkeys(
    ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "linear_key_head_dim", "linear_value_head_dim",
     "linear_head_dim", "dim_head", "d_kv", "global_head_dim", "attention_head_dim", "rotary_dim", "swa_head_dim",
     "swa_v_head_dim", "d_state", "mamba_d_state", "ssm_state_size", "state_size", "sliding_window", "window_size",
     "attention_chunk_size", "attention_window_size", "local_window_size", "query_pre_attn_scalar"), 8,
) | dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_blocks",
     "num_decoder_layers", "num_encoder_layers"), _LAYERS,
) | dict.fromkeys(
    ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_length", "context_length"), 256
) | dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4
) | dict.fromkeys(
    ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "experts_per_token", "num_experts_per_token"), 2
) | dict.fromkeys(("kv_lora_rank", "q_lora_rank", "mamba_d_head", "mamba_head_dim"), 16) | dict.fromkeys(
    ("n_group", "topk_group", "n_shared_experts", "num_mem_blocks"), 1
) | {
    "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "index_topk": 8, "index_head_dim": 16,
    "index_n_heads": 16,  # scores of few heads are often 0, and which of equal ones are chosen is not said
}  # fmt: skip
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
_NEVER_NONE = {"head_dim", "num_key_value_heads"}
# What the configuration of a family needs besides.
SETTINGS: dict[str, dict[str, Any]] = {
    # Its layers without rotations scale queries by their positions.
    "llama4_text": {"no_rope_layers": [1, 0], "floor_scale": 4},
}


class CannotBeMade(Exception):  # noqa: N818 - it says what is so
    """No tiny model of a family can be made from the names above."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of a family.

    Attributes:
        way: "native" layers, by its "definition", "refused", or "not made": its configuration needs settings.
        reason: Why it is refused or not made.
    """

    way: str
    reason: str = ""


def tiny_config(family: str) -> Any:
    """Return a small configuration of the family, with a layer of each kind that its own default has."""
    kind = CONFIG_MAPPING[family]
    return _shrunk(kind, SETTINGS.get(family, {}))


def _shrunk(kind: type[PretrainedConfig], settings: dict[str, Any]) -> Any:
    default = kind()
    fields = default.to_dict()
    names = {*fields, *getattr(kind, "attribute_map", {})} | set(inspect.signature(kind.__init__).parameters)
    asked = {
        name: value
        for name, value in _SIZES.items()
        if name in names and (fields.get(name, 0) is not None or name in _NEVER_NONE)
    } | _TOKENS
    if "kv_lora_rank" in asked:  # latent attention has keys for each head
        asked["num_key_value_heads"] = asked["num_attention_heads"]
    if isinstance(types := fields.get("layer_types"), list):
        asked["layer_types"] = list(dict.fromkeys(types))
        while len(asked["layer_types"]) < _LAYERS:
            asked["layer_types"].append(types[0])
        asked |= {name: len(asked["layer_types"]) for name in ("num_hidden_layers",) if name in asked}
    for name, part in getattr(default, "sub_configs", {}).items():
        if name.startswith(("text", "decoder", "language", "thinker")) and part is not PretrainedConfig:
            inner = getattr(default, name, None)
            if isinstance(inner, PretrainedConfig):
                asked[name] = _shrunk(type(inner), {}).to_dict()
    return kind(**(asked | settings))


def tiny_model(family: str) -> Any:
    """Return a random model of the family in fp32.

    Raises:
        CannotBeMade: Its configuration needs settings, or transformers itself cannot run it.
    """
    if family in SMALL:
        return make_model(family)
    try:
        config = tiny_config(family)
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        with quietly(), torch.device("meta"):
            size = sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
        if size > _MOST:
            raise CannotBeMade(f"{size:,} parameters")
        with quietly():
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim > 1:
                    weight.normal_(0.0, 0.5 if "embed" in name else 0.15)
                elif "sinks" in name:
                    weight.normal_(0.0, 1.0)
    except CannotBeMade:
        raise
    except Exception as error:
        raise CannotBeMade(f"{type(error).__name__}: {error}") from error
    return model


class Oracle:
    """A drafter that knows the continuations of some texts, and adds wrong tokens on every level."""

    name = "oracle"
    num_failures = 0

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = [list(text) for text in texts]

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        return [self._tree(span.request, budget) for span, budget in zip(spans, budgets, strict=True)]

    def _tree(self, request: Request, budget: TreeBudget) -> TokenTree:
        known = list(request.token_ids)
        text = next((text for text in self._texts if text[: len(known)] == known), known)
        right = text[len(known) : len(known) + budget.max_depth]
        tokens, parents, parent = [known[-1]], [-1], 0
        for token in right:
            for each in ((token + 5) % VOCAB, token, (token + 9) % VOCAB):
                tokens.append(each)
                parents.append(parent)
            parent = len(tokens) - 2
        tokens, parents = tokens[: budget.max_nodes + 1], parents[: budget.max_nodes + 1]
        return TokenTree(tuple(tokens), tuple(parents), tuple(Draw(i, self.name) for i in range(1, len(tokens))))

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


def prompts() -> list[list[int]]:
    """Prompts of a batch: two that share a prefix longer than a window, a short one."""
    long, tail, short = random_prompts([21, 4, 3])
    return [long, [*long[:18], *tail], short]


def load(model: Any, folder: Path) -> ModelRunner:
    """Return a runner of a model with prefixes that stay."""
    model.save_pretrained(folder)
    return ModelRunner(load_model(folder, torch.float32, torch.device("cpu")), 256, keeps_prefixes=True)


def requests(name: str) -> list[Request]:
    """Return greedy requests for the prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    return [make_request(f"{name}-{i}", prompt, params) for i, prompt in enumerate(prompts())]


def outcome_of(family: str, folder: Path) -> Outcome:
    """Load a tiny model of the family, and compare its greedy text with that of transformers.

    Raises:
        AssertionError: It loads, and answers wrongly.
    """
    try:
        model = tiny_model(family)
    except CannotBeMade as error:
        return Outcome("not made", first_line(error))
    model.generation_config.eos_token_id = None
    try:
        texts = [[*prompt, *reference.greedy(model, prompt, NUM_TOKENS)] for prompt in prompts()]
    except Exception as error:  # what a model lacks in transformers shows in any type
        texts, broken = [], f"generate: {type(error).__name__}: {first_line(error)}"
    try:
        runner = load(model, folder)
    except ModelError as error:
        about = f"model: family {family!r} is not supported: "
        reason = str(error).replace(str(folder), "the model").removeprefix(about)
        return Outcome("refused", reason.removesuffix(REMEDY).removeprefix("model: "))
    if not texts:
        return Outcome("not made", broken)
    if continued(runner, texts) != texts:
        check_own_texts(model, runner)
    return Outcome("native" if isinstance(runner.loaded.model, FusedDecoder) else "definition")


def check_own_texts(model: Any, runner: ModelRunner) -> None:
    """Check the same against the model's own passes without a cache: some families generate in another way."""
    texts = prompts()
    for text in texts:
        for _ in range(NUM_TOKENS):
            text.append(int(reference.last_logits(model, text).argmax()))
    assert continued(runner, texts) == texts


def continued(runner: ModelRunner, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return what the prompts of these texts become in a batch, with trees, and prefixes of the same prompts."""
    found = []
    for turn in range(2):  # the second time the prompts are in the cache
        engine = make_engine(runner, Oracle(texts), TreeBudget(9, 3, (3, 1, 1)))
        outputs = run(engine, requests(str(turn)))
        found.append([[*prompt, *output] for prompt, output in zip(prompts(), outputs, strict=True)])
    assert found[0] == found[1]
    return found[0]


HEADINGS = {
    "native": "Native layers",
    "definition": "By their definition",
    "refused": "Refused",
    "not made": "Not tried",
}


def page_of(outcomes: dict[str, Outcome], version: str) -> str:
    """Return the page of the documentation about these families."""
    parts = [_HEAD.format(version=version)]
    for way, heading in HEADINGS.items():
        chosen = {family: outcome for family, outcome in sorted(outcomes.items()) if outcome.way == way}
        parts.append(f"## {heading}\n")
        if way in ("native", "definition"):
            parts.append(textwrap.fill(", ".join(chosen), 120, break_on_hyphens=False) + "\n")
        else:
            rows = [f"| {family} | {outcome.reason.replace('|', ' ')} |" for family, outcome in chosen.items()]
            parts.append("\n".join(["| family | reason |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def ways_on(page: str) -> dict[str, str]:
    """Return the way of each family on a page."""
    ways: dict[str, str] = {}
    for way, heading in HEADINGS.items():
        text = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
        if way in ("native", "definition"):
            names = text.replace("\n", " ").split(",")
        else:
            names = [row.split("|")[1] for row in text.splitlines() if row.startswith("| ")][1:]
        ways |= {name.strip(): way for name in names}
    return ways


_HEAD = """# Families

This is what becomes of every causal family of transformers {version}. A tiny random model of each generates greedy text
in a batch, with token trees and cached prefixes. Its text is that of transformers, or the family is refused at load.
`python tools/families.py` writes this page, and `pytest -m sweep` checks it. transformers calls some families causal
that read in both directions, such as BERT.
"""
