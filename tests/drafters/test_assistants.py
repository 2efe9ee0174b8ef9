"""Gemma 4 assistants: growth by the formulas over their target's keys and values, exact output, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

from assistants import save_assistant
from heads import check_growth, drafter_of, llm_of
from reference.heads import SlowAssistant
from specinfer import LLM, SamplingParams
from specinfer.core.errors import ModelError
from specinfer.drafters import AssistantDrafter
from specinfer.model.heads import load
from specinfer.model.load import load_model
from specinfer.ops import PackedLinear, QuantizedLinear
from tiny import VOCAB, make_model, random_prompts, save_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
TARGETS = ("gemma4_text", "gemma4_text-shared", "gemma4_text-alike", "gemma4_text-moe")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(tmp_path_factory.mktemp(name), name) for name in TARGETS}


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_assistant(tmp_path_factory.mktemp("assistant"), clusters=8)


@pytest.mark.parametrize(
    ("family", "clusters", "position"),
    [("gemma4_text", 0, 0), ("gemma4_text-shared", 8, 0), ("gemma4_text-alike", 8, 1), ("gemma4_text-moe", 0, 1)],
)
def test_growth_follows_the_formulas(
    family: str,
    clusters: int,
    position: int,
    targets: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prompt is longer than the sliding window, and other requests have the first slots of the cache."""
    folder, model = save_assistant(tmp_path / "assistant", clusters=clusters), make_model(family)
    monkeypatch.setattr(
        "specinfer.setup.assembly.choose_dialect", lambda run, _: run.head.speak(run.head.dialects[position])
    )
    slow = SlowAssistant(folder, model, at_last=position == 1)
    with llm_of(targets[family], folder, tree="1") as llm:
        drafter = drafter_of(llm)
        assert isinstance(drafter, AssistantDrafter)
        assert drafter.runner.loaded.taps is None
        check_growth(llm, slow.tree, lengths=(5, 21))
        slots, features = llm.target.cache.slots("1")[:21], drafter.runner.features("1", 20, 21)
        logits, output = drafter.runner.score([drafter.runner.piece([7], slots, features)])
        wanted = slow.step(7, *slow.read(random_prompts([5, 21])[1]))
        torch.testing.assert_close(logits[0], wanted[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output[0], wanted[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
def test_of_a_head_in_clusters_only_the_rows_of_the_best_ones_are_read(
    quantization: str | None,
    native: bool,
    targets: dict[str, Path],
    assistant: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Packed or quantized weights would be made anew for each level: 262,144 rows where 4,096 are scored."""
    quantized: Any = load.quantize_linears
    monkeypatch.setattr(load, "quantize_linears", lambda *args, **_: quantized(*args, native=native))
    target = load_model(targets["gemma4_text"], torch.bfloat16, torch.device("cpu"), native=native)
    head: Any = load.load_head(assistant, target, quantization).model
    hidden = torch.randn(3, head.lm_head.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = head.lm_head.weight.detach() @ hidden.unsqueeze(-1)
    for kind in (PackedLinear, QuantizedLinear):
        monkeypatch.setattr(kind, "weight", property(lambda _: pytest.fail("the whole weight is made")))
    found = head.logits(hidden)
    is_scored = found.isfinite()
    assert is_scored.sum(dim=1).eq(3 * VOCAB // 8).all()
    torch.testing.assert_close(found[is_scored], whole.squeeze(-1).float()[is_scored], rtol=0.02, atol=0.02)


def test_an_assistant_needs_a_target_whose_layers_it_knows(
    targets: dict[str, Path], assistant: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"layer 0 of .* reads the keys and values of a layer with sliding_attention"):
        llm_of(save_model(tmp_path / "llama"), assistant)
    with pytest.raises(ModelError, match=r"is a drafter \(Gemma 4 assistant\); name its target as the model"):
        LLM(assistant)


@pytest.mark.distributed
def test_an_assistant_is_refused_for_a_target_in_several_processes(targets: dict[str, Path], assistant: Path) -> None:
    with pytest.raises(ModelError, match=r"reads keys and values of its target, which must be in one process; leave"):
        llm_of(targets["gemma4_text"], assistant, tensor_parallel_size=2)
