"""On simulated machines, "auto" is never clearly slower than plain decoding, whatever the batch and the lengths."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.batches.drafting import RIGHT_TOKEN, TextDrafting
from benchmarks.batches.machines import MACHINES
from benchmarks.batches.report import LEAST, print_batches
from benchmarks.batches.run import (
    BatchesConfig,
    Cell,
    best_trees,
    cells,
    compare,
    make_auto,
    make_requests,
    run_batches,
    serve,
)
from benchmarks.batches.texts import WRONG, Text, read_texts
from specinfer.core.request import Span
from specinfer.core.tree import TreeBudget
from specinfer.policy.base import FixedPolicy

SLOW_MEMORY, MIDDLE, MATRIX = MACHINES


@pytest.fixture(scope="module")
def texts() -> dict[int, list[Text]]:
    """A few texts of the embedded pair, greedy and sampled."""
    return {temperature: read_texts(6, 96, temperature) for temperature in (0, 1)}


# Those that were below before trees knew of the prompts in their pass, and others on all sides of them.
REPRESENTATIVE = [
    Cell(MATRIX, 32, 2000, 64, 1, in_turn=True),
    Cell(MIDDLE, 8, 2000, 8, 1, in_turn=True),
    Cell(SLOW_MEMORY, 16, 2000, 8, 1),
    Cell(SLOW_MEMORY, 1, 20, 8, 1),
    Cell(SLOW_MEMORY, 8, 200, 64, 0),
    Cell(MIDDLE, 16, 200, 64, 1, in_turn=True),
    Cell(SLOW_MEMORY, 64, 20, 64, 0),
]


@pytest.mark.parametrize("cell", REPRESENTATIVE, ids=lambda cell: f"{cell.machine.name}-{cell.batch}-{cell.prompt}")
def test_auto_is_as_fast_as_plain_decoding_with_the_reading_of_prompts(
    cell: Cell, texts: dict[int, list[Text]]
) -> None:
    assert compare(cell, texts[cell.temperature]).speed >= LEAST


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32, 64])
def test_auto_is_as_fast_as_plain_decoding_everywhere(batch: int) -> None:
    report = run_batches(BatchesConfig(batches=(batch,)))
    low = [one for one in report.results if one.speed < LEAST]
    assert not low
    assert len(report.results) == 3 * 3 * 3 * 2 * (1 if batch == 1 else 2)


def test_small_batches_of_a_good_drafter_are_much_faster(texts: dict[int, list[Text]]) -> None:
    for machine, least in ((SLOW_MEMORY, 1.3), (MATRIX, 2.0)):
        cell = Cell(machine, 8, 20, 64, 0)
        found = compare(cell, texts[0])
        assert found.decoding > least
        assert found.nodes > 0.3


@pytest.mark.covering(1)
@pytest.mark.parametrize(("batch", "least"), [(16, 1.25), (32, 1.05)])
@pytest.mark.parametrize("temperature", [0, 1])
def test_large_batches_gain_where_rows_are_cheap(
    batch: int, least: float, temperature: int, texts: dict[int, list[Text]]
) -> None:
    """In all, and at most a tenth less than with the best of some fixed least probabilities of a draft token."""
    cell = Cell(MATRIX, batch, 20, 64, temperature, in_turn=True)
    assert compare(cell, texts[temperature]).speed >= least
    auto, *fixed = (
        serve(cell, texts[temperature], make)
        for make in (
            make_auto,
            *(lambda _, prob=prob: FixedPolicy(TreeBudget(64, 4, min_path_prob=prob)) for prob in (0.2, 0.4, 0.7)),
        )
    )
    assert auto.seconds <= 1.1 * min(one.seconds for one in fixed)


def test_the_best_division_of_nodes_shows_where_nothing_is_to_be_gained(texts: dict[int, list[Text]]) -> None:
    """Where a row costs as much as a token of plain decoding, no tree is faster."""
    cell = Cell(SLOW_MEMORY, 32, 20, 8, 0)
    plain = serve(cell, texts[0], lambda _: FixedPolicy()).decoding_rate(32)
    assert best_trees(cell, texts[0])[0] < 1.03 * plain


def test_trees_on_a_text_have_its_tokens_and_end_where_the_drafter_is_wrong() -> None:
    confidence = np.tile(np.array([0.9, 0.05] + [0.001] * 6, dtype=np.float32), (4, 1))
    text = Text(confidence, np.array([0, 1, 0, WRONG]))
    (request,), places = make_requests(Cell(MIDDLE, 1, 3, 4, 0), [text], 1, seed=0)
    drafting = TextDrafting(places, [text])
    (tree,), num_levels = drafting.grow([Span(request, 2, 3)], [TreeBudget.expansion((1, 2, 1, 1))])
    assert num_levels == 4
    path = drafting.accepted(tree).path
    assert [tree.tokens[node] for node in path] == [RIGHT_TOKEN] * 3
    assert drafting.accepted(drafting.grow([Span(request, 2, 3)], [TreeBudget()])[0][0]).path == ()


def test_texts_are_what_the_drafter_would_propose(texts: dict[int, list[Text]]) -> None:
    for temperature, least in ((0, 0.6), (1, 0.45)):
        right = np.concatenate([text.right for text in texts[temperature]])
        assert least < (right == 0).mean() < 0.95
        confidence = np.concatenate([text.confidence for text in texts[temperature]])
        assert (np.diff(confidence, axis=1) <= 0).all()
        sure, unsure = confidence[:, 0] > 0.9, confidence[:, 0] < 0.5
        assert (right[sure] == 0).mean() > (right[unsure] == 0).mean() + 0.2


def test_costs_are_those_of_the_measured_machine() -> None:
    """Within a tenth; rows, and seconds of a pass that were measured."""
    for num_rows, seconds in ((1, 0.060), (8, 0.063), (14, 0.071), (16, 0.0835), (32, 0.159), (64, 0.330)):
        assert SLOW_MEMORY.target(num_rows) == pytest.approx(seconds, rel=0.1)
    costs = SLOW_MEMORY.measured()
    assert float(costs.draft(4, 4)) == pytest.approx(SLOW_MEMORY.draft(4, 4))
    assert float(costs.target(24)) == pytest.approx(SLOW_MEMORY.target(24), rel=0.02)


def test_the_report_names_what_is_too_slow(tmp_path: Path) -> None:
    path = tmp_path / "batches.json"
    torch.manual_seed(0)
    config = BatchesConfig((2,), (20,), (8,), (0,), num_texts=2, num_tokens=16, best=True, json=path)
    report = run_batches(config)
    assert [one.cell for one in report.results] == list(cells(config))
    assert all((one.best is None) == one.cell.in_turn for one in report.results)
    assert len(json.loads(path.read_text())["results"]) == 6
    shown = io.StringIO()
    print_batches(report, Console(file=shown, width=100))
    assert "0 of 6 cells" in shown.getvalue()
    assert f"{min(one.speed for one in report.results if one.cell.machine is MATRIX):.2f}" in shown.getvalue()


@pytest.mark.parametrize("field", [{"batches": (0,)}, {"temperatures": (2,)}, {"num_texts": 0}, {"num_tokens": 1}])
def test_a_wrong_field_is_named(field: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        BatchesConfig(**field)  # type: ignore[arg-type]
