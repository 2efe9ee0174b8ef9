"""Stages of a pipeline, run one after the other by hand, compute what the whole model does."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from specinfer.core.errors import ModelError
from specinfer.core.tree import Draw, TokenTree
from specinfer.model.batch import Piece, pack
from specinfer.model.forward import forward
from specinfer.model.kv_tensors import KVTensors, LayerShape
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load import load_model
from specinfer.model.sharding.stage import check_stage, make_stage, received
from specinfer.model.streamed import Feeder
from tiny import FAMILIES, make_model, quick, random_prompts, save_model, transformers_model, trees

CPU = torch.device("cpu")
NUM_LAYERS = 3
NUM_SLOTS = 64
_LAYERS = {"bloom": "n_layer", "mpt": "n_layers", "gpt2": "n_layer", "gpt_bigcode": "n_layer"}
_TREE = TokenTree((7, 3, 5, 9, 2), (-1, 0, 0, 1, 1), tuple(Draw(i, "a") for i in range(1, 5)))


def _folder(path: Path, family: str) -> Path:
    return save_model(path, family, **{_LAYERS.get(family, "num_hidden_layers"): NUM_LAYERS})


def _cuts(num_stages: int) -> list[range]:
    return {1: [range(3)], 2: [range(2), range(2, 3)], 3: [range(1), range(1, 2), range(2, 3)]}[num_stages]


class Pipeline:
    """Stages that hand hidden states over in one process."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        cuts: Sequence[range],
        shapes: Sequence[LayerShape],
        finish: Callable[[nn.Module], nn.Module] = lambda model: model,
    ) -> None:
        self.models, self.stores = [], []
        for layers in cuts:
            self.models.append(finish(_stage(make(), layers)))
            self.stores.append(KVTensors([shapes[i] for i in layers], NUM_SLOTS, torch.float32, CPU))

    def __call__(self, pieces: Sequence[Piece], *, native: bool = False) -> Tensor:
        out = None
        with torch.inference_mode():
            for model, store in zip(self.models, self.stores, strict=True):
                if out is not None:
                    like = received(model, len(out), torch.float32, CPU)
                    assert (out.shape, out.dtype) == (like.shape, like.dtype)
                out = forward(model, pack(pieces, store, CPU, native=native), out)
        assert out is not None
        return out


def _stage(model: nn.Module, layers: range) -> nn.Module:
    if len(layers) < NUM_LAYERS:
        make_stage(model, layers, is_first=layers.start == 0, is_last=layers.stop == NUM_LAYERS)
    return model


def _passes(first: Sequence[int] = (11, 4, 7), tree: TokenTree = _TREE) -> list[list[Piece]]:
    """Two prompts in two chunks; then a tree on the first, and one token more of the other."""
    prompts = random_prompts((9, 5), seed=3)
    slots = [np.arange(0, 30), np.arange(30, 60)]
    none = np.arange(0)

    def piece(i: int, start: int, chain: Sequence[int], tree: TokenTree | None) -> Piece:
        end = start + len(chain) + (tree.num_guessed if tree else 0)
        return Piece.from_span(chain, tree, slots[i][:start] if start else none, slots[i][start:end])

    chosen = TokenTree.root(prompts[1][-1])
    return [
        [piece(0, 0, prompts[0][:4], None), piece(1, 0, prompts[1], chosen)],
        [piece(0, 4, [*prompts[0][4:], *first], TokenTree.root(first[-1])), piece(1, 5, [8], TokenTree.root(8))],
        [piece(0, 9 + len(first), [7], tree), piece(1, 6, [3], TokenTree.root(3))],
    ]


@pytest.mark.parametrize(
    "family",
    quick(
        FAMILIES,
        *(
            "llama",
            "opt",
            "bloom",
            "falcon",
            "falcon-rw",
            "mpt",
            "gpt_bigcode",
            "gemma3_text",
            "gpt2",
            "gpt_neox",
            "gpt_oss",
        ),
    ),
)
def test_stages_of_a_family(family: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, family)
    whole = load_model(folder, torch.float32, CPU, native=False)

    def make() -> nn.Module:
        return load_model(folder, torch.float32, CPU, native=False).model

    one = Pipeline(make, _cuts(1), whole.layer_shapes)
    expected = [one(pieces) for pieces in _passes()]
    for num_stages in (2, 3) if family == "llama" else (3,):
        stages = Pipeline(make, _cuts(num_stages), whole.layer_shapes)
        for pieces, logits in zip(_passes(), expected, strict=True):
            assert torch.equal(stages(pieces), logits)
        for model, store in zip(stages.models[1:], stages.stores[1:], strict=True):
            batch = pack(_passes()[0], store, CPU, native=False)
            hidden = torch.randn(len(batch.token_ids), 32)
            with torch.inference_mode():
                check_stage(model, batch, hidden)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("qwen3", {"tie_word_embeddings": True})])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_stages_of_native_layers(family: str, changes: Any, quantization: str | None, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}  # whole groups of rounded weights
    folder = save_model(tmp_path, family, num_hidden_layers=NUM_LAYERS, **sizes, **changes)
    shapes = [LayerShape(2, 16, 16)] * NUM_LAYERS

    def run(cuts: Sequence[range]) -> list[Tensor]:
        make = partial(transformers_model, folder)
        stages = Pipeline(make, cuts, shapes, lambda model: FusedDecoder(model, quantization))
        return [stages(pieces, native=True) for pieces in _passes()]

    expected = run(_cuts(1))
    for num_stages in (2, 3):
        for logits, whole in zip(run(_cuts(num_stages)), expected, strict=True):
            assert torch.equal(logits, whole)


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_stages_see_trees_as_the_whole_does(data: st.DataObject, llama: Path) -> None:
    chain = data.draw(st.lists(st.integers(0, 95), min_size=1, max_size=12))
    tree = data.draw(trees(max_nodes=8, vocab=5))
    make = partial(transformers_model, llama)
    outputs = []
    for num_stages in (1, 2):
        stages = Pipeline(make, _cuts(num_stages), [LayerShape(2, 8, 8)] * NUM_LAYERS)
        outputs.append([stages(pieces) for pieces in _passes(chain, tree)])
    for one, other in zip(*outputs, strict=True):
        assert torch.equal(one, other)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _folder(tmp_path_factory.mktemp("llama"), "llama")


def test_a_stage_has_only_its_own_modules(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "opt")
    whole = sum(weight.numel() for weight in transformers_model(folder).parameters())
    first, middle, last = (_stage(transformers_model(folder), layers) for layers in _cuts(3))
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in (first, middle, last)]
    head = transformers_model(folder).lm_head.weight.numel()
    assert sum(sizes) == whole + head  # it is tied to the embedding: the first and the last stage need it
    assert sizes[1] < min(sizes[0], sizes[2])
    assert next(name for name, _ in middle.named_parameters()).startswith("model.decoder.layers.1.")


def test_a_stage_may_be_made_without_weights(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = make_model("llama", num_hidden_layers=NUM_LAYERS)
    make_stage(model, range(1, 3), is_first=False, is_last=True)
    assert {name.split(".")[2] for name, _ in model.named_parameters() if ".layers." in name} == {"1", "2"}
    assert all(weight.is_meta for weight in model.parameters())


def test_layers_that_get_more_than_hidden_states_are_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "llama")

    def with_embedding_added() -> Any:
        """Adds the embedding between two layers, as definitions with value residuals or skips do."""
        model = transformers_model(folder)
        seen = SimpleNamespace(embedded=None)
        model.model.embed_tokens.register_forward_hook(lambda _module, _args, out: setattr(seen, "embedded", out))
        model.model.layers[2].register_forward_pre_hook(lambda _module, args: (args[0] + seen.embedded, *args[1:]))
        return model

    model = with_embedding_added()
    embedding = model.model.embed_tokens
    make_stage(model, range(1, 3), is_first=False, is_last=True)
    model.model.embed_tokens.register_forward_hook(next(iter(embedding._forward_hooks.values())))
    batch = pack(_passes()[0], KVTensors([LayerShape(2, 8, 8)] * 2, NUM_SLOTS, torch.float32, CPU), CPU, native=False)
    with torch.inference_mode(), pytest.raises(ModelError, match=r"'llama' cannot be split.*parallel_size=1"):
        check_stage(model, batch, torch.randn(len(batch.token_ids), 32))


def test_layers_that_use_the_keys_of_others_are_refused(tmp_path: Path) -> None:
    model = transformers_model(_folder(tmp_path, "llama"))
    model.config.num_kv_shared_layers = 1
    with pytest.raises(ModelError, match="'llama' cannot be split into stages: some layers use the keys"):
        make_stage(model, range(1), is_first=True, is_last=False)


class _Noted:
    """A stream that brings nothing in, and notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def acquire(self, layer: int) -> None:
        self.calls.append(("acquire", layer))

    def release(self, layer: int) -> None:
        self.calls.append(("release", layer))


def test_a_streamed_stage_gives_its_last_layer_back(tmp_path: Path) -> None:
    model = _stage(transformers_model(_folder(tmp_path, "llama")), range(2))
    stream: Any = _Noted()
    parts: Any = [{f"model.layers.{i}.mlp.up_proj.weight": None} for i in range(2)]
    Feeder(stream).attach(model, parts)
    store = KVTensors([LayerShape(2, 8, 8)] * 2, NUM_SLOTS, torch.float32, CPU)
    with torch.inference_mode():
        forward(model, pack(_passes()[0], store, CPU, native=False))
    assert stream.calls == [("acquire", 0), ("release", 0), ("acquire", 1), ("release", 1)]


@pytest.mark.parametrize("family", ["llama", "falcon", "mpt", "opt", "gpt2"])
def test_the_last_layers_without_the_head(family: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, family)
    whole = load_model(folder, torch.float32, CPU, native=False)
    headless = load_model(folder, torch.float32, CPU, native=False).model
    make_stage(headless, range(1, 3), is_first=False, is_last=False)
    stages = Pipeline(
        lambda: load_model(folder, torch.float32, CPU, native=False).model, [range(1)], whole.layer_shapes
    )
    hidden = stages(_passes()[0])
    store = KVTensors(whole.layer_shapes[1:], NUM_SLOTS, torch.float32, CPU)
    with torch.inference_mode():
        after = forward(headless, pack(_passes()[0], store, CPU, native=False), hidden)
    assert after.shape == hidden.shape
    assert not torch.equal(after, hidden)
    assert sum(weight.numel() for weight in headless.parameters()) < 0.8 * whole.num_parameters
