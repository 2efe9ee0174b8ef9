"""What models compute: texts read in chunks, together and alone, trees on their ends, and errors of logits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import reference
from specinfer.core.tree import TokenTree
from specinfer.model.batch import Piece
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load import load_model
from specinfer.model.runner import ModelRunner
from specinfer.ops import Attends, Ending, LayerCall, LinearCall, Opens, PartCall
from specinfer.ops.cpu.layer_part import Adds
from specinfer.ops.cpu.recurrent_layer import RecurrentParts
from tiny import make_model, paths_of, random_prompts

CPU = torch.device("cpu")
#          9 - 11 - 12
#        /   \ 13
#  root - 10 - 9 - 11
TREE = TokenTree((8, 9, 10, 11, 9, 13, 12, 11), (-1, 0, 0, 1, 2, 1, 3, 4))
PROMPT = random_prompts([40])[0]  # five windows


def make(family: str, **changes: Any) -> Any:
    """A model whose norms, biases of choices and factors of layers are not those it begins with."""
    model = make_model(family, **changes)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight += torch.randn_like(weight) * 0.3
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer += torch.randn_like(buffer)
            # Layers of random models add little to hidden states: small numbers after layers would hide the rest.
            elif name.endswith("layer_scalar"):
                buffer.fill_((1.0, 0.8, 1.3, 0.9, 0.7)[int(name.split(".")[-2])])
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
        runner.forward([Piece.from_span(chunk, None, cache.slots("a"), slots)])
        cache.commit("a", range(len(chunk)))
    slots = cache.reserve("a", 1)
    logits = runner.forward([Piece.from_span(PROMPT[-1:], TokenTree.root(PROMPT[-1]), cache.slots("a"), slots)])
    cache.free("a")
    return logits[0]


def error(found: Tensor, wanted: Tensor) -> float:
    """The error's size, of what the logits differ by among themselves."""
    return float((found - wanted).norm() / (wanted - wanted.mean()).norm())


def check_rounding(model: Any, folder: Path, dtype: torch.dtype, quantization: str | None) -> None:
    """Check that native layers of a saved model round hardly more than the definition of transformers does."""
    wanted = reference.last_logits(model, PROMPT)
    runner, definition = (
        ModelRunner(load_model(folder, dtype, CPU, quantization, native=native), 64) for native in (True, False)
    )
    assert isinstance(runner.loaded.model, FusedDecoder)
    ours, theirs = (error(last_logits(each), wanted) for each in (runner, definition))
    assert ours < 1.5 * theirs + 0.01


class Reader:
    """Reads texts into a runner's cache, in chunks and together."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def read(self, name: str, tokens: list[int]) -> None:
        slots = self.runner.cache.reserve(name, len(tokens))
        self.runner.forward([Piece.from_span(tokens, None, self.runner.cache.slots(name), slots)])
        self.runner.cache.commit(name, range(len(tokens)))

    def piece(self, name: str, tree: TokenTree, chain: Sequence[int] = ()) -> Piece:
        """A tree at the end of what was read and of a chain, whose last token is the root."""
        chain = chain or tree.tokens[:1]
        slots = self.runner.cache.reserve(name, len(chain) + tree.num_guessed)
        return Piece.from_span(chain, tree, self.runner.cache.slots(name), slots)

    def alone(self, name: str, tokens: list[int]) -> Tensor:
        """[tokens, vocab] after each of the tokens, which are read one at a time."""
        rows = []
        for token in tokens:
            rows.append(self.runner.forward([self.piece(name, TokenTree.root(token))])[0].clone())
            self.runner.cache.commit(name, [0])
        self.runner.cache.free(name)
        return torch.stack(rows)

    def check_bits(self, text: list[int], tree: TokenTree, logits: Tensor, every: int = 1) -> None:
        """Check that a tree's logits after a text have the bits of tokens that are read one at a time.

        Args:
            every: The leaves whose paths are read: all, or each second one, and so on.
        """
        paths = paths_of(tree)
        for leaf in sorted(set(range(len(tree))) - set(tree.parents))[::every]:
            rows = self.alone("alone", [*text, tree.tokens[0], *paths[leaf]])
            for node, path in enumerate(paths):
                if path == paths[leaf][: len(path)]:
                    assert torch.equal(logits[node], rows[len(text) + len(path)])


def tree_logits(runner: ModelRunner) -> Tensor:
    """[2 * nodes, vocab] of `TREE` on two texts in one pass, of which one is longer than every sliding window."""
    reader, (long, short) = Reader(runner), _texts(runner)
    reader.read("long", long[:5])
    reader.read("long", long[5:14])
    chains = {"long": [*long[14:], 8], "short": [*short, 8]}
    try:
        return runner.forward([reader.piece(name, TREE, chain) for name, chain in chains.items()])
    finally:
        for name in chains:
            runner.cache.free(name)


def check_tree_logits(model: Any, runner: ModelRunner) -> None:
    """Check that the logits of each node are those of transformers after the path to it."""
    texts = [[*text, 8, *path] for text in _texts(runner) for path in paths_of(TREE)]
    wanted = reference.last_logits_of_each(model, texts)
    torch.testing.assert_close(tree_logits(runner), wanted, rtol=1e-3, atol=2e-4)


def _texts(runner: ModelRunner) -> list[list[int]]:
    return [text[: runner.loaded.max_position - 4] for text in random_prompts([21, 3])]


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
