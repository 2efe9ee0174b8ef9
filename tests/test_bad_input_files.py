"""Model files and sources: nothing of a model is run, nothing is read that its sizes do not promise, no pickles."""

import ast
import json
import struct
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import specinfer
from specinfer.core.errors import ModelError
from specinfer.model.definition import load_tokenizer
from specinfer.model.folder import find_folder
from specinfer.model.load import load_model
from tiny import save_model, save_tokenizer

SOURCE = Path(specinfer.__file__).parent
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tokenizer(save_model(tmp_path / "model"))


def load(folder: Path) -> Any:
    return load_model(find_folder(folder), torch.float32, torch.device("cpu"))


def write_weights(folder: Path, header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


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


# 46: nor that of a tokenizer
def test_46_code_of_a_tokenizer_is_not_run(folder: Path) -> None:
    marker = folder / "was_run"
    (folder / "tokenization_evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass T: pass\n")
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {
        "auto_map": {"AutoTokenizer": ["tokenization_evil.T", "tokenization_evil.T"]}
    }
    file.write_text(json.dumps(config))
    with suppress(ModelError):
        assert load_tokenizer(folder).encode("the")
    assert not marker.exists()


# 47: sizes that the file does not have; each is refused before memory is taken for it
@pytest.mark.parametrize(
    ("header", "length"),
    [
        ({}, 2**63),
        ({}, 2**40),
        (b"", 100_000_000),
        (b"{" * 100_000, None),
        (b"not json", None),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 2**62]}}, None),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}, None),
        ({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]}}, None),
        ({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}, None),
        ({"a": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}, None),
        ({"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}, None),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}, None),
        ({"a": 5}, None),
    ],
)
def test_47_headers_that_lie(folder: Path, header: Any, length: int | None) -> None:
    write_weights(folder, header, bytes(16), length)
    with pytest.raises(ModelError, match=f"{WEIGHTS} is damaged"):
        load(folder)


# 47: two tensors that share their bytes
def test_47_tensors_that_overlap(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    write_weights(folder, {"a": entry, "b": entry}, bytes(16))
    with pytest.raises(ModelError):
        load(folder)


# 47: a config that promises more than there is
@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": 2**14}, {"num_hidden_layers": 10**6}, {"vocab_size": 2**31}, {"max_position_embeddings": -1}],
)
def test_47_sizes_without_weights(folder: Path, changes: dict[str, int]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises((ModelError, ValueError)):
        load(folder)


# 47: names of shards that lead elsewhere
@pytest.mark.parametrize("name", ["../outside.safetensors", "/tmp/outside.safetensors", "a/../../outside.safetensors"])
def test_47_names_of_shards_stay_in_the_folder(folder: Path, name: str) -> None:
    (folder / WEIGHTS).rename(folder.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"outside\.safetensors"):
        load(folder)


@pytest.mark.parametrize("name", ["../../etc", "a/b/c", "-x/y", "x/..", "http://127.0.0.1/a", "a\nb", "", "\x00"])
def test_47_names_of_models_lead_nowhere_else(name: str) -> None:
    with pytest.raises(ModelError):
        find_folder(name)


# 32: sandboxes before this version could be left
def test_32_templates_are_rendered_by_a_sandbox_without_known_holes() -> None:
    assert tuple(map(int, version("jinja2").split(".")[:3])) >= (3, 1, 6)


# 48: packages come from one index
def test_48_no_other_index_is_asked() -> None:
    root = SOURCE.parents[1]
    for name in ("pyproject.toml", "Makefile", "constraints.txt"):
        if (root / name).is_file():
            assert "extra-index-url" not in (root / name).read_text()
