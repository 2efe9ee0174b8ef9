"""Every kernel compiles for a GPU: down to machine code, which takes no GPU. In a process without the interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import triton_versions

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "programs.py"
# What builds of PyTorch for GPUs bring along.
OF_BUILDS = sorted(set(re.findall(r"triton==([\d.]+)", (ROOT / "tests" / "torch_requirements.json").read_text())))
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
    "product of 1 output",
    "routed product int4, 1 ",
    "routed product Q4_K, 512 ",
]
WITHOUT_ATTENTION = ["convolve bfloat16 4", "recur Kimi", "recur Mamba-2", "recur RG-LRU"]  # one of each kind of decay
OF_LOGITS = ["truncation 128256", "adjustment 128256"]
OF_DRAFTS = ["candidates bfloat16, 8 x 128256", "drawn 16", "frontier 4"]
OF_DRAFTS += ["guesses 64", "tree 64", "ancestors 64", "kept"]


def compiled(folder: Path, *words: str, **variables: str) -> str:
    """What the tool prints; the PTX of all kernels is in the folder too."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, TOOL, "--ptx", folder / "ptx", *words]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def report(folder: Path) -> str:
    return compiled(folder, *SOME, *OF_LOGITS, *OF_DRAFTS, *OF_LAYERS, *WITHOUT_ATTENTION)


def kernels_of(report: str, names: list[str]) -> set[str]:
    lines = [line for line in report.splitlines() if line.startswith(tuple(names))]
    return {name for line in lines for name in re.findall(r"\b(\w+_program)\b", line)}


def test_kernels_compile(report: str) -> None:
    assert kernels_of(report, SOME) == {
        *("attend_program", "combine_program", "store_program", "rough_program", "choose_program"),
        *("walk_program", "softmax_program", "multi_step_program", "traversal_program", "commit_program"),
    }


def test_kernels_compile_where_their_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    cache = "specinfer.ops.triton.spare_cache:SpareCache"
    assert kernels_of(compiled(tmp_path, "gate bf", TRITON_CACHE_MANAGER=cache), ["gate"]) == {"gate_program"}


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


def needs(report: str) -> list[tuple[str, int, int]]:
    """Name, registers and bytes of stack of each kernel."""
    found = re.findall(r"^(.*_program) +(\d+) registers, +(\d+) bytes of stack", report, re.MULTILINE)
    return [(name, int(registers), int(stack)) for name, registers, stack in found]


def test_numbers_of_usual_kernels_fit_into_registers(report: str) -> None:
    """But for a few that the compiler of Triton 3.6 moves to the stack where it could use more registers."""
    names = ("attend 128", *OF_LAYERS, *OF_LOGITS, *OF_DRAFTS, *WITHOUT_ATTENTION)
    usual = [need for need in needs(report) if need[0].startswith(names)]
    assert len(usual) > 15
    for name, registers, stack in usual:
        assert stack <= (16 if registers <= 64 else 0), f"numbers of {name} do not all fit into registers:\n{report}"


def loop_of(ptx: str) -> str:
    """The longest loop: the lines from a label to a branch back to it."""
    lines, labels, loops = ptx.splitlines(), dict[str, int](), [""]
    for number, line in enumerate(lines):
        if label := re.match(r"\s*(\$\w+):", line):
            labels[label[1]] = number
        elif (branch := re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)) and branch[1] in labels:
            loops.append("\n".join(lines[labels[branch[1]] : number]))
    return max(loops, key=len)


def check_copies(folder: Path) -> None:
    """Keys, values, weights and inputs come by asynchronous copies; codes of 4 bits by those of 16 bytes."""
    ahead = {path.stem: path.read_text() for path in folder.glob("ptx/*_program.ptx")}
    ahead = {name: ptx for name, ptx in ahead.items() if re.search(r" (attend|product|few_rows)_program$", name)}
    codes = [name for name in ahead if re.search(r"product bfloat16 int4|routed product int4", name)]
    assert codes
    assert any(name.startswith("attend") for name in ahead)
    for name, ptx in ahead.items():
        assert re.search(r"\bcp\.async\.(c[ag]\.shared|bulk)", ptx), f"{name} loads nothing ahead"
    for name in codes:
        loop = loop_of(ahead[name])
        assert re.search(r"cp\.async\.cg\.shared\.global [^;]*, 0x10\b", loop), name
        assert not re.search(r"\bld\.global\S*\.[bus](8|16)\b", loop), f"{name} loads less than 4 bytes at a time"


def test_what_is_multiplied_is_loaded_ahead(folder: Path, report: str) -> None:
    assert "product_program" in report
    check_copies(folder)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", ["", *OF_BUILDS], ids=lambda version: version or "installed")
@pytest.mark.parametrize("arch", ["80", "86", "89", "90", "100", "120"])
def test_all_of_them_compile_and_fit(arch: str, version: str, tmp_path: Path) -> None:
    """Into shared memory, and but for little into registers: the tool fails otherwise."""
    try:
        words = ["--triton", version] if version and triton_versions.installed(version) else []
    except RuntimeError as error:
        pytest.skip(str(error))
    output = compiled(tmp_path, "--arch", arch, *words)
    assert f"for sm_{arch} by Triton {version}" in output
    ((calls, variants),) = re.findall(r"(\d+) calls compiled .*, (\d+) variants", output)
    # Each takes a second or more of a core; a model has weights of few types, and one type of cache.
    assert 50 < int(variants) <= 1.5 * int(calls)
    assert len(needs(output)) >= int(variants)
    assert all(registers <= 255 and stack <= 256 for _, registers, stack in needs(output))
    check_copies(tmp_path)


@pytest.mark.slow
def test_names_that_are_none_are_refused(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, TOOL, "walk", "fly"], capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.startswith("no kernel's name begins with fly")
