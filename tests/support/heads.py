"""Tiny heads on a target's hidden states in the public formats."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from specinfer import LLM, SamplingParams
from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.feature_drafter import FeatureDrafter
from tiny import paths_of, random_prompts

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def random_tensors(shapes: Mapping[str, Sequence[int]], seed: int = 0) -> dict[str, Tensor]:
    """Return random weights; those of norms are near 1."""
    source = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(*shape, generator=source) * (0.15 if len(shape) > 1 else 0.2) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def layer_shapes(prefix: str, inputs: int = 32, *, head_norms: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors of a Llama or Qwen3 layer without its input norm."""
    shapes: dict[str, tuple[int, ...]] = {
        "post_attention_layernorm.weight": (32,),
        "self_attn.q_proj.weight": (32, inputs),
        "self_attn.k_proj.weight": (16, inputs),
        "self_attn.v_proj.weight": (16, inputs),
        "self_attn.o_proj.weight": (32, 32),
        "mlp.gate_proj.weight": (48, 32),
        "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48),
    }
    if head_norms:
        shapes |= {"self_attn.q_norm.weight": (8,), "self_attn.k_norm.weight": (8,)}
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def save_head(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    drop: Sequence[str] = (),
    pickled: bool = False,
) -> Path:
    """Write a checkpoint without the tensors that are dropped."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    left = {name: tensor for name, tensor in tensors.items() if name not in drop}
    if pickled:
        torch.save(left, folder / "pytorch_model.bin")
    else:
        save_file(left, folder / "model.safetensors")
    return folder


def save_eagle3(
    folder: Path,
    layout: str = "original",
    *,
    vocab_size: int = 96,
    draft_ids: Sequence[int] | None = None,
    target_width: int = 32,
    family: str = "llama",
    num_taps: int = 3,
    seed: int = 0,
    drop: Sequence[str] = (),
    pickled: bool = False,
    own_embedding: bool = False,
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    parallel: bool = False,
    num_layers: int = 1,
    **fields: Any,
) -> Path:
    """Write an EAGLE-3 head.

    Args:
        layout: "original" (yuhuili, AngelSlim, SpecForge) or "speculators" (RedHatAI).
        draft_ids: Target ids of its own vocabulary, or None for all.
        drop: Tensors to leave out.
        parallel: Write a P-EAGLE head.
        fields: Further fields of config.json.
    """
    is_original = layout == "original"
    first = "midlayer." if is_original else "layers.0."
    num_draft = vocab_size if draft_ids is None else len(draft_ids)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (32, num_taps * target_width),
        f"{first}input_layernorm.weight": (32,),
        f"{first}hidden_norm.weight": (32,),
        "norm.weight": (32,),
        "lm_head.weight": (num_draft, 32),
    } | layer_shapes(first, 64, head_norms=family == "qwen3")
    for i in range(1, num_layers):
        shapes |= layer_shapes(f"layers.{i}.", head_norms=family == "qwen3")
        shapes[f"layers.{i}.input_layernorm.weight"] = (32,)
    if own_embedding:
        shapes["embed_tokens.weight"] = (vocab_size, 32)
    if fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (target_width,) for i in range(num_taps)}
    if norm_before_fc:
        shapes["input_norm.weight"] = (num_taps * target_width,)
    if parallel:
        shapes["mask_hidden"] = (1, 1, num_taps * target_width)
    tensors = random_tensors(shapes, seed)
    tensors["lm_head.weight"] *= 4
    if draft_ids is not None:
        ids = torch.tensor(draft_ids)
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids.clamp(max=vocab_size - 1), True)
    layer = TINY | {
        "model_type": family, "vocab_size": vocab_size, "num_hidden_layers": num_layers,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    config: dict[str, Any] = {"draft_vocab_size": num_draft}
    if is_original:
        config |= layer | {"architectures": ["LlamaForCausalLMEagle3"]}
    else:
        config |= {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    return save_head(folder, tensors, config | fields, drop=drop, pickled=pickled)


def save_tiny_head(folder: Path, num_layers: int = 1) -> Path:
    """Write an EAGLE-3 head with a reduced vocabulary, for a target of two layers."""
    return save_eagle3(
        folder, "speculators", draft_ids=range(2, 90), eagle_aux_hidden_state_layer_ids=[0, 1, 2], num_layers=num_layers
    )


_CYCLE = 64
_CYCLE_LAYER = {
    "hidden_size": _CYCLE, "intermediate_size": _CYCLE, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": _CYCLE, "max_position_embeddings": 256,
}  # fmt: skip


def _cycle_step() -> Tensor:
    """The matrix that turns a one-hot token into the next one."""
    step, tokens = torch.zeros(_CYCLE, _CYCLE), torch.arange(_CYCLE)
    step[(tokens * 5 + 3) % _CYCLE, tokens] = 1.0
    return step


def cycle_text(length: int, first: int = 1) -> list[int]:
    """Return what the target of `save_cycle` generates from this token on."""
    text = [first]
    while len(text) < length:
        text.append((text[-1] * 5 + 3) % _CYCLE)
    return text


def save_cycle(folder: Path) -> tuple[Path, Path]:
    """Write a target in which token t is followed by (5 t + 3) mod 64, and an EAGLE-3 head that knows it.

    Hidden states are one-hot: the target's layers add nothing, and the head's MLP turns a token into the next one.
    """
    size, step = _CYCLE, _cycle_step()
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model("llama", num_hidden_layers=8, tie_word_embeddings=False, **_CYCLE_LAYER, **ids)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(step)
    model.save_pretrained(folder / "target")
    tensors = {
        "fc.weight": torch.cat([torch.eye(size), torch.zeros(size, 2 * size)], dim=1),
        **{f"midlayer.{name}.weight": torch.ones(size)
           for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        "midlayer.self_attn.q_proj.weight": torch.randn(64, 2 * size),
        "midlayer.self_attn.k_proj.weight": torch.randn(32, 2 * size),
        "midlayer.self_attn.v_proj.weight": torch.randn(32, 2 * size),
        "midlayer.self_attn.o_proj.weight": torch.zeros(size, 64),
        "midlayer.mlp.gate_proj.weight": torch.eye(size) * 10,
        "midlayer.mlp.up_proj.weight": torch.eye(size),
        "midlayer.mlp.down_proj.weight": (step - torch.eye(size)) / (10 * size),  # of a one-hot times sqrt(64), twice
        "norm.weight": torch.ones(size),
        "lm_head.weight": step.clone(),
    }  # fmt: skip
    fields = {"model_type": "llama", "draft_vocab_size": size, "num_hidden_layers": 1, "rms_norm_eps": 1e-6}
    return folder / "target", save_head(folder / "head", tensors, _CYCLE_LAYER | fields)


# ------------------------------------------------------------------------------------------ blocks


def save_cycle_block(folder: Path) -> Path:
    """Write a DSpark head that knows what the target of `save_cycle` does by the token before, whatever it has read."""
    size, step = _CYCLE, _cycle_step()
    shapes = {"q_proj": (64, size), "k_proj": (32, size), "v_proj": (32, size)}
    at, source = "layers.0.", torch.Generator().manual_seed(0)
    tensors = {
        "fc.weight": torch.eye(size), "hidden_norm.weight": torch.ones(size), "norm.weight": torch.ones(size),
        **{f"{at}{name}.weight": torch.ones(size) for name in ("input_layernorm", "post_attention_layernorm")},
        **{f"{at}self_attn.{name}.weight": torch.randn(*shape, generator=source) for name, shape in shapes.items()},
        **{f"{at}self_attn.{name}.weight": torch.ones(16) for name in ("q_norm", "k_norm")},
        f"{at}self_attn.o_proj.weight": torch.zeros(size, 64),
        **{f"{at}mlp.{name}.weight": torch.zeros(size, size) for name in ("gate_proj", "up_proj", "down_proj")},
        "markov_head.markov_w1.weight": 20 * torch.eye(size), "markov_head.markov_w2.weight": step,
    }  # fmt: skip
    fields = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": 1, "markov_rank": size}
    fields |= {"block_size": 8, "mask_token_id": 63, "rms_norm_eps": 1e-6}
    return save_head(folder, tensors, _CYCLE_LAYER | fields)


def save_block(
    folder: Path,
    kind: str = "dflash",
    *,
    layout: str = "original",
    block_size: int = 6,
    num_layers: int = 2,
    num_taps: int | None = None,
    draft_ids: Sequence[int] | None = None,
    rank: int = 4,
    seed: int = 0,
    drop: Sequence[str] = (),
    **fields: Any,
) -> Path:
    """Write a block head of the kind "dflash", "jetspec" or "dspark", whose embedding is the target's."""
    taps = num_taps or num_layers
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (32, 32 * taps),
        "hidden_norm.weight": (32,),
        "norm.weight": (32,),
    }
    for i in range(num_layers):
        shapes |= {f"layers.{i}.input_layernorm.weight": (32,)} | layer_shapes(f"layers.{i}.", head_norms=True)
    if draft_ids is not None:
        shapes["lm_head.weight"] = (len(draft_ids), 32)
    if kind == "dspark":
        shapes |= {
            "markov_head.markov_w1.weight": (96, rank),
            "markov_head.markov_w2.weight": (96 if draft_ids is None else len(draft_ids), rank),
            "confidence_head.proj.weight": (1, 32 + rank),
        }
    tensors = random_tensors(shapes, seed)
    if kind == "dspark":
        tensors["markov_head.markov_w1.weight"] *= 10
        tensors["markov_head.markov_w2.weight"] *= 10
        tensors["confidence_head.proj.bias"] = torch.tensor([0.1])
    if draft_ids is not None:
        tensors["d2t"] = torch.tensor(list(draft_ids)) - torch.arange(len(draft_ids))
    layer = TINY | {
        "model_type": "qwen3", "vocab_size": 96, "num_hidden_layers": num_layers, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    config: dict[str, Any] = {"block_size": block_size}
    if layout == "speculators":
        config |= {"speculators_model_type": kind, "transformer_layer_config": layer, "mask_token_id": 95}
    elif kind == "dspark":
        config |= layer | {"architectures": ["Qwen3DSparkModel"], "mask_token_id": 95}
    else:
        config |= layer | {"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 95}}
        if kind == "jetspec":
            config["dflash_config"]["causal_head"] = True
    if kind == "dspark":
        config |= {"markov_rank": rank, "enable_confidence_head": True, "confidence_head_with_markov": True}
    return save_head(folder, tensors, config | fields, drop=drop)


def save_tiny_block(folder: Path, kind: str = "dspark") -> Path:
    """Write a block head for a target of two layers."""
    return save_block(folder, kind, layout="speculators", block_size=4, aux_hidden_state_layer_ids=[1, 2])


# ------------------------------------------------------------------------------------ running them


def llm_of(target: Path, *drafters: Path | str, **options: Any) -> LLM:
    """Load a target with drafters, in float32."""
    return LLM(target, drafters=[str(one) for one in drafters], **({"dtype": "float32", "max_num_seqs": 4} | options))


def drafter_of(llm: LLM, kind: type[Any] = FeatureDrafter) -> Any:
    """Return the only drafter of a kind: one that grows trees with a head, if no other is named."""
    assert llm.drafter is not None
    (drafter,) = [drafter for drafter in llm.drafter.models if isinstance(drafter, kind)]
    return drafter


def ids_of(prompts: Sequence[Sequence[int]]) -> list[Any]:
    """Return token ids as `LLM.generate` takes them."""
    return [{"prompt_token_ids": list(prompt)} for prompt in prompts]


def texts_of(llm: LLM, prompts: Sequence[Sequence[int]], params: Any) -> list[list[int]]:
    """Return the tokens generated after each prompt."""
    return [list(output.outputs[0].token_ids) for output in llm.generate(ids_of(prompts), params, use_tqdm=False)]


def accepted_share(llm: LLM) -> float:
    """Return the share of the draft tokens of all steps that were accepted."""
    steps = [step for step in llm.engine.metrics.recent if step.num_guessed]
    return sum(step.num_generated - step.num_requests for step in steps) / sum(step.num_guessed for step in steps)


def check_growth(
    llm: LLM,
    wanted: Callable[[list[int], Sequence[int]], TokenTree],
    *,
    lengths: Sequence[int] = (9,),
    shapes: Sequence[Sequence[int]] = ((3, 2, 2), (1, 1, 1, 1), (4, 1, 2)),
) -> None:
    """Compare trees of the head, of one shape after the other while text is generated, with those of its slow twin.

    Args:
        wanted: Function from the known tokens and the children of each level to the tree.
        lengths: Those of prompts.
    """
    params = SamplingParams(temperature=0.0, max_tokens=24)
    requests = [Request(str(i), prompt, params, seed=0) for i, prompt in enumerate(random_prompts(lengths))]
    for request in requests:
        llm.engine.add(request)
    while min(request.num_output for request in requests) < 1:
        llm.engine.step()
    for shape in shapes:
        spans = [Span(request, request.num_computed, len(request.token_ids)) for request in requests]
        trees = drafter_of(llm).draft(spans, [TreeBudget.expansion(shape)] * len(spans))
        for request, tree in zip(requests, trees, strict=True):
            assert sorted(paths_of(tree)) == sorted(paths_of(wanted(request.token_ids, shape)))
        llm.engine.step()


def outputs_beside_an_abort(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
    """Return the outputs of all prompts but the first, whose request is aborted after four steps."""
    requests = [Request(str(i), list(prompt), params, seed=0) for i, prompt in enumerate(prompts)]
    for request in requests:
        llm.engine.add(request)
    for _ in range(4):
        llm.engine.step()
        borrowed = [llm.target.cache.reserved(f"{request.request_id}, drafts") for request in requests]
        assert not any(map(len, borrowed)), "slots that a copy of the target borrows are given back at once"
    llm.engine.abort(requests[0])
    while not all(request.is_finished for request in requests):
        llm.engine.step()
    return [request.output_ids for request in requests[1:]]
