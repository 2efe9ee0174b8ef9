"""Model folders that are damaged, odd or hostile: each is refused by a ModelError that names the fault and a remedy."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from specinfer.core.errors import ModelError
from specinfer.model.folder import find_folder
from specinfer.model.load import load_model
from tiny import VOCAB, make_model

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DOWN, QUERIES = "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"
Damage = Callable[[Path], Any]
Tensors = dict[str, torch.Tensor]


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def rename(name: str, to: str) -> Damage:
    return lambda folder: (folder / name).rename(folder / to)


def text(name: str, content: str) -> Damage:
    return lambda folder: (folder / name).write_text(content, encoding="latin-1")


def config(**changes: Any) -> Damage:
    """Change fields of the configuration."""

    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def weights(change: Callable[[Tensors], Any]) -> Damage:
    """Change the weights."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def fill(name: str, place: tuple[int | slice, ...], value: float) -> Damage:
    """Set numbers of a weight."""
    return weights(lambda tensors: tensors[name].__setitem__(place, value))


def cut(keep: float) -> Damage:
    """Keep so many bytes of the weights, or such a share of them."""

    def damage(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])

    return damage


def header(given: dict[str, Any] | bytes, length: int | None = None) -> Damage:
    """Write weights of 16 bytes with this header, which says that it is of this length."""
    written = given if isinstance(given, bytes) else json.dumps(given).encode()
    size = struct.pack("<Q", len(written) if length is None else length)
    return lambda folder: (folder / WEIGHTS).write_bytes(size + written + bytes(16))


def split(folder: Path) -> None:
    """Write the weights in several files with an index."""
    (folder / WEIGHTS).unlink()
    make_model("llama").save_pretrained(folder, max_shard_size="20KB")


def outside(name: str) -> Damage:
    """Let an index name a file outside of the folder, which is there."""

    def damage(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder.parent / "outside.safetensors")
        index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def pickled(folder: Path) -> None:
    """Pickled weights are not read next to other safetensors."""
    save_file({"lora_A.weight": torch.ones(1)}, folder / "adapter.safetensors")
    (folder / WEIGHTS).unlink()
    torch.save(make_model("llama").state_dict(), folder / "pytorch_model.bin")


def codes(tensors: Tensors) -> None:
    """Let a weight be codes with scales."""
    tensors[f"{DOWN}_scale"] = tensors[DOWN].abs().amax(dim=1) / 127
    tensors[DOWN] = (tensors[DOWN] / tensors[f"{DOWN}_scale"].unsqueeze(1)).round().to(torch.int8)


def _entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


class Case(NamedTuple):
    message: str
    damage: Damage
    dtype: Any = torch.float32


_DAMAGED, _IN_FOLDER = rf"{WEIGHTS} is damaged.*fetch the model again", "{folder}"
CASES: dict[str, Case] = {
    "no config": Case(r"has no config\.json; it is not a Hugging Face model folder", remove("config.json")),
    "no weights": Case(r"no weights.*safetensors", remove(WEIGHTS)),
    **{
        f"only {name}": Case(f"only {name}, which can run code.*safetensors", rename(WEIGHTS, name))
        for name in ("pytorch_model.bin", "model.pt")
    },
    "pickled weights and an adapter": Case("", pickled),
    **{
        f"config {written!r}": Case(r"config\.json (of|is damaged)", text("config.json", written))
        for written in (
            "", "{", "null", "[]", "3", '"llama"', "{}", '{"model_type": 3}', '{"model_type": "none-such"}', "\x00\xff"
        )
    },
    **{
        repr(changes): Case("", config(**changes))
        for changes in (
            {"hidden_size": "32"}, {"hidden_size": 0}, {"hidden_size": -32}, {"hidden_size": 2**14},
            {"num_attention_heads": 0}, {"num_attention_heads": 5}, {"num_attention_heads": None},
            {"num_key_value_heads": 0}, {"num_key_value_heads": 3}, {"num_hidden_layers": -1}, {"num_hidden_layers": 0},
            {"num_hidden_layers": 10**6}, {"vocab_size": 0}, {"vocab_size": None}, {"vocab_size": 2**31},
            {"hidden_act": "none-such"},
            {"rope_parameters": {"rope_type": "none-such"}}, {"rope_parameters": 3},
            {"layer_types": ["mystery", "mystery"]}, {"max_position_embeddings": 0}, {"max_position_embeddings": -1},
        )
    },
    **{f"type {dtype}": Case("", config(dtype=dtype), "auto") for dtype in ("int8", "none-such", "Tensor")},
    **{f"cut to {keep}": Case(_DAMAGED, cut(keep)) for keep in (0, 4, 100, 0.5, 0.99, -1)},
    **{
        f"a header that lies, {i}": Case(_DAMAGED, header(*given))
        for i, given in enumerate([
            ({}, 2**63), ({}, 2**40), (b"", 100_000_000), (b"{" * 100_000,), (b"not json",),
            ({"a": _entry([4], 0, 2**62)},), ({"a": _entry([4], 16, 0)},), ({"a": _entry([2**40, 2**40], 0, 16)},),
            ({"a": _entry([-4], 0, 16)},), ({"a": _entry([4], 0, 16, "F99")},), ({"a": _entry([5], 0, 16)},),
            ({"a": _entry([4], 8, 24)},), ({"a": 5},),
        ])
    },
    "tensors that overlap": Case("", header({"a": _entry([4], 0, 16), "b": _entry([4], 0, 16)})),
    **{
        f"{value} in {name}": Case(f"weight {name} of .* NaN or infinity; fetch the model again",
                                   fill(name, (3, 2), value))
        for name in ("model.embed_tokens.weight", DOWN)
        for value in (float("nan"), float("inf"), -float("inf"))
    },
    "a weight that the type cannot represent": Case(
        "infinity|not finite", fill("model.embed_tokens.weight", (0,), 1e20), torch.float16
    ),
    # Their sum may overflow; each is a number all the same.
    "large finite weights": Case(
        "^(?!.*has NaN).*not finite in this dtype", fill("lm_head.weight", (slice(2), slice(2)), 3e38)
    ),
    "a missing weight": Case(
        rf"1 missing weights, {QUERIES}".replace(".", r"\."), weights(lambda tensors: tensors.pop(QUERIES))
    ),
    "weights of fewer layers than the config has": Case("9 missing weights", config(num_hidden_layers=3)),
    # Left out, they would make a model that runs and generates nonsense.
    "layers that the config does not know of": Case(
        r"no place for \d+ weights, model\.layers\.1", config(num_hidden_layers=1)
    ),
    "scales that the config does not know of": Case(rf"no place for 1 weights, {DOWN}_scale", weights(codes)),
    "a misshapen weight": Case(
        _IN_FOLDER,
        weights(lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"][:-1].clone()})),
    ),
    **{
        f"a config of another size, {changes}": Case(_IN_FOLDER, config(**changes))
        for changes in ({"vocab_size": VOCAB + 1}, {"intermediate_size": 64}, {"num_key_value_heads": 4})
    },
    # transformers would go on without it, and without the end tokens that only it names.
    "a damaged generation config": Case(
        r"generation_config\.json is damaged", text("generation_config.json", '{"eos_token_id":[0,26')
    ),
    **{
        f"{name} {value!r:.20}": Case(message, config(**{name: value}))
        for name, value, message in (
            ("architectures", ["a" * 10**5], r"not a decoder that generates text \(a{200}\)"),
            ("quantization_config", {"quant_method": []}, "quantized already"),
            ("quantization_config", {"quant_method": "a" * 10**5}, "quantized already.{,200}$"),
        )
    },
    "a long name in a damaged header": Case(r"is damaged \(.{,300}\); fetch", header({"a" * 10**5: 3})),
    "a deep generation config": Case(r"generation_config\.json is", text("generation_config.json", "[" * 9**5)),
    "a deep config": Case(r"config\.json is damaged", text("config.json", '{"a":' * 10**5)),
    **{
        f"end tokens {ids!r}": Case(
            r"eos_token_id in generation_config\.json or config\.json of .* is .*, not token ids; mend the file",
            text("generation_config.json", json.dumps({"eos_token_id": ids})),
        )
        for ids in ("</s>", [1, "2"], [[1]], 1.5, {"a": 1}, True)
    },
    **{
        f"a config of a far larger model, {changes}": Case(
            r"describes [\d,]+ parameters, and its files have [\d,]+; they do not belong together", config(**changes)
        )
        for changes in ({"hidden_size": 10**6}, {"head_dim": 10**6}, {"num_hidden_layers": 1900})
    },
    **{
        f"an index that names {name}": Case(r"outside\.safetensors", outside(name))
        for name in ("../outside.safetensors", "/tmp/outside.safetensors", "a/../../outside.safetensors")
    },
}  # fmt: skip
DAMAGED_INDEX = ["", "{}", "[]", "null", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}']


@pytest.mark.parametrize("name", CASES)
def test_a_folder_that_cannot_be_used_is_refused_by_its_fault(name: str, folder: Path) -> None:
    case = CASES[name]
    case.damage(folder)
    message = case.message.replace(_IN_FOLDER, str(folder))
    with pytest.raises(ModelError, match=f"(?s){message}"):
        load_model(find_folder(folder), case.dtype, torch.device("cpu"))


def test_architectures_that_are_no_list_are_not_read(folder: Path) -> None:
    config(architectures=2**31)(folder)
    assert find_folder(folder) == folder


@pytest.mark.parametrize("written", DAMAGED_INDEX)
def test_a_damaged_index_is_refused(written: str, folder: Path) -> None:
    split(folder)
    (folder / INDEX).write_text(written)
    with pytest.raises(ModelError):
        load_model(find_folder(folder), torch.float32, torch.device("cpu"))


def test_a_missing_part_of_the_weights_is_named(folder: Path) -> None:
    split(folder)
    part = sorted(folder.glob("*.safetensors"))[1]
    part.unlink()
    with pytest.raises(ModelError, match=rf"{part.name} is missing, though the index names it"):
        load_model(find_folder(folder), torch.float32, torch.device("cpu"))
