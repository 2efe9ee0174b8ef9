"""The tool that measures on a GPU: what is done is not done again, what hangs is ended, targets are held to."""

import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.names import parse_peer
from benchmarks.program import app as benchmarks
from specinfer.cli.app import app

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="module")
def tool() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        import gpu_figures

        yield gpu_figures
    for name in ("gpu_figures", "gpu_stages", "gpu_targets"):
        sys.modules.pop(name, None)


def script(tool: Any, name: str, code: str, **options: Any) -> Any:
    """A stage that runs Python code, which finds the report's place in its last argument."""
    file = options.pop("file")
    file.write_text(code)
    return tool.Stage(name, (file.stem,), 10, **options)


@pytest.fixture
def stage(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def make(name: str, code: str, **options: Any) -> Any:
        return script(tool, name, code, file=tmp_path / f"stage_{name}.py", **options)

    return make


REPORTING = "import sys\nprint('first\\n\\nlast')\nopen(sys.argv[-1], 'w').write('{\"speedup\": 3.5}')"


def test_a_stage_reports_its_outcome(tool: Any, stage: Any, tmp_path: Path) -> None:
    made = tool.run(stage("good", REPORTING), 60, tmp_path / "log")
    assert (made["state"], made["report"], made["output"]) == ("done", {"speedup": 3.5}, ["first", "last"])
    assert 0 < made["seconds"] < 60
    made = tool.run(stage("bad", "raise SystemExit('no such thing')"), 60, tmp_path / "log")
    assert (made["state"], made["report"], made["output"]) == ("status 1", None, ["no such thing"])
    made = tool.run(stage("quiet", "print('3 passed')", reports=False), 60, tmp_path / "log")
    assert (made["state"], made["output"]) == ("done", ["3 passed"])


def test_a_stage_that_hangs_is_ended_with_all_it_started(tool: Any, stage: Any, tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "print('begun', flush=True)\n"
        "time.sleep(60)"
    )
    made = tool.run(stage("hung", code), 3, tmp_path / "hung.log")
    assert (made["state"], made["output"]) == ("not done in 3 s", ["begun"])
    assert (tmp_path / "hung.log").read_text() == "begun\n"
    assert made["seconds"] < 30
    child = Path("/proc") / (tmp_path / "child").read_text() / "stat"
    deadline = time.monotonic() + 20
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_stage_ends_with_the_tool(tmp_path: Path) -> None:
    """However that is ended: nothing may hold the GPU when it is asked for again."""
    code = (
        f"import sys; sys.path.insert(0, {str(TOOLS)!r}); import gpu_figures as tool\n"
        f"from pathlib import Path; stage = tool.Stage('hung', ({str(tmp_path / 'hung.py')!r},), 60, reports=False)\n"
        f"tool.run(stage, 60, Path({str(tmp_path / 'hung.log')!r}))"
    )
    (tmp_path / "hung.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)")
    tool, log = subprocess.Popen([sys.executable, "-c", code]), tmp_path / "hung.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.05)
    stage = Path("/proc") / log.read_text().strip() / "stat"
    assert stage.exists()
    tool.kill()
    tool.wait()
    while stage.exists() and stage.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not stage.exists() or stage.read_text().rpartition(")")[2].split()[0] == "Z"


def test_what_is_done_is_not_run_again(tool: Any, stage: Any, tmp_path: Path) -> None:
    one, two, three = (stage(name, REPORTING) for name in ("one", "two", "three"))
    figures = tool.Figures(tmp_path / "out")
    figures.add("one", {"state": "done", "commit": "now", "report": {"speedup": 1.0}})
    figures.add("two", {"state": "status 1", "commit": "now", "report": None})
    again = tool.Figures(tmp_path / "out")  # as another call finds it
    assert again.left([one, two, three], "now") == [three, two]  # what failed comes last
    assert again.left([one, two, three], "later") == [one, two, three]  # of another commit nothing counts
    assert again.reports("now") == {"one": {"speedup": 1.0}}
    assert again.reports("later") == {}


def report(speedup: float, ratios: dict[str, float], beside: float) -> dict[str, Any]:
    arms = {
        name: {"tokens_per_second": 100.0, "stages": {"over_floor": {"target": ratio}, "percent_beside_target": beside}}
        for name, ratio in ratios.items()
    }
    arms["auto"]["speedup"] = speedup
    return {"speedup": speedup, "tree": "auto", "arms": arms}


def together(**ratios: float) -> dict[str, Any]:
    batches = [{"batch_size": int(size[1:]), "arms": {"auto": {"speedup": ratio}}} for size, ratio in ratios.items()]
    return {"options": {"trees": ["auto"]}, "batches": batches}


def test_targets_are_met_or_missed_or_not_measured(tool: Any) -> None:
    reports = {
        "latency-large-greedy": report(3.2, {"off": 1.05, "auto": 1.1, "best-first:64": 1.2}, 20.0),
        "latency-large-sampled": report(2.2, {"off": 1.05, "auto": 1.1}, 20.0),
        "throughput-large": together(_8=1.9, _32=0.99),
        "throughput-more": together(_1=3.0, _64=0.97),
        "peers-large": {
            "peers": {"transformers:bfloat16": {}, "transformers-assisted:bfloat16": {"tree_over_peer": 4.0}}
        },
        "identity-large": {"num_differing": 3, "arms": [
            {"temperature": 1.0, "batch_size": 8, "arm": "off", "num_parted": 2}
        ]},
        "passes-large": {"bandwidth_gb_per_s": 4000.0, "trees": [
            {"arm": arm, "rows": rows, "ms": ms}
            for arm, times in (("bfloat16", (4.0, 5.0)), ("bfloat16 batch-invariant", (4.2, 5.6)))
            for rows, ms in zip((1, 64), times, strict=True)
        ]},
    }  # fmt: skip
    required = tool.targets(reports)
    assert [(target.seen, target.is_met) for target in required[:-1]] == [
        (1.2, False), (20.0, True), (3.2, True), (2.2, False), (1.9, True), (0.97, False), (4.0, True), (3, False),
    ]  # fmt: skip
    assert (required[-1].seen, required[-1].is_met) == (pytest.approx(1.12), False)
    assert required[0].line().endswith("<=  1.15    1.20  MISSED")
    assert required[2].line().endswith(">=  3.00    3.20  met")
    assert all(target.is_met is None for target in tool.targets({}))
    assert tool.targets({})[0].line().endswith("-  not measured")
    assert tool.targets({"peers-large": {"peers": {}}})[6].is_met is None
    assert tool.summary(reports["latency-large-sampled"]) == "off 100.0/s; auto 100.0/s (2.20)"
    assert tool.summary(reports["throughput-large"]) == "over plain 8: 1.90, 32: 0.99"
    assert tool.summary(reports["identity-large"]) == "3 tokens differ; T 1, 8 together, off: 2 outputs"
    assert tool.summary(reports["passes-large"]).endswith("64 rows 5.60 ms; over the default 1: 1.05, 64: 1.12")


def test_every_command_is_one_that_the_command_line_takes(tool: Any) -> None:
    """Options that the commands do not know would be found out only on the GPU."""
    import typer.main

    bench = typer.main.get_command(app).commands["bench"]  # type: ignore[attr-defined]
    laboratory = typer.main.get_command(benchmarks)
    for sizes, device in ((tool.Sizes(), "cuda"), (tool.TINY, "cpu")):
        wanted = tool.stages(sizes, device, "demo")
        assert len({stage.name for stage in wanted}) == len(wanted)
        assert all(stage.limit <= tool.LIMIT for stage in wanted)
        for stage in wanted:
            if stage.words[0] in ("pytest", "tools/gpu_install.py"):
                continue
            assert stage.is_fresh == (device == "cuda"), "a driver of a GPU may not be copied"
            in_package = stage.words[:2] == ("specinfer", "bench")
            name = stage.words[2] if in_package else stage.words[1]
            command = (bench if in_package else laboratory).commands[name]  # type: ignore[attr-defined]
            words = [*stage.words[3 if in_package else 2 :], "--json", "x.json"]
            with command.make_context(name, words) as context:
                assert context.params.get("argument", context.params["model"]) == "demo"
                for peer in context.params.get("peer") or ():
                    parse_peer(peer, "bfloat16")


def test_what_is_most_telling_comes_first_and_fits_into_ten_minutes(tool: Any) -> None:
    names = [stage.name for stage in tool.stages(tool.Sizes(), "cuda", "demo")]
    worth = ["install", "tests", "latency-large-greedy", "ceiling-large", "identity-large", "passes-large"]
    assert names[:6] == worth
    assert tool.LIMIT < 600
    dry = [stage.name for stage in tool.stages(tool.TINY, "cpu", "demo")]
    assert dry == [name for name in names if name in dry]
    assert len(dry) == len(names) - 3


def test_a_list_prints_commands_and_runs_nothing(tmp_path: Path) -> None:
    words = [sys.executable, str(TOOLS / "gpu_figures.py"), "--out", str(tmp_path), "--list", "--commit", "abc"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout
    assert re.search(r"python -m pytest -m gpu -v --timeout 60 -n \d+ -p no:cacheprovider tests/gpu/test_bench", shown)
    assert "python -m benchmarks latency demo --device cuda --grow 7b --prompt-chars 600 --tree auto" in shown
    assert (
        "python -m benchmarks identity demo --device cuda --grow 7b --prompt-chars 600 --batch-invariant --num-"
        in shown
    )
    assert "peers-large              not run" in shown
    assert "commit abc" in shown
    assert shown.count("not measured") == 9
    refused = subprocess.run([*words, "--stages", "naps"], capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith("--stages: no stage naps; there are install, tests, latency-large-greedy")
    assert not (tmp_path / "figures.json").exists()


def test_the_page_names_stages_and_commits_that_exist(tool: Any) -> None:
    page = (TOOLS.parent / "docs" / "gpu.md").read_text()
    table = page[page.index("### Not run since") : page.index("## Prompts")]
    known = {stage.name for stage in tool.stages(tool.Sizes(), "cuda", "demo")}
    named = {word for row in table.splitlines() for word in re.findall(r"`((?:\w+-)*\w+)`", row.rpartition(" | ")[2])}
    assert len(named) > 8
    assert named <= known


def test_all_files_with_tests_for_gpus_are_run(tool: Any) -> None:
    stage = next(stage for stage in tool.stages(tool.Sizes(), "cuda", "demo") if stage.name == "tests")
    files = {"tests/gpu/test_kernels.py", "tests/gpu/test_gpu.py", "tests/ops/test_layer_kernels.py"}
    assert files <= set(stage.words)
    assert "tests/gpu/test_figures.py" not in stage.words
    assert "--collect-only" not in stage.words


def test_the_first_stages_in_small(tmp_path: Path) -> None:
    """Each result is there as its stage ends, so that a call that is ended leaves what it had."""
    words = [sys.executable, str(TOOLS / "gpu_figures.py"), "--out", str(tmp_path), "--dry-run", "--commit", "abc"]
    words += ["--stages", "install,ceiling-large"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^ceiling-large +done, \d+ s: off .+; 1 .+; replay:3 ", done.stdout, re.MULTILINE)
    stored = json.loads((tmp_path / "figures.json").read_text())
    assert {name: stage["state"] for name, stage in stored.items()} == {"install": "done", "ceiling-large": "done"}
    assert stored["ceiling-large"]["report"]["arms"]["replay:3"]["tokens_per_pass"] > 1.5
    assert "replay:3" in (tmp_path / "ceiling-large.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_of_it_in_small(tmp_path: Path) -> None:
    words = [sys.executable, str(TOOLS / "gpu_figures.py"), "--out", str(tmp_path), "--dry-run", "--commit", "abc",
             "--limit", "850"]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=880)
    assert done.returncode == 0, done.stdout
    stored = json.loads((tmp_path / "figures.json").read_text())
    assert len(stored) == 12
    assert stored["identity-large"]["report"]["num_differing"] == 0


def test_a_package_that_is_missing_comes_from_a_folder_of_wheels(tmp_path: Path) -> None:
    """Into a folder of its own; one without a wheel is named."""
    site, wheels = tmp_path / "site", tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "only_here-1.0-py3-none-any.whl", "w") as wheel:
        info = "only_here-1.0.dist-info"
        wheel.writestr("only_here.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: only-here\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    code = (
        f"import sys; sys.path.insert(0, {str(TOOLS)!r}); import gpu_install as tool; tool._FOR_TESTS = {{names!r}}\n"
        "raise SystemExit(tool.main())"
    )
    for names, status, line in (
        (("only-here",), 0, "packages: there"),
        (("Only_Here", "nowhere"), 1, "missing: nowhere; put a wheel of it into the folder of --wheels"),
    ):
        words = [sys.executable, "-c", code.format(names=names), "--wheels", str(wheels), "--site", str(site)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
        assert (done.returncode, line in done.stdout) == (status, True), done.stdout + done.stderr
        assert "missing: only" not in done.stdout.lower()
    assert (site / "only_here.py").is_file()
