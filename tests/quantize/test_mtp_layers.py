"""MTP layers of quantized models: kept where the format has names for them, otherwise left out with a warning."""

import json
from pathlib import Path

import gguf
import pytest
import torch

from pair_heads import LAYERS, save_mtp
from specinfer import LLM, SamplingParams
from specinfer.model.gguf.folder import find_gguf_folder
from specinfer.model.heads.mtp import MtpCheckpoint, has_mtp
from specinfer.model.offload.shards import Shards
from specinfer.quantize.checkpoint import write_quantized
from specinfer.quantize.options import QuantizeConfig
from tiny import random_prompts, save_tokenizer

WRITTEN = ("glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def save(folder: Path, family: str) -> Path:
    save_mtp(folder, family)
    save_tokenizer(folder)
    if "moe_text" in family:  # transformers' class for its tokenizers adds a token that this vocabulary has no room for
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        model = tokenizer["model"]
        last = max(model["vocab"], key=model["vocab"].get)
        model["vocab"]["<|endoftext|>"] = model["vocab"].pop(last)
        model["merges"] = [one for one in model["merges"] if "".join(one) != last]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def write(source: Path, out: Path, to: str) -> Path:
    write_quantized(QuantizeConfig(model=str(source), to=to, out=out))
    return out


def mtp_tensors(folder: Path) -> dict[str, torch.Tensor]:
    with Shards(folder, torch.float32) as shards:
        checkpoint = MtpCheckpoint(folder, shards.sources, torch.float32, torch.device("cpu"))
        return {name: checkpoint.take(name, *one.shape) for name, one in checkpoint.tensors.items()}


def texts(model: Path, **options: object) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(model, dtype="float32", **options) as llm:  # type: ignore[arg-type]
        prompts = [{"prompt_token_ids": ids} for ids in random_prompts([5, 20])]
        return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("family", WRITTEN)
def test_a_gguf_file_keeps_the_mtp_layer_and_it_drafts(family: str, tmp_path: Path) -> None:
    source, file = save(tmp_path / "source", family), write(tmp_path / "source", tmp_path / "m.gguf", "q8_0")
    fields = {name: one.contents() for name, one in gguf.GGUFReader(file).fields.items()}
    arch = fields["general.architecture"]
    assert (fields[f"{arch}.block_count"], fields[f"{arch}.nextn_predict_layers"]) == (LAYERS + 1, 1)
    found, wanted = mtp_tensors(find_gguf_folder(file)), mtp_tensors(source)
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert (found[name] - weight).norm() < 0.01 * weight.norm(), name
    assert texts(file, drafters=["mtp"], tree="2,1") == texts(file, tree="off")


def test_mtp_layers_without_names_in_gguf_files_are_left_out_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = save(tmp_path / "source", "mimo")
    file = write(source, tmp_path / "m.gguf", "q8_0")
    (line,) = [one.getMessage() for one in caplog.records if one.name.startswith("specinfer")]
    assert line == "MTP layers that GGUF files have no names for are left out: 16 weights"
    assert has_mtp(source)
    assert not has_mtp(find_gguf_folder(file))
    assert "num_nextn_predict_layers" not in json.loads((find_gguf_folder(file) / "config.json").read_text())


@pytest.mark.parametrize("family", ["glm4_moe", "mimo", "deepseek_v3", "qwen3_next"])
def test_folders_keep_mtp_layers_in_full_and_say_that_they_are_not_quantized(family: str, tmp_path: Path) -> None:
    source, folder = save(tmp_path / "source", family), write(tmp_path / "source", tmp_path / "int4", "int4")
    found, wanted = mtp_tensors(folder), mtp_tensors(source)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
    ignored = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    with Shards(source) as shards:
        layers = (f"model.layers.{LAYERS}.", "mtp.", "model.mtp")
        matrices = [name for name, one in shards.sources.items() if name.startswith(layers) and len(one.shape) == 2]
    assert matrices
    assert {name.removesuffix(".weight") for name in matrices} <= set(ignored)
    assert texts(folder, drafters=["mtp"], tree="2,1") == texts(folder, tree="off")
