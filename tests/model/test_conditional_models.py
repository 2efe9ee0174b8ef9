"""Models for images and more, of which texts take the model within that is for text: its layers are native, too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import reference
from assistants import save_assistant
from heads import ids_of, llm_of
from native_layers import CPU, PROMPT, check_rounding, error, last_logits
from specinfer import SamplingParams
from specinfer.core.config import OffloadConfig
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load import load_model
from specinfer.model.runner import ModelRunner
from tiny import FAMILIES, GEMMA_4, random_prompts

_VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
TEXTS = {
    "gemma3": FAMILIES["gemma3_text"],
    "gemma4": GEMMA_4["gemma4_text-shared"],
    "gemma4-moe": GEMMA_4["gemma4_text-moe"],
}


def conditional(name: str) -> Any:
    """A random model in fp32 with towers for text and images."""
    text = TEXTS[name] | {"pad_token_id": 0}
    config = AutoConfig.for_model(name.split("-")[0], text_config=text, vision_config=_VISION)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 0.15 if "embed" not in name else 0.5)
            else:
                weight += torch.randn_like(weight) * 0.3
    return model.eval()


@pytest.fixture(scope="module", params=TEXTS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model, folder = conditional(request.param), tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


def test_logits_are_those_of_transformers(made: tuple[Any, Path]) -> None:
    model, folder = made
    loaded = load_model(folder, torch.float32, CPU)
    assert isinstance(loaded.model, FusedDecoder)
    assert error(last_logits(ModelRunner(loaded, 64)), reference.last_logits(model, PROMPT)) < 1e-5


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_rounding_errors_are_those_of_the_definition(made: tuple[Any, Path], quantization: str | None) -> None:
    check_rounding(*made, torch.bfloat16, quantization)


def test_streamed_layers_compute_the_same(made: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = made
    loaded = load_model(folder, torch.float32, CPU, offload=OffloadConfig("disk", offload_folder=str(tmp_path)))
    assert loaded.stream is not None
    assert isinstance(loaded.model, FusedDecoder) == (not hasattr(model.model.language_model.layers[0], "experts"))
    assert error(last_logits(ModelRunner(loaded, 64)), reference.last_logits(model, PROMPT)) < 1e-5
    loaded.stream.close()


def test_an_assistant_drafts_for_the_model_within(made: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = made
    if model.config.model_type != "gemma4":
        pytest.skip("assistants are of Gemma 4")
    prompts = random_prompts([5, 40, 1])
    wanted = [reference.greedy(model, prompt, 12) for prompt in prompts]
    with llm_of(folder, save_assistant(tmp_path), "suffix", tree="2,2,1") as llm:
        assert isinstance(llm.target.loaded.model, FusedDecoder)
        outputs = llm.generate(ids_of(prompts), SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
        assert [list(one.outputs[0].token_ids) for one in outputs] == wanted
        assert any(step.num_guessed for step in llm.engine.metrics.recent)
