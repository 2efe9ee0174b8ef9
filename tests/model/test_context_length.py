"""Lengths that a model's rotations reach, and rotations of dynamic and longrope for the longest text."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specinfer import LLM, SamplingParams
from specinfer.core.config import OffloadConfig
from specinfer.model.context_length import max_position_of
from specinfer.model.definition import load_config
from specinfer.model.folder import find_folder
from specinfer.model.load import load_model
from specinfer.model.runner import ModelRunner
from specinfer.model.self_copy import load_self
from tests.model.gguf_files import write_model
from tiny import logits, make_model, random_prompts

CPU = torch.device("cpu")
OWN = {"max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
YARN = LINEAR | {"rope_type": "yarn", "original_max_position_embeddings": 64}
DYNAMIC = LINEAR | {"rope_type": "dynamic"}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [1.5, 2.0, 3.0, 4.0],
}


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def write(rope: dict[str, Any], family: str = "llama", **changes: Any) -> Path:
        make_model(family, rope_parameters=dict(rope), **(OWN | changes)).save_pretrained(tmp_path)
        return tmp_path

    return write


def phi3(save: Callable[..., Path], **changes: Any) -> Path:
    sizes: dict[str, Any] = {"max_position_embeddings": 256, "original_max_position_embeddings": 64} | changes
    return save(LONGROPE | {"original_max_position_embeddings": 64}, "phi3", sliding_window=None, **sizes)


def check(folder: Path, length: int, max_model_len: int | None = None) -> None:
    """Compare the logits after a text of this length with those of transformers, which knows only this text."""
    (text,) = random_prompts([length])
    runner = ModelRunner(load_model(folder, torch.float32, CPU, max_model_len=max_model_len), 512)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        wanted = model(torch.tensor([text])).logits[0, -1]
    torch.testing.assert_close(logits(runner, text)[-1], wanted, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("rope", "own", "length"),
    [
        (YARN, 64, 256),
        (YARN, 80, 256),  # more than the original, as in Qwen3
        (YARN, 512, 512),  # already the whole
        (YARN | {"factor": 2.5, "original_max_position_embeddings": 33}, 64, 82),
        (LINEAR, 64, 256),
        (LINEAR | {"factor": 1.0}, 64, 64),
        (LINEAR | {"factor": 1e300}, 64, 2**24),
    ],
)
def test_scaled_positions_reach_as_far_as_their_factor(
    save: Callable[..., Path], rope: dict[str, Any], own: int, length: int
) -> None:
    assert load_model(save(rope, max_position_embeddings=own), torch.float32, CPU).max_position == length


@pytest.mark.parametrize("rope", [YARN, LINEAR], ids=["yarn", "linear"])
def test_logits_beyond_the_original_length_are_those_of_transformers(
    save: Callable[..., Path], rope: dict[str, Any]
) -> None:
    check(save(rope), 200)


def test_the_length_of_requests_may_be_as_long_as_the_factor_allows(save: Callable[..., Path]) -> None:
    folder, greedy = save(YARN), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompt = {"prompt_token_ids": random_prompts([150])[0]}
    texts = [
        LLM(folder, dtype="float32", drafters=["ngram"], **options).generate(prompt, greedy)[0].outputs[0].token_ids
        for options in ({}, {"max_model_len": 256})
    ]
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="257 is more than the model's 256 positions"):
        LLM(folder, dtype="float32", drafters=["ngram"], max_model_len=257)


def test_rotations_by_kind_of_layer_reach_as_far_as_the_configuration_says(save: Callable[..., Path]) -> None:
    rope = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
    assert load_model(save(rope, "gemma3_text"), torch.float32, CPU).max_position == 64


def test_dynamic_rotations_are_those_of_the_longest_text(save: Callable[..., Path]) -> None:
    folder = save(DYNAMIC)
    assert load_model(folder, torch.float32, CPU).max_position == 64
    check(folder, 30)
    check(folder, 64, max_model_len=40)
    check(folder, 150, max_model_len=150)
    check(folder, 256, max_model_len=256)
    with pytest.raises(ValueError, match="257 is more than the model's 256 positions"):
        LLM(folder, dtype="float32", drafters=["ngram"], max_model_len=257)


def test_longrope_has_one_of_its_factors_for_texts_of_all_lengths(
    save: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = phi3(save)
    with caplog.at_level(logging.INFO):
        assert load_model(folder, torch.float32, CPU).max_position == 256
    assert "positions have the factors for texts of more than 64 tokens, also in shorter ones" in caplog.text
    check(folder, 200)
    check(folder, 65, max_model_len=100)
    check(folder, 64, max_model_len=64)
    check(folder, 10, max_model_len=32)
    assert load_model(folder, torch.float32, CPU, max_model_len=32).max_position == 64


def test_a_copy_of_the_target_has_its_rotations(save: Callable[..., Path]) -> None:
    target = load_model(save(DYNAMIC), torch.float32, CPU, max_model_len=256)
    assert load_self("self:int8", target, OffloadConfig()).max_position == 256


def test_a_gguf_file_reaches_as_far_as_its_factor(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", rope_parameters=dict(YARN), **OWN)
    folder = find_folder(tmp_path / "m.gguf")
    assert max_position_of(load_config(folder)) == 64
    assert load_model(folder, torch.float32, CPU).max_position == 256
