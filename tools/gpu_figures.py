"""Run all that is to be measured on a GPU, in pieces that each fit into some minutes, and print one short table last.

    python tools/gpu_figures.py --out figures                # again and again until nothing is left
    python tools/gpu_figures.py --out figures --dry-run      # what would be run
    python tools/gpu_figures.py --out figures --device cpu --tiny   # all of it in small, to try the tool itself

Everything is kept in OUT/figures.json, and what each step printed in OUT/STEP.log. A step that is done at this commit
is not run again, one that failed is tried again after the others. A step is begun only if it is expected to end within
--limit.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_targets import summary, targets

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 540  # seconds that a step may take
_LAST_LINES = 12  # of a step's output that are kept


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: of a small target and of a large one, as `--grow` takes them; None: as it is."""

    small: str | None = "1b"
    large: str | None = "7b"
    trees: tuple[str, ...] = ("auto", "best-first:16", "best-first:64")
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    context: int = 1024
    num_prompts: int = 6
    max_tokens: int = 128
    repeats: int = 2
    peers: tuple[str, ...] = ("transformers", "transformers-assisted")
    memory_budget: str = "8GiB"  # where the large target is streamed


TINY_SHARE = 0.1  # of the time that is expected
TINY = Sizes(None, None, ("auto", "1,1"), (1, 2), (1, 2), 16, 1, 8, 1, ("transformers-assisted",), "700MiB")


@dataclass(frozen=True, slots=True)
class Step:
    """One command.

    Attributes:
        seconds: That it is expected to take at most, on a GPU.
        reports: It writes a report where `--json` says.
    """

    name: str
    words: tuple[str, ...]
    seconds: int
    reports: bool = True

    def command(self, report: Path) -> list[str]:
        where = ["--json", str(report)] if self.reports else []
        return [sys.executable, "-m", *self.words, *where]


def test_steps() -> list[Step]:
    """A step for each file of tests that need a GPU, so that one that takes long or hangs holds up no other."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    # Most of the time is the compiler's, on one core for each process. Outcomes come one by one: a run may be ended.
    options = ("-m", "gpu", "-v", "-p", "no:cacheprovider", "-n", str(min(os.cpu_count() or 1, 12)))
    return [
        Step(
            f"tests-{path.stem[5:].replace('_', '-')}",
            ("pytest", *options, str(path.relative_to(ROOT))),
            150,
            reports=False,
        )
        for path in files
    ]


_LABORATORY = ("kernels", "offload")  # only in benchmarks/, as grown models are


def steps(sizes: Sizes, device: str, model: str) -> list[Step]:
    """All steps, first those that show whether the others are worth their time."""
    gpu = device != "cpu"

    def bench(name: str, kind: str, seconds: int, *words: str, grow: str | None = None) -> Step:
        size = () if grow is None else ("--grow", grow)
        is_of_laboratory = kind in _LABORATORY or "--peer" in words or grow is not None
        program = ("benchmarks", kind) if is_of_laboratory else ("specinfer", "bench", kind)
        return Step(name, (*program, model, "--device", device, *size, *words), seconds)

    trees = tuple(word for tree in sizes.trees for word in ("--tree", tree))
    count = ("--num-prompts", str(sizes.num_prompts), "--repeats", str(sizes.repeats))
    length = ("--max-tokens", str(sizes.max_tokens))
    batches = tuple(word for size in sizes.batches for word in ("--batch", str(size)))
    rows = tuple(word for size in sizes.rows for word in ("--rows", str(size)))
    peers = tuple(word for peer in sizes.peers for word in ("--peer", peer))
    passes = (*rows, "--context", str(sizes.context), "--repeats", str(3 * sizes.repeats))
    streamed = ("--offload", "cpu") if gpu else ("--offload", "disk")
    few = (
        "--memory-budget",
        sizes.memory_budget,
        "--num-prompts",
        str(min(2, sizes.num_prompts)),
        "--batch",
        "1",
        "--max-tokens",
        str(sizes.max_tokens // 4),
    )
    made = test_steps() if gpu else []
    made.append(bench("kernels-large", "kernels", 150, *passes, grow=sizes.large))  # the first to grow it
    for size, grow in (("small", sizes.small), ("large", sizes.large)):
        made.append(bench(f"latency-{size}-greedy", "latency", 120, *trees, *count, *length, grow=grow))
        sampled = (*trees, *count, *length, "--temperature", "1")
        made.append(bench(f"latency-{size}-sampled", "latency", 120, *sampled, grow=grow))
        one = ("--num-prompts", str(sizes.num_prompts), "--repeats", "1", "--max-tokens", str(sizes.max_tokens // 2))
        made.append(bench(f"throughput-{size}", "throughput", 180, *batches, *one, grow=grow))
    copied = ("--drafter", "self:int4", *trees, *count, *length)
    made.append(bench("latency-large-self", "latency", 120, *copied, grow=sizes.large))
    once = ("--tree", sizes.trees[0], "--num-prompts", str(min(4, sizes.num_prompts)), "--repeats", "1")
    made.append(bench("peers-large", "latency", 300, *once, *length, *peers, grow=sizes.large))
    made.append(bench("offload-large", "offload", 300, *streamed, *few, "--tree", sizes.trees[0], grow=sizes.large))
    made.append(bench("acceptance", "acceptance", 150, "--quick"))
    return made


class Figures:
    """What has been measured so far, in one file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._file = folder, folder / "figures.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.steps: dict[str, dict[str, Any]] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def is_done(self, name: str, commit: str) -> bool:
        known = self.steps.get(name, {})
        return known.get("state") == "done" and known["commit"] == commit

    def add(self, name: str, numbers: dict[str, Any]) -> None:
        self.steps[name] = numbers
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(self.steps, indent=1) + "\n")
        fresh.replace(self._file)

    def left(self, wanted: Sequence[Step], commit: str) -> list[Step]:
        """Those to be run, the ones that were tried before last."""
        found = [step for step in wanted if not self.is_done(step.name, commit)]
        return sorted(found, key=lambda step: self.steps.get(step.name, {}).get("commit") == commit)

    def reports(self, commit: str) -> dict[str, Any]:
        return {name: step["report"] for name, step in self.steps.items() if self.is_done(name, commit)}


def run(step: Step, longest: float, log: Path) -> dict[str, Any]:
    """One step, ended when it has taken too long: its state, the last lines of its output, and its report.

    Args:
        log: File of the whole output.
    """
    with tempfile.TemporaryDirectory(prefix="figures-") as place:
        report = Path(place) / "report.json"
        command, started = step.command(report), time.monotonic()
        paths = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, start_new_session=True, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=longest)
            state = "done" if process.returncode == 0 else f"status {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what it has started itself, too
            output, _ = process.communicate()
            state = f"not done in {longest:.0f} s"
        found = json.loads(report.read_text()) if state == "done" and step.reports else None
    log.write_text(output)
    last = [line for line in output.splitlines() if line.strip()][-_LAST_LINES:]
    seconds = time.monotonic() - started
    return {"state": state, "seconds": seconds, "command": command[1:], "output": last, "report": found}


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


def print_table(figures: Figures, wanted: Sequence[Step], commit: str, heading: str) -> None:
    print(f"\n{heading}\ncommit {commit}\n")
    for step in wanted:
        known = figures.steps.get(step.name)
        if known is None or known["commit"] != commit:
            print(f"{step.name:24} not run")
            continue
        words = summary(known["report"]) if known["state"] == "done" and step.reports else (known["output"] or [""])[-1]
        print(f"{step.name:24} {known['state']}, {known['seconds']:.0f} s: {words}")
    print(f"\n{'the large target':58}  {'asked':>8}    seen")
    for target in targets(figures.reports(commit)):
        print(target.line())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures; made if need be")
    parser.add_argument("--only", action="append", metavar="STEP", help="this step; may be repeated")
    parser.add_argument("--limit", type=float, default=LONGEST, help="seconds that this call may take")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="demo", help="what is grown; drafters are those that suit it")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the tool")
    parser.add_argument("--dry-run", action="store_true", help="print the commands that are left, and what is known")
    parser.add_argument("--commit", help="of a copy that has no history")
    return parser.parse_args()


def main() -> int:
    """0 if every step asked for is done and no target is missed; tiny sizes have no targets to miss."""
    asked, started = parse(), time.monotonic()
    commit = asked.commit or present_commit()
    wanted = steps(TINY if asked.tiny else Sizes(), asked.device, asked.model)
    if unknown := set(asked.only or ()) - {step.name for step in wanted}:
        print(
            f"--only: no step {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in wanted)}",
            file=sys.stderr,
        )
        return 2
    figures = Figures(asked.out)
    chosen = [step for step in wanted if asked.only is None or step.name in asked.only]
    for step in figures.left(chosen, commit):
        if asked.dry_run:
            print(" ".join(["python", *step.command(Path("REPORT"))[1:]]))
            continue
        left = asked.limit - (time.monotonic() - started)
        if left < (expected := step.seconds * (TINY_SHARE if asked.tiny else 1)):
            print(f"{step.name}: not begun, {left:.0f} s are left and it may take {expected:.0f}", flush=True)
            continue
        print(f"{step.name} ...", flush=True)
        figures.add(step.name, run(step, min(left, LONGEST), asked.out / f"{step.name}.log") | {"commit": commit})
    heading = "nothing was run" if asked.dry_run else where(asked.device)
    print_table(figures, chosen, commit, heading)
    is_done = all(figures.is_done(step.name, commit) for step in chosen)
    is_missed = not asked.tiny and any(target.is_met is False for target in targets(figures.reports(commit)))
    return int(not asked.dry_run and (is_missed or not is_done))


if __name__ == "__main__":
    sys.exit(main())
