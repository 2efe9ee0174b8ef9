"""Layers of Gemma 4 that share keys and values store them once; what they compute is tested with all native layers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from native_layers import CPU, PROMPT, error, last_logits, make, saved
from specinfer.model.attention import register
from specinfer.model.definition import load_config, read_definition
from specinfer.model.kv_tensors import KVTensors, bytes_per_slot
from specinfer.model.load import load_model
from specinfer.model.load_config import LoadConfig
from specinfer.model.probe import probe
from specinfer.model.runner import ModelRunner
from specinfer.parallel.group import Alone, ShardSpec
from thread_group import ThreadGroup
from tiny import make_model


@pytest.mark.parametrize("is_native", [True, False])
def test_layers_that_share_keys_and_values_store_them_once(is_native: bool, tmp_path: Path) -> None:
    model = make("gemma4_text-shared")
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
    folder, types = saved(make("gemma4_text-shared"), tmp_path), []
    register()
    config = load_config(folder)
    definition = read_definition(folder, config, torch.bfloat16).eval()

    def note(_module: Any, _args: Any, kwargs: Any, _output: Any) -> None:
        types.extend(tensor.dtype for pair in kwargs["shared_kv_states"].values() for tensor in pair)

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
