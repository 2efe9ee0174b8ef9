"""The measurement of models with layers without attention, on tiny ones."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import hybrid
from benchmarks.hybrid import HybridConfig, print_hybrid, run_hybrid
from specinfer.bench.bandwidth import Bandwidth
from tiny import HYBRIDS


@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba"])
def test_trees_prompts_and_states_are_measured(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {name: value for name, value in HYBRIDS[family].items() if name != "layer_types"}
    monkeypatch.setitem(hybrid.FAMILIES, family, fields)
    monkeypatch.setattr(hybrid, "Bandwidth", lambda device: Bandwidth(device, 2**17))
    file = tmp_path / "numbers.json"
    compares = family == "mamba"
    config = HybridConfig(family, layers=4, rows=(3,), prompt=12, context=7, repeats=1, compares=compares, json=file)
    report = run_hybrid(config)
    assert set(report["ms"]) == {"tree of 1", "tree of 3", "prompt of 12"} | ({"transformers"} if compares else set())
    assert all(value > 0 for value in (*report["ms"].values(), *report["ratios"].values()))
    memory = report["bytes"]
    assert memory["states of 8 requests"] == 16 * memory["one state"]
    assert 0 < memory["slots of 8 trees of 16 nodes"] < memory["a state for each of these nodes instead"]
    assert json.loads(file.read_text()) == json.loads(json.dumps(report))
    shown = io.StringIO()
    print_hybrid(report, Console(file=shown, width=90))
    assert "T(3)/T(1)" in shown.getvalue()


def test_families_that_are_not_known_are_refused() -> None:
    with pytest.raises(ValueError, match="family: 'llama' is none of"):
        HybridConfig("llama")


def test_a_new_drafter_is_measured_as_tune_would_begin_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "Bandwidth", lambda device: Bandwidth(device, 2**17))
    config = HybridConfig(drafter="new:hybrid:2x64", rows=(3,), prompt=5, context=7, repeats=1, compares=False)
    report = run_hybrid(config)
    assert set(report["ms"]) == {"tree of 1", "tree of 3", "prompt of 5"}
    assert report["bytes"]["one state"] > 0
    shown = io.StringIO()
    print_hybrid(report, Console(file=shown, width=90))
    assert shown.getvalue().startswith("new:hybrid:2x64: 0.2 million random bfloat16 weights")
    with pytest.raises(ValueError, match="drafter: new:eagle3 reads hidden states"):
        HybridConfig(drafter="new:eagle3")
