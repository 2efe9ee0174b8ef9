"""Mutants of each file of a model and of an adapter: used, or refused by an error that names the file or the folder."""

import json
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters import save_adapter
from mutants import mutated_bytes, mutated_json, mutated_safetensors
from specinfer.core.errors import ModelError, RequestError
from specinfer.inputs.text_reader import LocalTextReader
from specinfer.model.adapters.peft_folder import Shape, read_adapter
from specinfer.model.definition import load_tokenizer
from specinfer.model.folder import find_folder, sampling_defaults
from specinfer.model.load import load_model
from tests.model.gguf_files import tokenizer_metadata, write_model
from tiny import save_model, save_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
GENERATION = {
    "eos_token_id": [1], "bos_token_id": 0, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1,
    "repetition_penalty": 1.1,
}  # fmt: skip
CONFIG_FIELDS = (
    "model_type", "architectures", "hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "tie_word_embeddings", "max_position_embeddings", "sliding_window", "layer_types",
    "attention_bias", "mlp_bias", "hidden_act", "torch_dtype", "dtype", "quantization_config", "auto_map",
    "eos_token_id", "pad_token_id", "text_config", "is_encoder_decoder", "attn_implementation", "id2label",
    "partial_rotary_factor", "num_nextn_predict_layers", "eagle_config", "generation_config", "transformers_version",
)  # fmt: skip
TOKENIZER_FIELDS = (
    "tokenizer_class", "auto_map", "chat_template", "added_tokens_decoder", "extra_special_tokens",
    "additional_special_tokens", "model_max_length", "bos_token", "eos_token", "unk_token", "add_bos_token",
    "padding_side", "truncation_side", "clean_up_tokenization_spaces", "backend", "tokenizer_file", "vocab_file",
    "legacy", "added_tokens", "is_local", "processor_class", "split_special_tokens",
)  # fmt: skip
ADAPTER_FIELDS = (
    "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern",
    "layers_to_transform", "layers_pattern", "peft_type", "bias", "use_dora", "init_lora_weights", "lora_dropout",
    "modules_to_save", "base_model_name_or_path", "fan_in_fan_out", "megatron_config", "layer_replication",
)  # fmt: skip
Mutate = Callable[[bytes, int], bytes]
FILES: dict[str, Mutate] = {
    "config.json": lambda data, seed: mutated_json(data, seed, CONFIG_FIELDS),
    "generation_config.json": lambda data, seed: mutated_json(data, seed, [*GENERATION, "stop_strings", "max_length"]),
    "tokenizer.json": mutated_json,
    "tokenizer_config.json": lambda data, seed: mutated_json(data, seed, TOKENIZER_FIELDS),
    "model.safetensors": mutated_safetensors,
    "chat_template.jinja": mutated_bytes,
}
ADAPTER_FILES: dict[str, Mutate] = {
    "adapter_config.json": lambda data, seed: mutated_json(data, seed, ADAPTER_FIELDS),
    "adapter_model.safetensors": mutated_safetensors,
}
LINEARS = {f"model.layers.{i}.self_attn.q_proj": Shape(32, 32) for i in range(2)}
SECONDS, BYTES = 20.0, 2**29  # that a mutant of a file of 100 KB may take
AMOUNTS = [pytest.param(25), pytest.param(1500, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tokenizer(save_model(tmp_path_factory.mktemp("model")), TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


def use(folder: Path) -> None:
    """Load a model, and read a text and a conversation for it."""
    found = find_folder(folder)
    loaded = load_model(found, torch.float32, torch.device("cpu"))
    sampling_defaults(found)
    reader = LocalTextReader(load_tokenizer(found), loaded.max_position)
    if reader.chat.special_tokens or reader.chat.text() is not None:
        reader.encode("ab", "prompt")
        reader.read_chat([{"role": "user", "content": "ab"}], None, add_generation_prompt=True)


def check(use: Callable[[], Any], folder: Path, seed: int) -> None:
    """Use mutated files, and check how that ends, the seconds and the memory it took."""
    start, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        use()
    except RequestError as error:
        message = str(error)
        assert message.startswith("messages: "), (seed, message)
    except ModelError as error:
        message = str(error)
        assert folder.name in message, (seed, message)
    else:
        message = ""
    assert len(message) < 1500, (seed, message)
    assert "Traceback" not in message, (seed, message)
    assert time.process_time() - start < SECONDS, (seed, message)
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) < BYTES, (seed, message)


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("name", FILES)
def test_a_mutant_of_a_models_file_is_used_or_refused_by_name(
    name: str, amount: int, model: Path, tmp_path: Path
) -> None:
    whole, folder = (model / name).read_bytes(), tmp_path / "mutated-model"
    for seed in range(amount):
        shutil.copytree(model, folder)
        (folder / name).write_bytes(FILES[name](whole, seed))
        check(lambda: use(folder), folder, seed)
        shutil.rmtree(folder)


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("name", ADAPTER_FILES)
def test_a_mutant_of_an_adapters_file_is_used_or_refused_by_name(
    name: str, amount: int, model: Path, tmp_path: Path
) -> None:
    folder = save_adapter(tmp_path / "mutated-adapter", model, target_modules=["q_proj"])
    whole = (folder / name).read_bytes()
    for seed in range(10 * amount):
        (folder / name).write_bytes(ADAPTER_FILES[name](whole, seed))
        check(lambda: read_adapter(folder, LINEARS, 64), folder, seed)


@pytest.mark.parametrize("amount", AMOUNTS)
def test_a_mutant_of_a_gguf_file_is_used_or_refused_by_name(
    amount: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "whole.gguf", **tokenizer_metadata())
    whole, file = (tmp_path / "whole.gguf").read_bytes(), tmp_path / "mutated.gguf"
    for seed in range(amount):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache-{seed}"))
        file.write_bytes(mutated_bytes(whole, seed))
        check(lambda: use(file), file, seed)
        shutil.rmtree(tmp_path / f"cache-{seed}", ignore_errors=True)
