"""Sources: nothing of a model is evaluated or run, no pickles are read. Damaged files are for tests of models."""

import ast
from importlib.metadata import version
from pathlib import Path

import pytest

import specinfer

SOURCE = Path(specinfer.__file__).parent


Sources = list[tuple[Path, ast.Module]]


@pytest.fixture(scope="module")  # no longer: collections of garbage go through all nodes
def sources() -> Sources:
    return [(path, ast.parse(path.read_text())) for path in sorted(SOURCE.rglob("*.py"))]


def names_of(node: ast.AST) -> set[str]:
    """What an import brings in, or a call calls."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    is_named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
    return {ast.unparse(node.func)} if is_named else set()


# 28, 44, 45: nothing that comes from outside is ever evaluated or unpickled
def test_28_44_45_nothing_is_evaluated_or_unpickled(sources: Sources) -> None:
    refused = {
        "pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "zmq", "torch.load", "eval", "exec",
        "compile", "__import__", "os.system", "yaml.load", "yaml.unsafe_load", "numpy.load", "np.load",
        "torch.distributed.broadcast_object_list", "torch.distributed.recv_object_list", "multiprocessing.connection",
    }  # fmt: skip
    # Training reads what it wrote itself; heads and adapters are published as pickles too. All read tensors only.
    trains = {"loop.py", "report.py", "train.py", "training.py", "checkpoint.py", "peft_folder.py"}
    uses = [(path.name, name) for path, tree in sources for node in ast.walk(tree) for name in names_of(node) & refused]
    uses.remove(("peft_folder.py", "pickle"))  # for the name of an error
    uses.remove(("text_reader.py", "pickle"))  # its processes read only what the one that started them sends
    assert {pair for pair in uses if pair[1] != "torch.load" or pair[0] not in trains} == set()
    for path, tree in sources:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert "weights_only=True" in ast.unparse(node), path
    assert len(sources) > 100


# 28, 46: no shell is started, and code that comes with a model is never asked for
@pytest.mark.parametrize("name", ["shell", "trust_remote_code"])
def test_28_46_arguments_that_are_always_false(name: str, sources: Sources) -> None:
    for path, tree in sources:
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == name:
                assert isinstance(node.value, ast.Constant)
                assert node.value.value is False, path


# 32: sandboxes before this version could be left
def test_32_templates_are_rendered_by_a_sandbox_without_known_holes() -> None:
    assert tuple(map(int, version("jinja2").split(".")[:3])) >= (3, 1, 6)


# 48: packages come from one index
def test_48_no_other_index_is_asked() -> None:
    root = SOURCE.parents[1]
    for name in ("pyproject.toml", "Makefile", "constraints.txt"):
        if (root / name).is_file():
            assert "extra-index-url" not in (root / name).read_text()
