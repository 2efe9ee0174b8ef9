"""The stages of `gpu_figures.py`, in the order of their worth, and how much each measures."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LIKE_OTHERS = ("latency-small-greedy", "throughput-more", "acceptance")  # of which a dry run shows nothing more
_LABORATORY = ("kernels", "offload", "identity")  # only in benchmarks/, as grown models are


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: of a small target and of a large one, as `--grow` takes them; None: as it is.

    Attributes:
        replays: Draft tokens of the chains that are all right.
        compared: Prompts whose tokens are compared with plain decoding's, and tokens of each.
        invariant_rows: Rows of passes that are timed with and without `batch_invariant`.
    """

    small: str | None = "1b"
    large: str | None = "7b"
    trees: tuple[str, ...] = ("auto", "best-first:16", "best-first:64")
    tree: str = "auto"  # where there is one
    batches: tuple[int, ...] = (8, 32)
    more_batches: tuple[int, ...] = (1, 2, 4, 16, 64)
    replays: tuple[int, ...] = (7, 15, 31)
    compared: tuple[int, int] = (200, 32)
    invariant_rows: tuple[int, ...] = (1, 8, 32, 64)
    context: int = 1024
    num_prompts: int = 4
    prompt_chars: int = 600
    max_tokens: int = 128
    repeats: int = 2
    num_passes: int = 8  # of each number of rows
    peers: tuple[str, ...] = ("transformers", "transformers-assisted")
    memory_budget: str = "8GiB"  # where the large target is streamed


TINY = Sizes(
    None, None, ("auto",), "2,1", (2,), (1,), (3,), (2, 4), (1, 2), 16, 1, 60, 6, 1, 1, ("transformers",), "700MiB"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stage:
    """One command.

    Attributes:
        words: The command: a module, or a file that ends in ".py", and its arguments.
        limit: Seconds after which it is ended.
        reports: It writes a report where `--json` says.
        is_fresh: It runs in a new process of Python, not in a copy of this one that has imported PyTorch, as is done on
            CPUs: a driver of a GPU may not be copied.
    """

    name: str
    words: tuple[str, ...]
    limit: int
    reports: bool = True
    is_fresh: bool = True

    def command(self, report: Path) -> list[str]:
        where = ["--json", str(report)] if self.reports else []
        module = [] if self.words[0].endswith(".py") else ["-m"]
        return [sys.executable, *module, *self.words, *where]


def gpu_test_files() -> list[str]:
    """Return the files with tests that need a GPU, those of whole steps first."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    return [str(path.relative_to(ROOT)) for path in sorted(files, key=lambda path: (path.parent.name != "gpu", path))]


def _tests(*, is_dry: bool) -> Stage:
    """Return the stage of all tests for GPUs; without one they are collected, and not run."""
    # Most of the time is the compiler's, on one core for each process. Outcomes come one by one: a run may be ended.
    how = ("--collect-only", "-q") if is_dry else ("-v", "--timeout", "60", "-n", str(min(os.cpu_count() or 1, 12)))
    options = ("-m", "gpu", *how, "-p", "no:cacheprovider")
    return Stage("tests", ("pytest", *options, *gpu_test_files()), 150, reports=False)


def _flags(name: str, values: tuple[object, ...]) -> tuple[str, ...]:
    return tuple(word for value in values for word in (name, str(value)))


def stages(sizes: Sizes, device: str, model: str, wheels: Path | None = None, site: Path = Path("site")) -> list[Stage]:
    """Return all stages: first those that show whether the others are worth their time, last what is known already.

    Args:
        wheels: Folder with wheels of packages that are missing, or None.
        site: Folder that they are installed into.
    """
    is_dry = device == "cpu"

    def bench(name: str, kind: str, limit: int, *words: str, grow: str | None = None) -> Stage:
        size = () if grow is None else ("--grow", grow)
        is_of_laboratory = kind in _LABORATORY or "--peer" in words or grow is not None
        chars = () if kind in ("kernels", "acceptance") else ("--prompt-chars", str(sizes.prompt_chars))
        program = ("benchmarks", kind) if is_of_laboratory else ("specinfer", "bench", kind)
        return Stage(name, (*program, model, "--device", device, *size, *chars, *words), limit, is_fresh=not is_dry)

    trees, once = _flags("--tree", sizes.trees), ("--tree", sizes.tree)
    count = ("--num-prompts", str(sizes.num_prompts), "--repeats", "1")
    length = ("--max-tokens", str(sizes.max_tokens))
    repeated = ("--num-prompts", str(sizes.num_prompts), "--repeats", str(sizes.repeats))
    prompts, tokens = map(str, sizes.compared)
    together = ("--batch", str(sizes.batches[0]))
    passes = (*_flags("--rows", sizes.invariant_rows), "--context", str(sizes.context))
    half = ("--num-prompts", str(sizes.batches[-1]), "--repeats", "1", "--max-tokens", str(sizes.max_tokens // 2))
    install = ("tools/gpu_install.py", *(() if wheels is None else ("--wheels", str(wheels))), "--site", str(site))

    def latency(name: str, limit: int, *words: str, grow: str | None = sizes.large) -> Stage:
        return bench(name, "latency", limit, *words, *length, grow=grow)

    made = [
        Stage("install", install, 90, reports=False),
        _tests(is_dry=is_dry),
        latency("latency-large-greedy", 120, *trees, *count),  # the first to grow the models
        latency("ceiling-large", 80, "--drafter", "ngram", "--tree", "1", *_flags("--replay", sizes.replays), *count),
        bench("identity-large", "identity", 120, "--batch-invariant", "--num-prompts", prompts, "--max-tokens", tokens,
              *together, *once, grow=sizes.large),
        bench("passes-large", "kernels", 80, "--batch-invariant", *passes, "--repeats", str(sizes.num_passes),
              grow=sizes.large),
        latency("latency-large-eagle3", 80, "--drafter", "demo-eagle3", *once, *count),
        latency("latency-large-self", 80, "--drafter", "self:int4", *once, *count),
        bench("throughput-large", "throughput", 120, *_flags("--batch", sizes.batches), *once, *half, grow=sizes.large),
        latency("latency-large-sampled", 90, *once, *count, "--temperature", "1"),
        latency("peers-large", 240, *once, *count, *_flags("--peer", sizes.peers)),
        latency("latency-small-greedy", 90, *trees, *repeated, grow=sizes.small),
        bench("throughput-more", "throughput", 240, *_flags("--batch", sizes.more_batches), *once, *half,
              grow=sizes.large),
    ]  # fmt: skip
    streamed = ("--offload", "disk" if is_dry else "cpu", "--memory-budget", sizes.memory_budget, "--num-prompts")
    few = (
        *streamed,
        str(min(2, sizes.num_prompts)),
        "--batch",
        "1",
        "--max-tokens",
        str(max(sizes.max_tokens // 4, 2)),
    )
    made += [
        bench("offload-large", "offload", 240, *few, *once, grow=sizes.large),
        bench("acceptance", "acceptance", 150, "--quick"),
    ]
    return [stage for stage in made if not (is_dry and stage.name in _LIKE_OTHERS)]
