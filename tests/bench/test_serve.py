"""A server under load: who arrives when, what is noted of each request, and the numbers that follow."""

import asyncio
import json
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fake_server import FakeServer, serving
from reports import shown, written
from specinfer.bench.serve import run_serve
from specinfer.bench.serve_load import arrivals, at_rate, schedule, send_all, send_alone
from specinfer.bench.serve_options import DEFAULT, ServeConfig
from specinfer.bench.serve_page import arm_lines
from specinfer.bench.serve_process import running_server
from specinfer.bench.serve_report import Overhead, RateResult, ServeArm
from specinfer.bench.serve_requests import LoadRequest, load_requests
from specinfer.bench.serve_runs import RequestRun, Round
from specinfer.bench.serve_search import highest_rate, next_rate
from specinfer.cli.app import app
from specinfer.client import open_async_client
from specinfer.core.limits import SLO
from specinfer.reporting.spread import Spread
from tiny import save_model, save_tokenizer

INF = math.inf


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving(FakeServer()) as fake:
        yield fake


def make_run(prompt: int = 0, **changes: Any) -> RequestRun:
    values: dict[str, Any] = {
        "prompt": prompt, "start": 0.0, "ttft": 0.1, "gaps": (0.2, 0.2), "latency": 0.5, "num_prompt": 7,
        "num_output": 5, "text": "abc", "status": 200,
    }  # fmt: skip
    return RequestRun(**(values | changes))


def make_config(server: FakeServer, **changes: Any) -> ServeConfig:
    options: dict[str, Any] = {"base_url": server.url, "num_prompts": 3, "repeats": 2, "max_tokens": 3}
    return ServeConfig(**(options | changes))


def reporting(**changes: Any) -> ServeConfig:
    return ServeConfig(base_url="http://127.0.0.1:1", **changes)


# ------------------------------------------------------------------------------------ the plan


def search(first: float, limits: dict[str, float]) -> dict[float, dict[str, bool]]:
    """Return the rates that a search measures, and which arms met them, if each meets all rates up to its limit."""
    met: dict[float, dict[str, bool]] = {}
    while (rate := next_rate(first, met)) is not None:
        met[rate] = {arm: rate <= limit for arm, limit in limits.items()}
    return met


@pytest.mark.parametrize("first", [0.5, 3.0, 40.0])
def test_a_search_finds_the_highest_rate_of_each_arm(first: float) -> None:
    limits = {"off": 3.1, "auto": 7.7}
    met = search(first, limits)
    assert len(met) <= 16
    for arm, limit in limits.items():
        found = highest_rate(arm, met)
        assert found is not None
        assert limit / 1.12 <= found <= limit


def test_a_search_ends_if_no_rate_is_met_or_missed() -> None:
    missed = search(1.0, {"off": 0.0, "auto": 3.0})
    assert min(missed) == 1 / 16
    assert highest_rate("off", missed) is None
    assert highest_rate("auto", missed) == pytest.approx(2.83, abs=0.01)
    assert highest_rate("off", search(1.0, {"off": INF})) == 2.0**15


def test_a_rate_above_one_that_was_missed_does_not_count() -> None:
    met = {1.0: {"off": True}, 2.0: {"off": False}, 2.5: {"off": True}}
    assert highest_rate("off", met) == 1.0
    assert next_rate(1.0, met) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 5.0, INF])
def test_arrivals_keep_the_rate(burstiness: float) -> None:
    times = arrivals(200, 50.0, burstiness, 1)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(4.0)
    assert times == arrivals(200, 50.0, burstiness, 1)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    variation = statistics.pstdev(gaps) / statistics.mean(gaps)
    expected = 0.0 if math.isinf(burstiness) else burstiness**-0.5  # of a gamma distribution
    assert variation == pytest.approx(expected, rel=0.25, abs=1e-9)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrivals(3, INF, 1.0, 0) == [0.0] * 3


def test_times_of_a_trace_are_scaled_to_a_rate() -> None:
    assert at_rate([0.0, 1.0, 4.0], INF) == [0.0, 1.0, 4.0]
    assert at_rate([0.0, 1.0, 4.0], 1.5) == [0.0, 0.5, 2.0]
    assert at_rate([0.0, 0.0], 1.5) == [0.0, 0.0]


def test_arms_and_rates_take_turns(server: FakeServer) -> None:
    turns = list(schedule(make_config(server, trees=("off", "1,1")), (1.0, INF)))
    assert [(turn.rate, turn.repeat) for turn in turns] == [(1.0, 0), (INF, 0), (1.0, 1), (INF, 1)]
    assert [turn.arms[0] for turn in turns] == ["off", "1,1", "1,1", "off"]
    assert all(sorted(turn.arms) == ["1,1", "off"] for turn in turns)


def test_prompts_come_from_files_of_several_forms(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    wanted = ["one", "two", "three", "four"]
    talk = {"conversations": [{"from": "human", "value": "three"}, {"from": "gpt", "value": "no"}]}
    entries = ["one", {"prompt": "two"}, talk, {"messages": [{"role": "user", "content": "four"}]}, {"x": 1}, "  "]
    config = make_config(server, dataset=str(path), num_prompts=4)
    for text in (json.dumps(entries), "\n".join(map(json.dumps, entries)) + "\n\n"):
        path.write_text(text)
        assert [request.prompt for request in load_requests(config)] == wanted
    with pytest.raises(ValueError, match=r"num_prompts: .* has 4; ask for no more"):
        load_requests(make_config(server, dataset=str(path), num_prompts=5))
    for text, told in (("{", "neither JSON nor JSON lines"), ("[]", "has no prompts"), ("\x00", "neither JSON")):
        path.write_text(text)
        with pytest.raises(ValueError, match=told):
            load_requests(config)
    with pytest.raises(ValueError, match=r"dataset: .* no text that can be read"):
        load_requests(make_config(server, dataset=str(tmp_path / "none")))


def test_a_trace_gives_times_lengths_classes_and_targets(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    line: dict[str, Any] = {"timestamp": 1500, "output_length": 7, "class": "chat", "slo": {"tpot": 50}}
    config = make_config(server, dataset=str(path), num_prompts=2)
    path.write_text("\n".join(map(json.dumps, [line | {"prompt": "one"}, {"input_length": 20}])))
    first, second = load_requests(config)
    assert first == LoadRequest("one", 1.5, 7, "chat", SLO(tpot=50))
    assert 40 <= len(second.prompt) <= 80
    assert (second.time, second.kind, second.slo) == (None, "", None)
    with pytest.raises(ValueError, match=r"self_timed: a request of .* has no timestamp"):
        load_requests(make_config(server, dataset=str(path), num_prompts=2, self_timed=True))
    for wrong in ({"timestamp": "x"}, {"output_length": 0}, {"slo": {"e2el": 5}}):
        path.write_text(json.dumps({"prompt": "a"} | wrong))
        with pytest.raises(ValueError, match=f"dataset: .*{next(iter(wrong))}"):
            load_requests(config)


def test_the_trace_that_comes_with_the_package_has_two_classes(server: FakeServer) -> None:
    requests = load_requests(make_config(server, dataset="trace", num_prompts=64, self_timed=True))
    times = [request.time or 0.0 for request in requests]
    assert times == sorted(times)
    assert {request.kind for request in requests} == {"batch", "chat"}
    assert all(request.slo is not None and request.prompt for request in requests)


def test_random_prompts_are_the_seeds_own(server: FakeServer) -> None:
    first = load_requests(make_config(server, dataset="random", prompt_chars=50))
    assert first == load_requests(make_config(server, dataset="random", prompt_chars=50))
    assert first != load_requests(make_config(server, dataset="random", prompt_chars=50, seed=1))
    assert len(set(first)) == 3
    assert all(45 <= len(one.prompt) <= 50 for one in first)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"base_url": None}, "model: name one to serve"),
        ({"base_url": "nowhere"}, "not the address of a server"),
        ({"endpoint": "audio"}, "endpoint must be one of"),
        ({"trees": ()}, "trees: none given"),
        ({"trees": ("off", "off")}, "none twice"),
        ({"trees": ("x",)}, "tree"),
        ({"request_rates": (0.0,)}, "request_rates"),
        ({"request_rates": (math.nan,)}, "request_rates"),
        ({"burstiness": 0.0}, "burstiness must be above 0"),
        ({"find_rate": 90.0}, "find_rate: the search begins with one finite rate"),
        ({"find_rate": 90.0, "request_rates": (1.0, 2.0)}, "find_rate: the search begins with one finite rate"),
        ({"find_rate": 101.0, "request_rates": (1.0,)}, "find_rate must be a percentage"),
        ({"temperature": -1.0}, "temperature"),
        ({"num_prompts": 0}, "num_prompts"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"metrics": ("speed",)}, "metrics: 'speed' is not known"),
        ({"goodput": {"itl": 5.0}}, "goodput: itl is of tokens"),
        ({"goodput": {"ttft": 0.0}}, "goodput: limits must be"),
        ({"percentiles": (0.0,)}, "percentiles"),
        ({"measures_overhead": True}, "overhead: it is measured against"),
    ],
)
def test_bad_options_are_refused_by_name(server: FakeServer, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make_config(server, **changes)


# ------------------------------------------------------------------------------------ the load


def send(server: FakeServer, count: int, times: list[float], limit: int | None = None) -> Round:
    async def load() -> Round:
        async with open_async_client(server.url, None) as client:
            bodies = [{"prompt": "p", "stream": True, "stream_options": {"include_usage": True}}] * count
            return await send_all(client, "/v1/completions", bodies, times, limit, lambda: None)

    return asyncio.run(load())


def test_requests_are_sent_at_their_time_whatever_the_server_does(server: FakeServer) -> None:
    server.delay = 0.2
    made = send(server, 3, [0.0, 0.05, 0.1])
    for run, wanted in zip(made.runs, [0.0, 0.05, 0.1], strict=True):
        assert wanted <= run.start
        assert run.error is None
        assert (run.num_prompt, run.num_output, run.text) == (5, 3, "one two three")
        assert run.ttft >= 0.1
        assert len(run.gaps) == 2
        assert run.ttft + sum(run.gaps) <= run.latency
        assert run.tpot == pytest.approx((run.latency - run.ttft) / 2)
    assert server.most == made.most_at_once == 3


def test_a_limit_holds_requests_back(server: FakeServer) -> None:
    server.delay = 0.03
    made = send(server, 6, [0.0] * 6, limit=2)
    assert server.most == made.most_at_once == 2
    assert max(run.latency for run in made.runs) < 0.8 * made.duration  # waiting for a place is not part of it


def test_what_fails_is_noted(server: FakeServer) -> None:
    server.refusal = (429, {"error": {"message": "too much waits"}})
    (run,) = send(server, 1, [0.0]).runs
    assert run.is_refused
    assert run.error == "the server answers 429: too much waits"
    server.refusal = (400, b"no")
    (run,) = send(server, 1, [0.0]).runs
    assert (run.is_refused, run.error) == (False, "the server answers 400: no")
    server.refusal, server.broken = None, True
    (run,) = send(server, 1, [0.0]).runs
    assert run.error == "the stream ended before it was whole"
    server.events = [{"error": {"message": "the engine failed"}}]
    (run,) = send(server, 1, [0.0]).runs
    assert "the engine failed" in str(run.error)
    server.url = "http://127.0.0.1:1"
    (run,) = send(server, 1, [0.0]).runs
    assert run.status == 0
    assert "ConnectError" in str(run.error)


# ---------------------------------------------------------------------------------- the numbers


def test_the_numbers_are_those_of_vllm() -> None:
    runs = (make_run(), make_run(1, ttft=0.3, latency=0.7, num_output=3), make_run(2, error="no", status=503))
    arm = ServeArm("off", (Round(runs, 2.0), Round((make_run(),), 1.0)))
    numbers = arm.numbers(reporting(percentiles=(50.0, 99.0), goodput={"ttft": 200.0}))
    assert (numbers["completed"], numbers["failed"], numbers["refused"], numbers["duration"]) == (3, 1, 1, 3.0)
    assert (numbers["total_input_tokens"], numbers["total_output_tokens"]) == (21, 13)
    assert numbers["request_throughput"] == pytest.approx(1.0)
    assert numbers["request_goodput"] == pytest.approx(2 / 3)
    assert numbers["output_throughput"] == pytest.approx(13 / 3)
    assert numbers["total_token_throughput"] == pytest.approx(34 / 3)
    assert numbers["mean_ttft_ms"] == pytest.approx(500 / 3)
    assert numbers["median_ttft_ms"] == numbers["p50_ttft_ms"] == pytest.approx(100)
    assert numbers["mean_tpot_ms"] == pytest.approx((100 + 200 + 100) / 3)
    assert numbers["mean_itl_ms"] == pytest.approx(200)
    assert numbers["p99_e2el_ms"] == pytest.approx(696)
    assert "spec_decode_num_drafts" not in numbers


def test_goodput_is_counted_by_class_with_the_targets_of_each_request() -> None:
    runs = (
        make_run(kind="chat", limits={"ttft": 50.0}),  # took 100 ms
        make_run(1, kind="chat", limits={"ttft": 150.0, "tpot": 150.0}),
        make_run(2, kind="batch"),
        make_run(3, kind="batch", error="no", status=503),
    )
    arm = ServeArm("off", (Round(runs, 2.0),))
    config = reporting(metrics=("ttft",), goodput={"ttft": 120.0})
    assert arm.numbers(config)["request_goodput"] == pytest.approx(1.0)
    assert arm.by_class({"ttft": 120.0}) == {
        "batch": {"requests": 2, "good": 1, "request_goodput": 0.5},
        "chat": {"requests": 2, "good": 1, "request_goodput": 0.5},
    }
    assert "  of chat (met):                         1 of 2" in list(arm_lines(INF, arm, config))


def test_counters_of_speculation_are_summed() -> None:
    stats = {"num_spec_steps": 4, "num_draft_tokens": 10, "num_accepted_draft_tokens": 6}
    arm = ServeArm("auto", (Round((make_run(stats=stats), make_run(stats=stats), make_run()), 1.0),))
    assert arm.acceptance == {
        "spec_decode_num_drafts": 8, "spec_decode_num_draft_tokens": 20, "spec_decode_num_accepted_tokens": 12,
        "spec_decode_acceptance_rate": 60.0, "spec_decode_acceptance_length": 2.5,
    }  # fmt: skip


def test_ratios_are_of_pairs() -> None:
    plain = ServeArm("off", (Round((make_run(), make_run(1, text="x")), 2.0), Round((make_run(), make_run(1)), 2.0)))
    fast = ServeArm(
        "auto",
        (
            Round((make_run(latency=0.25), make_run(1, latency=0.1)), 1.0),
            Round((make_run(latency=0.5), make_run(1, error="no")), 2.0),
        ),
    )
    result = RateResult(INF, (fast, plain))
    ratios = result.ratios_of(fast)
    assert ratios["e2el"].median == pytest.approx(2.0)
    assert (ratios["e2el"].min, ratios["e2el"].max) == (1.0, 5.0)
    assert ratios["output_throughput"].max == pytest.approx(2.0)
    assert ratios["output_throughput"].min == pytest.approx(0.5)
    assert result.partings(fast) == (1, 3)
    assert result.ratios_of(plain) == {}
    assert RateResult(INF, (fast,)).ratios_of(fast) == {}


def test_most_at_once_counts_those_that_overlap() -> None:
    runs = [make_run(start=start, latency=1.0) for start in (0.0, 0.5, 1.0, 3.0)]
    assert Round(tuple(runs), 4.0).most_at_once == 2


def test_the_table_is_that_of_vllm() -> None:
    arm = ServeArm("off", (Round((make_run(),), 2.0),))
    lines = list(arm_lines(2.5, arm, reporting(metrics=("ttft", "tpot"), max_concurrency=4)))
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    assert "Successful requests:                     1" in lines
    assert "Request rate configured (RPS):           2.50" in lines
    assert "Maximum request concurrency:             4" in lines
    assert "---------------Time to First Token----------------" in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert "Mean TTFT (ms):                          100.00" in lines
    assert "P99 TPOT (ms):                           100.00" in lines
    assert not any("E2EL" in line or "goodput" in line for line in lines)


# ------------------------------------------------------------------------------------ whole runs


def test_a_run_against_a_server(server: FakeServer, tmp_path: Path) -> None:
    files = {"json": tmp_path / "numbers.json", "plot": tmp_path / "plot.svg"}
    report = run_serve(make_config(server, request_rates=(200.0, INF), api_key="a" * 20, **files))
    assert len(server.asked) == 2 + 2 * 2 * 2 * 3  # warming up; rates, rounds, arms, prompts
    plain = [body for body in server.asked if body.get("speculative") == {"tree": "off"}]
    assert len(plain) == len(server.asked) // 2
    assert all("speculative" not in body for body in server.asked if body not in plain)
    # The same prompt never comes again with the same salt.
    assert len({(body["prompt"], body["cache_salt"]) for body in server.asked}) == len(server.asked)
    assert {body["max_tokens"] for body in server.asked} == {3}
    assert all(body["ignore_eos"] and body["model"] == "tiny" for body in server.asked)
    numbers = written(report, tmp_path / "numbers.json")
    assert [rate["request_rate"] for rate in numbers["rates"]] == [200.0, "inf"]
    for rate in numbers["rates"]:
        assert list(rate["arms"]) == [DEFAULT, "off"]
        for arm in rate["arms"].values():
            assert (arm["completed"], arm["failed"]) == (6, 0)
            assert arm["output_lens"] == [3] * 6
        assert rate["arms"][DEFAULT]["num_other_texts"] == 0
        assert rate["arms"][DEFAULT]["ratios"]["e2el"]["median"] > 0
    assert "a" * 20 not in files["json"].read_text()
    assert {"cpu", "served_model", "date", "command"} <= numbers["environment"].keys()
    assert files["plot"].stat().st_size > 1000


def test_one_arm_on_another_server_sends_nothing_special(server: FakeServer) -> None:
    report = run_serve(make_config(server, trees=(DEFAULT,), repeats=1, warmups=0, endpoint="chat", temperature=0.5))
    assert set(server.asked[0]) == {
        "path", "model", "messages", "max_tokens", "temperature", "ignore_eos", "stream", "stream_options", "seed",
    }  # fmt: skip
    assert server.asked[0]["path"] == "/v1/chat/completions"
    assert report.measured.results[0].plain is None


@pytest.mark.parametrize("sends_slo", [True, False])
def test_a_trace_is_replayed_at_its_times_with_its_targets(server: FakeServer, tmp_path: Path, sends_slo: bool) -> None:
    path = tmp_path / "trace"
    entries = [{"prompt": f"p{i}", "timestamp": 60 * i, "output_length": 2 + i, "slo": {"ttft": 9e4}} for i in range(3)]
    path.write_text("\n".join(map(json.dumps, entries)))
    config = make_config(server, dataset=str(path), repeats=1, warmups=0, trees=("off",), self_timed=True,
                         sends_slo=sends_slo)  # fmt: skip
    (arm,) = run_serve(config).measured.results[0].arms
    assert [run.start for run in arm.runs] == pytest.approx([0.0, 0.06, 0.12], abs=0.05)
    assert sorted(body["max_tokens"] for body in server.asked) == [2, 3, 4]
    assert [body.get("slo") for body in server.asked] == [{"ttft": 9e4} if sends_slo else None] * 3
    assert arm.num_good({}) == 3


def test_the_highest_rate_is_searched_for_and_shown(server: FakeServer, tmp_path: Path) -> None:
    config = make_config(
        server, find_rate=90.0, request_rates=(100.0,), goodput={"ttft": 9e4}, repeats=1, trees=("auto", "off"),
        json=tmp_path / "report.json",
    )  # fmt: skip
    report = run_serve(config)
    rates = [result.rate for result in report.measured.results]
    assert rates == [100.0 * 2**i for i in range(16)]
    assert report.measured.highest_rates == {"auto": rates[-1], "off": rates[-1]}
    assert json.loads((tmp_path / "report.json").read_text())["highest_rates"] == report.measured.highest_rates
    assert "Requests a second that met their targets" in shown(report)
    assert "Highest rate at which 90 % met their targets: auto 3.28e+06, off 3.28e+06" in shown(report)


def test_a_search_without_targets_is_refused(server: FakeServer) -> None:
    with pytest.raises(ValueError, match="find_rate: the requests have no targets"):
        run_serve(make_config(server, find_rate=90.0, request_rates=(1.0,)))


def test_the_screen_shows_failures_and_how_arms_compare(server: FakeServer) -> None:
    text = shown(run_serve(make_config(server)))
    assert text.count("Serving Benchmark Result") == 2
    assert "Times faster than plain decoding" in text
    assert "0 of 6" in text


def test_a_run_without_any_answer_fails(server: FakeServer) -> None:
    server.refusal = (429, {"error": {"message": "too much waits"}})
    with pytest.raises(RuntimeError, match="no request was served; the first: the server answers 429: too much waits"):
        run_serve(make_config(server))
    with pytest.raises(ValueError, match="the server has tiny, not large"):
        run_serve(make_config(server, model="large"))
    with pytest.raises(ValueError, match="no server answers"):
        run_serve(make_config(server, base_url="http://127.0.0.1:1"))


def test_a_request_sent_alone_is_measured_as_among_others(server: FakeServer) -> None:
    body = {"prompt": "p", "stream": True, "stream_options": {"include_usage": True}}
    (wanted,) = send(server, 1, [0.0]).runs
    with closing(HTTPConnection(server.url.removeprefix("http://"))) as connection:
        runs = [send_alone(connection, "/v1/completions", body, "a-key") for _ in range(2)]
        server.refusal = 503, {"error": {"message": "later"}}
        refused = send_alone(connection, "/v1/completions", body, None)
    for run in runs:
        assert run.is_served
        assert (run.text, run.num_output, len(run.gaps)) == (wanted.text, wanted.num_output, len(wanted.gaps))
        assert 0 < run.ttft < run.latency
    assert not refused.is_served
    assert "later" in str(refused.error)
    assert send_alone(HTTPConnection("127.0.0.1:9"), "/", body, None).error


def test_overhead_is_reported() -> None:
    overhead = Overhead(Spread.from_values([0.5, 0.7]), Spread.from_values([2.0]), Spread.from_values([4.0]), 2)
    assert "0.600 ms a token (0.550 to 0.650) and 2.00 ms to the first token" in str(overhead)
    assert overhead.as_dict()["num_pairs"] == 2


def test_the_command_reads_its_options(server: FakeServer) -> None:
    words = ["bench", "serve", "--base-url", server.url, "--num-prompts", "2", "--repeats", "1", "--max-tokens", "3"]
    result = CliRunner().invoke(app, [*words, "--goodput", "ttft:1000", "--metric-percentiles", "50,90"])
    assert result.exit_code == 0, result.output
    assert "Request goodput (req/s):" in result.stdout
    assert "P90 E2EL (ms):" in result.stdout
    result = CliRunner().invoke(app, [*words, "--goodput", "ttft"])
    assert result.exit_code == 2
    assert "goodput: 'ttft' cannot be read" in result.stderr


def test_a_server_that_does_not_start_is_reported() -> None:
    started = time.monotonic()
    with (
        pytest.raises(RuntimeError, match=r"the server did not start: .*/no/such/model"),
        running_server("/no/such/model", []),
    ):
        pass
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_a_server_of_its_own_is_started_measured_and_ended(tmp_path: Path) -> None:
    model = save_tokenizer(save_model(tmp_path / "model", max_position_embeddings=1024))
    config = ServeConfig(
        model=str(model), drafters=("ngram",), dataset="random", prompt_chars=40, num_prompts=3, max_tokens=8,
        repeats=1, trees=("1,1", "off"), measures_overhead=True, dtype="float32",
    )  # fmt: skip
    report = run_serve(config)
    assert report.as_dict()["environment"]["served_model"] == "model"
    (result,) = report.measured.results
    assert [len(arm.served) for arm in result.arms] == [3, 3]
    assert result.partings(result.arms[0]) == (0, 3)
    assert all(run.num_output == 8 for arm in result.arms for run in arm.runs)
    assert report.measured.overhead is not None
    assert report.measured.overhead.num_pairs == 3
    assert report.measured.overhead.token_ms.median < 50
