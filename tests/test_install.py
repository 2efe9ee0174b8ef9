"""Installation: the pins, the extras and the Makefile go with every build of PyTorch that is supported."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import lock

ROOT = Path(__file__).resolve().parent.parent
TORCH = json.loads((Path(__file__).parent / "torch_requirements.json").read_text())["requirements"]
BUILDS = [(version, build) for version in TORCH for build in ("cpu", "cuda")]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
URL = "https://download.pytorch.org/whl/cpu"


def applies(requirement: Requirement, python: str, extra: str = "") -> bool:
    environment = {"platform_system": "Linux", "sys_platform": "linux", "python_version": python, "extra": extra}
    return requirement.marker is None or requirement.marker.evaluate(environment)


def required(version: str, build: str, python: str) -> list[Requirement]:
    """What a build of PyTorch requires on Linux."""
    lists = TORCH[version]
    every = [Requirement(line) for line in lists["every"] + (lists["cuda"] if build == "cuda" else [])]
    return [need for need in every if applies(need, python)]


def constraints() -> dict[str, SpecifierSet]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    return {canonicalize_name(pin.name): pin.specifier for pin in pins}


def extras() -> dict[str, list[Requirement]]:
    """What the package asks for itself, and with each extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {name: [Requirement(line) for line in lines] for name, lines in groups.items()}


def go_together(first: SpecifierSet, second: SpecifierSet) -> bool:
    """Whether a version is in both: one that either of them names, or one below or above all."""
    named = {specifier.version.removesuffix(".*") for specifier in (*first, *second)} | {"0", "99999"}
    return any(first.contains(version) and second.contains(version) for version in named)


def test_specifiers_that_exclude_each_other_are_found() -> None:
    assert not go_together(SpecifierSet("==3.7.1"), SpecifierSet("==3.9.0"))
    assert not go_together(SpecifierSet("<82"), SpecifierSet("==84.2.1"))
    assert go_together(SpecifierSet("==3.7.1"), SpecifierSet("<=3.9.0"))
    assert go_together(SpecifierSet(""), SpecifierSet("<82"))


@pytest.mark.parametrize(("version", "build"), BUILDS)
def test_the_constraints_allow_what_each_build_of_pytorch_requires(version: str, build: str) -> None:
    pins = constraints()
    for python in PYTHONS:
        for requirement in required(version, build, python):
            pin = pins.get(canonicalize_name(requirement.name), SpecifierSet())
            assert go_together(pin, requirement.specifier), f"{requirement.name}{pin}, but torch: {requirement}"


@pytest.mark.parametrize(("version", "build"), BUILDS)
def test_the_package_and_its_extras_allow_each_build_of_pytorch(version: str, build: str) -> None:
    for python in PYTHONS:
        brought = {canonicalize_name(need.name): need.specifier for need in required(version, build, python)}
        for name, requirements in extras().items():
            for need in requirements:
                specifier = brought.get(canonicalize_name(need.name), SpecifierSet())
                assert go_together(need.specifier, specifier), f"[{name}] asks for {need}, torch for {specifier}"
    (torch,) = (need for need in extras()[""] if need.name == "torch")
    assert torch.specifier.contains(f"{version}+{build}")


def test_the_pinned_pytorch_is_one_whose_requirements_are_known_and_fits_both_builds() -> None:
    pin = constraints()["torch"]
    (version,) = (version for version in TORCH if pin.contains(version))
    assert pin.contains(f"{version}+cpu")
    assert pin.contains(f"{version}+cu130")
    assert Version(f"{version}+cpu") > Version(version)  # an index that is named wins where both have it


def test_the_development_environment_has_triton_with_each_build() -> None:
    """The interpreter's tests need it, and a CPU build of PyTorch does not bring it."""
    groups = extras()
    (itself,) = (need for need in groups["dev"] if need.name == "specinfer")
    assert any(need.name == "triton" and applies(need, "3.11") for name in itself.extras for need in groups[name])


def test_the_guide_names_the_triton_that_each_build_of_pytorch_brings() -> None:
    guide = (ROOT / "docs" / "getting-started" / "gpu.md").read_text()
    listed = re.findall(r"^\| (2\.\d+) \| ([\d., ]+) \|$", guide, re.MULTILINE)
    brought: dict[str, set[str]] = {}
    for version in TORCH:
        tritons = {str(need.specifier) for need in required(version, "cuda", "3.11") if need.name == "triton"}
        brought.setdefault(version.rpartition(".")[0], set()).update(triton.removeprefix("==") for triton in tritons)
    assert {minor: set(names.split(", ")) for minor, names in listed} == brought


def commands(*words: str) -> list[str]:
    """What make would do in a checkout where nothing is installed yet."""
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo", *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [line for line in done.stdout.splitlines() if "pip install" in line]


def test_make_takes_pytorch_alone_from_the_index_that_is_named() -> None:
    locked, torch, package, _chat_model = commands(f"TORCH_INDEX={URL}")
    assert URL not in locked
    assert f"--index-url {URL}" in torch
    assert "--no-deps" in torch  # such an index has few versions of other packages, and none of those that are pinned
    assert "torch==" in torch
    assert URL not in package
    assert "-c constraints.txt" in torch
    assert "-c constraints.txt" in package


def test_make_takes_pytorch_from_where_pip_looks_otherwise() -> None:
    _locked, torch, _package, _chat_model = commands()
    assert "torch==" in torch
    assert "index-url" not in torch
    assert "--no-deps" not in torch


# ----------------------------------------------------------------------------------------- locks


LOCKS = ("dev", "image", "chat-model")


def locked(name: str) -> dict[str, Requirement]:
    """Each package of a lock file; every one has hashes."""
    entries = lock.packages((ROOT / "locks" / f"{name}.txt").read_text())
    requirements = {}
    for entry in entries:
        first, *hashes = entry.split(" \\\n    ")
        assert hashes, first
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", digest) for digest in hashes), first
        requirement = Requirement(first)
        assert canonicalize_name(requirement.name) not in requirements
        requirements[canonicalize_name(requirement.name)] = requirement
    return requirements


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_the_versions_of_the_constraints_and_no_address(name: str) -> None:
    pins = constraints()
    for package, requirement in locked(name).items():
        (pinned,) = requirement.specifier
        assert pinned.operator == "=="
        if requirement.marker is None or "emscripten" not in str(requirement.marker):
            assert pinned.version in pins.get(package, SpecifierSet("!=0")), package
    assert "//" not in (ROOT / "locks" / f"{name}.txt").read_text()


@pytest.mark.parametrize(("name", "extra"), [("dev", "dev"), ("image", "serve")])
@pytest.mark.parametrize("python", PYTHONS)
def test_a_lock_has_all_that_is_installed_but_what_belongs_to_a_build_of_pytorch(
    name: str, extra: str, python: str
) -> None:
    groups, wanted = extras(), []
    for need in (group := [*groups[""], *groups[extra]]):
        group += [each for name in need.extras for each in groups[name]] if need.name == "specinfer" else []
        wanted += [need] if need.name != "specinfer" and applies(need, python) else []
    wanted += [need for version in TORCH for build in ("cpu", "cuda") for need in required(version, build, python)]
    names = {package for package, need in locked(name).items() if applies(need, python)}
    missing = {canonicalize_name(need.name) for need in wanted} - names
    assert all(lock.OF_THE_BUILD.match(f"{package}==") for package in missing), missing
    assert "setuptools" in names, "the package itself is built with it"


def test_make_compares_hashes_unless_it_is_told_not_to() -> None:
    everything, _torch, package, chat_model = commands()
    assert "--no-deps --require-hashes -r locks/dev.txt" in everything
    assert "--no-deps --require-hashes -r locks/chat-model.txt" in chat_model
    assert "--no-build-isolation" in package, "what builds it is locked, too"
    assert not [line for line in commands("LOCKED=") if "locks/" in line or "--no-build-isolation" in line]


def test_packages_of_a_lock_keep_their_hashes_together() -> None:
    text = "# made\na==1 ; x \\\n    --hash=sha256:1 \\\n    --hash=sha256:2\n    # via b\ntorch==2 \\\n    --hash=c\n"
    entries = [entry for entry in lock.packages(text) if not lock.OF_THE_BUILD.match(entry)]
    assert entries == ["a==1 ; x \\\n    --hash=sha256:1 \\\n    --hash=sha256:2"]
