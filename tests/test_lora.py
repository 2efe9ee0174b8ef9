"""LoRA adapters: each request's output is that of a model with its adapter merged, whatever else is in the batch."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters import save_adapter, save_merged
from specinfer import LLM, AsyncLLM, EngineArgs, LoRARequest, RequestError, RequestOutput, SamplingParams
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


def _prompt_logprobs(output: RequestOutput) -> torch.Tensor:
    given: Any = output.prompt_logprobs
    return torch.tensor([next(iter(row.values())).logprob for row in given[1:]])


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


@pytest.fixture(scope="module")
def expected(merged: Sequence[Path]) -> list[list[list[int]]]:
    """The greedy and the seeded outputs of the eight prompts, each by the merged model of its request."""
    by_adapter = []
    for i, folder in enumerate(merged):
        with _llm(folder) as alone:
            by_adapter.append([_tokens(alone.generate(PROMPTS[i::5], params)) for params in (GREEDY, SEEDED)])
    return [[by_adapter[i % 5][which][i // 5] for i in range(len(PROMPTS))] for which in range(2)]


def _requests(adapters: Sequence[Path]) -> list[LoRARequest | None]:
    """None, then each adapter, for eight prompts."""
    named = [LoRARequest(folder.name, i + 1, str(folder)) for i, folder in enumerate(adapters)]
    return ([None, *named] * 2)[: len(PROMPTS)]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("tree", ["off", "2,1,1"])
def test_four_adapters_and_none_in_one_batch_give_what_the_merged_models_give(
    base: Path, adapters: list[Path], expected: list[list[list[int]]], tree: str, params: SamplingParams
) -> None:
    drafters = ["ngram", "suffix"] if tree != "off" else []
    with _llm(base, enable_lora=True, drafters=drafters, tree=tree) as llm:
        tokens = _tokens(llm.generate(PROMPTS, params, lora_request=_requests(adapters)))
        again = _tokens(llm.generate(PROMPTS, params, lora_request=_requests(adapters)))
    assert tokens == again == expected[params is SEEDED]
    assert len({tuple(output) for output in tokens}) == len(PROMPTS)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen2", "all-linear"),  # biases
        ("gemma3_text", "all-linear"),  # norms of what is added, another gate
        ("gpt2", "all-linear"),  # transposed weights, queries, keys and values in one layer; not fused
        ("phi3", ["qkv_proj", "down_proj"]),
        ("qwen3_5_text", "all-linear"),  # recurrences, and gates of attention; fused
        ("lfm2", "all-linear"),
        # Layers without keys and values, and with inputs.
        ("gemma4_text-shared", ["q_proj", "o_proj", "up_proj", "per_layer_input_gate", "per_layer_projection"]),
    ],
)
def test_other_families_give_what_their_merged_models_give(
    model_folder: Callable[..., Path], tmp_path: Path, family: str, targets: Any
) -> None:
    base = model_folder(family)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=targets)
    named = LoRARequest("one", 1, str(adapter))
    with _llm(base, enable_lora=True) as llm, _llm(save_merged(tmp_path / "merged", base, adapter)) as alone:
        tokens = _tokens(llm.generate(PROMPTS[:4], GREEDY, lora_request=[named, None, named, None]))
        plain = _tokens(llm.generate(PROMPTS[:4], GREEDY))
        merged = _tokens(alone.generate(PROMPTS[:4], GREEDY))
        scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        outputs = [
            llm.generate(PROMPTS[1], scored, lora_request=named)[0],
            llm.generate(PROMPTS[1], scored)[0],
            alone.generate(PROMPTS[1], scored)[0],
        ]
    assert tokens == [merged[0], plain[1], merged[2], plain[3]]
    # Of some random models the likeliest token stays the same.
    values = [_prompt_logprobs(output) for output in outputs]
    torch.testing.assert_close(values[0], values[2], rtol=1e-3, atol=1e-3)
    assert not torch.allclose(values[0], values[1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("family", "quantization"), [("llama", "int8"), ("llama", "int4"), ("gpt2", "int8")])
def test_adapters_are_added_to_quantized_weights(
    model_folder: Callable[..., Path], tmp_path: Path, family: str, quantization: str
) -> None:
    """The text of a request is the same alone and in a batch, drafted or not; the logits are those of the merged model
    but for the error of the weights."""
    base = model_folder(family)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules="all-linear", size=1.0)
    named, params = LoRARequest("one", 1, str(adapter)), SamplingParams(temperature=0, max_tokens=16, logprobs=1)
    with _llm(base, enable_lora=True, quantization=quantization, drafters=["ngram"], tree="off") as llm:
        alone = [_tokens(llm.generate([prompt], params, lora_request=named))[0] for prompt in PROMPTS[:3]]
        together = llm.generate([*PROMPTS[:3], *PROMPTS[:3]], params, lora_request=[named] * 3 + [None] * 3)
        assert _tokens(together[:3]) == alone
        plain = _tokens(llm.generate(PROMPTS[:3], params))
        assert _tokens(together[3:]) == plain
        assert alone != plain
    with _llm(base, enable_lora=True, quantization=quantization, drafters=["ngram"], tree="2,1,1") as llm:
        drafted = llm.generate([*PROMPTS[:3], *PROMPTS[:3]], params, lora_request=[named] * 3 + [None] * 3)
        assert _tokens(drafted) == [*alone, *plain]
        scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        adapted = llm.generate(PROMPTS[1], scored, lora_request=named)[0]
        unadapted = llm.generate(PROMPTS[1], scored)[0]
    with _llm(save_merged(tmp_path / "merged", base, adapter)) as merged:
        exact = merged.generate(PROMPTS[1], scored)[0]
    errors = [(_prompt_logprobs(output) - _prompt_logprobs(exact)).abs().mean() for output in (adapted, unadapted)]
    assert errors[0] < errors[1] / 3


def test_prefixes_and_earlier_answers_are_not_shared_between_adapters(base: Path, adapters: list[Path]) -> None:
    prompt = PROMPTS[1] * 4
    with _llm(base, enable_lora=True, drafters=["suffix"], tree="best-first:4") as llm:
        named = _requests(adapters)[1]
        first = llm.generate(prompt, GREEDY)[0]
        again, adapted = (llm.generate(prompt, GREEDY, lora_request=each)[0] for each in (None, named))
        adapted_again = llm.generate(prompt, GREEDY, lora_request=named)[0]
        drafters: Any = llm.drafter.drafters  # type: ignore[union-attr]
        (salts,) = (drafter.store.salts for drafter in drafters if drafter.name == "suffix")
        loaded: Any = llm.adapters
        salt = loaded.find(named).salt
        with pytest.raises(RequestError, match="cache_salt: "):  # its keys and values are those of the base
            llm.generate({"prompt": prompt, "cache_salt": f"\0{salt}"}, GREEDY)
    assert [output.num_cached_tokens for output in (first, adapted)] == [0, 0]
    assert again.num_cached_tokens == adapted_again.num_cached_tokens == len(prompt) - 1
    assert len(salts) == 2


def test_a_batch_has_no_more_adapters_than_allowed_and_all_are_served(
    base: Path, adapters: list[Path], expected: list[list[list[int]]]
) -> None:
    with _llm(base, enable_lora=True, max_loras=2, max_cpu_loras=3) as llm:
        most, step = 0, llm.engine.step

        def watched() -> Any:
            nonlocal most
            result = step()
            running = llm.engine.scheduler.running
            most = max(most, len({request.adapter for request in running if request.adapter is not None}))
            return result

        llm.engine.step = watched  # type: ignore[method-assign]
        tokens = _tokens(llm.generate(PROMPTS, GREEDY, lora_request=_requests(adapters)))
    assert tokens == expected[0]
    assert most == 2


def test_layers_that_are_streamed_have_adapters_too(
    base: Path, adapters: list[Path], expected: list[list[list[int]]]
) -> None:
    with _llm(base, enable_lora=True, offload="disk", memory_budget="4GiB") as llm:
        tokens = _tokens(llm.generate(PROMPTS[:5], GREEDY, lora_request=_requests(adapters)[:5]))
    assert tokens == expected[0][:5]


def test_a_conversation_a_stream_and_asynchronous_callers_have_adapters(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    base = model_folder("llama", tokenizer=True)
    named = LoRARequest("one", 1, str(save_adapter(tmp_path, base)))
    with _llm(base, enable_lora=True) as llm:
        (expected,) = _tokens(llm.generate("the cat", GREEDY, lora_request=named))
        *_, last = llm.stream("the cat", GREEDY, lora_request=named)
        assert last.output is not None
        assert _tokens([last.output]) == [expected]

        async def run() -> RequestOutput:
            async with AsyncLLM(llm) as engine:
                return await engine.complete("the cat", GREEDY, lora_request=named)

        assert _tokens([asyncio.run(run())]) == [expected]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a", "lora_request: give a LoRARequest, or a list"),
        ([None], "lora_request: 1 given for 2 prompts"),
        (LoRARequest("x", 1, "/no/such/folder"), "lora_path: no folder '/no/such/folder'"),
    ],
)
def test_requests_with_an_adapter_that_cannot_be_used_are_refused(base: Path, given: Any, message: str) -> None:
    with _llm(base, enable_lora=True) as llm, pytest.raises(ValueError, match=message):
        llm.generate(PROMPTS[:2], GREEDY, lora_request=given)


def test_one_number_is_one_adapter(base: Path, adapters: list[Path]) -> None:
    first, second = (LoRARequest("a", 1, str(folder)) for folder in adapters[:2])
    with _llm(base, enable_lora=True) as llm:
        llm.generate(PROMPTS[0], GREEDY, lora_request=first)
        with pytest.raises(RequestError, match="lora_int_id 1 is that of 'a' from"):
            llm.generate(PROMPTS[0], GREEDY, lora_request=second)


def test_a_model_without_adapters_refuses_requests_with_them(base: Path, adapters: list[Path]) -> None:
    with _llm(base) as llm, pytest.raises(RequestError, match="load it with enable_lora=True"):
        llm.generate(PROMPTS[0], GREEDY, lora_request=LoRARequest("a", 1, str(adapters[0])))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_loras": 0}, "max_loras must be at least 1"),
        ({"max_lora_rank": 0}, "max_lora_rank must be from 1"),
        ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras: 3 is less than max_loras, 4"),
    ],
)
def test_settings_of_adapters_that_cannot_be_used_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineArgs("demo", enable_lora=True, **options)
