"""Requests with LoRA adapters on a target that is split over processes have the outputs of one process."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from adapters import save_adapter
from specinfer import LLM, AsyncLLM, LoRARequest, RequestError, RequestOutput, SamplingParams
from tiny import random_prompts, save_model
from worlds import SETTINGS, sizes_of, workers

_PROMPTS = random_prompts([5, 40, 9, 17, 3])
_PARAMS = [SamplingParams(max_tokens=16, temperature=0.0), SamplingParams(max_tokens=16, seed=3, tree="2,2,1")]
_CONFIGS = [
    {"r": 4}, {"r": 9, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    {"r": 3, "layers_to_transform": [0]}, {"r": 16, "target_modules": ["k_proj", "o_proj", "gate_proj", "down_proj"]},
]  # fmt: skip


def _tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    assert not any(output.error for output in outputs)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("split", [(2, 1), pytest.param((1, 2), marks=pytest.mark.distributed)], ids=["tp2", "pp2"])
def test_ranks_add_what_one_process_adds(split: tuple[int, int], tmp_path: Path) -> None:
    """There are more adapters than fit into memory or a batch; they come, and are unloaded, while requests run."""
    folder = save_model(tmp_path / "model", "llama")
    named = [
        LoRARequest(f"a{i}", i + 1, str(save_adapter(tmp_path / f"a{i}", folder, i, **config)))
        for i, config in enumerate(_CONFIGS)
    ]
    requests, settings = [None, *named], SETTINGS | {"enable_lora": True}
    with LLM(folder, **settings) as llm:
        expected = [_tokens(llm.generate(_PROMPTS, params, lora_request=requests)) for params in _PARAMS]
    assert len({tuple(one) for one in expected[0]}) == len(_PROMPTS)
    with LLM(folder, **settings, **sizes_of(split), max_loras=3, max_cpu_loras=3) as llm:
        assert len(workers(llm)) == 1
        for params, wanted in zip(_PARAMS, expected, strict=True):
            assert _tokens(llm.generate(_PROMPTS, params, lora_request=requests)) == wanted
        spoil = {"layers.7.up.weight": torch.ones(1)}
        wrong = LoRARequest("wrong", 9, str(save_adapter(tmp_path / "wrong", folder, spoil=spoil)))
        with pytest.raises(RequestError, match=r"layers\.7\.up\.weight belongs to no linear layer"):
            llm.generate(_PROMPTS[0], lora_request=wrong)

        async def run() -> list[RequestOutput]:
            async with AsyncLLM(llm) as engine:

                async def complete(i: int) -> RequestOutput:
                    running = await engine.submit(_PROMPTS[i], _PARAMS[0], lora_request=requests[i])
                    if i:
                        assert llm.adapters is not None
                        assert llm.adapters.drop(i)
                    return await running.finish()

                return [await one for one in [asyncio.ensure_future(complete(i)) for i in range(len(_PROMPTS))]]

        assert _tokens(asyncio.run(run())) == expected[0]
