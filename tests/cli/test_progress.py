"""What takes long is told of: loading, timing, the first token, and what was read for the tokens said."""

import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from specinfer import LLM, SamplingParams
from specinfer.async_llm import AsyncLLM
from specinfer.cli import loading
from specinfer.cli.loading import FirstToken, LoadingLog, loading_bar
from specinfer.cli.screen import Screen
from specinfer.core.progress import begin
from specinfer.engine.tally import Tally
from specinfer.model import target
from specinfer.policy import cost_measurement
from specinfer.server.logs import StatsLog
from specinfer.server.metrics import Metrics

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
READ = r"read \d+\.\d GB at \d+\.\d\d GB/s"
Told = list[tuple[str, int, int]]


@pytest.fixture(scope="module")
def told() -> Told:
    return []


@pytest.fixture(scope="module")
def llm(model_folder: Callable[..., Path], told: Told, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = model_folder("llama", tokenizer=True, num_hidden_layers=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(target, "settle", lambda _budget, stream, *_: stream.settle(0))  # so small a model would stay
        with LLM(
            folder, drafters=["ngram"], offload="disk", progress=lambda *now: told.append(now), max_num_seqs=2
        ) as loaded:
            yield loaded


def test_loading_reports_how_much_of_the_layers_was_read(llm: LLM, told: Told) -> None:
    reading = [(done, total) for name, done, total in told if name.startswith("reading layers")]
    assert len(reading) >= llm.target.loaded.stream.num_layers
    assert [done for done, _ in reading] == sorted({done for done, _ in reading})
    assert reading[-1][0] == reading[-1][1] > 0


def test_timing_slow_passes_is_logged(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_measurement, "_NUM_QUICK", 1e9)
    told: Told = []
    cost_measurement.measure_costs(llm.target, llm.drafter, progress=lambda *now: told.append(now))
    each = llm.target.loaded.stream.bytes_per_pass
    assert [now[1] for now in told] == [i * each for i in range(len(told))]
    assert 3 <= len(told) <= 4
    assert {(name, total) for name, _, total in told} == {("timing passes", 4 * each)}


def test_a_bar_shows_what_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(force_terminal=True, width=200)
    with loading_bar(console, "loading big ...") as progress:
        progress("reading", 0, 4 * 10**9)
        progress("reading", 3 * 10**9, 4 * 10**9)
        time.sleep(0.3)  # a few frames
    out = capsys.readouterr().out
    assert "loading big" in out
    assert re.search(r"reading: 3\.0 GB at [\d.]+ GB/s, 4\.0 GB in all", out)


def test_the_bar_of_a_stage_that_counts_nothing_moves(capsys: pytest.CaptureFixture[str]) -> None:
    for total, moves in ((0, True), (10, False)):
        with loading_bar(Console(force_terminal=True, color_system="standard", width=200), "loading") as progress:
            progress("importing PyTorch", 0, total)
            time.sleep(0.3)  # a few frames
        assert ("\x1b[91m" in capsys.readouterr().out) == moves, "a bright part"


def test_a_log_has_a_line_now_and_then(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(loading.time, "monotonic", lambda: now[0])
    log = LoadingLog(logging.getLogger("specinfer").info)
    with caplog.at_level(logging.INFO, "specinfer"):
        for second in range(41):
            now[0] = float(second)
            log("reading", second * 10**9, 40 * 10**9)
    assert caplog.messages == [
        f"reading: read {second}.0 GB at 1.00 GB/s, 40.0 GB in all" for second in (10, 20, 30, 40)
    ]


def test_each_slow_stage_of_loading_has_a_line_off_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(loading, "LONG", 1.0)
    monkeypatch.setattr(loading.time, "monotonic", lambda: now[0])
    with loading_bar(Console(stderr=True), "loading m ...") as progress:
        for name, seconds in (("importing PyTorch", 2.5), ("reading the target", 0.25), ("measuring costs", 3.0)):
            begin(progress, name)
            now[0] += seconds
    err = capsys.readouterr().err
    assert err.splitlines() == ["specinfer: importing PyTorch: 2.5 s", "specinfer: measuring costs: 3.0 s"]


def test_captured_sizes_are_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LONG", 0.0)
    log = LoadingLog(logging.getLogger("specinfer").info)
    with caplog.at_level(logging.INFO, "specinfer"):
        for done in range(4):
            log("capturing passes of m", done, 3)
    assert caplog.messages == ["capturing passes of m: 3 of 3 sizes"]


def test_progress_of_reading_is_reported_until_the_first_token(llm: LLM) -> None:
    shown = FirstToken(llm)
    seen = []
    for _ in llm.stream("the", GREEDY):
        seen.append(shown.__rich__().plain)
    assert re.fullmatch(r"reading the prompt: \d+ of \d+ tokens · \d+\.\d GB at \d+\.\d\d GB/s", seen[0])


def test_metrics_report_the_bytes_read_since_the_last_line(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(stats=True)
    screen.watch(llm)
    answer = screen.stream(llm, "the", GREEDY, stoppable=False)
    assert answer.numbers is not None
    assert re.search(rf"a pass · .* tokens/s\n.* · {READ}$", answer.numbers), "the reason for no drafts is a line"
    screen.show(llm, llm.generate(["the", "a"], GREEDY, use_tqdm=False))
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"all prompts: {READ}", lines[-1])
    assert not any(re.search(READ, line) for line in lines[-3:-1])
    screen.numbers(llm.generate([], GREEDY))
    assert not capsys.readouterr().err


def test_a_model_in_memory_reads_nothing(model_folder: Callable[..., Path]) -> None:
    screen = Screen(stats=True)
    with LLM(model_folder("llama", tokenizer=True), drafters=[]) as llm:
        screen.watch(llm)
        answer = screen.stream(llm, "the", GREEDY, stoppable=False)
        assert answer.numbers is not None
        assert "read" not in answer.numbers
        text = Metrics(AsyncLLM(llm), Tally(), "m").scrape().decode()
    assert 'weights_read_bytes_total{model_name="m"} 0.0' in text


def test_a_server_counts_and_logs_what_is_read(llm: LLM) -> None:
    engine, tally = AsyncLLM(llm), Tally()
    metrics, log = Metrics(engine, tally, "m"), StatsLog(engine, tally, 10.0)
    stream = llm.target.loaded.stream
    before = stream.bytes_read
    llm.engine.observers.append(tally)
    llm.generate("the", GREEDY, use_tqdm=False)
    llm.engine.observers.remove(tally)
    text = metrics.scrape().decode()
    for name, value in (("bytes", stream.bytes_read), ("seconds", stream.seconds_reading)):
        match = re.search(rf"weights_read_{name}_total{{.*}} (\S+)", text)
        assert match is not None
        assert 0 < float(match[1]) <= value
    assert stream.bytes_read > before
    assert re.fullmatch(rf"Streamed weights: {READ}, passes waited \d+% of the time", log.lines()[-1])
