"""On a machine with bursts of other load, "auto" chooses about the same tree each time that costs are measured."""

import logging
from collections.abc import Callable
from pathlib import Path
from statistics import median_low
from types import SimpleNamespace

import pytest
import torch

from specinfer import LLM
from specinfer.policy import cost_measurement
from specinfer.policy.acceptance import AcceptanceModel
from specinfer.policy.cost_measurement import SIZES
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.policy.rank_choice import RankChoice
from tests.policy.simulated_machines import BusyClock

NUM_RUNS = 20

# Seconds of a pass by its rows, and of a draft level of one node.
MACHINES: dict[str, tuple[Callable[[int], float], float]] = {
    "short passes": (lambda rows: 0.001 * max(1 + 0.05 * rows, 0.1 * rows), 0.0003),
    "a processor with few cores": (lambda rows: 0.02 * max(1 + 0.02 * rows, 0.06 * rows), 0.003),
    "rows cost nearly nothing": (lambda rows: 0.01 * (1 + 0.001 * rows), 0.002),
    "slow drafter": (lambda rows: 0.01 * (1 + 0.03 * rows), 0.0045),
    "rows cost as much as passes": (lambda rows: 0.01 * (0.2 + 0.8 * rows), 0.004),
    "little gain": (lambda rows: 0.01 * (1 + 0.22 * rows), 0.0018),
}


class NoisyMachine:
    """A target and a drafter whose passes take more or less as long as costs tell, but in bursts of other load."""

    loaded = SimpleNamespace(taps=None, device=torch.device("cpu"))
    cache = SimpleNamespace(free=lambda _: None)

    def __init__(self, true: CostModel, seed: int) -> None:
        self._true, self.clock = true, BusyClock(seed)

    def _work(self, seconds: float) -> None:
        self.clock.work(seconds * (1 + abs(self.clock.random.normal(0, 0.03))))

    def run_pass(self, size: int) -> None:
        self._work(float(self._true.target(size)))

    def draft(self, _: object, budgets: object) -> None:
        widths = budgets[0].widths  # type: ignore[index]
        self._work(float(self._true.draft(sum(widths), len(widths))))

    def forget(self, _: object) -> None:
        pass

    def measure(self) -> CostModel:
        curve = cost_measurement._fastest(SIZES, self.run_pass, 3.0)
        return CostModel(curve, *cost_measurement._draft_costs(self, self, 3.0))  # type: ignore[arg-type]


def choose(costs: CostModel) -> tuple[int, int]:
    """Return the index and the number of nodes of the tree that is chosen at start."""
    optimizer = RankChoice(costs, AcceptanceModel())
    optimizer.choose(1)
    return optimizer._chosen, int(optimizer.sizes.num_nodes[optimizer._chosen])


@pytest.mark.parametrize("name", MACHINES)
def test_measurements_under_load_choose_the_same_kind_of_tree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None where the others have none, or else of a size that differs by half at most, and as fast within 3 %."""
    monkeypatch.setattr(cost_measurement, "_emptying_caches", lambda _: lambda: None)
    seconds, level = MACHINES[name]
    true = CostModel(
        Curve(SIZES, [seconds(size) for size in SIZES]), Curve((1, 64), (level, 1.3 * level)), 0.0, level / 3
    )
    rates = RankChoice(true, AcceptanceModel()).rates(1)
    chosen = []
    for seed in range(NUM_RUNS):
        machine = NoisyMachine(true, seed)
        monkeypatch.setattr(cost_measurement.time, "perf_counter", lambda machine=machine: machine.clock.now)
        chosen.append(choose(machine.measure()))
    usual = median_low([nodes for _, nodes in chosen])
    agree = [nodes == usual if 0 in (nodes, usual) else 2 / 3 <= nodes / usual <= 1.5 for _, nodes in chosen]
    # Where rows are expensive, trees of one and of three nodes are about equally fast.
    least = 0.8 if name == "little gain" else 0.9
    assert sum(agree) >= least * NUM_RUNS, chosen
    assert sum(rates[index] >= 0.97 * rates.max() for index, _ in chosen) >= 0.9 * NUM_RUNS


def test_loading_logs_what_is_expected_at_info_level(
    model_folder: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """As `specinfer serve` shows it: its lines are those of the level info and above."""
    with caplog.at_level(logging.INFO, "specinfer"):
        LLM(model_folder(tokenizer=True), device="cpu", drafters=["ngram"], tree="auto", max_num_seqs=2)
    (record,) = [record for record in caplog.records if record.getMessage().startswith("auto: ")]
    assert record.levelno == logging.INFO
    assert " expected" in record.getMessage() or "plain decoding, " in record.getMessage()
