"""A quantization is added as CONTRIBUTING.md says, and then works by its name."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor, nn
from torch.nn import functional

from specinfer import LLM, SamplingParams
from specinfer.core import config
from specinfer.model import linears
from tiny import offered

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class HalfLinear(nn.Module):
    """A replacement for `nn.Linear` with weights of 16 bits."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", layer.weight.detach().bfloat16(), persistent=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.get_buffer("weight").to(x.dtype), self.bias)


@pytest.fixture
def _half(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(config, "QUANTIZATIONS", (*config.QUANTIZATIONS, "half"))
    monkeypatch.setitem(linears.QUANTIZE, "half", lambda layer, _native: HalfLinear(layer))
    with offered("quantization", "half"):
        yield


@pytest.mark.usefixtures("_half")
@pytest.mark.parametrize("streamed", [False, True])
def test_an_added_quantization_rounds_the_layers_by_its_name(
    *, streamed: bool, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = model_folder("llama")
    options = {"offload": "disk", "offload_folder": tmp_path} if streamed else {}
    with LLM(folder, drafters=[], quantization="half", **options) as llm:
        layers = [module for module in llm.target.loaded.model.modules() if isinstance(module, HalfLinear)]
        assert len(layers) == 2 * 7 + 1, "seven in each of the two layers, and the head"
        found = llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids
    with LLM(folder, drafters=[], dtype="float32") as llm:
        plain = llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids
    assert found == plain, "rounding to 16 bits changes no token here"


@pytest.mark.usefixtures("_half")
def test_an_unknown_quantization_is_refused_with_the_added_one_among_the_names(
    model_folder: Callable[..., Path],
) -> None:
    with pytest.raises(ValueError, match="quantization must be one of int8, int4, fp8, half, not 'int2'"):
        LLM(model_folder("llama"), quantization="int2")
