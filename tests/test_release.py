"""The workflow of releases: its file is valid, and what it calls exists."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    by_name: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
    return by_name


def steps(jobs: dict[str, Any], key: str) -> list[str]:
    return [step[key] for job in jobs.values() for step in job["steps"] if key in step]


def test_actions_are_pinned_to_commits(jobs: dict[str, Any]) -> None:
    used = steps(jobs, "uses")
    assert len(used) > 5
    assert [action for action in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)] == []


def test_every_platform_of_the_tool_that_has_a_pytorch_is_tried(jobs: dict[str, Any]) -> None:
    tool = (ROOT / "tools" / "wheels.py").read_text(encoding="utf-8")
    built = set(re.findall(r'Platform\("(\w+)"', tool))
    tried = {row["wheel"] for row in jobs["wheels"]["strategy"]["matrix"]["include"]}
    assert built - tried == {"macosx_11_0_x86_64"}  # PyTorch has no builds for Macs with Intel processors
    assert tried <= built


def test_files_targets_and_packages_that_commands_name_exist(jobs: dict[str, Any]) -> None:
    commands = "\n".join(steps(jobs, "run"))
    for name in re.findall(r"\b(?:tools/\w+\.py|constraints\.txt)", commands):
        assert (ROOT / name).is_file()
    targets = re.findall(r"^(?:\w+=\w+ )?make (\w+)", commands, re.MULTILINE)
    assert targets == ["test", "oldest"]
    rules = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(targets) <= set(rules)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for package in project["optional-dependencies"]["wheels"]:
        assert re.search(rf"pip install .*\b{package}\b", commands)
    assert set(re.findall(r"^specinfer ([\w-]+)", commands, re.MULTILINE)) == {"collect-env", "generate"}


def test_only_what_passed_on_all_machines_is_published(jobs: dict[str, Any]) -> None:
    publish = jobs["publish"]
    assert publish["needs"] == ["wheels", "tests", "sbom"]
    assert jobs["wheels"]["needs"] == "build"
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert publish["permissions"] == {"id-token": "write"}
