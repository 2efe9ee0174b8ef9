"""Offline programs as vLLM's documentation has them: they run with only the imports changed. And vLLM's names."""

import asyncio
import dataclasses
import inspect
import json
import re
import shutil
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from specinfer import (
    LLM,
    AsyncLLM,
    EngineArgs,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TokensPrompt,
)
from specinfer.core.vllm_names import from_speculative_config, without_vllm_flags
from specinfer.core.vllm_tables import CALLS, ENGINE, METHODS, SAMPLING, SPECULATIVE
from specinfer.metrics import Counter, Gauge, Histogram, Vector
from tiny import EOS, save_tokenizer

PROMPTS = ["Hello, my name is", "The president of the United States is", "The capital of France is", "The future is"]
CHAT = (
    "{% for m in messages %}{{ m['role'] }}, {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant,{% endif %}"
)


@pytest.fixture(scope="module")
def model(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = model_folder("llama", tokenizer=True, eos_token_id=EOS, max_position_embeddings=512)
    copy = tmp_path_factory.mktemp("vllm") / "model"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return str(save_tokenizer(copy, CHAT))


# ------------------------------------------------------------------------------------------ programs


def test_basic(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=model, trust_remote_code=False, gpu_memory_utilization=0.9, swap_space=4, enforce_eager=True)
    outputs = llm.generate(PROMPTS, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Prompt: ")]
    assert [line.split("'")[1] for line in lines] == PROMPTS


def test_chat(model: str) -> None:
    llm = LLM(model=model, max_model_len=512, seed=0, dtype="auto", tokenizer_mode="auto", disable_log_stats=True)
    sampling_params = SamplingParams(max_tokens=8, temperature=0.7, top_p=0.9, top_k=20)
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "Write an essay about the importance of higher education."},
    ]
    (output,) = llm.chat(conversation, sampling_params, use_tqdm=False)
    assert llm.get_tokenizer().decode(output.prompt_token_ids).endswith("education.\nassistant,")
    conversations = [conversation for _ in range(10)]
    assert len(llm.chat(conversations, sampling_params, use_tqdm=True)) == 10
    template = "{% for m in messages %}{{ m['content'] }}, {% endfor %}"
    (templated,) = llm.chat(conversation, sampling_params, use_tqdm=False, chat_template=template)
    assert llm.get_tokenizer().decode(templated.prompt_token_ids).endswith("education., ")
    (again,) = llm.chat(conversation, sampling_params, use_tqdm=False)
    assert again.prompt_token_ids == output.prompt_token_ids
    (prefilled,) = llm.chat(conversation[:3], sampling_params, continue_final_message=True)
    assert llm.get_tokenizer().decode(prefilled.prompt_token_ids).endswith("you today?")


def test_async_streaming(model: str) -> None:
    async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> str:
        sampling_params = SamplingParams(max_tokens=20, temperature=0.8, seed=42, output_kind=RequestOutputKind.DELTA)
        text = ""
        async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=sampling_params):
            for completion in output.outputs:
                text += completion.text
            if output.finished:
                assert output.request_id == request_id
                break
        return text

    async def main() -> list[str]:
        engine_args = EngineArgs(model=model, enforce_eager=True, disable_log_stats=True, enable_log_requests=False)  # type: ignore[call-arg]
        engine = AsyncLLM.from_engine_args(engine_args)
        try:
            return [await stream_response(engine, prompt, f"stream-example-{i}") for i, prompt in enumerate(PROMPTS)]
        finally:
            engine.shutdown()

    params = SamplingParams(max_tokens=20, temperature=0.8, seed=42)
    assert asyncio.run(main()) == [output.outputs[0].text for output in LLM(model).generate(PROMPTS, params)]


def test_async_final_outputs(model: str) -> None:
    async def main() -> list[RequestOutput]:
        engine = AsyncLLM.from_engine_args(EngineArgs(model=model))

        async def complete(prompt: str, i: int) -> RequestOutput:
            final_output = None
            async for request_output in engine.generate(prompt, SamplingParams(temperature=0, max_tokens=9), str(i)):
                final_output = request_output
            assert final_output is not None
            return final_output

        outputs = await asyncio.gather(*(complete(prompt, i) for i, prompt in enumerate(PROMPTS)))
        engine.shutdown()
        return outputs

    outputs = asyncio.run(main())
    wanted = LLM(model).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=9))
    assert [output.outputs[0].text for output in outputs] == [output.outputs[0].text for output in wanted]


def test_engine_args_take_what_llm_takes() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3}
    args = EngineArgs(model="m", swap_space=4, seed=None, speculative_config=config)  # type: ignore[call-arg, arg-type]
    assert args == EngineArgs("m", drafters=["ngram"], tree="1,1,1")
    with pytest.raises(ValueError, match=r"^cpu_offload_gb: 4 has no equivalent"):
        EngineArgs(model="m", cpu_offload_gb=4)  # type: ignore[call-arg]


def test_default_sampling_params_are_those_that_the_model_recommends(model: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "do_sample": true}')
    with LLM(model=str(folder)) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=20)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculative_decoding(model: str, method: str) -> None:
    num_spec_tokens = 3
    speculative_config: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 1}
    if method == "draft_model":
        speculative_config = {"method": method, "model": model, "draft_tensor_parallel_size": 1}
    llm = LLM(
        model=model,
        trust_remote_code=True,
        tensor_parallel_size=1,
        enable_chunked_prefill=True,
        enforce_eager=False,
        gpu_memory_utilization=0.9,
        speculative_config=speculative_config | {"num_speculative_tokens": num_spec_tokens},
        disable_log_stats=False,
        max_model_len=256,
        limit_mm_per_prompt={"image": 5},
    )
    prompt_ids = [llm.get_tokenizer().encode(prompt, add_special_tokens=False) for prompt in PROMPTS]
    sampling_params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompt_ids], sampling_params=sampling_params)
    num_drafts = num_draft_tokens = num_accepted_tokens = 0
    acceptance_counts = [0] * num_spec_tokens
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            assert isinstance(metric, Counter)
            num_drafts += metric.value
        elif metric.name == "vllm:spec_decode_num_draft_tokens":
            assert isinstance(metric, Counter)
            num_draft_tokens += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens":
            assert isinstance(metric, Counter)
            num_accepted_tokens += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            assert isinstance(metric, Vector)
            for pos in range(len(metric.values)):
                acceptance_counts[pos] += metric.values[pos]
    stats = [output.metrics.speculative_decoding for output in outputs]
    assert num_drafts == sum(each["num_spec_steps"] for each in stats) > 0  # type: ignore[misc]
    assert num_draft_tokens == sum(each["num_draft_tokens"] for each in stats)  # type: ignore[misc]
    assert num_accepted_tokens == sum(acceptance_counts)
    assert max(each["num_spec_tokens"] for each in stats) == num_spec_tokens  # type: ignore[type-var]


@pytest.mark.usefixtures("small_demo")
def test_structured_outputs() -> None:
    class CarType(StrEnum):
        sedan = "sedan"
        suv = "SUV"

    class CarDescription(BaseModel):
        model: bool
        car_type: CarType

    grammar = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
"""
    llm = LLM(model="demo", max_model_len=200)

    def generate(prompt: str, sampling_params: SamplingParams) -> str:
        outputs = llm.generate(prompts=prompt, sampling_params=sampling_params)
        return outputs[0].outputs[0].text

    def params(**fields: Any) -> SamplingParams:
        return SamplingParams(structured_outputs=StructuredOutputsParams(**fields), max_tokens=100)

    assert generate("Classify this: it is wonderful!", params(choice=["Positive", "Negative"])) in {
        "Positive",
        "Negative",
    }
    assert re.fullmatch(
        r"\w{1,9}@\w{1,9}\.com\n", generate("An email address", params(regex=r"\w{1,9}@\w{1,9}\.com\n"))
    )
    car = CarDescription.model_validate(json.loads(generate("A car", params(json=CarDescription.model_json_schema()))))
    assert car.car_type in CarType
    assert re.fullmatch(r"SELECT col_[12]  from table_[12] ", generate("A query", params(grammar=grammar)))


def test_metrics(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(model=model, disable_log_stats=False)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    for metric in llm.get_metrics():
        if isinstance(metric, Gauge):
            print(f"{metric.name} (gauge) = {metric.value}")
        elif isinstance(metric, Counter):
            print(f"{metric.name} (counter) = {metric.value}")
        elif isinstance(metric, Vector):
            print(f"{metric.name} (vector) = {metric.values}")
        elif isinstance(metric, Histogram):
            print(f"{metric.name} (histogram)")
            print(f"    sum = {metric.sum}")
            print(f"    count = {metric.count}")
            for bucket_le, value in metric.buckets.items():
                print(f"    {bucket_le} = {value}")
    shown = capsys.readouterr().out
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert f"vllm:generation_tokens (counter) = {num_tokens}\n" in shown
    assert "vllm:num_requests_running (gauge) = 0\n" in shown
    assert re.search(r"vllm:e2e_request_latency_seconds \(histogram\)\n    sum = [\d.]+\n    count = 4\n", shown)
    assert "    +Inf = 4\n" in shown


# --------------------------------------------------------------------------------------------- names


def test_arguments_without_a_meaning_are_refused_by_name_with_the_reason(model: str) -> None:
    for name, entry in ENGINE.items():
        if entry.accepted is not None:
            with pytest.raises(ValueError, match=f"^{name}: 'something' has no equivalent: {re.escape(entry.about)}"):
                LLM(model, **{name: "something"})
    with pytest.raises(TypeError, match=r"^LLM\(\) got .* 'no_such_argument'$"):
        LLM(model, no_such_argument=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^LLM\(\) got .* 'drafter'; did you mean 'drafters'\?$"):
        LLM(model, drafter="ngram")  # type: ignore[call-arg]
    for name, entry in SAMPLING.items():
        assert SamplingParams(**{name: (entry.accepted or ("anything",))[0]}) == SamplingParams()
        if entry.accepted is not None:
            with pytest.raises(ValueError, match=f"^{name}: 'something' has no equivalent: "):
                SamplingParams(**{name: "something"})
    with pytest.raises(TypeError, match="no_such_field"):
        SamplingParams(no_such_field=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^SamplingParams\(\) got .* 'max_new_tokens'; did you mean 'max_tokens'\?$"):
        SamplingParams(max_new_tokens=1)  # type: ignore[call-arg]


def test_a_dtype_may_be_that_of_torch(model: str) -> None:
    assert EngineArgs(model, dtype=torch.bfloat16) == EngineArgs(model, dtype="bfloat16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^dtype must be one of auto, .*, not 'int8'"):
        LLM(model, dtype=torch.int8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 5},
         {"drafters": ["ngram"], "tree": "1,1", "prompt_lookup_max": 5, "prompt_lookup_min": 5}),
        ({"model": "m", "quantization": "fp8", "max_model_len": 9}, {"drafters": ["m"], "drafter_quantization": "fp8"}),
        ({"method": "suffix", "tree": "best-first:9"}, {"drafters": ["suffix"], "tree": "best-first:9"}),
        *(({"method": method, "model": "m", "num_speculative_tokens": 3}, {"drafters": ["m"], "tree": "1,1,1"})
          for method in ("eagle", "eagle3", "dflash", "dspark", "draft_model", "mtp", "gemma4_mtp")),
        ({"method": "ngram_gpu", "prompt_lookup_max": 3, "prompt_lookup_min": 2},
         {"drafters": ["ngram"], "prompt_lookup_max": 3, "prompt_lookup_min": 2}),
        ({"method": "mtp", "num_speculative_tokens": 1}, {"drafters": ["mtp"], "tree": "1"}),
        ({"method": "deepseek_mtp"}, {"drafters": ["mtp"]}),
        ({}, {}),
    ],
)  # fmt: skip
def test_speculative_configs_become_arguments(config: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert from_speculative_config(config) == wanted


def test_every_field_of_vllms_speculative_config_is_known() -> None:
    """As of version 0.33, with its defaults, which never change anything here."""
    defaults: dict[str, Any] = {
        "disable_padded_drafter_batch": False, "disable_eagle_block_drop": False, "use_local_argmax_reduction": False,
        "use_heterogeneous_vocab": False, "parallel_drafting": False, "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 10_000, "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1, "rejection_sample_method": "standard",
        "enable_adaptive_verification": False, "draft_sample_method": "greedy",
    }  # fmt: skip
    names = (
        "enforce_eager num_speculative_tokens model method draft_tensor_parallel_size tensor_parallel_size "
        "quantization moe_backend attention_backend kv_cache_dtype max_model_len revision code_revision "
        "draft_load_config index_share_for_mtp_iteration prompt_lookup_max prompt_lookup_min "
        "num_speculative_tokens_per_batch_size synthetic_acceptance_rates synthetic_acceptance_length dspark_draft_topk"
    )
    assert from_speculative_config(dict.fromkeys(names.split()) | defaults) == {}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(({"method": method, "model": "m"}, f"method {method!r}: ") for method in METHODS),
        *(({name: "?"}, f"{name}: ") for name, entry in SPECULATIVE.items() if entry.accepted is not None),
        ({"nonsense": 1}, "key 'nonsense' is not known"),
        ({"method": "ngram", "model": "m"}, 'method "ngram" has no model'),
        ({"method": "deepseek_mtp", "model": "m"}, 'method "mtp" has no model'),
        ({"method": "eagle3"}, "method 'eagle3' needs a model"),
        ({"model": 5}, "model must be a name"),
        ({"method": "jacobi", "model": "m"}, "method must be "),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be from 1"),
    ],
)
def test_speculative_configs_that_cannot_be_used_name_the_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^speculative_config: {re.escape(message)}"):
        LLM("demo", speculative_config=config)


def test_an_argument_is_not_given_twice() -> None:
    with pytest.raises(ValueError, match="speculative_config: it and tree both choose tree"):
        LLM("demo", tree="1", speculative_config={"method": "ngram", "num_speculative_tokens": 2})


def test_none_stands_for_the_default_as_in_vllm(model: str) -> None:
    names = ("seed", "max_num_seqs", "speculative_config", "enable_prefix_caching", "tree", "verification")
    llm = LLM(model, **dict.fromkeys((*names, "draft_sampling")))
    assert llm.max_num_seqs == EngineArgs("m").max_num_seqs


def test_models_that_generate_text_have_no_embeddings(model: str) -> None:
    llm = LLM(model)
    for method in (llm.embed, llm.encode, llm.score, llm.classify):
        with pytest.raises(RequestError, match=r"^embed: models generate text here"):
            method("the cat")


def test_completion_offers_what_is_meant_for_users(model: str) -> None:
    names = dir(LLM(model))
    assert {"generate", "chat", "stream", "get_metrics", "get_tokenizer", "embed", "shutdown"} <= set(names)
    assert not [name for name in names if name.startswith("_")]
    assert not {"engine", "reader", "jobs", "target"} & set(names)


def test_names_that_work_are_not_in_the_tables() -> None:
    ours = {each.name for each in dataclasses.fields(EngineArgs)} | set(inspect.signature(SamplingParams).parameters)
    assert not ours & {*ENGINE, *SAMPLING, *CALLS}


def test_names_without_effect_are_logged_once(model: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        for _ in range(2):
            EngineArgs(model, mm_encoder_tp_mode="data", trust_remote_code=None)
            SamplingParams(output_text_buffer_length=3)
    (line,) = [line for line in caplog.messages if line.startswith("mm_encoder_tp_mode")]
    assert line == "mm_encoder_tp_mode of vLLM has no effect: models read text only"
    assert not [line for line in caplog.messages if "trust_remote_code" in line], "None is no choice"


def test_every_argument_of_vllms_engine_is_known(model: str) -> None:
    """As of version 0.33, with its defaults, and with values that change no output."""
    defaults: dict[str, Any] = {
        "enable_return_routed_experts": False, "runner": "auto", "convert": "auto", "skip_tokenizer_init": False,
        "tokenizer_mode": "auto", "load_format": "auto", "config_format": "auto", "data_parallel_size": 1,
        "prefill_context_parallel_size": 1, "decode_context_parallel_size": 1, "cpu_offload_gb": 0,
        "offload_group_size": 0, "logprobs_mode": "raw_logprobs", "hf_overrides": {}, "model_class_overrides": {},
        "mm_encoder_only": False, "lora_dtype": "auto", "scheduling_policy": "fcfs", "worker_cls": "auto",
        "worker_extension_cls": "", "generation_config": "auto", "override_generation_config": {},
        "model_impl": "auto", "kv_cache_dtype_skip_layers": [], "logits_processors": [], "max_model_len": -1,
        "quantization": "gguf",
    }  # fmt: skip
    harmless: dict[str, Any] = {
        "enable_sleep_mode": True, "enable_expert_parallel": True, "enable_chunked_prefill": False, "swap_space": 8,
        "served_model_name": ["a"], "distributed_executor_backend": "ray", "model_impl": "vllm", "stream_interval": 5,
        "compilation_config": {"level": 3}, "kv_offloading_size": 4.0, "load_format": "runai_streamer",
        "enable_dbo": True, "attention_backend": "FLASHINFER", "cudagraph_capture_sizes": [1, 2], "hf_token": True,
        "profiler_config": {}, "fully_sharded_loras": True, "limit_mm_per_prompt": {"image": 0}, "numa_bind": True,
    }  # fmt: skip
    assert EngineArgs(model, **defaults) == EngineArgs(model, **harmless) == EngineArgs(model)
    flat = EngineArgs(model, spec_method="ngram", spec_tokens=2)
    assert flat == EngineArgs(model, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    with pytest.raises(ValueError, match="speculative_config: method is given twice"):
        EngineArgs(model, spec_method="ngram", speculative_config={"method": "suffix"})


def test_parameters_are_made_and_copied_as_in_vllm() -> None:
    given = SamplingParams.from_optional(temperature=None, max_tokens=3, extra_args={"a": 1}, detokenize=False)
    assert given == SamplingParams(max_tokens=3)
    assert given.clone() == given


def test_arguments_of_calls_have_no_effect_or_are_refused(model: str) -> None:
    llm, params = LLM(model), SamplingParams(max_tokens=1)
    options: dict[str, Any] = {"priority": [1], "tokenization_kwargs": {}, "mm_processor_kwargs": None}
    assert len(llm.generate(["the"], params, use_tqdm=False, **options)) == 1
    messages = [{"role": "user", "content": "the"}]
    assert len(llm.chat(messages, params, use_tqdm=False, chat_template_content_format="auto", **options)) == 1
    with pytest.raises(ValueError, match=r"^tokenization_kwargs: .* has no equivalent: cut the prompt before"):
        llm.generate(["the"], params, tokenization_kwargs={"truncation": True})
    with pytest.raises(TypeError, match=r"^chat\(\) got an unexpected keyword argument 'no_such'"):
        llm.chat(messages, params, no_such=1)


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("serve M --trust-remote-code --port 1", "serve M --port 1"),
        ("serve --swap-space 4 M --block-size=16", "serve M"),
        ("serve M --no-enable-chunked-prefill --disable_log_requests", "serve M"),
        ("serve M --compilation-config {} --compilation-config.mode 3", "serve M"),
        ("serve M --load-format auto --task generate --cpu-offload-gb 0", "serve M"),
        ("serve M --load-format dummy", "serve M --load-format dummy"),
        ("serve M --disable-sliding-window", "serve M --disable-sliding-window"),
        ("serve M --no-disable-sliding-window", "serve M"),
        ("serve M --served-model-name a", "serve M --served-model-name a"),
        ("serve M --hf-overrides", "serve M --hf-overrides"),
        ("serve M -- prompt --else", "serve M -- prompt --else"),
    ],
)
def test_flags_without_effect_are_left_out_of_a_command_line(words: str, left: str) -> None:
    assert without_vllm_flags(words.split(), {"--served-model-name", "--port"}) == left.split()
