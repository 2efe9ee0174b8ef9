"""The form in which drafters are loaded: quantized on request, whatever form their files have."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantized_files import save_quantized
from specinfer.drafters import loading
from specinfer.drafters.loading import load_draft_model
from specinfer.model.folder import find_folder
from specinfer.model.load import load_model
from tests.model.gguf_files import write_model

CPU = torch.device("cpu")
WIDE = {"hidden_size": 256, "intermediate_size": 256}


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("form", ["Q4_K", "Q8_0", "GPTQ", "FP8 of 128"])
def test_codes_of_files_are_rounded_again_on_request(
    form: str, quantization: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    target = load_model(model_folder("llama", tokenizer=True, **WIDE), torch.bfloat16, CPU)
    if form.startswith("Q"):
        write_model(tmp_path / "small.gguf", kind=form, **WIDE)
        folder = find_folder(tmp_path / "small.gguf")
    else:
        save_quantized(target.folder, tmp_path / "small", form)
        folder = tmp_path / "small"
    stored, rounded = (load_draft_model("small", folder, target, None, kind).loaded for kind in (None, quantization))
    assert (stored.quantization, rounded.quantization) == (None, quantization)
    assert stored.stored_types is not None
    assert rounded.stored_types is None
    assert rounded.weights_type == quantization


@pytest.mark.parametrize(("form", "usual"), [("bfloat16", "int8"), ("F16", "int8"), ("Q4_K", None), ("AWQ", None)])
def test_large_models_without_codes_are_rounded_on_cpus(
    form: str,
    usual: str | None,
    model_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = load_model(model_folder("llama", tokenizer=True, **WIDE), torch.bfloat16, CPU)
    folder = target.folder
    if form == "AWQ":
        save_quantized(target.folder, tmp_path / "small", form)
        folder = tmp_path / "small"
    elif form != "bfloat16":
        write_model(tmp_path / "small.gguf", kind=form, **WIDE)
        folder = find_folder(tmp_path / "small.gguf")
    assert load_draft_model("small", folder, target, None, None).loaded.quantization is None
    monkeypatch.setattr(loading, "_MANY", 1000)
    assert load_draft_model("small", folder, target, None, None).loaded.quantization == usual
    assert load_draft_model("small", folder, target, None, "int4").loaded.quantization == "int4"
