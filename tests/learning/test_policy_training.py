"""Training of a speculation policy: step logs, the outcomes of smaller trees, and what the network learns."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from specinfer.drafters.growth.calibration import Calibration
from specinfer.learning.policy.network_training import (
    evaluate_network,
    fixed_rates,
    rate_of,
    train_network,
)
from specinfer.learning.policy.options import PolicyConfig
from specinfer.learning.policy.step_collection import collect_steps, make_tasks
from specinfer.learning.policy.training import train_policy
from specinfer.learning.policy.tree_outcomes import _count, outcomes_of
from specinfer.llm import LLM
from specinfer.policy.features import feature_names
from specinfer.policy.network import Configuration, PolicyNetwork, make_configurations
from specinfer.policy.step_log import StepEntry, StepLog, read_log, write_log
from tests.learning.outputs import save_prompts
from tests.policy.simulated_machines import slow_target_costs
from tiny import random_prompts, save_model, save_tokenizer

SLOTS = ("model", "suffix")
NAMES = feature_names(SLOTS)
COSTS = slow_target_costs()


def entry(
    parents: Sequence[int],
    draws: Sequence[tuple[int, int, float]],
    path: Sequence[int],
    features: Sequence[float] | None = None,
) -> StepEntry:
    row = tuple([0.5] * len(NAMES) if features is None else features)
    return StepEntry(row, (0, 1), 96, 48, 0.0, tuple(parents), tuple(draws), tuple(path))


@st.composite
def entries(draw: st.DrawFn) -> StepEntry:
    """Trees in which every drafter's guesses hang on its own."""
    makers: list[set[int]] = [{0, 1}]
    parents: list[int] = []
    for node in range(1, draw(st.integers(0, 9)) + 1):
        parent = draw(st.integers(0, node - 1))
        parents.append(parent)
        above = sorted(makers[parent])
        makers.append(draw(st.sets(st.sampled_from(above), min_size=1)))
    draws = [
        (node, slot, draw(st.sampled_from([0.1, 0.4, 0.75, 0.98])))
        for node in range(1, len(makers))
        for slot in sorted(makers[node])
    ]
    path, last = [], 0
    while draw(st.booleans()) and (below := [n for n, parent in enumerate(parents, 1) if parent == last]):
        last = draw(st.sampled_from(below))
        path.append(last)
    return entry(parents, draws, path)


@given(st.lists(entries(), min_size=1, max_size=4))
def test_yields_are_those_of_trees_grown_node_by_node(made: list[StepEntry]) -> None:
    menu = (
        Configuration(),
        *(
            Configuration(slots, nodes, depth, least)
            for slots in (("model",), ("suffix",), SLOTS)
            for nodes, depth, least in ((1, 1, 0.0), (3, 2, 0.05), (8, 8, 0.2), (96, 48, 0.0))
        ),
    )
    log = StepLog(SLOTS, NAMES, tuple(made))
    outcomes = outcomes_of(log, menu)
    assert outcomes.known.all()
    for i, one in enumerate(made):
        makers = [frozenset(slot for node, slot, _ in one.draws if node == n) for n in range(1, len(one.parents) + 1)]
        for j, configuration in enumerate(menu):
            asked = frozenset(map(SLOTS.index, configuration.slots))
            quality = _worth(log, one, asked)
            accepted, nodes = reference.subtree_yield(
                one.parents, makers, quality, one.path, asked,
                configuration.max_nodes, configuration.max_depth, configuration.min_path_prob,
            )  # fmt: skip
            assert (outcomes.accepted[i, j], outcomes.nodes[i, j]) == (accepted, nodes)
            assert bool(outcomes.levels[i, j]) is configuration.uses_model


def _worth(log: StepLog, one: StepEntry, asked: frozenset[int]) -> list[float]:
    """Of the nodes 1, 2, ...: the product along the path of 1 less the chance that all who guess a node err."""
    calibration = Calibration()
    for other in log.entries:
        _count(calibration, other, True)
    quality = [1.0]
    seen: dict[tuple[int, int], int] = {}
    missed = [1.0] * (len(one.parents) + 1)
    for node, slot, sure in one.draws:
        rank = seen.get((one.parents[node - 1], slot), 0)
        seen[one.parents[node - 1], slot] = rank + 1
        if slot in asked:
            missed[node] *= 1.0 - float(calibration.acceptance_prob(f"{slot} greedy", [rank], [sure])[0])
    for node, parent in enumerate(one.parents, 1):
        quality.append((1.0 - missed[node]) * quality[parent])
    return quality[1:]


def test_a_small_tree_teaches_nothing_about_a_larger_one() -> None:
    small = replace(entry([0, 1], [(1, 0, 0.9), (2, 0, 0.9)], [1]), used=(0,), max_nodes=7, max_depth=6)
    menu = make_configurations(SLOTS)
    (known,) = outcomes_of(StepLog(SLOTS, NAMES, (small,)), menu).known
    assert {str(one) for one, is_known in zip(menu, known, strict=True) if is_known} == {
        "off",
        "model 3:3",
        "model 7:6",
    }


# ------------------------------------------------------------------------------------------------- logs


def _log(count: int = 3) -> StepLog:
    made = [entry([0, 0, 1], [(1, 0, 0.91), (2, 1, 0.5), (3, 0, 0.7)], [1, 3]) for _ in range(count)]
    made[0] = replace(made[0], features=(float("nan"), *made[0].features[1:]))
    return StepLog(SLOTS, NAMES, tuple(made))


def test_a_log_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write_log(path, _log())
    back = read_log(path)
    assert (back.slots, back.names) == (SLOTS, NAMES)
    assert back.entries[1:] == _log().entries[1:]
    assert np.isnan(back.features[0, 0])
    text = path.read_text()
    path.write_text(text[:-30])
    assert len(read_log(path).entries) == 2, "the last line is still being written"
    lines = text.splitlines(keepends=True)
    damaged = {
        "hello\n": "line 1",
        "": "empty",
        lines[1]: "line 1",
        lines[0] + lines[1][:40] + "\n" + lines[2]: "line 2",
        lines[0] + lines[1].replace('"parents":[0,0,1]', '"parents":[0,7,1]') + lines[2]: "line 2: .*contradicts",
        lines[0] + lines[1].replace('"path":[1,3]', '"path":[3,1]') + lines[2]: "line 2: .*contradicts",
    }
    for content, message in damaged.items():
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_log(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_log(tmp_path / "missing")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not text"):
        read_log(path)


# --------------------------------------------------------------------------------------------- learning


def _made_up(count: int, seed: int) -> StepLog:
    """Steps in which one feature says whether the lookup's long chain comes true, or the model's short one."""
    source = np.random.default_rng(seed)
    place, made = NAMES.index("suffix.reach"), []
    for _ in range(count):
        repeats = source.random() < 0.5
        features = source.normal(size=len(NAMES)) * 0.1
        features[NAMES.index("request.greedy")] = 1.0
        features[place] = 4.0 if repeats else 0.0
        chain, model = list(range(1, 25)), list(range(25, 29))
        parents = [0, *chain[:-1], 0, *model[:-1]]
        draws = [(n, 1, 0.97) for n in chain] + [(n, 0, 0.8) for n in model]
        path = chain if repeats else model[: source.integers(1, 5)]
        made.append(entry(parents, draws, path, features.tolist()))
    return StepLog(SLOTS, NAMES, tuple(made))


@pytest.mark.slow
def test_every_architecture_learns_from_a_feature() -> None:
    menu = make_configurations(SLOTS)
    learning, evaluation = _made_up(600, 0), _made_up(200, 1)
    learned, judged = (outcomes_of(log, menu) for log in (learning, evaluation))
    best = max(fixed_rates(judged, COSTS))
    for hidden in ((), (16,)):
        predictor = train_network(learned, menu, hidden, seed=0, num_steps=1500)
        quality = evaluate_network(predictor, judged, COSTS)
        assert quality.rate > 1.15 * best
        assert quality.num_weights == sum(w.size + b.size for w, b in predictor.layers)
        again = train_network(learned, menu, hidden, seed=0, num_steps=1500)
        assert all((w == v).all() for (w, _), (v, _) in zip(predictor.layers, again.layers, strict=True)), "seeded"
    blind = train_network(learned, menu, (), seed=0, num_steps=1500, left_out=("suffix",))
    assert evaluate_network(blind, judged, COSTS).rate < 1.05 * best


def test_rates_are_tokens_over_seconds() -> None:
    menu = (Configuration(), Configuration(("model",), 7, 6, 0.0))
    made = _made_up(4, 0)
    sample = outcomes_of(made, menu)
    assert fixed_rates(sample, COSTS)[0] == pytest.approx(1.0)
    emitted = 1.0 + sample.accepted[:, 1]
    seconds = COSTS.step(1, sample.nodes[:, 1], sample.levels[:, 1])
    assert rate_of(sample, np.ones(4, dtype=np.int64), COSTS) == pytest.approx(emitted.sum() / seconds.sum())


# -------------------------------------------------------------------------------------------- the whole


def test_prompts_become_tasks_that_fit() -> None:
    tasks = make_tasks([[1] * 10] * 6, (0.0, 1.0), [2], 20, 100)
    assert [task.temperature for task in tasks if len(task.prompt_ids) == 10 and task.max_tokens == 20] == [0, 1] * 3
    assert sum(task.max_tokens == 60 for task in tasks) == 2
    assert sum(task.prompt_ids == (*[1] * 10, 2, *[1] * 6) for task in tasks) == 2
    assert all(len(task.prompt_ids) + task.max_tokens <= 50 for task in make_tasks([[1] * 10] * 6, (0.0,), [2], 20, 50))


@pytest.mark.slow
def test_a_speculation_policy_is_trained_from_prompts_and_from_logs(tmp_path: Path) -> None:
    target, small = save_model(tmp_path / "target"), save_model(tmp_path / "small", noise=0.2)
    save_tokenizer(target)
    prompts = random_prompts([12] * 40)
    data = save_prompts(tmp_path / "data.jsonl", prompts)
    options: dict[str, Any] = {
        "target": str(target), "drafters": (str(small), "suffix"), "device": "cpu", "num_prompts": 24,
        "num_held_out": 4, "max_tokens": 72, "num_steps": 60, "architectures": ("linear", "1x16"),
        "pass_costs": ((1, 1.0), (64, 3.0)), "level_seconds": 0.02,
    }  # fmt: skip
    log = tmp_path / "steps.jsonl"
    config = PolicyConfig(data=(data,), out=tmp_path / "one.safetensors", keep_log=log, **options)
    report = train_policy(config)
    assert [row.name for row in report.architectures] == ["linear", "1x16"]
    assert [row.name for row in report.left_out] == [f"1x16 without {g}" for g in ("target", "request", *SLOTS)]
    assert report.chosen in ("linear", "1x16")
    assert report.best_fixed[1] == max(report.fixed.values()) > 0
    assert json.loads(json.dumps(report.as_dict()))["num_steps"] == report.num_steps
    made = PolicyNetwork.load(tmp_path / "one.safetensors")
    assert made.slots == SLOTS
    assert made.about["architecture"] == report.chosen
    again = replace(config, data=(), logs=(log,), out=tmp_path / "two.safetensors", keep_log=None)
    assert train_policy(again).num_steps + train_policy(again).num_held_out == len(read_log(log).entries)
    with LLM(
        target, drafters=[str(small), "suffix"], speculation_policy=tmp_path / "two.safetensors", device="cpu"
    ) as llm:
        (output,) = llm.generate([{"prompt_token_ids": prompts[0]}])
        assert output.error is None


def test_collected_steps_show_all_configurations_half_of_the_time(tmp_path: Path) -> None:
    target, small = save_model(tmp_path / "target"), save_model(tmp_path / "small", noise=0.2)
    tasks = make_tasks(random_prompts([9] * 4), (0.0, 1.0), [1], 72, 256)
    done: list[int] = []
    with LLM(target, drafters=[str(small), "suffix"], tree="best-first:96:48", max_num_seqs=8, device="cpu") as llm:
        log = collect_steps(llm, tasks, seed=0, note=done.append)
    assert done == list(range(1, len(tasks) + 1))
    known = outcomes_of(log, make_configurations(log.slots)).known
    assert known[:, 0].all()
    large = np.asarray([one.max_nodes == 96 for one in log.entries])
    assert 0.3 < large.mean() < 0.8
    # Near the end of the output a large tree tells of shallower ones.
    depths = np.asarray([one.max_depth for one in log.entries])
    assert (known.all(axis=1) == (large & (depths >= 47))).all()
    assert known[large & (depths >= 16)][:, :-1].any(axis=1).all()
    assert depths[large].min() < 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ()}, "data: give files"),
        ({"logs": ("x",)}, "not both"),
        ({"num_prompts": 1}, "num_prompts must be at least 4"),
        ({"temperatures": ()}, "temperatures"),
        ({"architectures": ("huge",)}, "architectures must be some of linear"),
        ({"pass_costs": ((4, 1.0), (1, 2.0))}, "pass_costs: give"),
        ({"out": "/nowhere/at/all"}, "out: .* cannot be written"),
    ],
)
def test_options_that_cannot_be_used_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyConfig(**({"data": ("text.txt",)} | changes))


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    write_log(tmp_path / "few.jsonl", _log(20))
    config = PolicyConfig(logs=(tmp_path / "few.jsonl",), out=tmp_path / "it", pass_costs=((1, 1.0),))
    with pytest.raises(ValueError, match=r"16 steps to train on .* give more prompts"):
        train_policy(config)
    assert not (tmp_path / "it").exists()
