"""Folders in PEFT's format: what is read, and what is refused by name before any of it is used."""

import json
import pickle
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adapters import ALL, ATTENTION, merged_model, save_adapter
from specinfer.core.errors import ModelError
from specinfer.core.lora import LoRAConfig, LoRARequest
from specinfer.model.adapters.peft_folder import Pair, Shape, read_adapter
from specinfer.model.adapters.registry import Adapters
from specinfer.model.load import load_model

_LAYER = {"q_proj": (32, 32), "k_proj": (32, 16), "v_proj": (32, 16), "o_proj": (32, 32)}
_MLP = {"gate_proj": (32, 48), "up_proj": (32, 48), "down_proj": (48, 32)}
LINEARS = {
    f"model.layers.{i}.{block}.{name}": Shape(*size)
    for i in range(2)
    for block, sizes in (("self_attn", _LAYER), ("mlp", _MLP))
    for name, size in sizes.items()
}


@pytest.fixture(scope="module")
def base(model_folder: Callable[..., Path]) -> Path:
    return model_folder("llama")


def _read(folder: Path, max_rank: int = 64) -> dict[str, Pair]:
    return read_adapter(folder, LINEARS, max_rank)[1]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"r": 3, "lora_alpha": 7, "use_rslora": True},
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": ["down_proj"], "layers_to_transform": [0]},
        {"target_modules": ["k_proj", "up_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 6}, "alpha_pattern": {".*down_proj": 3}},
        {"target_modules": ["down_proj", "q_proj"], "layers_to_transform": 1},
        {"exclude_modules": r".*layers\.1\..*"},
        {"target_modules": "all-linear", "exclude_modules": r"model\.layers\.\d+\.mlp\..*"},
        {"rank_pattern": {r".*?\.layers\.\d+\..*\.(q|k)_proj.*": 2, r"^model.layers.1.mlp.up_proj": 3}},
        {"rank_pattern": {f"model.layers.1.mlp.up_proj{i}": 3 for i in range(2000)}},  # more than `re` remembers
        {"exclude_modules": [], "modules_to_save": None, "use_dora": False, "lora_dropout": 0.1},
    ],
)
def test_matrices_are_those_that_peft_merges(base: Path, tmp_path: Path, config: Mapping[str, Any]) -> None:
    folder = save_adapter(tmp_path, base, **config)
    plain, merged = (dict(one.named_parameters()) for one in (merged_model(base, save_adapter(tmp_path / "none", base,
                     target_modules=[])), merged_model(base, folder)))  # fmt: skip
    pairs = _read(folder)
    changed = {name for name in LINEARS if not torch.equal(plain[f"{name}.weight"], merged[f"{name}.weight"])}
    assert pairs.keys() == changed
    for name, pair in pairs.items():
        torch.testing.assert_close(plain[f"{name}.weight"] + pair.up @ pair.down, merged[f"{name}.weight"])


def test_a_file_of_torch_is_read_without_running_code(base: Path, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path, base)
    stored = folder / "adapter_model.safetensors"
    expected = _read(folder)
    torch.save(load_file(stored), folder / "adapter_model.bin")
    stored.unlink()
    found = _read(folder)
    assert all(torch.equal(found[name].up, pair.up) for name, pair in expected.items())

    class Code:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    (folder / "adapter_model.bin").write_bytes(pickle.dumps({"a": Code()}, protocol=2))
    with pytest.raises(ModelError, match="cannot be read"):
        _read(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' cannot be applied, only LORA"),
        ({"use_dora": True}, "use_dora True cannot be applied; merge"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save .'lm_head'. cannot be applied; merge"),
        ({"bias": "all"}, "bias 'all' cannot be applied; merge"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights 'pissa_niter_16' changed the weights"),
        ({"r": 65}, "rank 65, more than max_lora_rank 64; raise that"),
        ({"rank_pattern": {"q_proj": 99}}, "rank 99, more than max_lora_rank 64"),
        ({"r": "8"}, "r must be a whole number of at least 1, not '8'"),
        ({"r": 0}, "r must be a whole number"),
        ({"lora_alpha": 1e400}, "lora_alpha must be a number, not inf"),
        ({"lora_alpha": None}, "lora_alpha must be a number"),
        ({"target_modules": [3]}, "target_modules must be a list of names"),
        ({"layers_to_transform": ["a"]}, "layers_to_transform must be a list of numbers"),
        ({"rank_pattern": {"(a*)*b": 2}}, "rank_pattern has a pattern that may take long"),
        ({"rank_pattern": {".*.*.*.*b": 2}}, "rank_pattern has a pattern that may take long"),
        ({"alpha_pattern": {"(": 2}}, "alpha_pattern has a pattern that cannot be read"),
        ({"alpha_pattern": [1]}, "alpha_pattern must be an object"),
    ],
)
def test_a_configuration_that_cannot_be_applied_is_refused_by_name(
    base: Path, tmp_path: Path, config: Mapping[str, Any], message: str
) -> None:
    folder = save_adapter(tmp_path, base)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(ModelError, match=message):
        _read(folder)


Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({f"{Q}.lora_A.weight": None}, f"has no tensor {Q}.lora_A.weight, only the other one"),
        ({f"{Q}.lora_A.weight": None, f"{Q}.lora_B.weight": None}, f"has no tensors for {Q}, which target_modules"),
        ({f"{Q}.lora_A.weight": torch.zeros(4, 31)}, r"is \[4, 31\] of torch.float32, and should be \[4, 32\]"),
        ({f"{Q}.lora_B.weight": torch.zeros(32, 4, dtype=torch.int8)}, "of torch.int8"),
        ({f"{Q}.lora_B.weight": torch.full((32, 4), torch.nan)}, "values that are not finite"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)}, "lm_head.lora_A.weight belongs to no linear"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 32)}, "belongs to no linear layer"),
        ({f"base_model.model.{Q}.lora_magnitude_vector.weight": torch.zeros(4)}, "belongs to no linear layer"),
        ({"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.zeros(4, 32)}, "belongs to no linear"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    base: Path, tmp_path: Path, spoil: Mapping[str, Any], message: str
) -> None:
    folder = save_adapter(tmp_path, base, spoil=spoil)
    with pytest.raises(ModelError, match=message):
        _read(folder)


def test_damaged_and_hostile_files_are_refused_at_once(base: Path, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "a", base)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole = weights.read_bytes()
    start = time.process_time()
    for content in (b"", whole[:100], whole[:-4], (2**60).to_bytes(8, "little") + whole[8:]):
        weights.write_bytes(content)
        with pytest.raises(ModelError, match="cannot be read"):
            _read(folder)
    with weights.open("wb") as file:
        file.truncate(2**40)  # takes no space on the disk
    with pytest.raises(ModelError, match="is larger than an adapter of rank 64 of this model can be"):
        _read(folder)
    weights.unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors"):
        _read(folder)
    for text in ("", "[]", "{", "[" * 100_000, '{"r": ' + "9" * 5000 + "}", " " * (1 << 21)):
        config.write_text(text)
        with pytest.raises(ModelError, match="lora_path: "):
            _read(folder)
    config.unlink()
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        _read(folder)
    assert time.process_time() - start < 5


def test_another_base_model_is_a_warning(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load_model(base, torch.float32, torch.device("cpu"))
    adapters = Adapters(loaded, LoRAConfig(1, 8, 2), str(base))
    named = [
        LoRARequest(f"a{i}", i + 1, str(save_adapter(tmp_path / f"a{i}", base, base_model_name_or_path=name)))
        for i, name in enumerate(("org/other", f"org/{base.name}"))
    ]
    for one in named:
        adapters.find(one)
    assert [record.getMessage() for record in caplog.records if "trained with" in record.getMessage()] == [
        f"adapter a0 was trained with org/other, and this is {base}"
    ]


def test_the_least_recently_used_adapter_leaves_memory_and_comes_back(base: Path, tmp_path: Path) -> None:
    loaded = load_model(base, torch.float32, torch.device("cpu"))
    adapters = Adapters(loaded, LoRAConfig(1, 8, 2), str(base))
    named = [LoRARequest(f"a{i}", i + 1, str(save_adapter(tmp_path / f"a{i}", base, i))) for i in range(3)]
    first, second = (adapters.find(one) for one in named[:2])
    assert adapters.find(named[0]) is first
    adapters.find(named[2])
    assert adapters.find(named[0]) is first
    again = adapters.find(named[1])
    assert again is not second
    assert again.salt == second.salt != first.salt  # what was cached for it is found again, also after a restart
    assert adapters.drop(2)
    assert not adapters.drop(2)


def test_names_of_targets_are_those_of_the_model() -> None:
    assert {name.split(".")[-1] for name in LINEARS} == set(ALL)
    assert set(ATTENTION) == set(_LAYER)
