"""GGUF files of models with recurrent layers, and of some others: weights, configuration, text."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specinfer import LLM, ModelError, SamplingParams
from specinfer.model.definition import load_plain
from specinfer.model.experts import QuantizedExperts
from specinfer.model.folder import find_folder
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.layers.packing import together
from specinfer.model.load import load_model
from specinfer.ops import ExpertsCall, PartCall, QuantizedLinear
from specinfer.ops.cpu.panels import TYPES
from tests.model.gguf_families import is_known
from tests.model.gguf_files import write_family
from tiny import make_tokenizer

CPU = torch.device("cpu")

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
# Layers in the order that files tell by an interval.
DELTA = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "hidden_size": 64}
WIDE = {"linear_value_head_dim": 32, "intermediate_size": 64}
MOE = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
PLAIN = {"hidden_size": 64, "intermediate_size": 64}
ROWS = {"hidden_size": 64, "intermediate_size": 64, "shared_intermediate_size": 32, "mamba_n_heads": 8}  # of blocks
FACTORS = {
    "attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.6, "logits_scaling": 1.5,
    "position_embedding_type": "rope",
}  # fmt: skip
YARN = {"olmo2__rope__scaling__type": "yarn", "olmo2__rope__scaling__factor": 2.0}
EXPERTS = {
    "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "moe_latent_size": 32, "n_group": 2,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
GLM = {
    "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "use_qk_norm": True,
}  # fmt: skip
DEEPSEEK = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 2,
}  # fmt: skip
DEEPSEEK_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7,
    "mscale_all_dim": 0.7,
}  # fmt: skip
ERNIE = {
    "use_bias": False,
    "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1, "moe_layer_end_index": 1,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3next": DELTA | WIDE | MOE,
    "qwen35": DELTA | WIDE,
    "qwen35moe": DELTA | WIDE | MOE,
    "granitehybrid": ROWS | FACTORS,
    "nemotron_h": ROWS | {
        "layer_types": ["linear_attention", "mlp", "full_attention", "linear_attention"], "num_hidden_layers": 4,
        "mamba_num_heads": 8,
    },
    "nemotron_h_moe": ROWS | EXPERTS | {"mamba_num_heads": 8},
    "falcon-h1": ROWS | {"mamba_d_ssm": 128},
    "mamba2": {"hidden_size": 64, "num_heads": 8},
    "jamba": ROWS | {"mamba_dt_rank": 32},
    "mamba": {"hidden_size": 64, "time_step_rank": 32},
    "kimi-linear": ROWS | {
        "linear_head_dim": 32, "linear_num_heads": 4, "moe_intermediate_size": 32, "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
    },
    "deepseek2": PLAIN | DEEPSEEK,
    "ernie4_5": PLAIN | {"head_dim": 16, "use_bias": False},
    "ernie4_5-moe": PLAIN | ERNIE,
    "lfm2": ROWS,
    "lfm2moe": ROWS | {"moe_intermediate_size": 32},
    "granite": PLAIN | {name: value for name, value in FACTORS.items() if "type" not in name},
    "smollm3": PLAIN | {"num_hidden_layers": 4},
    "olmo2": PLAIN,
    "granitemoe": PLAIN | {"num_local_experts": 4, "num_experts_per_tok": 2, "residual_multiplier": 0.6},
    "glm4moe": PLAIN | GLM,
    "glm4": PLAIN | {"head_dim": 16},
    "qwen2moe": PLAIN | MOE | {"num_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
NOPE = {
    "family": "granitemoehybrid", "layer_types": ["full_attention"] * 2, "num_hidden_layers": 2,
    "shared_intermediate_size": 64,
}  # fmt: skip
GRANITE_SHARED = {
    "family": "granitemoeshared", "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32,
}  # fmt: skip
OLMO3 = {
    "family": "olmo3", "num_hidden_layers": 4, "sliding_window": 8, "olmo2__attention__sliding_window": 8,
    "olmo2__attention__sliding_window_pattern": [True, True, True, False],
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, changes) for name, changes in ARCHITECTURES.items()} | {
    "qwen35-narrow": ("qwen35", DELTA | WIDE | {"linear_value_head_dim": 8}),  # heads within a block
    "granitehybrid-dense": (
        "granitehybrid",
        ROWS | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 64},
    ),
    "falcon-h1-normed": (
        "falcon-h1",
        ROWS | {"mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "granite-nope": ("granite", ROWS | NOPE | {"num_local_experts": 0, "num_experts_per_tok": 0}),
    "granitemoe-nope": ("granitemoe", ROWS | NOPE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe-shared": ("granitemoe", PLAIN | GRANITE_SHARED),
    "deepseek2-yarn": ("deepseek2", PLAIN | DEEPSEEK | {"q_lora_rank": None, "rope_parameters": DEEPSEEK_YARN}),
    "glm4moe-plain": ("glm4moe", PLAIN | GLM | {"use_qk_norm": False, "attention_bias": True}),
    "olmo3": ("olmo2", PLAIN | OLMO3),
    "falcon-mamba": ("mamba", {"hidden_size": 64, "time_step_rank": 32, "family": "falcon_mamba"}),
}
MODELS = {name: model for name, model in MODELS.items() if is_known(model[0])}  # to an older transformers
# Stored in 32 bits (Jamba's router is a linear layer before transformers 5.21), and made of transposed matrices.
DECODED = ("shared_expert_gate", "feed_forward.router", "kv_b_proj")
QUICK = ("qwen35moe", "granitehybrid", "falcon-h1", "lfm2moe")
cases = pytest.mark.parametrize(("arch", "changes"), MODELS.values(), ids=MODELS)


def check_logits(file: Path, model: Any) -> None:
    found = load_plain(find_folder(file), torch.float32)
    ids = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


@cases
def test_logits_are_those_of_the_model_that_was_written(tmp_path: Path, arch: str, changes: dict[str, Any]) -> None:
    check_logits(tmp_path / "m.gguf", write_family(tmp_path / "m.gguf", arch, **changes))


@pytest.mark.parametrize(
    ("arch", "changes"),
    [pytest.param(*model, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, model in MODELS.items()],
)
def test_greedy_text_of_a_file_is_that_of_its_folder(tmp_path: Path, arch: str, changes: dict[str, Any]) -> None:
    """With a tree in float32, and of the codes with a tree and without."""
    write_family(tmp_path / "m.gguf", arch, "Q8_0", **changes)
    load_plain(find_folder(tmp_path / "m-exact.gguf"), torch.float32).save_pretrained(tmp_path / "folder")
    make_tokenizer().save_pretrained(tmp_path / "folder")

    def text(name: str, dtype: str, drafters: list[str]) -> list[int]:
        llm = LLM(tmp_path / name, dtype=dtype, drafters=drafters, tree="2,1" if drafters else None)
        return llm.generate(["the other one"], GREEDY)[0].outputs[0].token_ids

    assert text("m.gguf", "float32", ["ngram"]) == text("folder", "float32", [])
    assert text("m.gguf", "auto", ["ngram"]) == text("m.gguf", "auto", [])


def _check_experts(found: Any, module: Any) -> None:
    if isinstance(module.down_proj, nn.Module):
        return  # the shared ones
    assert isinstance(found, QuantizedExperts)
    x, weights = torch.randn(3, module.down_proj.shape[1]), torch.rand(3, 2)
    routed = torch.tensor([[0, 1], [2, 3], [1, 3]])
    wanted = module(x, routed, weights)
    assert (found(x, routed, weights) - wanted).norm() < 0.03 * wanted.norm()


def _is_fused(arch: str, changes: dict[str, Any]) -> bool:
    if changes.get("family") == "granitemoehybrid":
        return True
    fused = (
        "qwen3next", "qwen35", "qwen35moe", "lfm2", "lfm2moe", "granitehybrid", "mamba2", "falcon-h1", "nemotron_h",
        "nemotron_h_moe", "ernie4_5", "ernie4_5-moe",
        "granite", "smollm3", "olmo2", "granitemoe", "glm4moe", "glm4", "qwen2moe", "olmo3",
    )  # fmt: skip
    return arch in fused and changes.get("linear_value_head_dim") != 8 and changes.get("moe_latent_size") is None


def _check_fused(found: FusedDecoder, exact: Any) -> None:
    for i, layer in enumerate(found.layers):
        for linear in layer.linears:
            weights = [exact.get_submodule(f"{found.layers_name}.{i}.{name}").weight for name in linear.names]
            rows = [call.rows(torch.arange(call.panels.outputs)) for call in linear.computed.chain]
            wanted = together(weights, interleaved=linear.interleaved)
            assert torch.equal(torch.cat(rows).to(wanted.dtype), wanted)
        for part, call in zip(layer.kinds, layer.call.parts, strict=True):
            if call.experts is not None:
                _check_fused_experts(call, exact.get_submodule(f"{found.layers_name}.{i}.{part.output}"))


def _check_fused_experts(part: PartCall, exact: Any) -> None:
    assert isinstance(part.between, ExpertsCall)
    if hasattr(exact, "gate_up_proj"):
        first = [together(one.chunk(2), interleaved=True) for one in exact.gate_up_proj]
    else:
        first = list(exact.up_proj)
    wanted = [weight for pair in zip(first, exact.down_proj, strict=True) for weight in pair]
    for call, weight in zip(part.between.calls, wanted, strict=True):
        assert call.panels.type not in TYPES.values()
        assert torch.equal(call.rows(torch.arange(call.panels.outputs)).to(weight.dtype), weight)


@cases
def test_matrices_stay_the_codes_of_the_file(tmp_path: Path, arch: str, changes: dict[str, Any]) -> None:
    """The codes are the numbers of the file in the model's order, and are multiplied by inputs in it."""
    write_family(tmp_path / "m.gguf", arch, "Q8_0", **changes)
    coded = load_model(find_folder(tmp_path / "m.gguf"), torch.bfloat16, CPU)
    exact = load_model(find_folder(tmp_path / "m-exact.gguf"), torch.bfloat16, CPU, native=False).model
    assert coded.stored_types == "Q8_0"
    assert isinstance(coded.model, FusedDecoder) == _is_fused(arch, changes)
    if isinstance(coded.model, FusedDecoder):
        _check_fused(coded.model, exact)
        return
    for name, module in exact.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith(DECODED):
            found = coded.model.get_submodule(name)
            assert isinstance(found, QuantizedLinear)
            assert torch.equal(found.weight, module.weight)
            x = torch.randn(3, module.in_features)
            wanted = module.float()(x)
            assert (found(x) - wanted).norm() < 0.02 * wanted.norm()  # activations are rounded to 8 bits
        if name.endswith("experts") and not isinstance(module, nn.Linear) and hasattr(module, "down_proj"):
            _check_experts(coded.model.get_submodule(name), module.float())


@pytest.mark.parametrize("arch", [one for one in ("glm4moe", "deepseek2", "ernie4_5-moe", "lfm2moe") if one in MODELS])
def test_what_chooses_experts_is_not_rounded_where_the_family_has_it_in_32_bits(arch: str, tmp_path: Path) -> None:
    """A last bit of bfloat16 next to a bias of 8 is a twentieth, and other experts."""
    model = write_family(tmp_path / "m.gguf", arch, "Q8_0", **ARCHITECTURES[arch])
    loaded = load_model(find_folder(tmp_path / "m.gguf"), torch.bfloat16, CPU, native=False)
    wanted = dict([*model.named_parameters(), *model.named_buffers()])
    found = [*loaded.model.named_parameters(), *loaded.model.named_buffers()]
    biases = {name: one for name, one in found if name.endswith(("correction_bias", "expert_bias"))}
    precise = {name: one for name, one in found if name in wanted and one.dtype == torch.float32} | biases
    assert biases
    for name, one in precise.items():
        assert torch.equal(one, wanted[name]), name


def test_matrices_of_qwen3_next_may_be_joined_as_older_and_newer_converters_do(tmp_path: Path) -> None:
    def join(tensors: dict[str, torch.Tensor], model: Any) -> None:
        for name in list(tensors):
            if name.endswith("attn_qkv.weight"):
                layer = model.model.layers[int(name.split(".")[1])].linear_attn
                del tensors[name], tensors[name.replace("attn_qkv", "attn_gate")]
                tensors[name.replace("attn_qkv", "ssm_in")] = layer.in_proj_qkvz.weight.detach()
            elif name.endswith("ffn_gate_exps.weight"):
                parts = [tensors.pop(name), tensors.pop(name.replace("gate_exps", "up_exps"))]
                tensors[name.replace("gate_exps", "gate_up_exps")] = torch.cat(parts, dim=1)

    model = write_family(tmp_path / "m.gguf", "qwen3next", rewrite=join, **ARCHITECTURES["qwen3next"])
    check_logits(tmp_path / "m.gguf", model)


def test_layers_for_several_tokens_after_the_last_one_are_left_out(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor], _model: Any) -> None:
        tensors |= {f"blk.4.{name}.weight": torch.ones(64) for name in ("attn_norm", "nextn.enorm", "nextn.hnorm")}

    counts = {"qwen35__block_count": 5, "qwen35__nextn_predict_layers": 1}
    model = write_family(tmp_path / "m.gguf", "qwen35", rewrite=add, **(DELTA | counts))
    check_logits(tmp_path / "m.gguf", model)
    write_family(tmp_path / "other.gguf", "qwen35", rewrite=add, **(DELTA | {"qwen35__nextn_predict_layers": 0}))
    with pytest.raises(ModelError, match=r"'blk.4.attn_norm.weight' has no place"):
        find_folder(tmp_path / "other.gguf")


def test_rotations_that_a_family_does_not_have_are_left_out(tmp_path: Path) -> None:
    """Converters write them for all families; of Nemotron-H by another size of heads."""
    changes = ARCHITECTURES["nemotron_h"] | {"nemotron_h__rope__dimension_count": 11}
    check_logits(tmp_path / "m.gguf", write_family(tmp_path / "m.gguf", "nemotron_h", **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qwen35__ssm__time_step_rank": 3}, "ssm.time_step_rank is 3"),
        ({"qwen35__ssm__time_step_rank": 2**20}, "not a number from 1 to 4096"),
        ({"qwen35__rope__dimension_count": 3}, "rope.dimension_count is 3"),
        ({"qwen35__attention__head_count_kv": [2, 1, 2, 2]}, "head_count_kv has 2 numbers"),
        ({"qwen35__attention__head_count_kv": [2, 2]}, "has no number"),
        ({"qwen35__nextn_predict_layers": 4}, "nextn_predict_layers is 4"),
        ({"qwen35__ssm__conv_kernel": None}, "ssm.conv_kernel is missing"),
        ({"qwen35__full_attention_interval": 3}, "is missing"),
        ({"qwen35__attention__head_count": 3, "num_attention_heads": 3}, "head_count is 3, no multiple of 2"),
        ({"nemotron_h_moe__expert_group_count": 3}, "expert_group_count is 3, of which 1 are used, for 4 experts"),
        ({"nemotron_h_moe__expert_group_used_count": 3}, "expert_group_count is 2, of which 3 are used"),
        ({"lfm2moe__expert_used_count": 5}, "expert_used_count is 5, of 4 experts"),
        ({"deepseek2__expert_gating_func": 1}, "expert_gating_func is 1, as in DeepSeek-V2, and not 2; take the model"),
        ({"deepseek2__leading_dense_block_count": 3}, "leading_dense_block_count is 3"),
        ({"deepseek2__rope__dimension_count": 40}, "rope.dimension_count is 40, and the size of a head 40"),
        (YARN | {"olmo2__rope__scaling__original_context_length": 2**25}, "original_context_length is 33554432"),
    ],
)
def test_metadata_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    arch = next(iter(changes)).split("__")[0]
    write_family(tmp_path / "m.gguf", arch, **(ARCHITECTURES[arch] | changes))
    with pytest.raises(ModelError, match=message):
        find_folder(tmp_path / "m.gguf")


def test_a_file_that_lacks_experts_is_refused_before_all_are_planned(tmp_path: Path) -> None:
    counts = {"qwen2moe__block_count": 20, "qwen2moe__expert_count": 4096}
    write_family(tmp_path / "m.gguf", "qwen2moe", **(ARCHITECTURES["qwen2moe"] | counts))
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=r"'blk\.0\.ffn_gate_inp\.weight' has the shape \[4, 64\]"):
            find_folder(tmp_path / "m.gguf")
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
