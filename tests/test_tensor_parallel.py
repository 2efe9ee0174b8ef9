"""A model split over ranks, which are threads here, computes what the whole one does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from native import native
from specinfer.kernels import choose
from specinfer.model.batch import Piece, pack
from specinfer.model.forward import forward
from specinfer.model.fused import FAMILIES as FUSED
from specinfer.model.fused import FusedDecoder
from specinfer.model.kv_cache import KVTensors
from specinfer.model.load import LoadedModel, load_model
from specinfer.parallel.share import Share
from specinfer.tree import Draw, TokenTree
from thread_group import ThreadGroup, at_once, make_shares
from tiny import FAMILIES, random_prompts, save_model

CPU = torch.device("cpu")
NUM_SLOTS = 64
WHOLE = (1, 1)
_TREE = TokenTree((7, 3, 5, 9, 2), (-1, 0, 0, 1, 1), tuple(Draw(i, "a") for i in range(1, 5)))
# Ranks of a tensor group, and stages. Four ranks share two KV heads, or one.
_SPLITS = {family: [(2, 2)] for family in FAMILIES}
_SPLITS |= {family: [(2, 1), (4, 1), (1, 2)] for family in ("llama", "falcon", "falcon-7b", "gpt_bigcode", "phi3")}
# Experts are multiplied with rows of whole 16 bytes.
_CHANGES: dict[str, dict[str, int]] = {"qwen3_moe": {"moe_intermediate_size": 32}}


def _passes() -> list[list[Piece]]:
    """Two prompts, one of them in two chunks; then a tree on that one, and one token more of the other."""
    first, second = random_prompts((9, 5), seed=3)
    slots = [np.arange(0, 30), np.arange(30, 60)]
    chain = TokenTree.chain(second[-1], [])
    none = np.arange(0)
    return [
        [Piece.of_span(first[:4], None, none, slots[0][:4]), Piece.of_span(second, chain, none, slots[1][:5])],
        [
            Piece.of_span([*first[4:], 7], _TREE, slots[0][:4], slots[0][4:14]),
            Piece.of_span([3], TokenTree.chain(3, []), slots[1][:5], slots[1][5:6]),
        ],
    ]


class Ranks:
    """All ranks' parts of a model, loaded one after the other: loading waits for nobody."""

    def __init__(
        self, folder: Path, shares: Sequence[Sequence[Share]], quantization: str | None = None, **options: Any
    ) -> None:
        self.stages = [
            [load_model(folder, torch.float32, CPU, quantization, share=share, **options) for share in stage]
            for stage in shares
        ]
        self.stores = {
            id(one): KVTensors(one.layer_shapes, NUM_SLOTS, one.dtype, CPU) for stage in self.stages for one in stage
        }

    def __call__(self, pieces: Sequence[Piece]) -> Tensor:
        hidden: list[Tensor | None] = [None] * len(self.stages[0])

        def compute(job: tuple[LoadedModel, Tensor | None]) -> Tensor:
            loaded, given = job
            store, in_double = self.stores[id(loaded)], loaded.quantization is not None
            try:
                with torch.inference_mode():
                    return forward(
                        loaded.model, pack(pieces, store, CPU, native=loaded.native, in_double=in_double), given
                    )
            except BaseException:
                if isinstance(loaded.share.tensor, ThreadGroup):
                    loaded.share.tensor.abort()
                raise

        for stage in self.stages:
            hidden = list(at_once(compute, list(zip(stage, hidden, strict=True))))
        assert hidden[0] is not None
        return hidden[0]


def _logits(folder: Path, split: tuple[int, int], quantization: str | None = None, **options: object) -> list[Tensor]:
    ranks = Ranks(folder, make_shares(*split), quantization, **options)
    return [ranks(pieces) for pieces in _passes()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("families")
    return {family: save_model(place / family, family, **_CHANGES.get(family, {})) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_compute_what_the_whole_does(folders: dict[str, Path], family: str) -> None:
    wanted = _logits(folders[family], WHOLE, native=False)
    for split in _SPLITS[family]:
        for found, whole in zip(_logits(folders[family], split, native=False), wanted, strict=True):
            torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)


@native
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "opt"])
def test_native_layers_of_parts_compute_what_the_whole_does(
    folders: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECINFER_NATIVE", "always")
    choose.cache_clear()
    changes = {"intermediate_size": 64} if family != "opt" else {}
    folder = save_model(folders[family] / "wide", family, **changes)
    wanted = _logits(folder, WHOLE, native=False)
    for split in [(2, 1), (2, 2)]:
        ranks = Ranks(folder, make_shares(*split))
        assert isinstance(ranks.stages[0][0].model, FusedDecoder) == (family in FUSED)
        for pieces, whole in zip(_passes(), wanted, strict=True):
            torch.testing.assert_close(ranks(pieces), whole, rtol=1e-5, atol=1e-5)
    choose.cache_clear()
