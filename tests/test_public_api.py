"""The public names: a short sorted list, all there, and nothing by accident."""

import importlib
import inspect
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

import specinfer

NAMES = {
    "LLM",
    "SLO",
    "AsyncLLM",
    "CompletionOutput",
    "EngineArgs",
    "EngineDeadError",
    "Generation",
    "LoRARequest",
    "Logprob",
    "ModelError",
    "QueueFullError",
    "QueueLimits",
    "Reasoning",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextChunk",
    "TextPrompt",
    "TokenTree",
    "TokensPrompt",
}


def _as_ruff_sorts(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_names_are_sorted_and_there() -> None:
    assert list(specinfer.__all__) == sorted(set(specinfer.__all__), key=_as_ruff_sorts)
    assert set(specinfer.__all__) == NAMES
    for name in specinfer.__all__:
        assert getattr(specinfer, name).__name__ == name


def test_a_star_import_brings_these_names() -> None:
    brought: dict[str, object] = {}
    exec("from specinfer import *", brought)
    assert set(brought) - {"__builtins__"} == set(specinfer.__all__)


def test_importing_the_package_is_quick() -> None:
    """`specinfer --help` does not wait for torch."""
    code = "import sys, specinfer; specinfer.ModelError; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False"]


def test_completion_offers_the_public_names() -> None:
    assert set(dir(specinfer)) == {*NAMES, "__version__"}


def test_other_names_are_not_there() -> None:
    assert not hasattr(specinfer, "Engine")
    with pytest.raises(AttributeError, match=r"specinfer.*'nothing'"):
        specinfer.nothing  # noqa: B018


def test_every_public_class_and_function_is_described() -> None:
    for name in specinfer.__all__:
        thing = getattr(specinfer, name)
        assert thing.__doc__
        for method_name, method in inspect.getmembers(thing, inspect.isfunction):
            if not method_name.startswith("_") and method.__module__.startswith("specinfer"):
                assert inspect.signature(method).return_annotation is not inspect.Signature.empty, method_name


def test_errors_are_value_errors() -> None:
    assert issubclass(specinfer.ModelError, ValueError)
    assert issubclass(specinfer.RequestError, ValueError)


def test_version_is_the_distributions() -> None:
    assert specinfer.__version__ == version("specinfer")
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", specinfer.__version__)


def test_importing_twice_is_harmless() -> None:
    from specinfer.model import attention

    attention.register()
    attention.register()
    assert importlib.import_module("specinfer") is specinfer


def test_importing_the_library_does_not_import_models_and_compilers() -> None:
    slow = ("transformers.modeling_utils", "torch._dynamo", "torch.distributed.tensor")
    program = f"import sys; from specinfer import LLM, AsyncLLM; assert not sys.modules.keys() & set({slow!r})"
    subprocess.run([sys.executable, "-c", program], check=True)
