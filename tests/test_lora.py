"""LoRA adapters: each request's output is that of a model with its adapter merged, whatever else is in the batch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from adapters import save_adapter, save_merged
from specinfer import LLM, LoRARequest, RequestOutput, SamplingParams
from tiny import random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
SEEDED = SamplingParams(temperature=0.9, seed=3, max_tokens=16)
PROMPTS = random_prompts([5, 30, 9, 17, 3, 12, 21, 8])
# What the adapters of the four requests differ in.
CONFIGS: list[dict[str, Any]] = [
    {"r": 4, "lora_alpha": 8},
    {"r": 9, "lora_alpha": 3, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    {"r": 2, "target_modules": "all-linear", "rank_pattern": {"down_proj": 5}, "alpha_pattern": {".*o_proj": 1}},
    {"r": 16, "layers_to_transform": [1], "target_modules": ["k_proj", "o_proj", "gate_proj"]},
]


def _llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **({"device": "cpu", "dtype": "float32", "drafters": []} | options))


def _tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def base(model_folder: Callable[..., Path]) -> Path:
    return model_folder("llama")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [save_adapter(folder / f"a{i}", base, i, **config) for i, config in enumerate(CONFIGS)]


@pytest.fixture(scope="module")
def merged(base: Path, adapters: Sequence[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The model itself, then with each adapter."""
    folder = tmp_path_factory.mktemp("merged")
    return [base, *(save_merged(folder / adapter.name, base, adapter) for adapter in adapters)]


def _requests(adapters: Sequence[Path]) -> list[LoRARequest | None]:
    """None, then each adapter, for eight prompts."""
    named = [LoRARequest(folder.name, i + 1, str(folder)) for i, folder in enumerate(adapters)]
    return ([None, *named] * 2)[: len(PROMPTS)]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("tree", ["off", "2,1,1", "best-first:8"])
def test_four_adapters_and_none_in_one_batch_give_what_the_merged_models_give(
    base: Path, adapters: list[Path], merged: list[Path], tree: str, params: SamplingParams
) -> None:
    drafters = ["ngram", "suffix"] if tree != "off" else []
    with _llm(base, enable_lora=True, drafters=drafters, tree=tree) as llm:
        found = _tokens(llm.generate(PROMPTS, params, lora_request=_requests(adapters)))
        again = _tokens(llm.generate(PROMPTS, params, lora_request=_requests(adapters)))
    expected = []
    for i, prompt in enumerate(PROMPTS):
        with _llm(merged[i % 5]) as alone:
            expected += _tokens(alone.generate([prompt], params))
    assert found == again == expected
    assert len({tuple(one) for one in found}) == len(PROMPTS)
