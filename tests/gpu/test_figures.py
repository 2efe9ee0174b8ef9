"""The tool that measures all on a GPU: what is done is not done again, what hangs is ended, targets are held to."""

import json
import os
import re
import subprocess
import sys
import time
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
    for name in ("gpu_figures", "gpu_targets"):
        sys.modules.pop(name, None)


def script(tool: Any, name: str, code: str, **options: Any) -> Any:
    """A step that runs Python code, which finds the report's place in its last argument."""
    file = options.pop("file")
    file.write_text(code)
    return tool.Step(name, (file.stem,), 10, **options)


@pytest.fixture
def step(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def make(name: str, code: str, **options: Any) -> Any:
        return script(tool, name, code, file=tmp_path / f"step_{name}.py", **options)

    return make


REPORTING = "import sys\nprint('first\\n\\nlast')\nopen(sys.argv[-1], 'w').write('{\"speedup\": 3.5}')"


def test_a_step_reports_its_outcome(tool: Any, step: Any, tmp_path: Path) -> None:
    made = tool.run(step("good", REPORTING), 60, tmp_path / "log")
    assert (made["state"], made["report"], made["output"]) == ("done", {"speedup": 3.5}, ["first", "last"])
    assert 0 < made["seconds"] < 60
    made = tool.run(step("bad", "raise SystemExit('no such thing')"), 60, tmp_path / "log")
    assert (made["state"], made["report"], made["output"]) == ("status 1", None, ["no such thing"])
    made = tool.run(step("quiet", "print('3 passed')", reports=False), 60, tmp_path / "log")
    assert (made["state"], made["output"]) == ("done", ["3 passed"])


def test_a_step_that_hangs_is_ended_with_all_it_started(tool: Any, step: Any, tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "print('begun', flush=True)\n"
        "time.sleep(60)"
    )
    made = tool.run(step("hung", code), 3, tmp_path / "hung.log")
    assert (made["state"], made["output"]) == ("not done in 3 s", ["begun"])
    assert (tmp_path / "hung.log").read_text() == "begun\n"
    assert made["seconds"] < 30
    child = Path("/proc") / (tmp_path / "child").read_text() / "stat"
    deadline = time.monotonic() + 20
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"


def test_what_is_done_is_not_run_again(tool: Any, step: Any, tmp_path: Path) -> None:
    one, two, three = (step(name, REPORTING) for name in ("one", "two", "three"))
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
        "throughput-large": together(_1=3.0, _8=1.9, _32=0.99, _64=0.97),
        "peers-large": {
            "peers": {"transformers:bfloat16": {}, "transformers-assisted:bfloat16": {"tree_over_peer": 4.0}}
        },
    }
    found = tool.targets(reports)
    assert [(target.seen, target.is_met) for target in found] == [
        (1.2, False), (20.0, True), (3.2, True), (2.2, False), (1.9, True), (0.97, False), (4.0, True),
    ]  # fmt: skip
    assert found[0].line().endswith("<=  1.15    1.20  MISSED")
    assert found[2].line().endswith(">=  3.00    3.20  met")
    assert all(target.is_met is None for target in tool.targets({}))
    assert tool.targets({})[0].line().endswith("-  not measured")
    reports["peers-large"] = {"peers": {}}
    assert tool.targets(reports)[-1].is_met is None
    assert tool.summary(reports["latency-large-sampled"]) == "off 100.0/s; auto 100.0/s (2.20)"
    assert tool.summary(reports["throughput-large"]) == "over plain 1: 3.00, 8: 1.90, 32: 0.99, 64: 0.97"


def test_every_command_is_one_that_the_command_line_takes(tool: Any) -> None:
    """Options that the commands do not know would be found out only on the GPU."""
    import typer.main

    bench = typer.main.get_command(app).commands["bench"]  # type: ignore[attr-defined]
    laboratory = typer.main.get_command(benchmarks)
    for sizes, device in ((tool.Sizes(), "cuda"), (tool.TINY, "cpu")):
        wanted = tool.steps(sizes, device, "demo")
        assert len({step.name for step in wanted}) == len(wanted)
        assert all(step.seconds <= tool.LONGEST for step in wanted)
        for step in wanted:
            if step.words[0] == "pytest":
                continue
            in_package = step.words[:2] == ("specinfer", "bench")
            name = step.words[2] if in_package else step.words[1]
            command = (bench if in_package else laboratory).commands[name]  # type: ignore[attr-defined]
            with command.make_context(name, [*step.words[3 if in_package else 2 :], "--json", "x.json"]) as context:
                assert context.params.get("argument", context.params["model"]) == "demo"
                for peer in context.params.get("peer") or ():
                    parse_peer(peer, "bfloat16")


def test_a_dry_run_prints_commands_and_runs_nothing(tmp_path: Path) -> None:
    words = [sys.executable, str(TOOLS / "gpu_figures.py"), "--out", str(tmp_path), "--dry-run", "--commit", "abc"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout
    assert re.search(r"python -m pytest -m gpu -v -p no:cacheprovider -n \d+ tests/gpu/test_kernels.py\n", shown)
    assert "python -m benchmarks latency demo --device cuda --grow 7b --tree auto" in shown
    assert "peers-large              not run" in shown
    assert "commit abc" in shown
    assert shown.count("not measured") == 7
    refused = subprocess.run([*words, "--only", "naps"], capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith("--only: no step naps; there are tests-")
    assert json.loads((tmp_path / "figures.json").read_text() if (tmp_path / "figures.json").exists() else "{}") == {}


def test_each_file_of_tests_for_gpus_is_a_step(tool: Any) -> None:
    """One that is ended for its time is run again alone, and the others are not."""
    steps = [step for step in tool.steps(tool.Sizes(), "cuda", "demo") if step.words[0] == "pytest"]
    files = {step.words[-1] for step in steps}
    assert {"tests/gpu/test_kernels.py", "tests/gpu/test_gpu.py", "tests/ops/test_layer_kernels.py"} <= files
    assert "tests/gpu/test_figures.py" not in files
    assert len({step.name for step in steps}) == len(steps) > 4
    assert not [step for step in tool.steps(tool.TINY, "cpu", "demo") if step.words[0] == "pytest"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_of_it_in_small(tmp_path: Path) -> None:
    words = [sys.executable, str(TOOLS / "gpu_figures.py"), "--out", str(tmp_path), "--device", "cpu", "--tiny",
             "--limit", "1700", "--commit", "abc"]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=1750)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("done, ") == 11
    measured = [line for line in done.stdout.splitlines() if line.endswith(("met", "MISSED"))]
    assert len(measured) == 6  # eight together are not among the small sizes
