"""Native decoders: one call for all layers, layers that do not agree, packed weights, rotations and embeddings."""

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import reference
from native_layers import CPU, TREE, Reader
from specinfer import LLM, SamplingParams
from specinfer.core.tree import TokenTree
from specinfer.demo.corpus import heldout_prompts
from specinfer.model import load_config
from specinfer.model.batch import pack
from specinfer.model.layers import packing
from specinfer.model.layers.check import Verdict
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load import load_model
from specinfer.model.probe import Probe
from specinfer.model.runner import ModelRunner
from tiny import make_model, random_prompts


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text", "bamba", "lfm2"])
def test_layers_in_one_native_call_compute_what_they_do_one_by_one(
    family: str, model_folder: Callable[..., Path]
) -> None:
    """Also after the tables of rotations have grown; whoever watches the layers gets them one by one."""
    loaded = load_model(model_folder(family, max_position_embeddings=3000), torch.bfloat16, CPU)
    reader, seen = Reader(ModelRunner(loaded, 700)), list[int]()
    for length in (20, 600):
        reader.read(str(length), random_prompts([length])[0])
        batch = pack([reader.piece(str(length), TREE)], reader.runner.tensors, CPU, native=True)
        one_by_one = loaded.model(batch, watch=lambda layer, _: seen.append(layer))
        assert torch.equal(loaded.model(batch), one_by_one)
    assert max(seen) > 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}])
def test_trees_change_nothing_in_half_precision(options: dict[str, str]) -> None:
    prompts = heldout_prompts(3, num_chars=300)
    params = [SamplingParams(temperature=t, max_tokens=24, seed=5) for t in (0.0, 0.0, 1.0)]
    generated = []
    for tree in ("off", "3,2,1,1", "best-first:24"):
        with LLM("demo", tree=tree, device="cpu", max_model_len=400, **options) as llm:  # type: ignore[arg-type]
            generated.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert generated[0] == generated[1] == generated[2]


def test_what_does_not_agree_is_not_used(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Probe, "judge", lambda *_: Verdict("layer 3", 2.0, 0.1, 0.3))
    with caplog.at_level(logging.WARNING):
        loaded = load_model(model_folder("llama"), torch.float32, CPU)
    assert not any(isinstance(module, FusedDecoder) for module in loaded.model.modules())
    assert "native fused layers" in caplog.text
    assert "layer 3 errs by 200.00%" in caplog.text


def test_a_layer_computed_otherwise_is_noticed(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = FusedDecoder.__init__

    def wrong(self: FusedDecoder, *args: object, **options: object) -> None:
        right(self, *args, **options)  # type: ignore[arg-type]
        attention = self.layers[1].attention
        assert attention is not None
        self.layers[1].attention = attention._replace(scale=1.2 * attention.scale)

    monkeypatch.setattr(FusedDecoder, "__init__", wrong)
    with caplog.at_level(logging.WARNING):
        loaded = load_model(model_folder("llama"), torch.float32, CPU)
    assert not isinstance(loaded.model, FusedDecoder)
    assert "native fused layers" in caplog.text


def test_float32_weights_of_a_bfloat16_checkpoint_take_half_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And multiplied as before, to the last bit."""
    model = make_model("llama")
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    model.save_pretrained(tmp_path)
    tokens, logits, sizes = random_prompts([20])[0], list[Tensor](), list[int]()
    for narrows in (True, False):
        if not narrows:
            monkeypatch.setattr(packing, "_is_bfloat16", lambda _: False)
        loaded = load_model(tmp_path, torch.float32, CPU)
        logits.append(Reader(ModelRunner(loaded, 40)).alone("a", tokens))
        sizes.append(sum(call.panels.num_bytes for layer in loaded.model.layers for call in layer.call.linears))
    assert torch.equal(*logits)
    assert sizes[0] * 2 == sizes[1]
    torch.testing.assert_close(logits[0][-1], reference.last_logits(model, tokens), rtol=1e-4, atol=1e-5)


def test_float32_weights_keep_their_type_where_it_is_needed(model_folder: Callable[..., Path]) -> None:
    loaded = load_model(model_folder("llama"), torch.float32, CPU)
    types = {call.panels.packed.dtype for layer in loaded.model.layers for call in layer.call.linears}
    assert types == {torch.float32}


def test_copies_share_what_is_packed(model_folder: Callable[..., Path]) -> None:
    loaded = load_model(model_folder("llama"), torch.float32, CPU)
    tokens = random_prompts([5])[0]
    wanted = Reader(ModelRunner(loaded, 40)).alone("a", tokens)
    copied = replace(loaded, model=copy.deepcopy(loaded.model))
    assert torch.equal(Reader(ModelRunner(copied, 40)).alone("a", tokens), wanted)


def test_positions_beyond_the_table(model_folder: Callable[..., Path]) -> None:
    """Rotations are made when they are needed."""
    loaded = load_model(model_folder("llama", max_position_embeddings=3000), torch.float32, CPU)
    by_torch = load_model(model_folder("llama", max_position_embeddings=3000), torch.float32, CPU, native=False)
    tokens = random_prompts([1200])[0]
    logits = []
    for decoder in (loaded, by_torch):
        reader = Reader(ModelRunner(decoder, 1300))
        reader.read("a", tokens[:1199])
        logits.append(reader.runner.forward([reader.piece("a", TokenTree.root(tokens[1199]))]))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_tied_embeddings_are_in_memory_once(
    quantization: str | None, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder("llama", tie_word_embeddings=True)
    loaded = load_model(folder, torch.float32, CPU, quantization)
    assert isinstance(loaded.model, FusedDecoder)
    assert (loaded.model.embedding is None) == (quantization is None), "a rounded head has lost what it was"
    monkeypatch.setattr(load_config, "can_fuse", lambda _: False)
    definition = load_model(folder, torch.float32, CPU, quantization, native=quantization is not None)
    if quantization is None:
        assert loaded.num_bytes == pytest.approx(definition.num_bytes, rel=0.02)
    tokens = random_prompts([9])[0]
    logits = [Reader(ModelRunner(decoder, 40)).alone("a", tokens) for decoder in (loaded, definition)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)
