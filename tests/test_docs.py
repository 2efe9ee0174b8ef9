"""README, CONTRIBUTING and docs name files, commands, flags and objects that exist, and their programs run."""

import importlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import specinfer
from benchmarks.program import app as laboratory
from specinfer.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "specinfer"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FOLDERS = ("src", "tests", "tools", "examples", "deploy", "docs", "benchmarks")
ABOUT_CODE = ["CONTRIBUTING.md", "docs/architecture.md", "docs/gpu.md", "docs/verification.md"]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"(?<![\w./~*{-])[\w-][\w./-]*\.(?:py|h|cpp|toml|css|js)\b")
# Another program, files of clients, and a name that is not to be given.
OTHERS = {"llama.cpp", "config.toml", "opencode.json", "extra-openai-models.yaml", "utils.py"}


def code(text: str) -> Iterator[str]:
    """The code of a page: lines of blocks, with continued lines joined, and spans."""
    for _, block in BLOCK.findall(text):
        yield from block.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))


def commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """Each command, with its flags."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)
        flags = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
        yield (*path, name), flags | {"--help", "-h"}


@pytest.fixture(scope="module")
def files() -> set[str]:
    return {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")} | {"pyproject.toml"}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_page_names_files_that_exist(page: Path, files: set[str]) -> None:
    named = {file for line in code(page.read_text()) for file in FILE.findall(line)} - OTHERS
    missing = {
        file
        for file in named
        if not ((ROOT / file).exists() or any(PACKAGE.rglob(file)) if "/" in file else file in files)
    }
    assert not missing


def test_the_file_tree_names_files_and_folders_that_exist() -> None:
    (_, tree), *_ = reversed(BLOCK.findall((ROOT / "README.md").read_text()))
    folder = PACKAGE
    for line in tree.splitlines():
        if match := re.match(r" {0,2}(\w+)/(?!\w)", line):
            folder = next(path for above in (PACKAGE, ROOT) if (path := above / match[1]).is_dir())
        for name in re.findall(r"(?<![\w/])(\w+)/(?!\w)", line):
            assert any((above / name).is_dir() for above in (folder, PACKAGE, ROOT)), line
        for name in re.findall(r"[\w/]+\.(?:py|h)\b", line):
            assert any(folder.rglob(name)), line


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_page_names_commands_and_flags_that_exist(page: Path) -> None:
    known = dict(commands(typer.main.get_command(app)))
    for line in code(page.read_text()):
        for match in re.finditer(r"(?:^|[\s/])specinfer (?!import)((?:[a-z][a-z-]* ?)+)([^#|]*)", line):
            words = tuple(match[1].split())
            path = next((words[:n] for n in (2, 1) if words[:n] in known), None)
            assert path is not None, line
            flags = set(re.findall(r"(?<=\s)--[a-z][a-z-]+", f" {match[0]}"))
            assert flags <= known[path], f"{line}: {flags - known[path]}"


@pytest.mark.parametrize("name", ABOUT_CODE)
def test_a_page_about_the_code_names_folders_that_exist(name: str) -> None:
    spans = re.findall(r"`([\w/]+)/`", BLOCK.sub("", (ROOT / name).read_text()))
    assert all((ROOT / folder).is_dir() or any(PACKAGE.rglob(folder)) for folder in spans), spans


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_page_names_paths_in_the_repository_that_exist(page: Path) -> None:
    for span in re.findall(rf"`((?:{'|'.join(FOLDERS)})/\w[\w./-]*)`", page.read_text()):
        assert (ROOT / span).exists(), span


def test_tests_that_a_gpu_is_to_run_are_selected() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    for file, words in re.findall(r'`pytest -m gpu (\S+?)(?: -k "?([\w ]+?)"?)?`', page):
        names = re.findall(r"def (test_\w+)", (ROOT / file).read_text())
        assert all(any(word in name for name in names) for word in words.split(" or ")), f"{file} {words}"


@pytest.fixture(scope="module")
def sources() -> str:
    return "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("name", ABOUT_CODE)
def test_a_page_about_the_code_names_classes_and_methods_that_exist(name: str, sources: str) -> None:
    spans = re.findall(r"`([A-Z][A-Za-z]*[a-z])(?:\.([a-z_]+))?(?:\(.*?\))?`", BLOCK.sub("", (ROOT / name).read_text()))
    for kind, member in spans:
        assert re.search(rf"^(?:class {kind}\b|{kind}\b.* = )", sources, re.MULTILINE), kind
        assert re.search(rf"^    (?:async )?(?:def )?{member}\b", sources, re.MULTILINE), f"{kind}.{member}"


def test_a_recipe_names_tables_that_exist(sources: str) -> None:
    for table in re.findall(r"`(_?[A-Z][A-Z_]{4,})`", (ROOT / "CONTRIBUTING.md").read_text()):
        assert re.search(rf"^{table}\b.* = ", sources, re.MULTILINE), table


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_page_names_benchmarks_that_exist(page: Path) -> None:
    known = dict(commands(typer.main.get_command(laboratory)))
    for line in code(page.read_text()):
        for match in re.finditer(r"(?<!checkout [0-9a-f]{7}; python )-m benchmarks ([a-z]+)([^#]*)", line):
            assert (match[1],) in known, line
            flags = set(re.findall(r"(?<=\s)--[a-z][a-z-]+", match[2]))
            assert flags <= known[match[1],], f"{line}: {flags - known[match[1],]}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_page_names_modules_and_objects_that_exist(page: Path) -> None:
    for line in code(page.read_text()):
        for name in re.findall(r"(?<![\w./:-])specinfer(?!\.service)((?:\.[A-Za-z_]\w*)+)(?![\w/*])", line):
            assert resolves(name[1:].split(".")), name


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_page_shows_the_source_of_functions_that_exist(page: Path) -> None:
    for name in re.findall(r"<!-- source: specinfer\.([\w.]+) -->", page.read_text()):
        assert resolves(name.split(".")), name


def resolves(parts: list[str]) -> bool:
    """Whether a dotted name in the package is a module, or an attribute of one."""
    value: Any = specinfer
    for i, part in enumerate(parts):
        if not hasattr(value, part):
            try:
                importlib.import_module(f"specinfer.{'.'.join(parts[: i + 1])}")
            except ModuleNotFoundError:
                return False
        value = getattr(value, part)
    return True


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_on_a_page_is_valid_and_imports_names_that_exist(page: Path) -> None:
    for kind, block in BLOCK.findall(page.read_text()):
        if kind == "python":
            compile(
                "async def block():\n" + textwrap.indent(block, "    "), str(page), "exec"
            )  # may be part of a method
            for names in re.findall(r"^from specinfer import (.+)", block, re.MULTILINE):
                assert {name.strip() for name in names.split(",")} <= set(specinfer.__all__)


@pytest.mark.parametrize(
    "program", [block for _, block in BLOCK.findall((ROOT / "docs/getting-started/library.md").read_text())]
)
def test_a_program_for_newcomers_runs(
    program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECINFER_NATIVE")  # the embedded pair with what is fastest here
    exec(compile(program, "library.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
