"""Model folders: their weights, types, end tokens, names and tokenizers; nothing in them is run."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specinfer.core.errors import ModelError
from specinfer.core.tree import TokenTree
from specinfer.model.attention import register
from specinfer.model.batch import Piece
from specinfer.model.definition import load_config, load_tokenizer, read_definition
from specinfer.model.folder import find_folder
from specinfer.model.kv_cache import NO_SLOTS
from specinfer.model.load import load_model
from specinfer.model.runner import ModelRunner
from tiny import VOCAB, make_model, save_tokenizer

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"
STATUS = Path("/proc/self/status")


def _load(folder: Path, dtype: Any = torch.float32) -> Any:
    return load_model(find_folder(folder), dtype, CPU)


def _edit(folder: Path, name: str = "config.json", **changes: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_good_folder(folder: Path) -> None:
    loaded = _load(folder)
    assert loaded.folder == folder
    assert (loaded.vocab_size, loaded.max_position, loaded.eos_token_ids) == (VOCAB, 256, ())
    assert loaded.dtype == torch.float32
    assert loaded.num_parameters == sum(p.numel() for p in make_model("llama").parameters())
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert not loaded.model.training


@pytest.mark.skipif(not STATUS.exists(), reason="the system does not report a process's memory like this")
def test_weights_are_mapped_until_they_are_moved_to_the_device(tmp_path: Path) -> None:
    """So a host may have less memory than a model for its GPU: pages of files can be dropped at any time."""
    config = AutoConfig.for_model("llama", vocab_size=40_000, hidden_size=512, intermediate_size=64,
                                  num_hidden_layers=1, num_attention_heads=4, tie_word_embeddings=False)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    size = sum(weight.nbytes for weight in model.parameters())
    model.save_pretrained(tmp_path)
    del model
    register()
    before = _anonymous_bytes()
    model = read_definition(tmp_path, load_config(tmp_path), "auto")
    assert _anonymous_bytes() - before < size // 4
    assert sum(weight.nbytes for weight in model.parameters()) == size > 80e6


def _anonymous_bytes() -> int:
    """Return the bytes of this process's memory that are no pages of files."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types(folder: Path, dtype: torch.dtype) -> None:
    assert _load(folder, dtype).dtype == dtype
    assert _load(folder, "auto").dtype == torch.float32


@pytest.mark.parametrize(("eos", "wanted"), [(None, ()), (0, (0,)), (5, (5,)), ([5, 7], (5, 7))])
def test_end_tokens(folder: Path, eos: Any, wanted: tuple[int, ...]) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert _load(folder).eos_token_ids == wanted


def test_end_tokens_of_the_config_alone(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    _edit(folder, eos_token_id=[3, 4])
    assert _load(folder).eos_token_ids == (3, 4)


# ------------------------------------------------------------------------------------------- folders


NAMES = ["/no/such/folder", "./none", "~/none", "a/b/c", "", "a b", "../x", "https://x.y/z", "http://127.0.0.1/a"]
ODD_NAMES = ["../../etc", "-x/y", "x/..", "a\nb", "\x00"]


@pytest.mark.parametrize("name", [*NAMES, *ODD_NAMES])
def test_a_name_that_is_no_folder_leads_nowhere_else(name: str) -> None:
    with pytest.raises(ModelError, match=r"(?s)^model: .*folder"):
        find_folder(name)


def test_a_hub_name_that_cannot_be_fetched() -> None:
    with pytest.raises(ModelError, match=r"nobody/nothing.*is not in the cache.*give a folder"):
        find_folder("nobody/nothing")


def test_files_that_are_missing_or_of_another_kind_are_named_as_such(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json' is not a GGUF file; name one, or the folder"):
        find_folder(folder / "config.json")
    with pytest.raises(ModelError, match=r"no file '.*m\.gguf'; check its name"):
        find_folder(folder / "m.gguf")


def test_code_in_the_folder_is_not_run(folder: Path) -> None:
    marker = folder / "was_run"
    (folder / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    auto = {"AutoConfig": "modeling_evil.C", "AutoModelForCausalLM": "modeling_evil.M"}
    _edit(folder, auto_map=auto)
    _load(folder)
    _edit(folder, auto_map=auto, model_type="evil")
    with pytest.raises(ModelError):
        _load(folder)
    assert not marker.exists()


def test_shards(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    whole, runner = make_model("llama"), ModelRunner(_load(tmp_path), 8)
    tokens = [3, 1, 4, 5, 6]
    slots = runner.cache.reserve("a", len(tokens))
    logits = runner.forward([Piece.from_span(tokens[:2], TokenTree.chain(1, tokens[2:]), NO_SLOTS, slots)])
    wanted = whole(input_ids=torch.tensor([tokens])).logits[0, 1:]
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("eos", [5000, -1, [3, 5000]])
def test_end_tokens_outside_the_vocabulary_are_never_met(folder: Path, eos: object) -> None:
    _edit(folder, eos_token_id=eos)
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert _load(folder).eos_token_ids == ((3,) if isinstance(eos, list) else ())


# ----------------------------------------------------------------------------------------- tokenizers


def test_code_of_a_tokenizer_is_not_run(folder: Path) -> None:
    marker = save_tokenizer(folder) / "was_run"
    (folder / "tokenization_evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass T: pass\n")
    _edit(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_evil.T"] * 2})
    with suppress(ModelError):
        assert load_tokenizer(folder).encode("the")
    assert not marker.exists()


def test_no_tokenizer_is_no_error(folder: Path) -> None:
    assert load_tokenizer(folder) is None


def test_the_tokenizer_of_the_folder(folder: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(folder))
    assert len(tokenizer) == VOCAB
    assert tokenizer.decode(tokenizer.encode("the cat\u20ac")) == "the cat\u20ac"


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"model": 3}'])
def test_damaged_tokenizer(folder: Path, text: str) -> None:
    save_tokenizer(folder)
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(
        ModelError, match=rf"^model: the tokenizer of {folder} cannot be used \(.*; fetch the model again"
    ):
        load_tokenizer(folder)


def test_weights_that_do_not_fit_into_a_gpu_name_the_model_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, model_folder: Callable[..., Path]
) -> None:
    def fail(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore of it")

    monkeypatch.setattr("specinfer.model.load.read_shard", fail)
    folder = model_folder()
    with pytest.raises(
        ModelError, match=r"does not fit into the memory of cpu: CUDA out of memory.*; set quantization"
    ):
        load_model(folder, "auto", torch.device("cpu"))
