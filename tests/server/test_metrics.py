"""What is counted, measured, logged and sent: equal to what the requests themselves say."""

import asyncio
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from serving import serve, slow_steps
from specinfer.async_llm import AsyncLLM, Generation
from specinfer.core.sampling import SamplingParams
from specinfer.engine.engine import Engine
from specinfer.engine.tally import MAX_POSITION, Tally
from specinfer.llm import LLM
from specinfer.server import observation
from specinfer.server.logs import BackgroundHandler, StatsLog, configure
from specinfer.server.metrics import Metrics, as_vllm
from specinfer.server.middleware import REQUEST_ID
from specinfer.server.observation import Observation, Telemetry
from specinfer.server.state import ServerState
from tiny import random_prompts

# vLLM's names, behind the prefix: what reads its metrics reads ours.
NAMES = set(
    re.findall(
        r"\w+",
        """
num_requests_running num_requests_waiting kv_cache_usage_perc num_preemptions_total
prompt_tokens_total prompt_tokens_cached_total generation_tokens_total
prefix_cache_queries_total prefix_cache_hits_total
e2e_request_latency_seconds_count time_to_first_token_seconds_count inter_token_latency_seconds_count
request_queue_time_seconds_count request_prefill_time_seconds_count request_decode_time_seconds_count
request_inference_time_seconds_count request_time_per_output_token_seconds_count
request_prompt_tokens_count request_generation_tokens_count request_params_n_count request_params_max_tokens_count
iteration_tokens_total_count request_success_total
spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
spec_decode_num_accepted_tokens_per_pos_total
""",
    )
)


@pytest.fixture(scope="module")
def llm(model_folder: Callable[..., Path]) -> LLM:
    drafter = model_folder(noise=0.1, tokenizer=True)
    return LLM(model_folder(tokenizer=True), drafters=[str(drafter), "ngram"], tree="2,1,1", max_num_seqs=4)


def numbers(text: str) -> dict[str, float]:
    """Samples by name and, where they have any beside the model's, labels."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            labels = sorted((key, value) for key, value in sample.labels.items() if key != "model_name")
            found[sample.name.removeprefix("specinfer:") + "".join(f" {key}={value}" for key, value in labels)] = (
                sample.value
            )
    return found


async def finish(state: ServerState, count: int = 5, **params: object) -> list[Generation]:
    asked = SamplingParams(**({"temperature": 0.0, "max_tokens": 24} | params))  # type: ignore[arg-type]
    prompts = random_prompts([7, 9, 11, 13, 15][:count])
    generations = [await state.engine.submit(prompt, asked) for prompt in prompts]
    for generation in generations:
        await generation.finish()
    return generations


def test_metrics_agree_with_the_requests(llm: LLM) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        async with Observation(state.engine, state):
            generations = await finish(state, n=2)
            await client.get("/nothing")
            await client.post("/tokenize", json=[])
            got = numbers((await client.get("/metrics")).text)
        requests = [request for generation in generations for request in generation.requests]
        assert not NAMES - {name.split(" ")[0] for name in got}
        stats = [request.speculation for request in requests]
        assert got["prompt_tokens_total"] == sum(len(request.prompt_ids) for request in requests)
        assert got["generation_tokens_total"] == sum(request.num_output for request in requests) == 10 * 24
        assert got["spec_decode_num_drafts_total"] == sum(one.num_spec_steps for one in stats) > 0
        assert got["spec_decode_num_draft_tokens_total"] == sum(one.num_draft_tokens for one in stats)
        accepted = sum(one.num_accepted_draft_tokens for one in stats)
        assert got["spec_decode_num_accepted_tokens_total"] == accepted > 0
        at = [got.get(f"spec_decode_num_accepted_tokens_per_pos_total position={i}", 0) for i in range(4)]
        assert sum(at) == accepted
        assert at == sorted(at, reverse=True)  # deeper ones need those above
        assert at[3] == 0
        by = {name: value for name, value in got.items() if name.startswith("accepted_nodes_total")}
        assert len(by) == 2
        assert max(by.values()) <= accepted <= sum(by.values())  # what both guessed counts for both
        assert got["request_success_total finished_reason=length"] == 10
        assert got["e2e_request_latency_seconds_count"] == got["time_to_first_token_seconds_count"] == 10
        assert got["request_params_n_sum"] == 10
        assert got["request_params_max_tokens_sum"] == 240
        assert got["request_generation_tokens_sum"] == 240
        assert got["steps_total executor=host"] == state.engine.llm.engine.metrics.num_steps > 24 / 4
        assert got["steps_total executor=device"] == 0
        passes = sum(one.num_target_passes for one in stats)
        assert got["inter_token_latency_seconds_count"] == passes - 10
        assert got["tree_nodes_sum"] == got["spec_decode_num_draft_tokens_total"]
        assert got["num_requests_running"] == got["num_requests_waiting"] == 0
        assert got["kv_cache_usage_perc"] == 0
        assert got["request_refused_total reason=not_found"] == 1
        assert got["request_refused_total reason=invalid_json"] == 1
        e2e = sum((request.times.finished or 0) - request.times.arrival for request in requests)
        assert got["e2e_request_latency_seconds_sum"] == pytest.approx(e2e)

    serve(llm, body)


def test_the_weights_of_drafters_show(model_folder: Callable[..., Path], llm: LLM) -> None:
    drafters = [model_folder(noise=noise, tokenizer=True) for noise in (3.0, 0.1)]
    poor, good = (folder.name for folder in drafters)
    choosing = LLM(model_folder(tokenizer=True), drafters=[*map(str, drafters), "ngram"], tree="2,1", select="hedge:1")

    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        async with Observation(state.engine, state):
            before = numbers((await client.get("/metrics")).text)
            await finish(state)
            after = numbers((await client.get("/metrics")).text)
        weights = {name: value for name, value in after.items() if name.startswith("drafter_weight")}
        assert set(weights) == {f"drafter_weight drafter={name}" for name in (poor, good, "ngram")}
        assert sum(weights.values()) == pytest.approx(1.0)
        assert before[f"drafter_weight drafter={good}"] == pytest.approx(1 / 3)
        assert weights[f"drafter_weight drafter={good}"] > 2 * weights[f"drafter_weight drafter={poor}"]

    serve(choosing, body)

    async def nothing(client: httpx.AsyncClient, state: ServerState) -> None:
        async with Observation(state.engine, state):
            assert "drafter_weight" not in (await client.get("/metrics")).text

    serve(llm, nothing)


def test_prefixes_that_were_kept_are_counted(llm: LLM) -> None:
    (prompt,) = random_prompts([40], seed=7)

    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        async with Observation(state.engine, state):
            outputs = [await state.engine.complete(prompt) for _ in range(2)]
            got = numbers((await client.get("/metrics")).text)
        assert outputs[1].num_cached_tokens > 0
        assert got["prefix_cache_hits_total"] == sum(output.num_cached_tokens for output in outputs)
        assert got["prefix_cache_queries_total"] == 80
        assert 0 < got["kv_cache_kept_perc"] < 1

    serve(llm, body)


def test_what_runs_and_what_is_left_early_shows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch)

    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        metrics = Metrics(state.engine, Tally(), "tiny")
        params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        generations = [await state.engine.submit(prompt, params) for prompt in random_prompts([5] * 6)]
        got = numbers(metrics.scrape().decode())
        while got["num_requests_running"] < 4 or not got["kv_cache_usage_perc"]:  # they run before they hold slots
            await asyncio.sleep(0.001)
            got = numbers(metrics.scrape().decode())
        assert got["num_requests_running"] == 4
        assert got["num_requests_waiting"] == 2
        assert got["kv_cache_usage_perc"] < 1
        for generation in generations:
            generation.close()
        got = {}
        while (
            got.get("request_success_total finished_reason=abort", 0) < 6
        ):  # told to the loop after the engine is idle
            await asyncio.sleep(0.001)
            got = numbers(metrics.scrape().decode())
        assert got["request_success_total finished_reason=abort"] == 6
        assert got["num_requests_running"] == got["kv_cache_usage_perc"] == 0

    serve(llm, body)


def test_requests_that_were_ended_from_outside_are_forgotten(llm: LLM) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        metrics = Metrics(state.engine, Tally(), "tiny")
        metrics._last_token_at |= {f"gone-{i}": 0.0 for i in range(1000)}
        await finish(state, count=1)
        assert metrics._last_token_at == {}

    serve(llm, body)


def test_labels_are_bounded(llm: LLM) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        metrics = Metrics(state.engine, Tally(), "tiny")
        for i in range(100):
            metrics.count_refusal(f"code-{i}")
        got = numbers(metrics.scrape().decode())
        assert got["request_refused_total reason=other"] == 100
        assert not [name for name in got if "code-" in name]

    serve(llm, body)


def test_passes_and_tokens_are_counted_by_the_rule_that_auto_chose(model_folder: Callable[..., Path]) -> None:
    drafter, tally = str(model_folder(noise=0.1, tokenizer=True)), Tally()
    with LLM(model_folder(tokenizer=True), drafters=[drafter], tree="2,1,1", verification="auto") as llm:
        llm.engine.observers.append(tally)
        outputs = llm.generate(["the", "a"], SamplingParams(max_tokens=16), use_tqdm=False)
        llm.generate("the", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        got = numbers(Metrics(AsyncLLM(llm), tally, "tiny").scrape().decode())
    for rule, output in zip(("coupled", "traversal"), outputs, strict=True):
        stats = output.metrics.speculative_decoding
        assert got[f"verification_drafts_total verification={rule}"] == stats["num_spec_steps"]
        plain = cast("int", stats["num_target_passes"]) - cast("int", stats["num_spec_steps"])
        assert got[f"verification_tokens_total verification={rule}"] == 16 - plain


def test_a_tally_reads_while_it_counts() -> None:
    tally = Tally()
    before = tally.copy()
    tally.totals.num_generated_tokens += 5
    tally.totals.accepted_at[MAX_POSITION - 1] += 2
    tally.totals.read_by["one"] += 3
    spent = tally.copy().since(before)
    assert spent.num_generated_tokens == 5
    assert spent.accepted_at[-1] == 2
    assert spent.read_by == {"one": 3}
    assert before.num_generated_tokens == before.accepted_at[-1] == 0


# --------------------------------------------------------------------------------------------- logs


def test_lines_are_about_the_interval_and_silent_when_nothing_runs(llm: LLM) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        tally = Tally()
        llm.engine.observers.append(tally)
        log = StatsLog(state.engine, tally, 10.0)
        assert log.lines() == []
        await finish(state, count=1)
        speed, speculation = log.lines()
        assert re.search(r"Avg prompt throughput: [1-9][\d.]* tokens/s, Avg generation throughput: [1-9]", speed)
        assert "Running: 0 reqs, Waiting: 0 reqs" in speed
        assert "Prefix cache hit rate: " in speed
        totals = tally.copy()
        length = 1 + totals.num_accepted_tokens / totals.num_drafts
        assert f"Mean acceptance length: {length:.2f}" in speculation
        (rates,) = re.findall(r"Per-position acceptance rate: ([\d., ]+), Avg", speculation)
        first = totals.accepted_at[0] / totals.num_drafts
        assert rates.split(", ")[0] == f"{first:.3f}"
        assert f"Drafted: {totals.num_draft_tokens} tokens" in speculation
        assert log.lines() == []
        await finish(state, count=1, tree="off")
        assert len(log.lines()) == 1

    serve(llm, body)


def test_lines_show_how_far_prompts_are_read(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Speed is that of the interval, without cached tokens, and held slots count even if they are cached."""
    slow_steps(monkeypatch, 0.03)
    target = LLM(model_folder(tokenizer=True), drafters=[], max_num_batched_tokens=8)
    (prompt,) = random_prompts([200], seed=3)

    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        tally = Tally()
        target.engine.observers.append(tally)
        log, metrics = StatsLog(state.engine, tally, 10.0), Metrics(state.engine, tally, "tiny")
        await state.engine.complete(prompt[:100], SamplingParams(temperature=0.0, max_tokens=1))
        assert log.lines()
        generation = await state.engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=50))
        (request,) = generation.requests
        seen = list[float]()
        while not request.num_output:
            await asyncio.sleep(0.03)
            before, used = request.num_prompt_computed, numbers(metrics.scrape().decode())["kv_cache_usage_perc"]
            lines = log.lines()
            if before in (0, 200) or len(lines) == 1:
                continue
            found = re.fullmatch(r"Prompt processing progress: (\d+)/200 tokens \((.*)%\), 1 reqs", lines[1])
            assert found is not None
            assert int(found[1]) >= before
            assert float(found[2]) == pytest.approx(int(found[1]) / 2)
            seen.append(float(re.findall(r"Avg prompt throughput: ([\d.]+)", lines[0])[0]))
            (usage,) = re.findall(r"KV cache usage: ([\d.]+)%", lines[0])
            assert 100 / target.target.cache.num_slots < float(usage) / 100 + 0.001
            assert float(usage) / 100 >= used - 0.001
        assert len(seen) > 2
        assert min(seen) > 0, "while a single prompt is read, too"
        assert max(seen) < 100 / 0.03, "cached tokens are not read"
        generation.close()

    serve(target, body)


def test_lines_come_by_themselves(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        async with Observation(state.engine, state):
            await finish(state, count=1)
            while not caplog.records:
                await asyncio.sleep(0.01)

    with caplog.at_level(logging.INFO, "specinfer.server.logs"):
        serve(llm, body, log_stats_interval=0.02)
    assert "Avg generation throughput" in caplog.records[0].getMessage()


def test_log_lines_name_their_request(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info")
    mark = REQUEST_ID.set("abc")
    logging.getLogger("specinfer.server").info("inside")
    REQUEST_ID.reset(mark)
    logging.getLogger("specinfer.server").info("outside")
    logging.getLogger("specinfer.server").info("%s", "one\nINFO forged \x1b[31m")
    logging.getLogger("elsewhere").info("not shown")
    logging.getLogger().handlers[0].flush()
    inside, outside, foreign = capsys.readouterr().err.splitlines()
    assert "specinfer.server [abc]: inside" in inside
    assert "specinfer.server: outside" in outside
    assert foreign.endswith("one\\x0aINFO forged \\x1b[31m")


# -------------------------------------------------------------------------------------------- spans


def test_each_prompt_has_a_span(llm: LLM) -> None:
    exporter = InMemorySpanExporter()

    async def body(client: httpx.AsyncClient, state: ServerState) -> list[Generation]:
        spans = Telemetry(state.engine, "http://unused", "tiny", exporter)
        generations = await finish(state, count=2, n=2)
        await asyncio.to_thread(spans._provider.force_flush)
        return generations

    generations = serve(llm, body)
    spans = exporter.get_finished_spans()
    assert len(spans) == 2
    for span, generation in zip(spans, generations, strict=True):
        assert span.name == "llm_request"
        assert span.attributes is not None
        assert span.attributes["gen_ai.request.id"] == generation.request_id
        assert span.attributes["gen_ai.usage.prompt_tokens"] == len(generation.requests[0].prompt_ids)
        assert span.attributes["gen_ai.usage.completion_tokens"] == 48
        assert span.attributes["gen_ai.response.finish_reason"] == "length"
        waited, first = (span.attributes[f"gen_ai.latency.time_{name}"] for name in ("in_queue", "to_first_token"))
        assert 0 <= float(waited) <= float(first) <= float(span.attributes["gen_ai.latency.e2e"])  # type: ignore[arg-type]
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.end_time > span.start_time


def test_spans_need_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    observation.check_installed()
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk", None)
    with pytest.raises(ValueError, match=r"otlp_endpoint: .*specinfer\[otel\]"):
        observation.check_installed()


def test_all_that_watches_is_put_together_and_taken_apart(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trees.jsonl"

    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        async with Observation(state.engine, state):
            await finish(state, count=1)
        assert state.scrape is None

    serve(llm, body, metrics=False, trace=str(trace), log_stats_interval=0.0)
    assert len(trace.read_text().splitlines()) > 2


def test_a_failed_draft_is_counted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> float:
        metrics = Metrics(state.engine, Tally(), "tiny")
        before = numbers(metrics.scrape().decode())["draft_failures_total"]

        def fail(*_: object) -> None:
            raise ValueError("no guesses today")

        assert isinstance(llm.engine, Engine)
        monkeypatch.setattr(llm.engine.drafter, "draft", fail)
        await finish(state, count=1)
        return numbers(metrics.scrape().decode())["draft_failures_total"] - before

    assert serve(llm, body) > 0


def test_a_log_that_nobody_reads_stops_nobody() -> None:
    reading, writing = os.pipe()
    with open(reading) as pipe, open(writing, "w") as stream:
        handler = BackgroundHandler(stream)
        record = logging.makeLogRecord({"msg": "x" * 100})
        start = time.monotonic()
        for _ in range(30_000):
            handler.emit(record)
        handler.flush()
        assert time.monotonic() - start < 10, "the pipe takes 64 kB, and 10,000 lines may wait"
        read: list[str] = []
        thread = threading.Thread(target=lambda: read.extend(pipe))
        thread.start()
        handler.flush()
        handler.emit(record)
        handler.flush()
        stream.close()
        thread.join()
    dropped = [line for line in read if "lines were dropped" in line]
    num_dropped = sum(int(line.split(" lines were dropped")[0].split()[-1]) for line in dropped)
    assert num_dropped > 10_000
    assert len(read) - len(dropped) + num_dropped == 30_001, "every line is written or counted"


def test_vllms_prefix_and_labels(llm: LLM) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> str:
        async with Observation(state.engine, state):
            await finish(state)
            return (await client.get("/metrics")).text

    text = serve(llm, body, metrics_prefix="vllm")
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.name for sample in samples} >= {f"vllm:{name}" for name in NAMES}
    assert {(sample.labels["model_name"], sample.labels["engine"]) for sample in samples} == {("tiny", "0")}
    assert "specinfer:" not in text
    odd = b'specinfer:a{model_name="specinfer:b"} 1.0\n'
    assert as_vllm(odd) == b'vllm:a{engine="0",model_name="specinfer:b"} 1.0\n'
