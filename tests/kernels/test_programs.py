"""Every kernel compiles for a GPU: down to machine code, which takes no GPU. In a process without the interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "programs.py"
# One form of every kernel; all that there are take minutes.
SOME = [
    "attend 128 bfloat16, 8",
    "attend float8_e4m3fn 128 bfloat16, 8",
    "store float8_e4m3fn of bf",
    "attend all",
    "store bf",
    "choose float32, 64",
    "walk 64",
    "multi-step 128",
    "traversal 128",
    "commit",
]
OF_LAYERS = [
    "add_norm bfloat16 4",
    "rotate bfloat16 128 n",
    "rotate bfloat16 to float8_e4m3fn",
    "gate bf",
    "few rows, 32",
    "low rank bf",
    "product bfloat16 fp8, 32",
    "routed product int4, 1 ",
    "routed product Q4_K, 512 ",
]
WITHOUT_ATTENTION = ["convolve bfloat16 4", "recur Kimi", "recur Mamba-2", "recur RG-LRU"]  # one of each kind of decay
OF_LOGITS = ["truncation 128256", "adjustment 128256"]
OF_DRAFTS = ["candidates bfloat16, 8 x 128256", "drawn 16", "frontier 4"]
OF_DRAFTS += ["guesses 64", "tree 64", "ancestors 64", "kept"]


def compiled(folder: Path, *words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, TOOL, *words], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compiled(tmp_path_factory.mktemp("compiled"), *SOME, *OF_LOGITS, *OF_DRAFTS, *OF_LAYERS, *WITHOUT_ATTENTION)


def kernels_of(report: str, names: list[str]) -> set[str]:
    lines = [line for line in report.splitlines() if line.startswith(tuple(names))]
    return {name for line in lines for name in re.findall(r"\b(\w+_program)\b", line)}


def test_kernels_compile(report: str) -> None:
    assert kernels_of(report, SOME) == {
        *("attend_program", "combine_program", "store_program", "rough_program", "choose_program"),
        *("walk_program", "softmax_program", "multi_step_program", "traversal_program", "commit_program"),
    }


def test_kernels_of_draft_loops_compile(report: str) -> None:
    assert kernels_of(report, OF_DRAFTS) == {
        *("chunk_program", "candidates_program", "draws_program", "frontier_program"),
        *("guesses_program", "tree_program", "ancestors_program", "kept_program"),
    }


def test_kernels_of_logits_compile(report: str) -> None:
    assert kernels_of(report, OF_LOGITS) == {"listing_program", "limits_program", "adjust_program"}


def test_kernels_of_layers_compile(report: str) -> None:
    between, products = {"add_norm_program", "rotate_program", "gate_program"}, {"product_program", "widen_program"}
    products.add("few_rows_program")
    adapters = {"down_program", "up_program"}
    assert kernels_of(report, OF_LAYERS) == {*between, *products, "add_parts_program", *adapters}


def test_kernels_of_layers_without_attention_compile(report: str) -> None:
    assert kernels_of(report, WITHOUT_ATTENTION) == {"convolve_program", "recur_program"}


def test_numbers_of_usual_kernels_fit_into_registers(report: str) -> None:
    names = ("attend 128", *OF_LAYERS, *OF_LOGITS, *OF_DRAFTS, *WITHOUT_ATTENTION)
    usual = [line for line in report.splitlines() if line.startswith(names) and "_program" in line]
    assert len(usual) > 15
    assert all(" 0 bytes of stack" in line for line in usual), "numbers do not all fit into registers:\n" + report


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", ["80", "86", "89", "90", "100", "120"])
def test_all_of_them_compile_and_fit(arch: str, tmp_path: Path) -> None:
    """Into shared memory, and but for little into registers: the tool fails otherwise."""
    output = compiled(tmp_path, "--arch", arch)
    assert f"for sm_{arch}" in output
    (variants,) = re.findall(r", (\d+) variants", output)
    # Each takes a second or more of a core; a model has weights of few types, and one type of cache.
    assert 50 < int(variants) <= 300


@pytest.mark.slow
def test_names_that_are_none_are_refused(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, TOOL, "walk", "fly"], capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.startswith("no kernel's name begins with fly")
