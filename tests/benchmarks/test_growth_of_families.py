"""Qwen 2 and 3 and Gemma 3 keep their width: folders compute the same function, GGUF files the same bits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.growth.gguf_files import grow_file, grown_bytes
from benchmarks.growth.models import plan_growth
from benchmarks.growth.targets import grow_folder
from heads import save_eagle3
from specinfer import LLM, SamplingParams
from specinfer.bench.models import Models, find_models
from specinfer.model.definition import load_config
from specinfer.model.folder import find_folder
from specinfer.model.gguf.folder import weights_file
from specinfer.model.gguf.header import read_header
from specinfer.planning.growth_shape import Shape, shape_for, shape_of
from specinfer.quantize.checkpoint import write_quantized
from specinfer.quantize.options import QuantizeConfig
from tiny import save_model, save_tokenizer

FAMILIES = ("qwen2", "qwen3", "gemma3_text")
QWEN_1_5B = {  # Qwen2.5-Coder 1.5B
    "vocab_size": 151936, "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "intermediate_size": 8960, "tie_word_embeddings": False,
}  # fmt: skip


def larger(folder: Path, more: int = 64) -> Shape:
    """A shape with more than twice the layers and a wider MLP."""
    old = shape_of(load_config(folder))
    return replace(old, num_layers=2 * old.num_layers + 1, intermediate_size=old.intermediate_size + more)


@torch.no_grad()
def logits_of(folder: Path) -> torch.Tensor:  # [1, tokens, vocab]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(input_ids=torch.arange(3, 40)[None]).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_computes_the_same_function(family: str, tmp_path: Path) -> None:
    source = save_model(tmp_path / "small", family)
    grown = grow_folder(source, tmp_path / "big", larger(source), dtype=torch.float32)
    torch.testing.assert_close(logits_of(grown), logits_of(source), rtol=1e-4, atol=1e-4)
    assert shape_of(load_config(grown)) == larger(source)


def test_layers_of_several_kinds_keep_their_order(tmp_path: Path) -> None:
    source = save_model(tmp_path / "small", "gemma3_text")
    grown = load_config(grow_folder(source, tmp_path / "big", larger(source), dtype=torch.float32))
    old = load_config(source).layer_types
    assert len(set(old)) == 2
    assert grown.layer_types == [old[i % len(old)] for i in range(2 * len(old) + 1)]


def test_a_head_of_layers_of_several_kinds_does_not_grow(tmp_path: Path) -> None:
    target, head = save_model(tmp_path / "target", "gemma3_text"), tmp_path / "head"
    save_eagle3(head, draft_ids=range(2, 90))
    with pytest.raises(ValueError, match=r"grow: .* reads layers of several kinds; leave grow out"):
        plan_growth(Models(target, (str(head),)), "1m", "float32")


def test_the_shape_of_a_real_model() -> None:
    from transformers import Qwen2Config

    config = Qwen2Config(**QWEN_1_5B)
    shape = shape_for("7.4b", config)
    assert shape == Shape(1536, 56, 12, 2, 25856)
    assert 7.4e9 <= shape.num_parameters(151936, 128, tied=False) <= 1.1 * 7.4e9
    assert shape_for("2b", config).num_layers == 28  # its MLP is no wider than those that caches hold


@pytest.fixture(params=FAMILIES)
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of Q4_K_M, and a folder of the cache that stands for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "head_dim": 64,
    }
    if request.param == "gemma3_text":  # every sixth layer sees all tokens, as in its files
        kinds = [*["sliding_attention"] * 5, "full_attention"]
        sizes |= {"num_hidden_layers": 6, "layer_types": kinds, "query_pre_attn_scalar": 64}
    source = save_model(tmp_path / "source", request.param, **sizes)
    save_tokenizer(source)
    write_quantized(QuantizeConfig(model=str(source), out=tmp_path / "small.gguf", to="q4_k_m"))
    return tmp_path / "small.gguf"


def bits_of(model: Path) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and the log-probabilities of each, on some prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": list(range(start, start + 9))} for start in (5, 40, 71)]
    with LLM(str(model), drafters=["ngram"], tree="off", device="cpu") as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [(list(one.token_ids), [next(iter(at.values())).logprob for at in one.logprobs]) for one in outputs]


def test_a_file_grows_to_one_that_computes_the_same_bits(file: Path, tmp_path: Path) -> None:
    models = find_models(str(file), ("ngram",))
    shape = larger(models.target, more=768)
    grown = grow_file(models.target, tmp_path / "grown", shape)
    assert shape_of(load_config(grown)) == shape
    assert bits_of(weights_file(grown)) == bits_of(file)
    old, new = (read_header(weights_file(folder)).tensors for folder in (models.target, grown))
    assert sum(place.num_bytes for place in new.values()) == grown_bytes(models.target, shape)
    assert new["blk.1.ffn_up.weight"].shape == (512 + 768, 256)
    assert {place.kind for place in new.values()} == {place.kind for place in old.values()}


def test_a_grown_file_is_dense_and_is_written_once(file: Path, tmp_path: Path) -> None:
    folder = find_folder(file)
    grown = grow_file(folder, tmp_path / "grown", larger(folder, more=768))
    state = weights_file(grown).stat()
    assert grow_file(folder, tmp_path / "grown", larger(folder, more=768)) == grown
    assert weights_file(grown).stat().st_mtime_ns == state.st_mtime_ns
    header = read_header(weights_file(grown))
    for name, place in header.tensors.items():
        if not name.endswith((".attn_output.weight", ".ffn_down.weight")) and place.num_bytes > 4096:
            data = weights_file(grown).read_bytes()[place.offset : place.offset + place.num_bytes]
            assert data.count(0) < 0.1 * len(data), name


def test_a_file_is_grown_by_a_measurement_and_keeps_its_dtype(file: Path) -> None:
    models = find_models(str(file), ("ngram",))
    plan = plan_growth(models, "20m", "bfloat16")
    (growth,) = plan.growths.values()
    made = plan.make()
    written = weights_file(made.target)
    assert written is not None
    assert growth.num_bytes == 0  # it exists
    assert 20e6 <= shape_of(load_config(made.target)).num_parameters(128, 64, tied=False) <= 22e6
    assert json.loads((made.target / "grown.json").read_text())["shape"]["hidden_size"] == 256


def test_a_file_does_not_grow_in_width(file: Path, tmp_path: Path) -> None:
    folder = find_folder(file)
    wider = replace(larger(folder), hidden_size=512)
    with pytest.raises(ValueError, match="grow in layers and MLPs alone; keep width and heads"):
        grow_file(folder, tmp_path / "grown", wider)
