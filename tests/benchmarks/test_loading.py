"""Loads of quantized models are timed in turns with transformers' own."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.loading import LOADING, READING, THEIRS, LoadingConfig, print_loading, run_loading
from gguf_files import write_model
from quantized_files import save_quantized
from tiny import save_model


def test_each_part_of_each_load_is_timed(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", kind="Q8_0", hidden_size=64, intermediate_size=64)
    source = save_model(tmp_path / "source", hidden_size=64, intermediate_size=96)
    save_quantized(source, tmp_path / "gptq", "GPTQ")
    models = (str(tmp_path / "m.gguf"), str(tmp_path / "gptq"))
    report = run_loading(LoadingConfig(models, repeats=2, json=tmp_path / "load.json"))
    file, folder = report.rows
    assert (file.types, folder.types) == ("Q8_0", "int4")
    assert all(len(file.seconds[name]) == 2 for name in (READING, LOADING, THEIRS))
    assert folder.fault is not None  # its packages are not installed
    assert not folder.seconds[THEIRS]
    assert json.loads((tmp_path / "load.json").read_text())["models"][models[1]]["fault"] == folder.fault
    shown = io.StringIO()
    print_loading(report, Console(file=shown, width=200))
    assert f"transformers does not load {models[1]}" in shown.getvalue()


def test_repeats_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="repeats"):
        LoadingConfig(("demo",), repeats=0)
