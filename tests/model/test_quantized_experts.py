"""Experts rounded at load: near their numbers, the same in native layers, modules, parts and streams."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specinfer.core.config import OffloadConfig
from specinfer.core.errors import ModelError
from specinfer.core.sampling import SamplingParams
from specinfer.drafters import SmallModelDrafter
from specinfer.model.definition import load_plain
from specinfer.model.linears import ROUTER, quantize_linears, rounds_experts
from specinfer.model.load import load_model
from specinfer.model.quantized_experts import QuantizedExperts, can_quantize_experts
from specinfer.model.runner import ModelRunner
from specinfer.ops.quantization import BITS, dequantize, quantize
from specinfer.planning.target_shape import BYTES, mean_bytes
from specinfer.policy.offload_choice import layer_weights
from thread_group import WHOLE, Ranks, make_shards
from tiny import VOCAB, logits, make_engine, make_model, make_request, quick, random_prompts, resized, run, save_model

CPU = torch.device("cpu")
# Gates apart from values or beside them, biases, other gates, no gates, and each kind of router.
FUSED = (
    "mixtral", "qwen3_moe", "qwen2_moe-mixed", "glm4_moe-grouped", "granitemoe", "hy_v3", "minimax_m2", "ernie4_5_moe",
    "lfm2_moe", "qwen3_next", "nemotron_h", "gemma4_text-moe",
)  # fmt: skip
MODULES = ("gpt_oss", "phimoe", "jamba", "kimi_linear", "bailing_hybrid", "minimax", "flex_olmo")
WIDE = {"hidden_size": 128, "intermediate_size": 128}
Folders = Callable[..., Path]
Runners = Callable[..., ModelRunner]


def _stacks(model: nn.Module) -> list[tuple[Any, str]]:
    """The modules of experts, and the names of the stacks that they have."""
    found = [module for module in model.modules() if can_quantize_experts(module)]
    return [(one, name) for one in found for name, weight in one.named_parameters() if weight.ndim == 3]


def _rounded(folder: Path, quantization: str, *, experts: bool) -> Any:
    """The definition with the numbers that the codes stand for."""
    bits = BITS[quantization]
    model = load_plain(folder, torch.float32).eval().requires_grad_(False)
    head = model.get_output_embeddings()
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear and (layer is head or ("layers." in name and not ROUTER.search(name))):
            layer.weight = nn.Parameter(dequantize(quantize(layer.weight, 8 if layer is head else bits)))
    for module, name in _stacks(model) if experts else ():
        for matrix in getattr(module, name):
            rows = matrix.T.contiguous() if module.is_transposed else matrix
            numbers = dequantize(quantize(rows, bits))
            matrix.copy_(numbers.T if module.is_transposed else numbers)
    return model


@pytest.mark.covering(1)
@pytest.mark.parametrize("quantization", BITS)
@pytest.mark.parametrize(
    "family",
    quick(
        [*FUSED, *MODULES],
        *("mixtral", "qwen2_moe-mixed", "glm4_moe-grouped", "granitemoe", "ernie4_5_moe", "nemotron_h"),
        *("gemma4_text-moe", "gpt_oss", "phimoe", "kimi_linear"),
    ),
)
def test_experts_compute_with_rounded_weights(family: str, quantization: str, model_folder: Folders) -> None:
    """Near the definition with the rounded numbers, and so are the products of GPUs, which round no activations."""
    folder, tokens = model_folder(family), random_prompts([24], seed=3)[0]
    loaded, plain = (load_model(folder, torch.float32, CPU, quantization, native=native) for native in (True, False))
    assert loaded.compute_path == f"native {'fused' if family in FUSED else 'linear'} layers"
    found, exact = (logits(ModelRunner(one, 64), tokens) for one in (loaded, plain))
    wanted, other = (
        _rounded(folder, quantization, experts=experts)(input_ids=torch.tensor([tokens])).logits[0]
        for experts in (True, False)
    )
    # Of the middle place: where a router's scores are close, rounded activations choose another expert.
    off, off_other = ((found - one).std(dim=1).median() for one in (wanted, other))
    assert off < 0.08 * wanted.std()
    assert quantization == "int8" or off < 0.7 * off_other  # 8 bits of weights lose less than those of activations
    assert (exact - wanted).std(dim=1).median() < 1e-5 * wanted.std()


@pytest.mark.parametrize("family", ["mixtral", "phimoe"])
def test_experts_take_the_memory_of_their_codes(family: str, tmp_path: Path) -> None:
    save_model(tmp_path, family, **WIDE)
    stacks = [getattr(module, name) for module, name in _stacks(make_model(family, **WIDE))]
    numbers = sum(stack.numel() for stack in stacks)
    plain = load_model(tmp_path, torch.float32, CPU)
    for quantization in BITS:
        loaded = load_model(tmp_path, torch.float32, CPU, quantization)
        rest = plain.num_parameters - numbers
        assert loaded.num_bytes < BYTES[quantization] * numbers + 4 * rest


@pytest.mark.covering(1)
@pytest.mark.parametrize("quantization", BITS)
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe-mixed", "nemotron_h", "gpt_oss", "phimoe"])
def test_trees_change_no_text(family: str, quantization: str, runner_of: Runners) -> None:
    # PyTorch computes the last numbers of a tensor, where they fill no vector, by other functions.
    changes = {"intermediate_size": 64} if family in ("gpt_oss", "phimoe") else {}
    runner = runner_of(family, quantization=quantization, **changes)
    prompts = random_prompts([3, 26, 12], seed=5)
    params = [SamplingParams(temperature=0.0, max_tokens=12)] * 2 + [SamplingParams(temperature=0.8, max_tokens=12)]
    jobs = [make_request(str(i), prompt, params[i], seed=i) for i, prompt in enumerate(prompts)]
    alone = [run(make_engine(runner), [make_request(str(i), p, params[i], seed=i)])[0] for i, p in enumerate(prompts)]
    drafter = SmallModelDrafter(resized(runner_of(family, 0, 0.15, **changes), 1024), VOCAB)
    assert run(make_engine(runner, drafter, (2, 2, 1)), jobs) == alone
    assert sum(job.speculation.num_accepted_draft_tokens for job in jobs) > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("quantization", BITS)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "phimoe"])
def test_experts_that_are_streamed_generate_what_those_in_memory_do(
    family: str, quantization: str, tmp_path: Path
) -> None:
    folder, tokens = save_model(tmp_path / "target", family, **WIDE), random_prompts([24], seed=3)[0]
    whole = load_model(folder, torch.float32, CPU, quantization)
    offload = OffloadConfig("disk", None, tmp_path / "copy")
    streamed, other = (load_model(folder, torch.float32, CPU, one, offload=offload) for one in (quantization, None))
    assert streamed.stream is not None
    assert other.stream is not None
    try:
        assert streamed.compute_path == f"{whole.compute_path}, streamed"
        assert torch.equal(logits(ModelRunner(streamed, 64), tokens), logits(ModelRunner(whole, 64), tokens))
        assert streamed.stream.buffer_bytes < 0.6 * other.stream.buffer_bytes
    finally:
        streamed.stream.close()
        other.stream.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("quantization", BITS)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_parts_of_experts_compute_what_the_whole_does(family: str, quantization: str, tmp_path: Path) -> None:
    """But for sums in another order, which may move activations by a step where they are rounded to 8 bits."""
    own = {"gpt_oss": {"head_dim": 32}, "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 128}}
    save_model(tmp_path, family, **WIDE, **own.get(family, {}))
    plain, wanted = Ranks(tmp_path, WHOLE).logits(), Ranks(tmp_path, WHOLE, quantization).logits()
    for split in [(2, 1), (2, 2)]:
        for found, whole, exact in zip(Ranks(tmp_path, split, quantization).logits(), wanted, plain, strict=True):
            assert (found - whole).norm() < 0.3 * (whole - exact).norm()


@pytest.mark.parametrize(("quantization", "group"), [("int8", 64), ("int4", 32)])
def test_groups_of_experts_that_ranks_would_share_are_refused(quantization: str, group: int, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3_moe", **WIDE, head_dim=32, moe_intermediate_size=group)
    shard = make_shards(2, 1)[0][0]
    refusal = rf"2 ranks would have {group // 2} inputs of mlp\.experts\.down_proj .*{group}"
    with pytest.raises(ModelError, match=refusal):
        load_model(tmp_path, torch.float32, CPU, quantization, shard=shard)
    load_model(tmp_path, torch.float32, CPU, "fp8", shard=shard)


class _Unknown(nn.Module):
    """Experts whose class does not say what lies between their matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.zeros(2, 8, 4)), nn.Parameter(torch.zeros(2, 4, 4))


def test_experts_that_stay_are_named(model_folder: Folders, caplog: pytest.LogCaptureFixture) -> None:
    """Those of another structure, and all where weights become floating-point numbers of 8 bits."""
    assert rounds_experts("int8", torch.device("cuda"))
    assert not rounds_experts("fp8", CPU)
    for family in ("mixtral", "phimoe"):
        load_model(model_folder(family), torch.float32, CPU, "int8")
        assert "stay as they are" not in caplog.text
    load_model(model_folder("mixtral"), torch.float32, CPU, "fp8")
    assert "stay as they are, only the other layers are quantized: mlp.experts.down_proj, mlp.ex" in caplog.text
    caplog.clear()
    model: Any = make_model("mixtral")
    model.model.layers[1].mlp.experts = _Unknown()
    with caplog.at_level(logging.WARNING):
        quantize_linears(model, "int4", model.config, CPU)
    assert len([one for one in caplog.records if "mlp.experts.down_proj, mlp.experts.gate_up" in one.message]) == 1
    assert isinstance(model.model.layers[0].mlp.experts, QuantizedExperts)
    assert isinstance(model.model.layers[1].mlp.experts, _Unknown)


def test_a_number_after_the_last_expert_stands_for_none() -> None:
    model: Any = make_model("mixtral")
    quantize_linears(model, "int8", model.config, CPU)
    experts = model.model.layers[0].mlp.experts
    x, weights = torch.randn((3, 32), generator=torch.Generator().manual_seed(0)), torch.full((3, 2), 0.5)
    wanted = experts(x, torch.tensor([[0], [1], [3]]), weights[:, :1])
    assert torch.equal(experts(x, torch.tensor([[4, 0], [1, 4], [4, 3]]), weights), wanted)


def test_plans_count_experts_as_they_are_stored(model_folder: Folders) -> None:
    folder, gpu = model_folder("mixtral"), torch.device("cuda")
    experts = sum(getattr(one, name)[0].numel() * 4 for one, name in _stacks(make_model("mixtral"))) // 2
    rounded, kept = (layer_weights(folder, gpu, quantization) for quantization in ("int8", "fp8"))
    assert (rounded.kept, kept.kept) == (0, experts)
    assert rounded.rounded == kept.rounded + experts
    assert rounded == layer_weights(folder, CPU)
    assert mean_bytes(folder, "bfloat16", "int4", CPU) == mean_bytes(folder, "bfloat16", "int4", gpu) == BYTES["int4"]
    assert mean_bytes(folder, "bfloat16", "fp8", CPU) > 1.0
    assert mean_bytes(folder, "bfloat16", None, gpu) == 2.0
    assert mean_bytes(model_folder("llama"), "bfloat16", "int8", gpu) == BYTES["int8"]
