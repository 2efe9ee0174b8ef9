"""The choice of a drafter for a streamed target, from simulated figures."""

from pathlib import Path

import pytest
import torch

from specinfer.core.config import OffloadConfig
from specinfer.policy import offload_choice
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.policy.offload_choice import (
    Candidate,
    LayerMemory,
    OffloadChoice,
    best_of,
    compare,
    copies_of,
    usual_copy,
)
from specinfer.policy.streamed_costs import Pass, StreamedCurve
from tiny import save_model

# 20 layers of 100 bytes in 16 bits; a row takes a millisecond beside 20 ms for reading the weights from memory.
COMPUTING = StreamedCurve([Pass(1, 0.021, 0.0), Pass(129, 0.149, 0.0)])
LAYER_SECONDS = 0.1
CPU = torch.device("cpu")


def memory_of(spare: int) -> LayerMemory:
    return LayerMemory(num_layers=20, layer_bytes=100, weights=1000, spare_bytes=spare)


def choices_of(spare: int, *drafters: Candidate) -> dict[tuple[str, ...], OffloadChoice]:
    memory = memory_of(spare)
    found = compare(memory, COMPUTING, LAYER_SECONDS, [*drafters, *copies_of(memory, COMPUTING, None)])
    return {one.candidate.drafters: one for one in found}


def test_a_copy_leaves_fewer_layers_in_memory_and_passes_take_longer_by_those() -> None:
    found = choices_of(1200)
    assert {names: one.num_resident for names, one in found.items()} == {(): 12, ("self:int8",): 1, ("self:int4",): 6}
    assert [one.pass_seconds for one in found.values()] == pytest.approx([0.8, 1.9, 1.4])


def test_speed_is_over_plain_decoding_with_all_of_the_memory() -> None:
    plain, *others = choices_of(1200).values()
    assert (plain.num_nodes, plain.tokens_per_pass, plain.speedup) == (0, 1.0, 1.0)
    assert plain.tokens_per_second == pytest.approx(1 / 0.8)
    for one in others:
        assert one.num_nodes >= one.num_levels > 4
        assert one.speedup == pytest.approx(one.tokens_per_second * 0.8)
        assert one.tokens_per_second < one.tokens_per_pass / one.pass_seconds  # drafting takes time, too


def test_a_copy_without_room_is_shown_and_not_chosen() -> None:
    found = choices_of(600)
    assert found["self:int8",].num_resident is None
    assert found["self:int8",].tokens_per_second == 0.0
    assert best_of(tuple(found.values())).candidate.drafters == ("self:int4",)
    assert best_of(tuple(choices_of(500).values())).candidate.drafters == ()


def test_a_small_drafter_wins_where_it_is_as_good_as_a_copy() -> None:
    costs = CostModel(COMPUTING, Curve((1, 64), (0.002, 0.002)))
    small = Candidate(("small",), 20, (0.84, 0.09, 0.03), costs, is_measured=True)
    assert best_of(tuple(choices_of(1200, small).values())).candidate is small
    poor = Candidate(("small",), 20, (0.3,), costs, is_measured=True)
    assert best_of(tuple(choices_of(1200, poor).values())).candidate.drafters != ("small",)


def test_drafts_for_half_of_the_passes_gain_half_as_much() -> None:
    costs = CostModel(COMPUTING, Curve((1, 64), (1e-9, 1e-9)))
    often, seldom = (Candidate(("ngram",), 0, (0.7,), costs, share) for share in (1.0, 0.5))
    gains = [choices_of(0, one)["ngram",].speedup - 1 for one in (often, seldom)]
    assert gains[1] == pytest.approx(gains[0] / 2, rel=0.02)


def test_the_last_layers_need_no_place_beside_the_ring() -> None:
    assert memory_of(1799).num_resident(0) == 17
    assert memory_of(1800).num_resident(0) == 20
    assert choices_of(1800)[()].pass_seconds == pytest.approx(0.021)  # nothing is read


def test_a_target_is_not_compared_with_itself_or_with_known_drafters() -> None:
    memory = memory_of(1200)
    names = [one.drafters for one in copies_of(memory, COMPUTING, "int8")]
    assert names == [("self:int4",)]
    assert copies_of(memory, COMPUTING, "int8", known=("self:int4", "suffix")) == []


@pytest.mark.parametrize(("budget", "copy"), [(400_000, None), (1_000_000, "self:int4"), (None, "self:int4")])
def test_the_copy_of_a_target_that_is_not_loaded_depends_on_the_budget(
    budget: int | None, copy: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(offload_choice, "used_bytes", lambda _: 200_000)
    target = save_model(tmp_path / "target", num_hidden_layers=8, hidden_size=64, intermediate_size=128)
    assert usual_copy(target, OffloadConfig("disk", budget, tmp_path), None, CPU) == copy


@pytest.mark.parametrize(("free", "copy"), [(300_000, None), (1_000_000, "self:int4")])
def test_the_copy_of_a_target_on_a_gpu_depends_on_the_memory_there(
    free: int, copy: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Others use most of it, and the machine's own memory does not matter."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free + 10**9))
    target = save_model(tmp_path / "target", num_hidden_layers=8, hidden_size=64, intermediate_size=128)
    assert usual_copy(target, OffloadConfig("disk", None, tmp_path), None, torch.device("cuda", 0)) == copy


def test_only_a_target_streamed_from_a_packed_copy_gets_a_copy_by_itself(tmp_path: Path) -> None:
    target = save_model(tmp_path / "target")
    assert usual_copy(target, OffloadConfig(), None, CPU) is None
    assert usual_copy(target, OffloadConfig("disk"), None, CPU) is None
