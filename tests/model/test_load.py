"""Model folders that cannot be used: each is refused by a ModelError that names the fault and the remedy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
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


@pytest.fixture
def folder(model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """A good model that a test may damage."""
    return Path(shutil.copytree(model_folder("llama"), tmp_path / "model"))


def _load(folder: Path, dtype: Any = torch.float32) -> Any:
    return load_model(find_folder(folder), dtype, CPU)


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


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
    size = sum(one.nbytes for one in model.parameters())
    model.save_pretrained(tmp_path)
    del model
    register()
    before = _anonymous_bytes()
    model = read_definition(tmp_path, load_config(tmp_path), "auto")
    assert _anonymous_bytes() - before < size // 4
    assert sum(one.nbytes for one in model.parameters()) == size > 80e6


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


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "~/none", "a/b/c", "", "a b", "../x", "https://x.y/z"])
def test_no_folder(name: str) -> None:
    with pytest.raises(ModelError, match=r"^model: .*folder"):
        find_folder(name)


def test_a_hub_name_that_cannot_be_fetched() -> None:
    with pytest.raises(ModelError, match=r"nobody/nothing.*is not in the cache.*give a folder"):
        find_folder("nobody/nothing")


def test_files_that_are_missing_or_of_another_kind_are_named_as_such(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json' is not a GGUF file; name one, or the folder"):
        find_folder(folder / "config.json")
    with pytest.raises(ModelError, match=r"no file '.*m\.gguf'; check its name"):
        find_folder(folder / "m.gguf")


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json; it is not a Hugging Face model folder"):
        _load(folder)


def test_no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelError, match=r"no weights.*safetensors"):
        _load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_not_read(folder: Path, name: str) -> None:
    (folder / WEIGHTS).rename(folder / name)
    with pytest.raises(ModelError, match=f"only {name}, which can run code.*safetensors"):
        _load(folder)


def test_pickled_weights_are_not_read_next_to_safetensors(folder: Path) -> None:
    save_file({"lora_A.weight": torch.ones(1)}, folder / "adapter.safetensors")
    (folder / WEIGHTS).unlink()
    torch.save(make_model("llama").state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelError):
        _load(folder)


# -------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "3", '"llama"', "{}", '{"model_type": 3}', '{"model_type": "none-such"}', "\x00\xff"],
)
def test_damaged_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config\.json (of|is damaged)"):
        _load(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "32"},
        {"hidden_size": 0},
        {"hidden_size": -32},
        {"num_attention_heads": 0},
        {"num_attention_heads": 5},
        {"num_attention_heads": None},
        {"num_key_value_heads": 0},
        {"num_key_value_heads": 3},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 0},
        {"vocab_size": 0},
        {"vocab_size": None},
        {"hidden_act": "none-such"},
        {"rope_parameters": {"rope_type": "none-such"}},
        {"rope_parameters": 3},
        {"layer_types": ["mystery", "mystery"]},
        {"max_position_embeddings": 0},
        {"max_position_embeddings": -1},
    ],
    ids=repr,
)
def test_a_config_that_makes_no_sense(folder: Path, changes: dict[str, Any]) -> None:
    _edit(folder, **changes)
    with pytest.raises(ModelError):
        _load(folder)


@pytest.mark.parametrize("dtype", ["int8", "none-such", "Tensor"])
def test_a_type_that_is_none(folder: Path, dtype: str) -> None:
    _edit(folder, dtype=dtype)
    with pytest.raises(ModelError):
        _load(folder, "auto")


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


# ------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.99, -1])
def test_truncated_weights(folder: Path, keep: float) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(ModelError, match=rf"{WEIGHTS} is damaged.*fetch the model again"):
        _load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"])
def test_weights_that_are_not_finite(folder: Path, name: str, value: float) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][3, 2] = value

    _edit_weights(folder, damage)
    with pytest.raises(ModelError, match=f"weight {name} of .* NaN or infinity; fetch the model again"):
        _load(folder)


def test_large_finite_weights_are_not_taken_for_infinite(folder: Path) -> None:
    """Their sum may overflow; each is a number all the same."""

    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][:2, :2] = 3e38

    _edit_weights(folder, enlarge)
    with pytest.raises(ModelError, match="not finite in this dtype") as error:
        _load(folder)
    assert "has NaN" not in str(error.value)


def test_missing_weights(folder: Path) -> None:
    _edit_weights(folder, lambda tensors: tensors.pop("model.layers.0.self_attn.q_proj.weight"))
    with pytest.raises(ModelError, match=r"1 missing weights, model\.layers\.0\.self_attn\.q_proj\.weight"):
        _load(folder)


def test_weights_of_fewer_layers_than_the_config_has(folder: Path) -> None:
    _edit(folder, num_hidden_layers=3)
    with pytest.raises(ModelError, match="9 missing weights"):
        _load(folder)


def test_misshapen_weights(folder: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()

    _edit_weights(folder, cut)
    with pytest.raises(ModelError, match=str(folder)):
        _load(folder)


@pytest.mark.parametrize("changes", [{"vocab_size": VOCAB + 1}, {"intermediate_size": 64}, {"num_key_value_heads": 4}])
def test_config_of_another_size(folder: Path, changes: dict[str, int]) -> None:
    _edit(folder, **changes)
    with pytest.raises(ModelError, match=str(folder)):
        _load(folder)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    return tmp_path


def test_shards(sharded: Path) -> None:
    whole, runner = make_model("llama"), ModelRunner(_load(sharded), 8)
    tokens = [3, 1, 4, 5, 6]
    slots = runner.cache.reserve("a", len(tokens))
    logits = runner.forward([Piece.of_span(tokens[:2], TokenTree.chain(1, tokens[2:]), NO_SLOTS, slots)])
    wanted = whole(input_ids=torch.tensor([tokens])).logits[0, 1:]
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=rf"{shard.name} is missing, though the index names it"):
        _load(sharded)


DAMAGED_INDEX = ["", "{}", "[]", "null", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}']


@pytest.mark.parametrize("text", DAMAGED_INDEX)
def test_damaged_index(sharded: Path, text: str) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(ModelError):
        _load(sharded)


def test_layers_the_config_does_not_know_of(folder: Path) -> None:
    """Left out, they would make a model that runs and generates nonsense."""
    _edit(folder, num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"no place for \d+ weights, model\.layers\.1"):
        _load(folder)


def test_scales_of_weights_the_config_does_not_know_of(folder: Path) -> None:
    """Codes would be taken for weights."""
    weights = load_file(folder / WEIGHTS)
    name = "model.layers.0.mlp.down_proj.weight"
    weights[f"{name}_scale"] = weights[name].abs().amax(dim=1) / 127
    weights[name] = (weights[name] / weights[f"{name}_scale"].unsqueeze(1)).round().to(torch.int8)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"no place for 1 weights, {name}_scale"):
        _load(folder)


@pytest.mark.parametrize("eos", [5000, -1, [3, 5000]])
def test_end_tokens_outside_the_vocabulary_are_never_met(folder: Path, eos: object) -> None:
    _edit(folder, eos_token_id=eos)
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert _load(folder).eos_token_ids == ((3,) if isinstance(eos, list) else ())


def test_a_damaged_generation_config_is_refused(folder: Path) -> None:
    """transformers would go on without it, and without the end tokens that only it names."""
    (folder / "generation_config.json").write_text('{"eos_token_id":[0,26')
    with pytest.raises(ModelError, match=r"generation_config\.json is damaged"):
        _load(folder)


def test_a_weight_that_the_type_cannot_represent(folder: Path) -> None:
    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][0, :] = 1e20

    _edit_weights(folder, enlarge)
    with pytest.raises(ModelError, match=r"infinity|not finite"):
        _load(folder, torch.float16)


# ----------------------------------------------------------------------------------------- tokenizers


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
