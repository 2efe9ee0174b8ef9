"""Acceptance: what is counted is what the requests counted, errors are the jackknife's, bad input is refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from heads import save_eagle3
from reports import shown, written
from specinfer.bench import acceptance
from specinfer.bench.acceptance import next_token_ranks, run_acceptance
from specinfer.bench.acceptance_drafters import describe, disturbed_copies
from specinfer.bench.acceptance_options import PARTS, AcceptanceConfig
from specinfer.bench.acceptance_plans import PLANS, shapes
from specinfer.bench.acceptance_report import SAME_TIME, Counted, Counts, HitRates, Setup, jackknife, ratios
from specinfer.bench.acceptance_time import fitting_trees
from specinfer.cli.app import app
from specinfer.core.tree_shape import parse_tree
from specinfer.model.load import load_model
from specinfer.model.runner import ModelRunner
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.reporting.report import Report
from tiny import load_runner

PROMPTS = ((1, 2, 3, 4), (5, 6, 7, 8, 9))
SETUP = Setup(("draft",), "coupled", "shared-noise", "1", 0.0)


def make_config(folders: tuple[str, str], **changes: Any) -> AcceptanceConfig:
    target, drafter = folders
    options = {"model": target, "drafters": (drafter, "suffix"), "device": "cpu", "prompts": PROMPTS,
               "max_tokens": 12, "nodes": (4,), "temperatures": (0.0, 1.0), "num_prompts": 2}  # fmt: skip
    return AcceptanceConfig(**(options | changes))


@pytest.fixture(scope="module")
def report(folders: tuple[str, str]) -> Report[Counted]:
    return run_acceptance(make_config(folders))


def test_all_parts_have_their_rows(report: Report[Counted]) -> None:
    assert list(report.measured.parts) == [*PARTS[1:], SAME_TIME]
    assert [(rates.drafter, rates.temperature) for rates in report.measured.hit_rates] == [
        ("drafter", 0.0),
        ("drafter", 1.0),
    ]
    assert [row.label for row in report.measured.parts["table2"]] == ["greedy", "sampled"]
    assert [list(row.cells) for row in report.measured.parts["table2"]] == [[f"k={k}" for k in range(1, 6)]] * 2
    assert [row.label.split(",")[0] for row in report.measured.parts["table3"]] == [
        "target-only",
        "target-only",
        "multi-step",
    ]
    assert [row.label for row in report.measured.parts["drafters"]] == ["drafter", "suffix", "the first 2, merged"]
    rules = report.measured.parts["rules"]
    assert [row.label for row in rules if row.group.startswith("temperature 0,")] == ["any rule"]
    assert len(rules) == 1 + 7


def test_a_drafter_that_is_the_target_is_always_right(report: Report[Counted]) -> None:
    greedy, sampled = report.measured.hit_rates
    assert [greedy.within(k).value for k in (1, 5)] == [1.0, 1.0]
    assert greedy.within(1).value >= sampled.within(1).value
    for row in report.measured.parts["rules"]:
        if row.label == "any rule" or row.label.startswith("coupled"):
            # Chains of 4, and 12 tokens: passes of 5, 5 and 2.
            assert row.cells["chain"].tokens_per_pass.value == pytest.approx(4.0)
            assert row.cells["chain"].generated == (12, 12)
            assert row.cells["chain"].passes == (3, 3)


def test_trees_that_are_compared_have_the_same_number_of_nodes(report: Report[Counted]) -> None:
    for num_nodes in (1, 2, 3, 4, 7, 8, 16, 31, 32, 64, 1024):
        sizes = {name: parse_tree(tree).max_nodes for name, tree in shapes(num_nodes).items()}
        assert sizes["chain"] == sizes["best-first"] == num_nodes
        assert all(num_nodes - 4 < size <= num_nodes for size in sizes.values()), sizes
    assert shapes(32)["paper"] == "1,1,5,1,1,1,1,1"  # the paper's own
    assert shapes(32)["wide"] == "4,1,1,1,1,1,1,1"


def test_rules_are_compared_on_the_trees_that_are_given(folders: tuple[str, str]) -> None:
    rules = PLANS["rules"](make_config(folders, parts=("rules",), trees=("<1,1,3>", "best-first:6:2")), folders[1:])
    assert [group for group, *_ in rules if not group.endswith("1")] == ["temperature 0"]
    for _, _, cells in rules:
        assert {name: setup.tree for name, setup in cells.items()} == {
            "<1,1,3>": "<1,1,3>",
            "best-first:6:2": "best-first:6:2",
        }


def test_errors_are_those_of_a_mean_where_the_estimate_is_one() -> None:
    values = [1.0, 4.0, 7.0, 2.0]
    found = jackknife(lambda prompts: sum(values[i] for i in prompts) / len(prompts), len(values))
    spread = torch.tensor(values).std().item() / len(values) ** 0.5
    assert (found.value, found.error) == (3.5, pytest.approx(spread))
    assert jackknife(lambda prompts: 1.0, 1).error is None


def test_ratios_are_paired() -> None:
    base = Counts(SETUP, (10, 20, 30), (10, 10, 10), (0, 0, 0))
    double = Counts(SETUP, (20, 40, 60), (10, 10, 10), (0, 0, 0))
    assert base.tokens_per_pass.error
    over = double.over(base)
    assert (over.value, over.error) == (pytest.approx(2.0), pytest.approx(0.0, abs=1e-12))


def test_several_drafters_are_compared_with_the_best_single_one(report: Report[Counted]) -> None:
    compared = ratios("drafters", report.measured.parts["drafters"])
    assert {row.label for row, *_ in compared} == {"suffix", "the first 2, merged"}
    assert all(base.setup.drafters == ("drafter",) for *_, base in compared)
    naive = ratios("table3", report.measured.parts["table3"])
    assert {base.setup.drawing for *_, base in naive} == {"top-k"}


def test_drafters_are_compared_in_the_same_time_too(report: Report[Counted]) -> None:
    for row in report.measured.parts["drafters"]:
        for counts in row.cells.values():
            assert counts.tokens_per_second == sum(counts.generated) / counts.seconds > 0
    assert "The same runs, all prompts at once: tokens per second" in shown(report)
    rows = report.measured.parts[SAME_TIME]
    assert [row.label for row in rows] == ["drafter", "suffix", "the first 2, merged"]
    assert re.fullmatch(r"best first, steps of \d+\.\d\d ms, verified by coupled", rows[0].group)
    shape = rows[0].cells["temperature 0"].setup.tree.removeprefix("best-first:")
    assert f"{rows[0].cells['temperature 0'].tokens_per_pass.value:.2f}±0.00 {shape}" in shown(report)


def test_trees_fit_into_the_time_of_a_step_by_measured_costs() -> None:
    costs = CostModel(Curve([1, 9], [1.0, 1.8]), Curve([1, 100], [0.2, 0.2]), draft_start=0.1)
    # 1.0 of the first row, 0.1 of each node, 0.2 of each level and 0.1 of the first.
    assert fitting_trees(costs, 2.01, 64) == [(7, 1), (5, 2)]
    assert fitting_trees(costs, 2.61, 64) == [(10, 1), (9, 2), (7, 4)]  # beyond 9 rows a row costs 0.2
    assert fitting_trees(costs, 2.61, 8) == [(8, 1), (8, 2), (7, 4)]
    assert fitting_trees(costs, 1.0, 64) == [(1, 1)]


def test_every_kind_of_drafter_is_described(tmp_path: Path) -> None:
    assert describe("self:int8") == "the target itself with weights rounded to int8"
    assert describe(str(save_eagle3(tmp_path / "head"))) == f"the EAGLE-3 head {tmp_path / 'head'}"
    assert describe(str(tmp_path)) == f"the small model {tmp_path}"


def test_hit_rates_count_ranks_within() -> None:
    rates = HitRates("draft", 0.0, ((0, 1, 4), (0,)))
    assert [rates.within(k).value for k in (1, 2, 4, 5)] == [0.5, 0.75, 0.75, 1.0]


def test_ranks_are_those_of_the_model_itself(runner_of: Callable[..., ModelRunner]) -> None:
    runner = runner_of()
    prompt, output = [3, 1, 4, 1, 5], [9, 2, 6]
    with torch.inference_mode():
        reference = load_model(runner.loaded.folder, torch.float32, torch.device("cpu"))
        fresh = load_runner(reference.folder)
        expected = []
        for i, token in enumerate(output):
            row = torch.tensor(next_rows(fresh, [*prompt, *output[:i]]))
            expected.append(int((row > row[token]).sum()))
    assert next_token_ranks(runner, prompt, output) == expected


def test_an_unknown_token_ranks_behind_all_that_a_drafter_knows(
    runner_of: Callable[..., ModelRunner],
) -> None:
    folder, ids = runner_of().loaded.folder, torch.tensor([9, 6, 1])
    cut = ModelRunner(load_model(folder, torch.float32, torch.device("cpu"), token_map=ids), 64)
    ranks = next_token_ranks(cut, [3, 1, 4], [9, 2, 6])
    assert ranks[1] == len(ids)
    assert max(ranks[0], ranks[2]) < len(ids)


def next_rows(runner: ModelRunner, tokens: list[int]) -> list[float]:
    from specinfer.core.tree import TokenTree
    from specinfer.model.batch import Piece

    slots = runner.cache.reserve("x", len(tokens))
    try:
        piece = Piece.from_span(tokens, TokenTree.root(tokens[-1]), runner.cache.slots("x"), slots)
        return runner.forward([piece])[0].tolist()
    finally:
        runner.cache.free("x")


def test_disturbed_copies_are_worse_and_worse(folders: tuple[str, str], tmp_path: Path) -> None:
    copies = disturbed_copies(Path(folders[1]), tmp_path)
    all_of_them = [Path(folder) for folder in (folders[1], *copies)]
    models = [load_model(folder, torch.float32, torch.device("cpu"), native=False).model for folder in all_of_them]
    whole, *others = [torch.cat([p.flatten() for p in model.parameters()]) for model in models]
    distances = [(other - whole).norm().item() for other in others]
    assert 0 < distances[0] < distances[1]


def test_what_is_written_and_shown(folders: tuple[str, str], report: Report[Counted], tmp_path: Path) -> None:
    paths = {"json": tmp_path / "numbers.json", "plot": str(tmp_path / "plot.svg")}
    made = run_acceptance(make_config(folders, parts=("table1", "drafters"), drafters=(folders[1],), **paths))
    numbers = written(made, tmp_path / "numbers.json")
    assert {"table1", "drafters", "options", "environment", "ratios"} <= numbers.keys()
    assert "table2" not in numbers
    assert Path(paths["plot"]).read_text().lstrip().startswith("<?xml")
    report.draw(tmp_path / "all.png")
    assert (tmp_path / "all.png").stat().st_size > 1000
    text = shown(report, 80)
    assert "Table 1" in text
    assert "as a multiple of the best single drafter" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parts": ("table9",)}, "part must be one of table1, .*, not 'table9'"),
        ({"parts": ("shift",)}, "shift is measured by python -m benchmarks shift"),
        ({"parts": ()}, "parts: none given"),
        ({"nodes": (0,)}, "nodes must be a whole number from 1 to 1024, not 0"),
        ({"nodes": (-1,)}, "nodes must be"),
        ({"nodes": (1_000_000,)}, "nodes must be"),
        ({"nodes": (8, 8)}, "nodes: 8, 8 given"),
        ({"trees": ("auto",)}, "trees: 'auto' has no fixed number of nodes"),
        ({"trees": ("1,1", "1,1")}, "trees: 1,1, 1,1 given"),
        ({"trees": ("1,1",), "parts": ("table2",)}, "trees: only the rules part takes trees"),
        ({"num_prompts": -3}, "num_prompts must be"),
        ({"max_tokens": 1}, "max_tokens must be"),
        ({"temperatures": (-1.0,)}, "temperature must be"),
        ({"verification": "guess"}, "verification must be one of"),
        ({"dtype": "int3"}, "dtype must be one of"),
        ({"seed": -1}, "seed must be"),
        ({"prompts": ()}, "prompts: one is empty"),
        ({"drafters": ()}, "drafters: empty"),
        ({"plot": "x.bmp"}, "plot: x.bmp must end in one of"),
        ({"plot": "/no/such/folder/x.png"}, "plot: /no/such/folder/x.png cannot be written"),
        ({"json": "."}, "json: . cannot be written"),
    ],
)
def test_bad_input_is_refused_before_the_long_work(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    def refuse_to_load(*_: object, **__: object) -> None:
        raise AssertionError("the long work began")

    monkeypatch.setattr(acceptance, "LLM", refuse_to_load)
    with pytest.raises(ValueError, match=message):
        run_acceptance(make_config(folders, **changes))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--part", "table9"], "part must be one of"),
        (["--nodes", "0"], "nodes must be a whole number from 1 to 1024"),
        (["--num-prompts", "-1"], "--num-prompts must be"),
        (["--json", "/no/such/folder/x.json"], "json: /no/such/folder/x.json cannot be written"),
    ],
)
def test_the_command_refuses_in_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["bench", "acceptance", *words])
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.err.startswith("specinfer: error: ")
    assert message in said.err
    assert len(said.err.splitlines()) == 1
