"""Measurement of costs at start-up: sizes that fit, load that comes and goes, and streamed targets."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specinfer import LLM, SamplingParams
from specinfer.core.request import Request
from specinfer.drafters import SmallModelDrafter, make_drafter
from specinfer.drafters.drafter_cache import DrafterCache
from specinfer.model.batch import Piece
from specinfer.model.graphs.capture import Graphs
from specinfer.model.graphs.sizes import Size
from specinfer.model.recurrent.scan import Scan
from specinfer.model.runner import ModelRunner
from specinfer.ops.cpu.draft import DraftCall
from specinfer.policy import cost_measurement, streamed_costs
from specinfer.policy.acceptance import AcceptanceModel
from specinfer.policy.cost_measurement import SIZES, measure_costs
from specinfer.policy.cost_model import CostModel
from specinfer.policy.rank_choice import RankChoice
from tests.policy.simulated_machines import StreamedTarget
from tiny import VOCAB, resized


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_positions", [256, 4, 2])
@pytest.mark.parametrize("family", ["opt", "mpt", "gpt_bigcode"])
def test_models_whose_positions_end_before_the_largest_size_are_measured(
    family: str, num_positions: int, model_folder: Callable[..., Path]
) -> None:
    name = {"opt": "max_position_embeddings", "mpt": "max_seq_len", "gpt_bigcode": "n_positions"}[family]
    folder = model_folder(family, tokenizer=True, **{name: num_positions})
    llm = LLM(folder, device="cpu", drafters=[str(folder)])
    costs = llm._parts.speculator.policy._default.costs  # type: ignore[attr-defined]
    assert costs.target.sizes.tolist() == list(SIZES)
    (output,) = llm.generate([[5]], SamplingParams(max_tokens=1))
    assert len(output.outputs[0].token_ids) == 1


@pytest.mark.parametrize("kinds", [["ngram"], ["suffix", "ngram"], ["model"]], ids=repr)
def test_measuring_leaves_everything_as_it_was(kinds: list[str], runner_of: Callable[..., ModelRunner]) -> None:
    target, small = resized(runner_of("llama"), 400), resized(runner_of("llama", 0, 0.15), 400)
    drafter = make_drafter([small if kind == "model" else kind for kind in kinds], VOCAB)
    assert drafter is not None
    costs = measure_costs(target, drafter, max_seconds=0.5)
    assert target.cache.num_free == small.cache.num_free == 400
    assert 0 < float(costs.target(1)) <= float(costs.target(64))
    assert 0 < float(costs.draft_level(1)) <= float(costs.draft_level(64))
    assert costs.read_token >= 0


def test_measured_passes_of_recurrent_layers_continue_from_a_state(
    runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of requests do, which compute a context's states once."""
    scanned, arrays = [], Scan._arrays

    def counted(self: Scan) -> Any:
        found = arrays(self)
        scanned.append((len(found[0]), len(self.new)))
        return found

    monkeypatch.setattr(Scan, "_arrays", counted)
    target = resized(runner_of("qwen3_5_text"), 400)
    drafter = make_drafter(["ngram"], VOCAB)
    assert drafter is not None
    costs = measure_costs(target, drafter, max_seconds=0.2)
    assert all(tokens == new for tokens, new in scanned)
    assert {new for _, new in scanned} >= set(costs.target.sizes.tolist())
    assert target.cache.num_free == 400


def test_sizes_for_which_there_is_no_memory_or_time_are_left_out(
    runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make_drafter(["ngram"], VOCAB)
    assert drafter is not None
    costs = measure_costs(resized(runner_of("llama"), 40), drafter)
    assert costs.target.sizes.tolist() == [1, 2, 4, 8, 14, 16]
    clock = iter(itertools.count())
    monkeypatch.setattr(cost_measurement.time, "perf_counter", lambda: float(next(clock)))
    costs = measure_costs(resized(runner_of("llama"), 2048), drafter, max_seconds=11.5)  # each looks at it three times
    assert costs.target.sizes.tolist() == list(SIZES[:4])


def test_load_that_comes_and_goes_is_measured_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest run of each size counts, and less never costs more."""
    took = iter([9.0, 2.0, 3.0, 1.0, 9.0, 9.0, 5.0, 9.0, 9.0, 9.0, 9.0, 2.5, 9.0, 9.0, 9.0])
    now = [0.0]

    def run(_: int) -> None:
        now[0] += next(took)

    monkeypatch.setattr(cost_measurement.time, "perf_counter", lambda: now[0])
    curve = cost_measurement._fastest((1, 2, 4), run, max_seconds=300.0)
    assert curve.seconds.tolist() == [1.0, 2.0, 2.5]


def test_small_sizes_are_measured_again_and_again_though_large_ones_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them pays for what is cold; it must not be all that is known of it."""
    sizes: list[int] = []
    now = [0.0]

    def run(size: int) -> None:
        now[0] += 3.0 if not sizes else {1: 1.0, 2: 1.1, 64: 30.0, 128: 60.0, 256: 120.0}[size]
        sizes.append(size)

    monkeypatch.setattr(cost_measurement.time, "perf_counter", lambda: now[0])
    curve = cost_measurement._fastest((1, 2, 64, 128, 256), run, max_seconds=75.0)
    assert sizes == [1, 2, 64, 1, 2, 1, 2, 1, 2, 1, 2, 128]
    assert curve.sizes.tolist() == [1, 2, 64, 128]
    assert curve.seconds.tolist() == pytest.approx([1.0, 1.1, 30.0, 60.0])


def test_a_failing_measurement_gives_slots_back(
    runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, small = resized(runner_of("llama"), 400), resized(runner_of("llama", 0, 0.15), 400)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    for runner in (target, small):
        with monkeypatch.context() as patch:
            patch.setattr(runner, "forward", fail)
            patch.setattr(DraftCall, "__call__", fail)
            with pytest.raises(KeyboardInterrupt):
                measure_costs(target, SmallModelDrafter(small, VOCAB), max_seconds=0.1)
        assert target.cache.num_free == small.cache.num_free == 400


def test_a_cache_with_one_free_slot_gives_the_cost_of_one_row(runner_of: Callable[..., ModelRunner]) -> None:
    target, drafter = resized(runner_of("llama"), 40), make_drafter(["ngram"], VOCAB)
    assert drafter is not None
    target.cache.reserve("other", 39)
    costs = measure_costs(target, drafter)
    assert costs.target.sizes.tolist() == [1]
    assert float(costs.target(1)) > 0
    assert target.cache.num_available == 1


def test_a_streamed_target_is_timed_by_few_passes_and_a_quick_one_like_others(
    runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = resized(runner_of("llama"), 1200)
    drafter = make_drafter(["ngram"], VOCAB)
    assert drafter is not None
    for row, read, sizes in ((0.02, 4.0, [1, 1, 128, 256]), (1e-5, 1e-4, [1, *SIZES])):
        stream = StreamedTarget(row, read)
        monkeypatch.setattr(target, "loaded", replace(target.loaded, stream=stream))
        monkeypatch.setattr(cost_measurement, "_target_pass", lambda _, size, stream=stream: stream.run(size))
        monkeypatch.setattr(cost_measurement.time, "perf_counter", lambda stream=stream: stream.now)
        monkeypatch.setattr(streamed_costs, "perf_counter", lambda stream=stream: stream.now)
        costs = measure_costs(target, drafter)
        assert stream.sizes[: len(sizes)] == sizes
        assert float(costs.target(190)) == pytest.approx(stream.true(190), rel=0.1)
    small = resized(runner_of("llama"), 40)
    stream = StreamedTarget(0.02)
    monkeypatch.setattr(small, "loaded", replace(small.loaded, stream=stream))
    monkeypatch.setattr(cost_measurement, "_target_pass", lambda _, size: stream.run(size))
    monkeypatch.setattr(cost_measurement.time, "perf_counter", lambda: stream.now)
    monkeypatch.setattr(streamed_costs, "perf_counter", lambda: stream.now)
    assert float(measure_costs(small, drafter).target(1)) == 4.0
    assert stream.sizes == [1, 1], "there is no room for more"


class SlowFirstRuns:
    """A clock and the passes of two models, of which the first of each padded size also takes the time of a capture."""

    TICK = 2.0**-20  # seconds, so that sums are exact

    def __init__(self, capture: float) -> None:
        self.now, self._capture = 0.0, capture
        self._seen: set[tuple[str, Size | None]] = set()

    def run(self, model: str, seconds: float, pieces: Sequence[Piece]) -> Tensor:
        size, rows = Size.from_pieces(pieces), sum(piece.num_logits for piece in pieces)
        if (model, size.padded()) not in self._seen:
            self._seen.add((model, size.padded()))
            self.now += self._capture
        self.now += round((seconds + 1e-5 * size.tokens) / self.TICK) * self.TICK
        return torch.zeros(rows, VOCAB)


def measured_with(
    capture: float, runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> tuple[CostModel, float]:
    """Return the costs of a pair on a GPU that captures for this long, and the seconds that the measurement took."""
    machine, graphs = SlowFirstRuns(capture), Graphs(torch.device("cpu"))
    target, small = (resized(runner_of("llama"), 1200) for _ in range(2))
    target.graphs = small.graphs = graphs
    monkeypatch.setattr(cost_measurement.time, "perf_counter", lambda: machine.now)
    monkeypatch.setattr(target, "forward", partial(machine.run, "target", 6e-3))
    monkeypatch.setattr(small, "forward", partial(machine.run, "small", 8e-4))
    return measure_costs(target, SmallModelDrafter(small, VOCAB)), machine.now


def test_captures_and_compilation_are_no_part_of_the_costs(
    runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Curves, trees and what a prompt costs are those of a machine that captures in no time."""
    quick, seconds = measured_with(0.0, runner_of, monkeypatch)
    slow, more_seconds = measured_with(0.375, runner_of, monkeypatch)
    assert more_seconds > seconds + len(SIZES) * 0.375
    assert slow.as_dict() == quick.as_dict()
    assert slow.target.sizes.tolist() == list(SIZES)
    assert slow.read_token == pytest.approx(1e-5, rel=0.1), "a row costs as much"
    for count in (1, 2, 4, 8, 16, 32):
        trees = [RankChoice(costs, AcceptanceModel()).choose(count) for costs in (quick, slow)]
        assert trees[0] == trees[1]
        assert trees[0].max_nodes or count > 1


def test_a_prompt_is_read_anew_each_time_that_it_is_measured(
    runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that keeps prefixes would know the prompt of the measurement before."""
    inner = runner_of("llama")
    target, small = (ModelRunner(inner.loaded, 400, keeps_prefixes=True) for _ in range(2))
    tokens: list[int] = []
    note_read = DrafterCache.note_read

    def counted(self: DrafterCache, request: Request, count: int) -> None:
        tokens.append(count)
        note_read(self, request, count)

    monkeypatch.setattr(DrafterCache, "note_read", counted)
    drafter = SmallModelDrafter(small, VOCAB)
    for _ in range(2):
        tokens.clear()
        measure_costs(target, drafter, max_seconds=0.1)
        assert sum(size > 32 for size in tokens) >= 2


def test_passes_over_prompts_are_measured_where_a_step_reads_more(
    runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the largest size the cost is taken as proportional, but a GPU reads a token faster in a larger pass."""
    target = resized(runner_of("llama"), 4200)
    monkeypatch.setattr(target, "loaded", replace(target.loaded, max_position=2048))
    assert cost_measurement.pass_sizes(target) == [*SIZES]
    monkeypatch.setattr(cost_measurement, "prompt_tokens", lambda _: 2048)
    assert cost_measurement.pass_sizes(target) == [*SIZES, 1024], "longer texts than the model's are not read"
    hybrid = resized(runner_of("lfm2"), 4200)
    monkeypatch.setattr(hybrid, "loaded", replace(hybrid.loaded, max_position=4096))
    assert cost_measurement.pass_sizes(hybrid) == [*SIZES], "these targets read no more of a prompt in a step"
    passes = []

    def forward(pieces: list[Piece]) -> torch.Tensor:
        passes.append([(len(piece.tokens), piece.num_logits, int(piece.positions[-1])) for piece in pieces])
        return torch.zeros(pieces[0].num_logits, 1)

    monkeypatch.setattr(target, "forward", forward)
    measure_costs(target, None)
    assert {len(passed) for passed in passes} == {1}
    read = {tokens: rest for ((tokens, *rest),) in passes}
    assert read[1024] == [1, 32 + 1023]
    assert read[512] == [512, 32 + 7], "of trees the logits are computed"
    assert target.cache.num_free == 4200
