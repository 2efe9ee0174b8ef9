"""The reproduction of the paper: sequences give the results of the tree; parts show the numbers of the paper."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import sequences
from benchmarks.paper import PaperConfig, run_paper
from benchmarks.sequences import SequenceRunner, paths_of, split
from specinfer.core.tree import Draw, TokenTree
from specinfer.model.batch import Piece
from specinfer.model.runner import ModelRunner
from tiny import VOCAB, resized

# Two branches below the root, one of which forks again: paths 0-1-3, 0-1-4 and 0-2.
TREE = TokenTree((7, 8, 9, 10, 11), (-1, 0, 0, 1, 1), tuple(Draw(node, "d", None, 0.5) for node in range(1, 5)))


def _piece(runner: ModelRunner) -> Piece:
    cache = runner.cache
    prefix = [3, 4, 5]
    slots = cache.reserve("r", len(prefix))
    runner.forward([Piece.from_span(prefix, None, cache.slots("r"), slots)])
    cache.commit("r", range(len(prefix)))
    return Piece.from_span([6, 7], TREE, cache.slots("r"), cache.reserve("r", 6))


def test_a_tree_is_split_into_its_paths(runner_of) -> None:  # type: ignore[no-untyped-def]
    runner = resized(runner_of(), 64)
    piece = _piece(runner)
    assert paths_of(piece) == [[0, 1, 3], [0, 1, 2, 4], [0, 1, 2, 5]]
    found = split(piece, runner.cache)
    assert [places for _, places in found] == [[0, 2], [1, 3], [4]]
    assert [sequence.num_logits for sequence, _ in found] == [2, 2, 1]
    own = np.concatenate(
        [piece.slots[path[-one.num_logits :]] for (one, _), path in zip(found, paths_of(piece), strict=True)]
    )
    assert set(own) == set(piece.slots[1:].tolist())
    runner.cache.free("sequences")
    runner.cache.free("r")


def test_sequences_have_the_logits_and_the_cache_of_the_tree(runner_of) -> None:  # type: ignore[no-untyped-def]
    runner = resized(runner_of(), 64)
    piece = _piece(runner)
    expected = runner.forward([piece]).clone()
    keys = [layer[piece.slots].clone() for layer in runner.tensors.keys]
    for layer in runner.tensors.keys:
        layer[piece.slots] = 0
    logits = SequenceRunner(runner).forward([piece])
    assert logits.shape == (len(TREE), VOCAB)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    for layer, key in zip(runner.tensors.keys, keys, strict=True):
        torch.testing.assert_close(layer[piece.slots], key, rtol=1e-4, atol=1e-4)
    assert len(runner.cache.reserved("sequences")) == 0
    runner.cache.free("r")


@pytest.mark.slow
def test_parts_are_written_beside_the_numbers_of_the_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_split = []
    monkeypatch.setattr(sequences, "split", lambda *given: num_split.append(1) or split(*given))
    parts = ("figure7", "figure10", "figure11")
    config = PaperConfig("demo", parts=parts, batch_sizes=(1, 2), max_tokens=8, json=tmp_path / "paper.json")
    report = run_paper(config)
    assert [table.name for table in report.tables] == list(parts)
    assert num_split  # the arm of sequences ran
    assert report.tables[0].as_list()[-2]["paper"] == "1.5-2.5"
    written = json.loads((tmp_path / "paper.json").read_text())
    assert [line["label"] for line in written["figure11"]][:2] == ["tree", "sequences"]
    assert float(written["figure7"][0]["2"]) > 0


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(ValueError, match=r"part must be one of figure7, .*, not 'table4'"):
        PaperConfig(parts=("table4",))
