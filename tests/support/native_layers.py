"""Models whose layers are native, and what they compute: texts read in chunks and in company, errors of logits."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specinfer.core.tree import TokenTree
from specinfer.model.batch import Piece
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load import load_model
from specinfer.model.runner import ModelRunner
from specinfer.ops import Attends, Ending, LayerCall, LinearCall, Opens, PartCall
from specinfer.ops.cpu.layer_part import Adds
from specinfer.ops.cpu.recurrent_layer import RecurrentParts
from tiny import make_model, random_prompts

CPU = torch.device("cpu")
TREE = TokenTree((8, 9, 10, 11, 9, 13, 12, 11), (-1, 0, 0, 1, 2, 1, 3, 4))
PROMPT = random_prompts([40])[0]  # five windows


def make(family: str, **changes: Any) -> Any:
    """A model whose norms are not those it begins with."""
    model = make_model(family, **changes)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight += torch.randn_like(weight) * 0.3
    return model


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32, quantization: str | None = None) -> ModelRunner:
    return ModelRunner(load_model(folder, dtype, CPU, quantization), 64)


def load_fused(model: Any, folder: Path) -> tuple[ModelRunner, FusedDecoder]:
    runner = load(saved(model, folder))
    decoder = runner.loaded.model
    assert isinstance(decoder, FusedDecoder)
    return runner, decoder


def last_logits(runner: ModelRunner) -> Tensor:
    """[vocab] after the prompt, which is read in two chunks."""
    cache = runner.cache
    for chunk in (PROMPT[:25], PROMPT[25:-1]):
        slots = cache.reserve("a", len(chunk))
        runner.forward([Piece.of_span(chunk, None, cache.slots("a"), slots)])
        cache.commit("a", range(len(chunk)))
    slots = cache.reserve("a", 1)
    logits = runner.forward([Piece.of_span(PROMPT[-1:], TokenTree.root(PROMPT[-1]), cache.slots("a"), slots)])
    cache.free("a")
    return logits[0]


def error(found: Tensor, wanted: Tensor) -> float:
    """The error's size, of what the logits differ by among themselves."""
    return float((found - wanted).norm() / (wanted - wanted.mean()).norm())


class Reader:
    """Reads texts into a runner's cache, in chunks and in company."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def read(self, name: str, tokens: list[int]) -> None:
        slots = self.runner.cache.reserve(name, len(tokens))
        self.runner.forward([Piece.of_span(tokens, None, self.runner.cache.slots(name), slots)])
        self.runner.cache.commit(name, range(len(tokens)))

    def piece(self, name: str, tree: TokenTree) -> Piece:
        slots = self.runner.cache.reserve(name, len(tree))
        return Piece.of_span(tree.tokens[:1], tree, self.runner.cache.slots(name), slots)

    def alone(self, name: str, tokens: list[int]) -> Tensor:
        """[vocab] after the last token; all of them one at a time."""
        for token in tokens[:-1]:
            self.read(name, [token])
        logits = self.runner.forward([self.piece(name, TokenTree.root(tokens[-1]))])
        self.runner.cache.free(name)
        return logits[0]


def paired_call(
    linears: tuple[LinearCall, LinearCall, LinearCall, LinearCall],
    norms: tuple[Tensor, Tensor],
    eps: float,
    *,
    post_norms: tuple[Tensor | None, Tensor | None] = (None, None),
    gate: Ending = Ending.GATED,
    recurrent: RecurrentParts | None = None,
) -> LayerCall:
    """A layer of Llama's shape: attention, or a recurrence, then a gated MLP.

    Args:
        linears: Queries, keys and values together, or what a recurrence reads; the output of either; alternating
            gates and values; the MLP's output.
    """
    adds = [Adds(one) for one in post_norms]
    mixing = PartCall(linears[:2], recurrent or Attends(), norms[0], eps, adds=adds[0])
    return LayerCall((mixing, PartCall(linears[2:], Opens(ending=gate), norms[1], eps, adds=adds[1])))
