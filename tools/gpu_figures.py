"""Run all that has not run on a GPU yet, the most telling first, within ten minutes; print a short table last.

    python tools/gpu_figures.py --out figures              # as far as ten minutes go; call it again for what is left
    python tools/gpu_figures.py --out figures --dry-run    # all of it in small on CPUs, to try the tool itself
    python tools/gpu_figures.py --out figures --list       # the commands that are left, and what is known

Everything is stored in OUT/figures.json as each stage ends, and what each stage printed in OUT/STAGE.log. A stage that
is done at this commit is not run again, one that failed is tried again after the others. Each has a limit of its own,
and is begun only if half of that is left of --limit.
"""

import argparse
import ctypes
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_stages import ROOT, TINY, Sizes, Stage, stages
from gpu_targets import summary, targets

LIMIT = 560  # seconds of a call
_LAST_LINES = 12  # of a stage's output that are kept
_POLL = 0.05  # seconds
_PR_SET_PDEATHSIG = 1
_LEAST = 0.5  # of its limit that must be left to a stage
# What the stages import, once for all of them; none of it touches a GPU.
_PRELOADED = ("transformers", "benchmarks.comparisons", "benchmarks.kernels", "benchmarks.identity",
              "benchmarks.offload", "specinfer.llm", "specinfer.bench.latency")  # fmt: skip


class Figures:
    """What has been measured so far, in one file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._file = folder, folder / "figures.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.stages: dict[str, dict[str, Any]] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def is_done(self, name: str, commit: str) -> bool:
        known = self.stages.get(name, {})
        return known.get("state") == "done" and known["commit"] == commit

    def add(self, name: str, numbers: dict[str, Any]) -> None:
        self.stages[name] = numbers
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(self.stages, indent=1) + "\n")
        fresh.replace(self._file)

    def left(self, wanted: Sequence[Stage], commit: str) -> list[Stage]:
        """Those to be run, the ones that were tried before last."""
        left = [stage for stage in wanted if not self.is_done(stage.name, commit)]
        return sorted(left, key=lambda stage: self.stages.get(stage.name, {}).get("commit") == commit)

    def reports(self, commit: str) -> dict[str, Any]:
        return {name: stage["report"] for name, stage in self.stages.items() if self.is_done(name, commit)}


def run(stage: Stage, longest: float, log: Path) -> dict[str, Any]:
    """Run a stage, and end it when it has taken too long: its state, the last lines of its output, and its report.

    Args:
        log: File of the whole output, written as it comes.
    """
    with tempfile.TemporaryDirectory(prefix="figures-") as place:
        report = Path(place) / "report.json"
        command, started = stage.command(report), time.monotonic()
        process_id, status = _begin(command, log, is_fresh=stage.is_fresh), None
        while status is None and time.monotonic() - started < longest:
            ended, code = os.waitpid(process_id, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if ended else None
            time.sleep(_POLL)
        if status is None:
            os.killpg(process_id, signal.SIGKILL)  # what it has started itself, too
            os.waitpid(process_id, 0)
        state = f"not done in {longest:.0f} s" if status is None else "done" if status == 0 else f"status {status}"
        measured = json.loads(report.read_text()) if state == "done" and stage.reports else None
    last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-_LAST_LINES:]
    seconds = time.monotonic() - started
    return {"state": state, "seconds": seconds, "command": command[1:], "output": last, "report": measured}


def _begin(command: Sequence[str], log: Path, *, is_fresh: bool) -> int:
    """Start a command in a process group of its own: a new process, or a copy of this one, which has imported much."""
    sys.stdout.flush()
    process_id = os.fork()
    if process_id:
        return process_id
    status = 1
    try:
        os.setsid()
        _end_with_parent()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(ROOT)
        if is_fresh:
            os.execv(command[0], list(command))
        assert command[1] == "-m"
        sys.argv = list(command[2:])
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end_with_parent() -> None:
    """Let this process be ended when its parent is, however that ends: nothing may hold the GPU after a call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def present_commit() -> str:
    """Of this checkout, "-dirty" if files differ."""
    try:
        words = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def where(device: str) -> str:
    """Device and versions, on one line."""
    import torch

    names = [f"torch {torch.__version__}"]
    for package in ("transformers", "triton"):
        try:
            names.append(f"{package} {__import__(package).__version__}")
        except ImportError:
            names.append(f"no {package}")
    if device == "cpu":
        return ", ".join(["CPU", *names])
    properties = torch.cuda.get_device_properties(device)
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return ", ".join([properties.name, memory, f"CUDA {torch.version.cuda}", *names])


def outcome(stage: Stage, known: dict[str, Any]) -> str:
    """Return one line on what came of a stage."""
    words = summary(known["report"]) if known["state"] == "done" and stage.reports else (known["output"] or [""])[-1]
    return f"{stage.name:24} {known['state']}, {known['seconds']:.0f} s: {words}"


def print_table(figures: Figures, wanted: Sequence[Stage], commit: str, heading: str) -> None:
    print(f"\n{heading}\ncommit {commit}\n")
    for stage in wanted:
        known = figures.stages.get(stage.name)
        is_known = known is not None and known["commit"] == commit
        print(outcome(stage, known) if known is not None and is_known else f"{stage.name:24} not run")


def print_targets(figures: Figures, commit: str) -> bool:
    """Print what the large target must show, and return whether any of it is missed."""
    required = targets(figures.reports(commit))
    print(f"\n{'the large target':58}  {'asked':>8}    seen")
    for target in required:
        print(target.line())
    return any(target.is_met is False for target in required)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures; made if need be")
    parser.add_argument("--stages", metavar="STAGE,STAGE", help="only these stages")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that this call may take")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="demo", help="what is grown; drafters are those that suit it")
    parser.add_argument("--wheels", type=Path, help="folder with wheels of packages that are missing here")
    parser.add_argument("--dry-run", action="store_true", help="all stages in small on CPUs, to try the tool")
    parser.add_argument("--list", action="store_true", help="print the commands that are left, and what is known")
    parser.add_argument("--commit", help="of a copy that has no history")
    return parser.parse_args()


def prepare(site: Path, *, is_dry: bool, folder: Path) -> None:
    """Set the paths of this process and of all it starts, and import what the stages need."""
    places = [str(ROOT / "src"), str(ROOT), str(site)]
    sys.path[:0] = places
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*places, os.environ.get("PYTHONPATH"))))
    if is_dry:  # costs and grown models of a try are of no use later
        os.environ["XDG_CACHE_HOME"] = str(folder.resolve() / "cache")


def preload() -> None:
    """Import what stages import, which takes seconds."""
    importlib.invalidate_caches()  # packages may have come since the start
    from specinfer.core.systems import load_openmp

    load_openmp()
    for name in _PRELOADED:
        importlib.import_module(name)


def main() -> int:
    """Return 0 if every stage asked for is done and no target is missed; a dry run has no targets to miss."""
    asked, started = parse(), time.monotonic()
    commit, device = asked.commit or present_commit(), "cpu" if asked.dry_run else asked.device
    site, wheels = (asked.out / "site").resolve(), None if asked.wheels is None else asked.wheels.resolve()
    wanted = stages(TINY if asked.dry_run else Sizes(), device, asked.model, wheels, site)
    names = None if asked.stages is None else asked.stages.split(",")
    if unknown := set(names or ()) - {stage.name for stage in wanted}:
        known = ", ".join(stage.name for stage in wanted)
        print(f"--stages: no stage {', '.join(sorted(unknown))}; there are {known}", file=sys.stderr)
        return 2
    figures = Figures(asked.out)
    chosen = [stage for stage in wanted if names is None or stage.name in names]
    if asked.list:
        for stage in figures.left(chosen, commit):
            print(" ".join(["python", *stage.command(Path("REPORT"))[1:]]))
        print_table(figures, chosen, commit, "nothing was run")
        print_targets(figures, commit)
        return 0
    prepare(site, is_dry=asked.dry_run, folder=asked.out)
    is_loaded = False
    for stage in figures.left(chosen, commit):
        if not stage.is_fresh and not is_loaded:
            preload()
            is_loaded = True
        left = asked.limit - (time.monotonic() - started)
        if left < _LEAST * stage.limit:
            print(f"{stage.name:24} not begun, {left:.0f} s are left and it may take {stage.limit}", flush=True)
            continue
        measured = run(stage, min(left, stage.limit), (asked.out / f"{stage.name}.log").resolve())
        figures.add(stage.name, measured | {"commit": commit})
        print(outcome(stage, measured), flush=True)
    print_table(figures, chosen, commit, where(device))
    is_done = all(figures.is_done(stage.name, commit) for stage in chosen)
    return int(not is_done or (not asked.dry_run and print_targets(figures, commit)))


if __name__ == "__main__":
    sys.exit(main())
