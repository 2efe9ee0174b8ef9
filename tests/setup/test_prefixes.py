"""Prefixes that outlast the process: a second start computes little of a prompt, and its text is the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapters import save_adapter
from heads import save_tiny_head
from specinfer import LLM, SamplingParams
from specinfer.core.lora import LoRARequest
from specinfer.core.outputs import RequestOutput
from tiny import random_prompts

Folders = Callable[..., Path]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=8)
(PROMPT,) = random_prompts([300])


def _llm(model: Path, folder: Path | None, **options: Any) -> LLM:
    usual = {"device": "cpu", "drafters": [], "max_num_batched_tokens": 64, "max_num_seqs": 4}
    return LLM(model, **({"prefix_cache_dir": folder} if folder else {}), **(usual | options))


def _answer(llm: LLM, params: SamplingParams = GREEDY, salt: str | None = None, **options: Any) -> RequestOutput:
    prompt: Any = {"prompt_token_ids": PROMPT} | ({} if salt is None else {"cache_salt": salt})
    (output,) = llm.generate(prompt, params, use_tqdm=False, **options)
    return output


def _start(model: Path, folder: Path | None, params: SamplingParams = GREEDY, **options: Any) -> tuple[Any, int]:
    """The tokens that one start generates, and how many tokens of the prompt it did not compute."""
    with _llm(model, folder, **options) as llm:
        output = _answer(llm, params)
        return output.outputs[0].token_ids, output.num_cached_tokens or 0


def _model(folders: Folders, family: str = "llama", **changes: Any) -> Path:
    return folders(family, tokenizer=True, **({"max_position_embeddings": 1024} | changes))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next", "lfm2", "mamba2", "falcon_h1-normed"])
def test_a_second_start_reads_what_the_first_has_computed(
    family: str, params: SamplingParams, model_folder: Folders, tmp_path: Path
) -> None:
    changes = {} if family == "mamba2" else {"max_position_embeddings": 1024}
    model = model_folder(family, tokenizer=True, **changes)
    wanted, _ = _start(model, None, params, max_model_len=512)
    first, num_first = _start(model, tmp_path, params, max_model_len=512)
    second, num_second = _start(model, tmp_path, params, max_model_len=512)
    assert first == second == wanted
    assert (num_first, num_second) == (0, 256)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}, {"quantization": "int8"}])
def test_other_numbers_have_other_files(options: dict[str, Any], model_folder: Folders, tmp_path: Path) -> None:
    model = _model(model_folder)
    starts = [_start(model, tmp_path, **each) for each in ({}, options, {}, options)]
    assert [num_cached for _, num_cached in starts] == [0, 0, 256, 256]
    assert starts[1] == (starts[3][0], 0)


def test_a_changed_model_has_other_files(model_folder: Folders, tmp_path: Path) -> None:
    assert _start(_model(model_folder), tmp_path)[1] == 0
    other = model_folder("llama", 0, 0.1, tokenizer=True, max_position_embeddings=1024)  # of the same size
    assert _start(other, tmp_path) == (_start(other, None)[0], 0)


def test_salts_never_share(model_folder: Folders, tmp_path: Path) -> None:
    model = _model(model_folder)
    with _llm(model, tmp_path) as llm:
        assert _answer(llm, salt="a").num_cached_tokens == 0
    with _llm(model, tmp_path) as llm:
        assert _answer(llm, salt="b").num_cached_tokens == 0
        assert _answer(llm).num_cached_tokens == 0
        assert _answer(llm, salt="a").num_cached_tokens == 256


def test_an_adapter_finds_its_own_after_a_restart_and_after_a_change_nothing(
    model_folder: Folders, tmp_path: Path
) -> None:
    model, texts, counts = _model(model_folder), [], []
    for seed in (0, 0, 1):
        named = LoRARequest("a", 1, str(save_adapter(tmp_path / f"adapter{seed}", model, seed)))
        with _llm(model, tmp_path / "kept", enable_lora=True) as llm:
            output = _answer(llm, lora_request=named)
            texts.append(output.outputs[0].token_ids)
            counts.append(output.num_cached_tokens)
            assert _answer(llm).outputs[0].token_ids == _start(model, None)[0]
    assert counts == [0, 256, 0]
    assert texts[0] == texts[1]


def test_a_draft_model_keeps_its_own(model_folder: Folders, tmp_path: Path) -> None:
    model = _model(model_folder)
    drafter = model_folder("llama", 0, 0.1, tokenizer=True, max_position_embeddings=1024)
    options: dict[str, Any] = {"drafters": [str(drafter)], "tree": "1,1", "drafter_window": "all"}
    texts, read = [], []
    for _ in range(2):
        with _llm(model, tmp_path, **options) as llm:
            (runner,) = llm.small_models.values()
            texts.append(_answer(llm).outputs[0].token_ids)
            assert runner.cache.store is not None
            assert llm.prefixes is not None
            read.append(llm.prefixes.num_read_tokens)
    assert texts[0] == texts[1] == _start(model, None)[0]
    assert read == [0, 512]  # of the target and of the drafter


def test_hidden_states_for_heads_come_back(model_folder: Folders, tmp_path: Path) -> None:
    model = _model(model_folder)
    head = save_tiny_head(tmp_path / "head")
    results, counts = [], []
    for _ in range(2):
        with _llm(model, tmp_path / "kept", drafters=[str(head)], tree="1,1") as llm:
            output = _answer(llm)
            counts.append(output.num_cached_tokens)
            # With other hidden states the head would have drafted other tokens.
            drafts = [str(each) for each in llm.get_metrics() if "spec_decode" in each.name]
            results.append((output.outputs[0].token_ids, drafts))
    assert counts == [0, 256]
    assert results[0] == results[1]


def test_damaged_files_cost_only_time_and_are_written_again(model_folder: Folders, tmp_path: Path) -> None:
    model = _model(model_folder)
    wanted, _ = _start(model, tmp_path)
    for file in (tmp_path / "prefixes-1").iterdir():
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 0x10
        file.write_bytes(data)
    # What follows a damaged block is not read, so the second one is noticed by the next start.
    assert [_start(model, tmp_path) for _ in range(3)] == [(wanted, 0), (wanted, 128), (wanted, 256)]


def test_a_server_reads_while_others_generate(model_folder: Folders, tmp_path: Path) -> None:
    model = _model(model_folder)
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in random_prompts([300, 290, 5, 260, 300])]
    with _llm(model, None) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    for _ in range(2):
        with _llm(model, tmp_path) as llm:
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == wanted
            assert llm.target.cache.is_balanced()
    assert [output.num_cached_tokens for output in outputs] == [256, 256, 0, 256, 256]


def test_what_is_measured_at_load_leaves_no_files(model_folder: Folders, tmp_path: Path) -> None:
    with _llm(_model(model_folder), tmp_path, drafters=["ngram"], tree="auto") as llm:
        llm.prepare()
        prefixes = llm.prefixes
    assert prefixes is not None
    assert prefixes.num_bytes == 0
