"""Kernels are compiled before captures: programs run without their launches, with zeros where these would write."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from specinfer.core.tree import TreeBudget
from specinfer.drafters import HeadRunner
from specinfer.drafters.kind import DraftKind
from specinfer.engine.device.draft_shape import shape_of
from specinfer.engine.device.known_tokens import DraftInputs
from specinfer.engine.device.logprobs import Asked
from specinfer.engine.device.passes import BlockPass
from specinfer.engine.device.processing import Processing
from specinfer.engine.device.step_programs import StepPrograms
from specinfer.model.heads import block, eagle3
from specinfer.model.layers import device as device_decoder
from specinfer.model.linears import quantize_linears
from specinfer.model.load import load_model
from specinfer.model.runner import ModelRunner
from specinfer.ops import layer_ops, tree_ops
from tests.engine.device.step_programs import ASSISTANT, CPU, programs_of, save_head, target_of, with_head
from tiny import FAMILIES

pytest.importorskip("triton")
import interpreter as interpreter
from specinfer.ops.triton.compilation import Zeros

KINDS = ["EAGLE-3", "EAGLE-3, as PyTorch has it", "EAGLE", "MTP", "DFlash", "DSpark", "P-EAGLE", ASSISTANT]
ONLY_WRITE = {
    "store", "commit", "add_candidates", "draw_candidates", "next_frontier", "merge_guesses", "best_tree",
    "keep_drafted", "adjust_logits", "walk_multi_step", "walk_traversal",
}  # fmt: skip


@pytest.fixture
def skipped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were left out: tensors that they write to keep their values, and results are zero."""
    calls: list[str] = []

    def without(kernel: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            calls.append(name)
            if name in ONLY_WRITE:
                return None
            result = kernel(*copy.deepcopy(args), **copy.deepcopy(options))
            return tree_map(lambda one: torch.zeros_like(one) if isinstance(one, Tensor) else one, result)

        return run

    names = [name for name in tree_ops.__all__ if not name[0].isupper()]
    for module, of_module in (
        (tree_ops, names),
        (layer_ops, ["convolve", "recur", "routed_product"]),
        (device_decoder, ["add_norm", "rotate_and_store", "gate"]),
        (eagle3, ["add_norm"]),
        (block, ["add_norm"]),
    ):
        for name in of_module:
            monkeypatch.setattr(module, name, without(getattr(module, name), name))
    return calls


def _run(programs: StepPrograms) -> None:
    programs.inputs.clear()
    with torch.inference_mode(), Zeros():
        if programs.size.shape.num_nodes:
            programs.draft()
        programs.verify()


@pytest.mark.parametrize("kind", KINDS)
def test_programs_with_heads_run_without_their_kernels(
    kind: str, model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skipped: list[str]
) -> None:
    monkeypatch.setattr("specinfer.model.heads.load.pack_linears", lambda _: None)  # as on a GPU
    folder = tmp_path / "head"
    save_head(folder, kind)
    loaded, head = with_head(folder, target_of(kind, folder, model_folder), is_fused="PyTorch" not in kind)
    _run(programs_of(loaded, TreeBudget(8, 3), 4, Processing.ADJUSTMENT, 8, Asked(5, 3), 2, head=head))
    assert {"attend", "add_candidates", "best_tree", "walk", "commit"} <= set(skipped)


@pytest.mark.parametrize("family", FAMILIES)
def test_programs_of_every_family_run_without_their_kernels(
    family: str, model_folder: Callable[..., Path], skipped: list[str]
) -> None:
    loaded = load_model(model_folder(family), torch.float32, CPU, native=False)
    for rule, budget in (("multi-step", TreeBudget(8, 2)), ("traversal", TreeBudget.expansion((2, 1))), (None, None)):
        _run(programs_of(loaded, budget, 4, Processing.ADJUSTMENT, 0, Asked(5, 3), rule=rule))
    assert {"attend", "store", "choose", "walk_traversal"} <= set(skipped)


def test_features_of_mask_tokens_are_computed_before_kernels_are_left_out(
    model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are computed once, by a product that has a kernel where weights are rounded."""
    monkeypatch.setattr("specinfer.model.heads.load.pack_linears", lambda _: None)  # as on a GPU
    save_head(tmp_path, "P-EAGLE")
    loaded, head = with_head(tmp_path, model_folder("llama"), is_fused=True)
    quantize_linears(head.model, "fp8", None, CPU)
    runner = HeadRunner(head, ModelRunner(loaded, 64), 64)
    block = runner.head.block
    assert block is not None
    shape = shape_of(
        [TreeBudget(8, 3)],
        15,
        16,
        kinds=(
            DraftKind(reads_features=True, reads_paths=True, block=range(1, block.size), max_depth=block.max_depth),
        ),
    )
    none = torch.zeros(2, dtype=torch.int32)
    inputs = DraftInputs(torch.zeros(2, shape.num_columns, dtype=torch.int32), none, none)
    product = layer_ops.quantized_product
    with monkeypatch.context() as left_out, Zeros():
        left_out.setattr(layer_ops, "quantized_product", lambda *args: torch.zeros_like(product(*args)))
        BlockPass(runner, shape, inputs, 2, CPU)
    made = BlockPass(runner, shape, inputs, 2, CPU)
    assert made._mask is not None
    assert torch.equal(made._mask, head.model.fc(head.model.mask_hidden[0]))
    assert made._mask.any()


def test_new_memory_is_zero() -> None:
    given = torch.ones(2, 3)
    with Zeros():
        made = [torch.empty(9), torch.empty_like(given), given.new_empty(4, 2), torch.empty_strided((2, 2), (1, 2))]
        kept = given + 1
    assert not any(one.any() for one in made)
    assert torch.equal(kept, torch.full((2, 3), 2.0))
