"""Passes with adapters at padded sizes, as GPUs capture them; here by their plain twins."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from adapters import save_adapter
from specinfer.core.lora import LoRAConfig, LoRARequest
from specinfer.model.adapters.registry import Adapters
from specinfer.model.batch import Piece
from specinfer.model.graphs.capture import Graphs
from specinfer.model.kv_cache import NO_SLOTS
from specinfer.model.layers import device as device_decoder
from specinfer.model.layers.device import DeviceDecoder
from specinfer.model.load import load_model
from specinfer.model.runner import ModelRunner
from specinfer.ops import AdapterTable
from specinfer.ops.cpu import low_rank

CPU = torch.device("cpu")


def test_passes_with_adapters_have_fixed_sizes(
    model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row with the adapter of its request, as in passes without padding, and as if it were alone."""
    monkeypatch.setattr(low_rank, "packs", lambda _: False)
    monkeypatch.setattr(device_decoder, "has_few_rows_kernel", lambda *_: True)  # whose kernel knows no adapters
    base = model_folder("llama")
    loaded = load_model(base, torch.float32, CPU, native=False)
    loaded = replace(loaded, model=DeviceDecoder(loaded.model, loaded.max_position).eval())
    adapters = Adapters(loaded, LoRAConfig(2, 8, 2), "base")
    tables: list[AdapterTable | None] = [None]
    for i in (1, 2):
        request = LoRARequest(f"a{i}", i, str(save_adapter(tmp_path / str(i), base, i)))
        tables.append(adapters.find(request).table)
    runner = ModelRunner(loaded, 64, graphs=Graphs(CPU))
    padded = runner.padded
    assert padded is not None
    slots = np.arange(30).reshape(3, 10)
    pieces = [
        replace(Piece.from_span([5 + i] * 10, None, NO_SLOTS, slots[i]), adapter=table, num_logits=1)
        for i, table in enumerate(tables)
    ]
    exact = padded.forward(pieces).clone()
    assert not any(size.adapts for size in padded.sizes)
    padded.adapter_slots = adapters._sites.adapter_slots(adapters.config)
    for order in ([0, 1, 2], [2, 0, 1]):
        found = padded.forward([pieces[i] for i in order])
        torch.testing.assert_close(found, exact[order], atol=1e-4, rtol=1e-4)
    assert sum(size.adapts for size in padded.sizes) == 1
    alone = padded.forward([pieces[2]])
    torch.testing.assert_close(alone, exact[2:3], atol=1e-4, rtol=1e-4)
    assert (exact[2] - padded.forward([replace(pieces[2], adapter=None)])).abs().max() > 0.1
