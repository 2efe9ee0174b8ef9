"""The embedded pair: what is packed comes back, and what is damaged is refused."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from demo_pair import packing
from heads import save_eagle3
from specinfer.core.errors import ModelError
from specinfer.core.sampling import SamplingParams
from specinfer.demo import corpus, pair
from specinfer.demo.chat_model import DRAFTER_NAMES
from specinfer.demo.pair import DemoFilesError
from specinfer.llm import LLM
from specinfer.ops.quantization import dequantize, quantize

NAMES = ("target", "drafter")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An ordinary folder with a tiny random model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    folder = tmp_path / "source"
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture
def packed(source: Path, tmp_path: Path) -> Path:
    packing.pack(source, tmp_path / "packed")
    return tmp_path / "packed"


def test_round_trip_is_within_half_a_step(source: Path, packed: Path, tmp_path: Path) -> None:
    pair.unpack(packed, tmp_path / "folder")
    before, after = load_file(source / pair.WEIGHTS), load_file(tmp_path / "folder" / pair.WEIGHTS)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        half_step = tensor.abs().amax(dim=-1, keepdim=True) / 254 if tensor.ndim == 2 else 0
        assert ((tensor - after[name]).abs() <= half_step + 1e-7).all(), name


def test_four_bits_take_half_a_byte_a_weight_and_come_back_as_the_quantized_weights(tmp_path: Path) -> None:
    source = save_eagle3(tmp_path / "head", draft_ids=range(3, 90, 2))
    packing.pack(source, tmp_path / "packed", without=("t2d",), bits=4, drafter_quantization="int4")
    pair.unpack(tmp_path / "packed", tmp_path / "folder")
    before, packed, after = (load_file(tmp_path / name / pair.WEIGHTS) for name in ("head", "packed", "folder"))
    assert after.keys() == before.keys() - {"t2d"}
    assert packed["fc.weight"].numel() == before["fc.weight"].numel() / 2
    assert torch.equal(after["fc.weight"], dequantize(quantize(before["fc.weight"], 4)))
    half_step = before["midlayer.mlp.down_proj.weight"].abs().amax(dim=1, keepdim=True) / 254  # 48 inputs: as int8
    assert ((before["midlayer.mlp.down_proj.weight"] - after["midlayer.mlp.down_proj.weight"]).abs() <= half_step).all()
    assert torch.equal(after["d2t"], before["d2t"])
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert config["drafter_quantization"] == "int4"


def test_packed_matrices_take_one_byte_a_weight(packed: Path) -> None:
    tensors = load_file(packed / pair.WEIGHTS)
    assert tensors["model.embed_tokens.weight"].dtype == torch.int8
    assert "lm_head.weight" not in tensors  # tied: stored once


def test_unpacked_dtype(packed: Path, tmp_path: Path) -> None:
    pair.unpack(packed, tmp_path / "folder", torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "folder" / pair.WEIGHTS).values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "folder").dtype == torch.bfloat16


def test_many_may_unpack_at_once(packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "folder"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: pair.unpack(packed, folder), range(8)))
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]
    AutoModelForCausalLM.from_pretrained(folder)


def test_half_a_folder_is_replaced(packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "folder"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    pair.unpack(packed, folder)
    assert (folder / pair.WEIGHTS).is_file()
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]


@pytest.mark.parametrize("name", [pair.WEIGHTS, "config.json", "tokenizer.json"])
def test_damaged_file_is_refused(packed: Path, tmp_path: Path, name: str) -> None:
    content = bytearray((packed / name).read_bytes())
    content[-1] ^= 1
    (packed / name).write_bytes(content)
    with pytest.raises(DemoFilesError, match=rf"{name} is damaged: reinstall"):
        pair.unpack(packed, tmp_path / "folder")


@pytest.mark.parametrize("name", [pair.WEIGHTS, pair.CHECKSUMS])
def test_missing_file_is_named(packed: Path, tmp_path: Path, name: str) -> None:
    (packed / name).unlink()
    with pytest.raises(DemoFilesError, match=rf"{name} is missing: reinstall"):
        pair.unpack(packed, tmp_path / "folder")


def test_embedded_pair_is_small() -> None:
    files = [path for path in pair.PACKED.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 40e6


def test_embedded_pair_has_the_promised_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = pair.demo_folders()
    stamp = (folders.target / pair.WEIGHTS).stat().st_mtime_ns
    assert pair.demo_folders() == folders
    assert (folders.target / pair.WEIGHTS).stat().st_mtime_ns == stamp  # not unpacked again
    sizes = {
        name: sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(getattr(folders, name)).parameters())
        for name in NAMES
    }
    assert sizes["target"] >= 20_000_000
    assert sizes["drafter"] <= sizes["target"] / 20


@pytest.mark.slow
def test_the_set_foresees_more_than_its_first() -> None:
    prompts, params = corpus.heldout_prompts(4), SamplingParams(temperature=0.0, max_tokens=48)
    said, passes = [], []
    for names in (["demo"], list(DRAFTER_NAMES)):
        with LLM("demo", drafters=names, tree="1,1,1,1,1,1") as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        said.append([output.outputs[0].token_ids for output in outputs])
        passes.append(sum(output.metrics.speculative_decoding["num_target_passes"] for output in outputs))
    assert said[0] == said[1]
    assert passes[1] < 0.95 * passes[0]


def test_the_embedded_head_is_accepted_more_often_than_not_and_changes_no_text() -> None:
    prompts, params = corpus.heldout_prompts(2, num_chars=200), SamplingParams(temperature=0.0, max_tokens=32)
    with LLM("demo", drafters=["demo-eagle3"], tree="1,1,1") as llm:
        (runner,) = llm.small_models.values()
        assert runner.loaded.quantization == "int4"
        outputs = llm.generate(prompts, params, use_tqdm=False)
    with LLM("demo", tree="off") as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in plain]
    assert sum(output.metrics.speculative_decoding["num_target_passes"] for output in outputs) < 32


def test_an_unpacked_pair_that_was_cut_short_is_unpacked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    weights = pair.demo_folders().drafter / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    assert pair.demo_folders().drafter == weights.parent
    assert weights.read_bytes() == whole


def test_an_unpacked_pair_that_was_changed_is_unpacked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    weights = pair.demo_folders().drafter / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-7] + bytes(byte ^ 1 for byte in whole[-7:]))
    assert pair.demo_folders().drafter == weights.parent
    assert weights.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"demo: .* cannot be written .*XDG_CACHE_HOME"):
        pair.demo_folders()


def test_embedded_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = pair.demo_folders()
    assert (folders.target / "tokenizer.json").read_bytes() == (folders.drafter / "tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(folders.target)
    text = corpus.heldout_prompts(1)[0] + "\n\téé\U0001f600"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert set(tokenizer(text)) == {"input_ids", "attention_mask"}
    assert tokenizer.eos_token == "<|endoftext|>"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "two\nlines"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "# user: two\n# lines\n"


def test_record_holds_the_figures() -> None:
    record = json.loads((pair.PACKED / "training.json").read_text())
    for name in NAMES:
        figures = record["heldout"][name]
        assert abs(figures["loss"] - figures["loss_before_packing"]) < 0.01
    assert record["agreement"]["heldout_files"]["hit_rates"][0] > 0.5
