"""On a CUDA device: steps of the device's own say what plain decoding says, with one wait a step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters import save_adapter
from assistants import save_assistant
from heads import save_cycle, save_cycle_block, save_tiny_block, save_tiny_head
from on_device import executor_of
from specinfer import LLM, LoRARequest, Reasoning, SamplingParams
from specinfer.drafters import sparse_context
from specinfer.engine.device.executor import DeviceExecutor
from specinfer.engine.timer import Marks
from tiny import FAMILIES, KINDS_OF_HYBRIDS, random_prompts

pytestmark = pytest.mark.gpu
MIXTURES = {"mixtral", "qwen3_moe", "gpt_oss"}  # some of which cannot be captured
PROMPTS = random_prompts([3, 40, 17, 60, 9])
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40),
    SamplingParams(temperature=1.0, seed=1, max_tokens=33),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=2, max_tokens=24, logprobs=2),
    SamplingParams(temperature=0.6, seed=3, max_tokens=40),
    SamplingParams(temperature=0.0, max_tokens=12),
]


def _llm(folder: Path, small: Path, tree: str, **options: Any) -> LLM:
    return LLM(folder, drafters=[str(small)], tree=tree, device="cuda", max_num_batched_tokens=32, **options)


def _tokens(llm: LLM) -> list[list[int]]:
    tokens = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
    cache = llm.target.cache
    assert cache.num_free + cache.num_cached == cache.num_slots
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_the_device_generate_what_plain_decoding_does(family: str, model_folder: Callable[..., Path]) -> None:
    folder, small = model_folder(family), model_folder(family, noise=0.02)
    wanted = _tokens(_llm(folder, small, "off", enforce_eager=True))
    for tree in ("off", "1,1,1", "2,2,1", "best-first:16:6"):
        llm = _llm(folder, small, tree)
        executor = llm.engine.executors[0]
        assert _tokens(llm) == wanted
        if isinstance(executor, DeviceExecutor) and family not in MIXTURES:
            assert llm.engine.executors[0] is executor, "no step has failed"
            assert executor.num_launched > 5
        assert isinstance(executor, DeviceExecutor) or family in MIXTURES or "falcon-rw" in family


@pytest.mark.parametrize("rule", ["multi-step", "traversal"])
@pytest.mark.parametrize("tree", ["2,2,1", "best-first:16:6", "auto"])
def test_tokens_are_drawn_on_the_device(tree: str, rule: str, model_folder: Callable[..., Path]) -> None:
    """Greedy requests have the tokens of plain decoding; the drafts of the others are accepted, too."""
    folder, small = model_folder("llama"), model_folder("llama", noise=0.02)
    wanted = _tokens(_llm(folder, small, "off", enforce_eager=True))
    llm = _llm(folder, small, tree, verification=rule)
    executor = executor_of(llm.engine)
    outputs = llm.generate(PROMPTS, PARAMS)
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert [len(one) for one in tokens] == [len(one) for one in wanted]
    assert [tokens[0], tokens[4]] == [wanted[0], wanted[4]]
    assert executor_of(llm.engine) is executor, "no step has failed"
    assert any(size.rule == rule and size.shape.num_nodes for size in executor._device.sizes.found)
    accepted = [dict(one.metrics.speculative_decoding)["mean_acceptance_length"] for one in outputs]
    assert tree == "auto" or min(accepted[1], accepted[3]) > 1.5


@pytest.mark.parametrize("tree", ["off", "2,2,1", "best-first:15:5"])
def test_grammars_bad_words_and_budgets_of_thoughts_mask_tokens_amid_a_step(tree: str) -> None:
    thought = Reasoning("", "</t>", (60, 47, 116, 62), is_open=True)
    thoughts = [{"prompt": text, "reasoning": thought} for text in ("def f(", "It is")]
    prompts = ["# numbers\n", "Once upon a time", "def main(", "The ", *thoughts]
    params = [
        SamplingParams(max_tokens=30, seed=2, structured_outputs={"regex": "[0-9]{3}( [0-9]{3}){4}"}),
        SamplingParams(max_tokens=30, temperature=0.0),
        SamplingParams(max_tokens=30, temperature=0.0, structured_outputs={"regex": "[a-z ]+"}, logprobs=2),
        SamplingParams(max_tokens=30, temperature=0.7, seed=3, repetition_penalty=1.1, bad_words=["the", "a"]),
        SamplingParams(max_tokens=30, temperature=0.0, thinking_token_budget=9),
        SamplingParams(max_tokens=30, temperature=0.9, seed=4, thinking_token_budget=17, top_k=30),
    ]
    options: dict[str, Any] = {"dtype": "float32", "device": "cuda", "max_num_batched_tokens": 32}
    wanted, llm = LLM("demo", tree="off", enforce_eager=True, **options), LLM("demo", tree=tree, **options)
    executor = llm.engine.executors[0]
    assert isinstance(executor, DeviceExecutor)
    found, plain = llm.generate(prompts, params), wanted.generate(prompts, params)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in plain]
    assert [one.outputs[0].finish_reason for one in found] == [one.outputs[0].finish_reason for one in plain]
    assert [one.outputs[0].num_reasoning_tokens for one in found[4:]] == [9, 17]
    assert llm.engine.executors[0] is executor, "no step has failed"
    assert executor.num_launched > 5


@pytest.mark.parametrize("family", KINDS_OF_HYBRIDS)
def test_models_with_layers_without_attention_generate_what_plain_decoding_does(
    family: str, model_folder: Callable[..., Path]
) -> None:
    folder, small = model_folder(family), model_folder("llama", noise=0.02)
    options: dict[str, Any] = {"dtype": "float32", "device": "cuda", "max_num_batched_tokens": 32}
    wanted = _tokens(LLM(folder, drafters=[], enforce_eager=True, **options))
    for drafters, tree in (([], "off"), ([str(small), "suffix"], "best-first:16:6"), ([str(small)], "3,2,1")):
        llm = LLM(folder, drafters=drafters, tree=tree, **options)
        executor = llm.engine.executors[0]
        assert isinstance(executor, DeviceExecutor)
        assert _tokens(llm) == wanted
        assert llm.engine.executors[0] is executor, "no step has failed"
        assert executor.num_launched > 5


def test_steps_of_the_device_add_what_the_adapter_of_each_request_adds(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder, small = model_folder("llama"), model_folder("llama", noise=0.02)
    saved = [LoRARequest(f"a{i}", i, str(save_adapter(tmp_path / str(i), folder, i))) for i in (1, 2, 3)]
    given = [saved[0], None, saved[1], saved[2], saved[0]]
    found = []
    for tree, options in (("off", {"enforce_eager": True}), ("off", {}), ("2,2,1", {})):
        llm = _llm(folder, small, tree, enable_lora=True, max_loras=2, max_cpu_loras=3, **options)
        executor = llm.engine.executors[0]
        outputs = llm.generate(PROMPTS, PARAMS, lora_request=given)
        found.append([output.outputs[0].token_ids for output in outputs])
        if not options:
            assert isinstance(executor, DeviceExecutor)
            assert llm.engine.executors[0] is executor, "no step has failed"
            assert any(size.adapts for size in executor._device.sizes.found)
    assert found[0] == found[1] == found[2]
    assert found[0] != _tokens(_llm(folder, small, "off"))


@pytest.mark.parametrize(
    ("family", "copy"),
    [("llama", "self:int4"), ("qwen3", "self:int8"), ("gemma3_text", "self:int4"), ("llama", "self:int4-sparse")],
)
def test_copies_of_the_target_generate_what_plain_decoding_does(
    family: str, copy: str, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_context, "_LEAST", 12)
    monkeypatch.setattr(sparse_context, "_PAGE", 1)
    folder = model_folder(family)
    wanted = _tokens(_llm(folder, folder, "off", enforce_eager=True))
    for tree in ("1,1,1", "2,2,1", "best-first:16:6", "auto"):
        llm = LLM(folder, drafters=[copy, "suffix"], tree=tree, device="cuda", max_num_batched_tokens=32)
        executor = executor_of(llm.engine)
        assert all(one.why_not_captured is None for one in llm.small_models.values())
        assert _tokens(llm) == wanted
        assert llm.engine.executors[0] is executor, "no step has failed"
        assert executor.num_launched > 5


@pytest.mark.parametrize("kind", ["EAGLE-3", "dflash", "dspark", "assistant"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_generate_what_plain_decoding_does(
    dtype: str, kind: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = model_folder("gemma4_text" if kind == "assistant" else "llama")
    if kind == "assistant":
        head = save_assistant(tmp_path, clusters=8)
    else:
        head = save_tiny_head(tmp_path) if kind == "EAGLE-3" else save_tiny_block(tmp_path, kind)
    found = []
    for tree in ("off", "1,1,1", "2,2,1", "best-first:16:6", "auto"):
        llm = _llm(folder, head, tree, dtype=dtype)
        executor = executor_of(llm.engine)
        found.append(_tokens(llm))
        assert llm.engine.executors[0] is executor, "no step has failed"
        assert executor.num_launched > 5
    assert [[len(tokens) for tokens in of] for of in found] == [[40, 33, 24, 40, 12]] * 5
    if dtype == "float32":
        assert all(of == found[0] for of in found)


@pytest.mark.parametrize("kind", ["EAGLE-3", "DSpark"])
@pytest.mark.parametrize("tree", ["1,1,1,1,1,1", "best-first:12:6"])
def test_a_perfect_head_is_accepted_at_every_level(tree: str, kind: str, tmp_path: Path) -> None:
    """An error of pairing, position or level is a wrong token."""
    target, head = save_cycle(tmp_path)
    if kind == "DSpark":
        head = save_cycle_block(tmp_path / "block")
    llm = _llm(target, head, tree, dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=43, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": [i, (5 * i + 3) % 64]} for i in range(3)], params, use_tqdm=False)
    assert executor_of(llm.engine).num_launched >= 6
    assert all(dict(one.metrics.speculative_decoding)["mean_acceptance_length"] > 6.8 for one in outputs)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("drafter", ["small model", "head"])
def test_one_event_a_step_is_waited_for(
    drafter: str, model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch itself tells of every wait in a step that is launched; of those for events there is one."""
    small = save_tiny_head(tmp_path) if drafter == "head" else model_folder("llama", noise=0.02)
    llm = _llm(model_folder("llama"), small, "2,2,1")
    _tokens(llm)  # captures
    for job in range(4):
        llm.engine.add(llm.jobs.read(f"again {job}", {"prompt_token_ids": PROMPTS[job]}, PARAMS[0], job).requests[0])
    for _ in range(6):
        llm.engine.step()
    waits = []
    wait = Marks.wait

    def waited(self: Marks) -> None:
        waits.append(1)
        wait(self)

    monkeypatch.setattr(Marks, "wait", waited)
    executor = executor_of(llm.engine)
    before = executor.num_launched
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            llm.engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert executor.num_launched == before + 2
    assert len(waits) == 2
    while llm.engine.has_work:
        llm.engine.step()


def test_auto_and_half_precision_generate_as_many_tokens(model_folder: Callable[..., Path]) -> None:
    llm = _llm(model_folder("llama"), model_folder("llama", noise=0.02), "auto", dtype="bfloat16")
    assert [len(tokens) for tokens in _tokens(llm)] == [40, 33, 24, 40, 12]
