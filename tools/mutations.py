"""Small faults put into the source, one at a time: do the tests of a module notice?

    python tools/mutations.py --count 20 --seed 1 --only verify/logits.py

puts faults into a copy of the repository and runs the tests of the changed module there. A fault is caught if a test
fails, or does not end in time. It prints each fault that no test noticed, and the share of those that were caught.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600  # for the tests of one fault
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add,
}  # fmt: skip
_SWAPPED_NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}
# Texts, types and logs, whose faults no test has to notice; assertions state what cannot be false.
_LEFT_OUT = (ast.Assert, ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.AnnAssign)

# Modules below src/specinfer, and the tests that must notice their faults.
_TREES = ("verify/test_verify.py", "verify/test_known_wrong.py", "verify/test_exactness.py")
TESTS: dict[str, tuple[str, ...]] = {
    "core/config.py": ("core/test_config.py", "test_engine_args.py"),
    "core/systems.py": ("core/test_systems.py",),
    "core/noise.py": ("core/test_noise.py",),
    "core/request.py": ("core/test_request.py", "engine/test_engine.py"),
    "core/sampling.py": ("core/test_sampling.py", "verify/test_logits.py", "verify/test_verify.py"),
    "core/text.py": ("core/test_text.py",),
    "core/token_counts.py": ("verify/test_logits.py",),
    "core/tree.py": ("core/test_tree.py", "drafters/growth/test_tree_batch.py", "drafters/test_small_model.py"),
    "core/grammar/lark.py": ("core/test_grammar.py", "core/test_repetition.py"),
    "core/grammar/state.py": ("core/test_grammar.py",),
    "verify/batch.py": ("verify/test_verify.py", "engine/test_engine.py"),
    "verify/device_batch.py": ("verify/test_device_batch.py",),
    "verify/device_trees.py": ("verify/test_device_batch.py", "verify/test_verify.py"),
    "verify/logits.py": ("verify/test_logits.py",),
    "verify/algorithms.py": _TREES,
    "model/kv_cache.py": ("model/test_kv_cache.py", "model/test_prefix_cache.py"),
    "model/kv_tensors.py": ("model/test_kv_cache.py",),
    "model/prefix_cache.py": ("model/test_prefix_cache.py",),
    "engine/scheduler.py": ("engine/test_scheduler.py", "engine/test_waiting.py", "engine/test_in_flight_step.py"),
    "engine/waiting.py": ("engine/test_waiting.py", "engine/test_scheduler.py"),
    "drafters/drafter_cache.py": (
        "drafters/test_small_model.py",
        "drafters/merge/test_selection.py",
        "learning/test_adaptation.py",
    ),
    "drafters/small_model.py": ("drafters/test_small_model.py", "learning/test_adaptation.py"),
    "drafters/growth/calibration.py": ("drafters/growth/test_calibration.py",),
    "drafters/growth/draft_sampling.py": ("drafters/growth/test_draft_sampling.py",),
    "drafters/growth/tree_batch.py": ("drafters/growth/test_tree_batch.py",),
    "drafters/lookup/ngram.py": ("drafters/lookup/test_ngram.py",),
    "drafters/lookup/passage.py": ("drafters/lookup/test_passage.py",),
    "drafters/lookup/prediction.py": ("drafters/lookup/test_prediction.py",),
    "drafters/lookup/siblings.py": ("drafters/lookup/test_siblings.py",),
    "drafters/lookup/source_scores.py": ("drafters/lookup/test_source_scores.py",),
    "drafters/lookup/suffix.py": ("drafters/lookup/test_suffix.py",),
    "drafters/lookup/suffix_automaton.py": ("drafters/lookup/test_suffix_automaton.py",),
    "drafters/lookup/suffix_growth.py": ("drafters/lookup/test_suffix.py",),
    "drafters/merge/budget_split.py": ("drafters/merge/test_merged.py",),
    "drafters/merge/guarded.py": ("drafters/merge/test_merged.py",),
    "drafters/merge/hedge.py": ("drafters/merge/test_hedge.py",),
    "drafters/merge/merged.py": ("drafters/merge/test_merged.py", "drafters/merge/test_selection.py"),
    "drafters/merge/pruning.py": ("drafters/merge/test_pruning.py", "drafters/merge/test_merged.py"),
    "drafters/merge/scoring.py": (
        "drafters/merge/test_selection.py",
        "drafters/merge/test_selection_of_heads.py",
    ),
    "drafters/merge/selection.py": ("drafters/merge/test_selection.py",),
}

# Faults of exactness that look right: a module, an expression in it, the other one, and the tests that must notice.
_NEXT_TO_A_DRAW = ("verify/test_exactness.py::test_a_choice_next_to_a_draw_does_not_reveal_it",)
_EXACTNESS = (
    # A token that is chosen next to a drawn one has a confidence that depends on the draw.
    ("drafters/growth/draft_sampling.py", "whole.gather(1, ranks)", "whole.gather(1, places)", _NEXT_TO_A_DRAW),
    # A drawn token has a confidence that depends on the draw.
    (
        "drafters/growth/draft_sampling.py",
        "torch.where(drawn, sure, whole.gather(1, ranks))",
        "whole.gather(1, torch.where(drawn, places, ranks))",
        _NEXT_TO_A_DRAW,
    ),
)

# Faults that change no result, by the changed line and the new text: the other value cannot occur, or only the speed
# depends on it.
EQUIVALENT = {
    ("course.waits.pop(model, None)", "course.waits.pop(None, model)"),
    ("if known >= 0:  # another text continued the same way", "known > 0"),
    ("if length > min_match and negated * (1.0 - share) < -MIN_PATH_PROB:", "length >= min_match"),
    ("reach = max(map(len, words), default=1) - 1", "max(map(len, words), default=1) + 1"),
    ("for after in range(max(self.num_indexed, 1), len(tokens)):", "min(self.num_indexed, 1)"),
    ("if token < 0:", "1"),
    (
        "if known > num_shared:  # another request has cached the same tokens in the meantime: use its slots",
        "known >= num_shared",
    ),
    ("length = text.lengths[state] if state >= 0 else 0", "1"),
    ("while source >= 0 and (known := self.follow(source, token)) < 0:", "(known := self.follow(source, token)) <= 0"),
    ("while source >= 0 and (known := self.follow(source, token)) < 0:", "1"),
    ("while (target := self.follow(state, token)) < 0:", "(target := self.follow(state, token)) <= 0"),
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: other text for a piece of a module.

    Attributes:
        start, end: Place of the piece in the module's UTF-8 bytes.
        tests: Those that must notice.
    """

    module: str
    line: int
    start: int
    end: int
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.old}  ->  {self.new}"

    def applied_to(self, source: bytes) -> bytes:
        return source[: self.start] + f"({self.new})".encode() + source[self.end :]


def mutants_of(module: str, source: str) -> list[Mutant]:
    """Every fault for a module that may change a result."""
    lines, starts = source.splitlines(), [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in _mutable(ast.parse(source)):
        for changed in _changes(node):
            if (lines[node.lineno - 1].strip(), ast.unparse(changed)) in EQUIVALENT:
                continue
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            found.append(
                Mutant(
                    module,
                    node.lineno,
                    starts[node.lineno - 1] + node.col_offset,
                    starts[node.end_lineno - 1] + node.end_col_offset,
                    ast.unparse(node),
                    ast.unparse(changed),
                    TESTS.get(module, ()),
                )
            )
    return found


def mutants_of_exactness() -> list[Mutant]:
    """The faults of exactness."""
    mutants = []
    for module, old, new, tests in _EXACTNESS:
        source = (ROOT / "src/specinfer" / module).read_bytes()
        assert source.count(old.encode()) == 1, f"{module}: {old} must occur once"
        start = source.index(old.encode())
        line = 1 + source[:start].count(b"\n")
        mutants.append(Mutant(module, line, start, start + len(old.encode()), old, new, tests))
    return mutants


def _mutable(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions below a node that a fault may change."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "keywords" if _is_dataclass(node) else ""):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue  # of `zip`, whose arguments are always of one length
            if not isinstance(child, ast.AST) or isinstance(child, _LEFT_OUT) or _is_log(child):
                continue
            if isinstance(child, ast.expr) and not isinstance(getattr(child, "ctx", None), ast.Store):
                yield child
            yield from _mutable(child)


def _is_dataclass(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("dataclass", "TypeVar")


def _is_log(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).startswith(("logger.", "logging."))
    )


def _changes(node: ast.expr) -> Iterator[ast.expr]:
    changed = deepcopy(node)
    match changed:
        case ast.Compare(ops=[op]) if type(op) in _SWAPPED:
            changed.ops = [_SWAPPED[type(op)]()]  # type: ignore[list-item]
            yield changed
        case ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in _SWAPPED and not _has_text(changed):
            changed.op = _SWAPPED[type(op)]()  # type: ignore[assignment]
            yield changed
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Call(func=ast.Name(id=name) as function) if name in _SWAPPED_NAMES:
            function.id = _SWAPPED_NAMES[name]
            yield changed
        case ast.Call(func=ast.Attribute(attr=name) as function) if name in _SWAPPED_NAMES:
            function.attr = _SWAPPED_NAMES[name]
            yield changed
        case ast.Call(func=function, args=[first, second, *_]) if not _is_commutative(function):
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                changed.args[:2] = [second, first]
                yield changed
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float() as value):
            yield ast.Constant(value * 2 if value else 1.0)


def _has_text(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(node))


def _is_commutative(function: ast.expr) -> bool:
    """Whether the order of arguments has no effect, or raises a TypeError at once."""
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("isinstance", "getattr", "setattr", "hasattr", "cast", "zip", "field", "replace", "monkeypatch")


def sample(count: int, seed: int, only: str = "") -> list[Mutant]:
    """`count` faults of all modules, drawn with a seed; fewer if there are not so many."""
    every = [
        mutant
        for module in TESTS
        if only in module
        for mutant in mutants_of(module, (ROOT / "src/specinfer" / module).read_text(encoding="utf-8"))
    ]
    return random.Random(seed).sample(every, min(count, len(every)))


class Copies:
    """Copies of the repository, in each of which one fault at a time is tried."""

    def __init__(self, folder: Path, count: int) -> None:
        self._free: Queue[Path] = Queue()
        for number in range(count):
            copy = folder / str(number)
            for part in ("src", "tests", "tools", "docs"):
                shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
            for part in ("pyproject.toml", "README.md", "Makefile"):
                shutil.copy(ROOT / part, copy)
            self._free.put(copy)

    def survives(self, mutant: Mutant) -> bool:
        """Whether the module's tests pass in spite of a fault."""
        copy = self._free.get()
        place = copy / "src/specinfer" / mutant.module
        source = place.read_bytes()
        try:
            place.write_bytes(mutant.applied_to(source))
            return self._pass(copy, mutant.tests)
        finally:
            place.write_bytes(source)
            self._free.put(copy)

    def check_whole(self, mutants: Sequence[Mutant]) -> None:
        """Refuse to go on if the tests of these faults do not pass without a fault."""
        copy = self._free.get()
        files = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
        assert self._pass(copy, tuple(files), len(files) * SECONDS), "the tests must pass without a fault"
        self._free.put(copy)

    def _pass(self, copy: Path, files: Sequence[str], seconds: float = SECONDS) -> bool:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
        environment = os.environ | {
            "PYTHONPATH": str(copy / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        try:
            run = subprocess.run(
                ["nice", "-n", "10", *command, *(f"tests/{file}" for file in files)],
                cwd=copy,
                env=environment,
                capture_output=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            print(f"{copy}: no end within {seconds:.0f} seconds", flush=True)
            return False
        return run.returncode == 0


def survivors(mutants: Sequence[Mutant], num_workers: int = 2, *, check: bool = True) -> list[Mutant]:
    """The faults that no test notices, each printed as soon as it is known.

    Args:
        check: Whether to run the tests once without a fault before.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(num_workers) as pool:
        copies = Copies(Path(folder), num_workers)
        if check:
            copies.check_whole(mutants)

        def survives(mutant: Mutant) -> bool:
            found = copies.survives(mutant)
            print("survives" if found else "caught  ", mutant, flush=True)
            return found

        return [mutant for mutant, found in zip(mutants, pool.map(survives, mutants), strict=True) if found]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=60, help="Number of faults.")
    parser.add_argument("--seed", type=int, default=0, help="Seed by which they are drawn.")
    parser.add_argument("--only", default="", help="Modules whose path contains this.")
    parser.add_argument("--exactness", action="store_true", help="Try the faults of exactness in place of drawn ones.")
    parser.add_argument("--workers", type=int, default=2, help="Faults that are tried at once.")
    parser.add_argument("--no-check", action="store_true", help="Do not run the tests without a fault first.")
    options = parser.parse_args()
    mutants = mutants_of_exactness() if options.exactness else sample(options.count, options.seed, options.only)
    left = survivors(mutants, options.workers, check=not options.no_check)
    print(f"{len(mutants) - len(left)} of {len(mutants)} faults were caught")
    print("\n".join(map(str, left)))


if __name__ == "__main__":
    main()
