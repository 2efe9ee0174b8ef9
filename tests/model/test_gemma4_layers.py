"""Native layers of Gemma 4: transformers' results, the same bits in any pass, and keys and values stored once."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from native import ISAS, each_isa
from native_layers import CPU, PROMPT, error, last_logits, make, saved
from specinfer.model.attention import register
from specinfer.model.definition import load_config, read_definition
from specinfer.model.kv_tensors import KVTensors, bytes_per_slot
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load import load_model
from specinfer.model.load_config import LoadConfig
from specinfer.model.probe import probe
from specinfer.model.runner import ModelRunner
from specinfer.parallel.group import Alone, ShardSpec
from tests.model.native_checks import (
    change_attentions,
    change_experts,
    change_plan,
    check_change_shows,
    check_logits,
    check_rounding,
    check_trees,
)
from thread_group import ThreadGroup
from tiny import GEMMA_4, make_model

# Layers of random models add little to hidden states: small numbers after layers would hide the rest.
_FACTORS = (1.0, 0.8, 1.3, 0.9, 0.7)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from each_isa(request)


def made(family: str, **changes: Any) -> Any:
    """A model whose numbers, but for matrices, are not those it begins with."""
    model = make(family, **changes)
    with torch.no_grad():
        for layer, factor in zip(model.model.layers, _FACTORS, strict=True):
            layer.layer_scalar.fill_(factor)
    return model


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in GEMMA_4},
    "heads of 512": ("gemma4_text-alike", {"head_dim": 256, "global_head_dim": 512}),
    "as many heads of keys": ("gemma4_text-alike", {"num_global_key_value_heads": 4}),
    "untied and biased": ("gemma4_text-shared", {"tie_word_embeddings": False, "attention_bias": True}),
    "with silu": ("gemma4_text-shared", {"hidden_activation": "silu"}),
    "inputs and experts": (
        "gemma4_text-moe",
        {"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2, "final_logit_softcapping": 5.0},
    ),
    "keys that are values, and shared": (
        "gemma4_text-alike", {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[name]
    model = made(family, **changes)
    check_logits(model, tmp_path)


@pytest.mark.parametrize("name", ["heads of 512", "inputs and experts"])
def test_all_instruction_sets_compute_what_transformers_does(isa: str, name: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[name]
    model = made(family, **changes)
    check_logits(model, tmp_path)


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", GEMMA_4)
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, "int8"), (torch.float32, "int4")],
)
def test_rounding_errors_are_those_of_the_definition(
    family: str, dtype: torch.dtype, quantization: str | None, tmp_path: Path
) -> None:
    model = made(family)
    check_rounding(model, tmp_path, dtype, quantization)


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", GEMMA_4)
@pytest.mark.parametrize(
    ("dtype", "quantization"), [(torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, "int4")]
)
def test_trees_have_the_bits_of_chains(
    family: str, dtype: torch.dtype, quantization: str | None, model_folder: Callable[..., Path]
) -> None:
    loaded = load_model(model_folder(family, global_head_dim=288), dtype, CPU, quantization)
    check_trees(loaded)


def _parts(decoder: FusedDecoder, numbers: range = range(9), **changes: Any) -> None:
    for layer in decoder.layers:
        for i, part in enumerate(layer.call.parts):
            for name, value in changes.items() if i in numbers else ():
                setattr(part._structure, name, value)


MUTATIONS: dict[str, tuple[str, Callable[[FusedDecoder], None]]] = {
    "values as they are": ("gemma4_text", lambda it: change_attentions(it, value_norm=None)),
    "one rotation for all": ("gemma4_text", lambda it: change_plan(it.layers[0], rotation=it.layers[1].rotation)),
    "hidden states as layers leave them": ("gemma4_text", lambda it: _parts(it, hidden_factor=1.0)),
    "no cap": ("gemma4_text-shared", lambda it: setattr(it.head, "cap", None)),
    "inputs of the first layer for all": ("gemma4_text-shared", lambda it: _parts(it, column=0)),
    "an MLP that is added alone": ("gemma4_text-moe", lambda it: _parts(it, range(1, 2), sum=0)),
    "a router that reads what experts read": ("gemma4_text-moe", lambda it: _parts(it, router_norm=None)),
    "weights of experts without their scales": ("gemma4_text-moe", lambda it: change_experts(it, scales=None)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_part_that_is_wrong_shows(name: str, tmp_path: Path) -> None:
    """Else the tests above would not show it."""
    family, mutate = MUTATIONS[name]
    model = made(family)
    check_change_shows(model, tmp_path, mutate)


@pytest.mark.parametrize("is_native", [True, False])
def test_layers_that_share_keys_and_values_store_them_once(is_native: bool, tmp_path: Path) -> None:
    model = made("gemma4_text-shared")
    wanted = reference.last_logits(model, PROMPT)
    loaded = load_model(saved(model, tmp_path), torch.float32, CPU, native=is_native)
    assert [shape.shares for shape in loaded.layer_shapes] == [None, None, None, 2, 1]
    runner = ModelRunner(loaded, 64)
    tensors = runner.tensors
    assert isinstance(tensors, KVTensors)
    assert tensors.keys[3] is tensors.keys[2]
    assert tensors.values[4] is tensors.values[1]
    assert bytes_per_slot(loaded.layer_shapes, torch.float32) == tensors.num_bytes() / 64 == 4 * 2 * 2 * (8 + 16 + 8)
    assert error(last_logits(runner), wanted) < 1e-5


def test_a_recorded_pass_reads_no_keys_of_less_precision(tmp_path: Path) -> None:
    """The definition in its own type computes each layer again, beside the pass in float32."""
    folder, types = saved(made("gemma4_text-shared"), tmp_path), []
    register()
    config = load_config(folder)
    definition = read_definition(folder, config, torch.bfloat16).eval()

    def note(_module: Any, _args: Any, kwargs: Any, _output: Any) -> None:
        types.extend(one.dtype for pair in kwargs["shared_kv_states"].values() for one in pair)

    definition.model.layers[-1].register_forward_hook(note, with_kwargs=True)
    probe(definition, config, CPU, records=True)
    assert set(types) == {torch.float32}


@pytest.mark.parametrize("family", ["gemma4_text-shared", "gemma4_text-moe"])
def test_results_that_are_normed_before_they_are_added_up_are_not_split_over_ranks(
    family: str, model_folder: Callable[..., Path]
) -> None:
    folder, model = model_folder(family), make_model(family)
    for group, fuses in ((Alone(), True), (ThreadGroup.make(2)[0], family != "gemma4_text-moe")):
        job = LoadConfig(folder, model.config, torch.float32, CPU, shard=ShardSpec(group))
        assert job.fuses(model) == fuses
